"""Every strategy by every engine on GPUs: trains, saves and goes on as the plain loop on a CPU does."""

import contextlib
import datetime
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from course_lib.errors import ConfigError
from course_lib.lessons import parity
from course_lib.parallel import collectives, sharding
from course_lib.parallel.sharding import Shard
from course_lib.system import seeding
from course_lib.training import precision, run
from course_lib.training.engines import build_engine, process_group
from tests.gpu import training as t
from tests.gpu.machine import on_gpu_ranks
from tests.long_cases import some

FIRST = [("ddp", "torch"), ("zero1", "torch"), ("zero3", "scratch"), ("fsdp", "torch")]
GROUPS = {  # pairs that can share a process: DeepSpeed and Accelerate's plugin leave their marks on it
    "some": FIRST,
    "others": [pair for pair in t.PAIRS if pair[1] in ("torch", "scratch") and pair not in FIRST],
    "accelerate": [pair for pair in t.PAIRS if pair[1] == "accelerate"],
    "deepspeed": [pair for pair in t.PAIRS if pair[1] == "deepspeed"],
}
ACROSS = [  # saved by two ranks, resumed by three
    (("zero1", "torch"), ("zero3", "scratch")),
    (("fsdp", "torch"), ("ddp", "torch")),
    (("ddp", "torch"), ("fsdp", "scratch")),
    (("zero3", "scratch"), ("zero1", "torch")),
]
GIVEN_UP = {"GPU_SIM_TIMEOUT": "10"}


def test_every_pair_is_tried():
    assert sorted(pair for group in GROUPS.values() for pair in group) == sorted(t.PAIRS)


@pytest.fixture(scope="module")
def first_runs(gpus, tmp_path_factory):
    """What two of four GPUs found, by group of pairs; and where the checkpoints are."""
    folder, found = tmp_path_factory.mktemp("runs"), {}

    def of(group):
        if group not in found:
            found[group] = t.trained(gpus, folder, 2, [t.of(pair, **t.SAVING) for pair in GROUPS[group]], gpus=4)
        return found[group], folder

    return of


@pytest.mark.parametrize("group", some(GROUPS, "some"))
def test_they_train_as_the_plain_loop_does(first_runs, plain, group):
    t.agree(first_runs(group)[0], plain)


@pytest.mark.parametrize("group", some(GROUPS, "some"))
def test_they_go_on_where_they_stood_and_where_fewer_gpus_are_seen(gpus, first_runs, plain, tmp_path, group):
    _, folder = first_runs(group)
    runs = [t.of(pair, resume_from_checkpoint=t.saved(folder, pair)) for pair in GROUPS[group]]
    t.agree(t.trained(gpus, tmp_path, 2, runs), plain, from_step=t.SAVED_AT)


@pytest.mark.long
def test_more_ranks_go_on_with_another_strategy_and_engine(gpus, first_runs, plain, tmp_path):
    _, folder = first_runs("some")
    layout = {"global_batch_size": parity.GLOBAL_ROWS, "batch_size": 2, "gradient_accumulation_steps": 1}
    runs = [t.of(after, resume_from_checkpoint=t.saved(folder, before), **layout) for before, after in ACROSS]
    t.agree(t.trained(gpus, tmp_path, 3, runs), plain, from_step=t.SAVED_AT)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 4])
def test_any_number_of_ranks_goes_on_from_deepspeed_and_from_accelerate(gpus, first_runs, plain, tmp_path, ranks):
    saved = [(first_runs(group)[1], pair) for group in ("deepspeed", "accelerate") for pair in GROUPS[group]]
    runs = [
        (t.name_of(pair), {"strategy": "zero2", "engine": "scratch", "resume_from_checkpoint": t.saved(folder, pair)})
        for folder, pair in saved
    ]
    t.agree(t.trained(gpus, tmp_path, ranks, runs), plain, from_step=t.SAVED_AT)


@pytest.mark.long
@pytest.mark.parametrize("order", ["early-1", "early-2"])
@pytest.mark.parametrize("group", GROUPS)
def test_in_whatever_order_results_come_there_is_no_race(gpus, plain, tmp_path, group, order):
    t.agree(t.trained(gpus, tmp_path, 2, [t.of(pair) for pair in GROUPS[group]], environment=t.ORDERS[order]), plain)


class NotWaitedFor:
    """A collective's work whose wait does nothing."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        return True


def kinds_of_findings(folder, engine):
    """Of a run whose streams, or whose gathers, no longer wait for one another."""
    import gpu_sim

    if engine == "torch":
        torch.cuda.Stream.wait_event = torch.cuda.Event.wait = lambda *_: None
    else:
        gather = dist.all_gather_single
        dist.all_gather_single = lambda *args, **options: NotWaitedFor(gather(*args, **options))
    with contextlib.suppress(Exception):  # what it computes is garbage, which an engine may notice
        t.found_on(folder, 2, [t.of(("fsdp", engine))])
    return {finding.kind for finding in gpu_sim.findings()}


@pytest.mark.parametrize("engine", ["torch", "scratch"])
def test_without_their_waits_the_same_engines_are_caught(gpus, tmp_path, engine):
    kinds = set().union(*gpus.ranks(2, kinds_of_findings, tmp_path, engine, environment=GIVEN_UP))
    assert kinds & {"read before it was written", "two writes at once", "written while it was read", "never waited for"}


def without_a_launcher(folder, runs):
    found = t.found_on(folder, 1, runs)
    assert "RANK" not in os.environ and "MASTER_PORT" not in os.environ
    return found


@pytest.mark.parametrize(
    "pairs",
    [
        [("zero1", "torch"), ("fsdp", "torch"), ("zero3", "scratch"), ("ddp", "scratch")],
        pytest.param([("zero2", "deepspeed")], marks=pytest.mark.long),
    ],
    ids=["others", "deepspeed"],
)
def test_one_process_that_nobody_launched_shares_its_state_with_itself(gpus, plain, tmp_path, pairs):
    t.agree([gpus.run(without_a_launcher, tmp_path, [t.of(pair) for pair in pairs], gpus=1)], plain)


# --- a whole run ---


def watched_run(folder):
    """A run whose baselines look whether anyone could be waiting for them."""
    own, groups = run.score_baselines, []

    def score(*args):
        groups.append(dist.is_initialized())
        return own(*args)

    with mock.patch.object(run, "score_baselines", score):
        return *t.whole_run(folder, {"strategy": "fsdp", "batch_size": 4}), groups


def test_a_whole_run_and_nobody_waits_while_rank_0_scores_baselines(gpus, tmp_path):
    (summary, findings, groups), (_, others, none) = gpus.ranks(2, watched_run, tmp_path / "run")
    assert findings == others == [] and (groups, none) == ([False], [])
    assert summary["device"] == "cuda" and summary["train"]["steps"] == 3 and summary["eval"]["rows"] == 16
    assert set(summary["baselines"]) == {"majority_class", "tfidf_logistic_regression"}
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


# --- the process group ---


def connected(folder, watchdog, minutes):
    """Makes an engine's group, and asks which GPU is current when the first question is put to CUDA."""
    import gpu_sim.cuda

    torch.cuda.set_device(0)  # as in a rank that torchrun has started
    asked, own = [], torch.cuda.is_bf16_supported

    def supported(*args, **options):
        asked.append(torch.cuda.current_device())
        return own(*args, **options)

    with mock.patch.object(torch.cuda, "is_bf16_supported", supported):
        build_engine(parity.task(folder, 2, device="cuda", mixed_precision="auto", watchdog=watchdog))
    assert set(asked) == {dist.get_rank()}
    assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
    made_with = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    process_group.have_patience(watchdog)
    later = gpu_sim.cuda.timeouts
    assert later and {made_with, *later} == {datetime.timedelta(minutes=minutes)}


@pytest.mark.parametrize("watchdog, minutes", [(300.0, 55), (0.0, 30)])
def test_groups_carry_the_hosts_tensors_too_and_outlast_the_watchdog(gpus, tmp_path, watchdog, minutes):
    gpus.ranks(2, connected, tmp_path, watchdog, minutes)


# --- the random streams ---


def streams():
    torch.cuda.set_device(1)
    device = torch.device("cuda", 1)
    old = {**seeding.rng_state(torch.device("cpu")), "cuda": [torch.cuda.get_rng_state(i) for i in (0, 1)] * 2}
    mine = seeding.rng_state(device)
    assert len(mine["cuda"]) == 1
    first = torch.rand(3, device=device)
    for state in (mine, old, {**old, "cuda": old["cuda"][1:2]}):
        seeding.set_rng_state(state, device)
        assert_close(torch.rand(3, device=device), first, rtol=0, atol=0)
    seeding.set_rng_state({**old, "cuda": []}, device)  # saved on a CPU


def test_a_rank_stores_its_own_gpus_stream_and_reads_the_files_that_hold_all(gpus):
    gpus.run(streams, gpus=2)


def on_the_cpu():
    seeding.seed_everything(3, 1)
    seeding.set_rng_state(seeding.rng_state(torch.device("cpu")), torch.device("cpu"))
    return torch.cuda.is_initialized()


def test_a_run_on_the_cpu_leaves_cuda_alone(gpus):
    assert gpus.run(on_the_cpu) is False


# --- shards to a whole ---


def whole_from_shards():
    """Shards of two dtypes on GPUs and on the host, some empty, two ranks alike, in gathers of 24 bytes."""
    dist.init_process_group(process_group.GPU_BACKENDS)
    rank, device = dist.get_rank(), torch.device("cuda", dist.get_rank())
    a, b, c = torch.arange(20.0), torch.arange(9).to(torch.bfloat16), torch.arange(6.0)
    starts = [0, 3, 11, 20]
    mine = a[starts[rank] : starts[rank + 1]]
    shards = {
        "on GPUs": Shard(torch.Size([4, 5]), starts[rank], mine.to(device)),
        "on the host": Shard(torch.Size([4, 5]), starts[rank], mine.clone()),
        "here and there": Shard(torch.Size([4, 5]), starts[rank], mine.to(device) if rank else mine.clone()),
        "on one": Shard(torch.Size([9]), 0, (b if rank == 2 else b[:0]).to(device)),
        "on all": Shard(torch.Size([2, 3]), 0, c.to(device)),
        "twice": Shard(torch.Size([2, 3]), 3 * (rank > 0), c[3 * (rank > 0) :][:3].to(device)),
    }
    wholes = [a.view(4, 5)] * 3 + [b] + [c.view(2, 3)] * 2
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sharding.ROOM = 24  # the ranks' own
    with mock.patch.object(dist, "send"), mock.patch.object(dist, "recv"):  # which would open a communicator each
        found = sharding.gather_whole(shards)
    assert list(found) == (list(shards) if rank == 0 else [])
    assert_close(list(found.values()), wholes if rank == 0 else [], rtol=0, atol=0)
    return torch.cuda.max_memory_allocated() - before


def test_whole_tensors_come_by_gathers_of_bounded_size(gpus):
    peak, *_ = gpus.ranks(3, whole_from_shards)
    assert 0 < peak <= 8 * 1024  # blocks of 512 bytes: chunks alone


# --- the collectives from messages ---


@on_gpu_ranks(3, environment=GIVEN_UP)
def test_fewer_elements_than_ranks_are_reduced_in_a_groups_first_call():
    few = torch.full((2,), dist.get_rank() + 1.0, device="cuda")
    collectives.all_reduce(few)  # some ranks have nothing to send
    collectives.barrier()
    assert few.tolist() == [6.0, 6.0]


@on_gpu_ranks(3, environment=GIVEN_UP)
def test_a_rank_with_nothing_to_send_or_receive_comes_to_a_groups_first_call():
    rank = dist.get_rank()
    sent = [torch.full((0 if 2 in (rank, to) else 2,), 10.0 * rank + to, device="cuda") for to in range(3)]
    received = [torch.empty_like(each) for each in sent]
    collectives.all_to_all(received, sent)
    wanted = [[], [], []] if rank == 2 else [[rank] * 2, [10.0 + rank] * 2, []]
    assert [each.tolist() for each in received] == wanted


# --- fp16 ---


def learning_rates(folder, training_type, ranks, logging_steps, infinite_at):
    """The learning rate at each log of a run in fp16, one of whose steps overflows; and the schedule's place."""
    rates, places = [], []

    def begin(self, trainer):
        trainer.stored.scaler._init_scale = 1024.0
        calls = iter(range(10**6))
        weight = next(p for p in trainer.model.parameters() if p.requires_grad)
        per_step = trainer.sampler.accumulation
        weight.register_hook(lambda g: g * float("inf") if next(calls) // per_step == infinite_at else g)

    def log(self, trainer, values):
        if "loss" in values:
            rates.append(values["learning_rate"])
            places.append(trainer.scheduler.last_epoch)

    options = {"training_type": training_type, "mixed_precision": "fp16", "max_steps": 4, "warmup_steps": 0}
    every = {"logging_steps": logging_steps, "save_steps": logging_steps, "save_total_limit": None, "eval_steps": 0}
    with mock.patch.multiple(parity._Keep, on_train_begin=begin, on_log=log):
        t.found_on(folder, ranks, [("fp16", options | every)])
    return rates, places


@pytest.mark.parametrize("training_type, ranks", [pytest.param("basic", 1, marks=pytest.mark.long), ("accelerated", 2)])
def test_the_learning_rate_stays_where_fp16_skips_a_step(gpus, tmp_path, training_type, ranks):
    def found(name, *rest):
        run = learning_rates, tmp_path / name, training_type, ranks, *rest
        return gpus.run(*run, gpus=1) if training_type == "basic" else gpus.ranks(ranks, *run)[0]

    rates, places = found("each", 1, 1)
    assert places == [1, 1, 2, 3] and rates[0] > rates[1] == rates[2] > rates[3], "the step after it has its rate"
    assert found("seldom", 4, 1) == (rates[3:], [3])
    assert found("none", 4, 9)[1] == [4]


def hints(folder):
    """What "auto" says on a V100, and on what computes bf16."""
    found = []
    for capable, capability, options in [
        (False, (7, 0), {}),
        (False, (7, 5), {"strategy": "fsdp"}),
        (False, (7, 0), {"training_type": "basic"}),
        (True, (8, 0), {}),
        (False, (6, 0), {}),
        (False, (7, 0), {"mixed_precision": "no"}),
    ]:
        config = parity.task(folder, 1, **{"device": "cuda", "mixed_precision": "auto"} | options)
        torch.cuda.is_bf16_supported = mock.Mock(return_value=capable)
        torch.cuda.get_device_capability = mock.Mock(return_value=capability)
        found.append(precision.hint(config, torch.device("cuda", 0)))
    return found


def test_a_gpu_without_bfloat16_says_what_would_use_it(gpus, tmp_path):
    ddp, fsdp, basic, *nothing = gpus.run(hints, tmp_path, gpus=1)
    assert ddp == basic and ddp.endswith("training in float32; its tensor cores take --mixed_precision fp16")
    assert fsdp == ddp + ", which --strategy ddp and --engine deepspeed have"
    assert nothing == [None, None, None]


# --- devices without ---


def test_a_device_that_the_launcher_keeps_off_is_not_picked(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert precision.pick_device("auto").type == "mps"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert precision.pick_device("auto").type == precision.pick_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="device is mps, and ACCELERATE_USE_CPU keeps this process on the CPU"):
        precision.pick_device("mps")
