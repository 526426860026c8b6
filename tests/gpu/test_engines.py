"""Every strategy by every engine on GPUs: trains, saves and goes on as the plain loop on a CPU does."""

import datetime
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.lessons import parity
from course_lib.parallel import collectives, sharding
from course_lib.parallel.sharding import Shard
from course_lib.system import seeding
from course_lib.training import evaluation, precision, run
from course_lib.training.engines import build_engine, process_group
from tests.gpu import training as t

FIRST = [("ddp", "torch"), ("zero1", "torch"), ("zero3", "scratch"), ("fsdp", "torch")]
GROUPS = {  # pairs that can share a process: DeepSpeed and Accelerate's plugin leave their marks on it
    "some": FIRST,
    "others": [pair for pair in t.PAIRS if pair[1] in ("torch", "scratch") and pair not in FIRST],
    "accelerate": [pair for pair in t.PAIRS if pair[1] == "accelerate"],
    "deepspeed": [pair for pair in t.PAIRS if pair[1] == "deepspeed"],
}
SOME = [pytest.param(name, marks=() if name == "some" else pytest.mark.long) for name in GROUPS]
ACROSS = [  # saved by two ranks, resumed by three
    (("zero1", "torch"), ("zero3", "scratch")),
    (("fsdp", "torch"), ("ddp", "torch")),
    (("ddp", "torch"), ("fsdp", "scratch")),
    (("zero3", "scratch"), ("zero1", "torch")),
]


def test_every_pair_is_tried():
    assert sorted(pair for group in GROUPS.values() for pair in group) == sorted(t.PAIRS) and len(t.PAIRS) == 14


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The plain loop on the CPU."""
    return parity.trace(parity.task(tmp_path_factory.mktemp("plain"), 1, training_type="basic", max_steps=t.STEPS))


@pytest.fixture(scope="module")
def first_runs(gpus, tmp_path_factory):
    """What two of four GPUs found, by group of pairs; and where the checkpoints are."""
    folder, found = tmp_path_factory.mktemp("runs"), {}

    def of(group):
        if group not in found:
            runs = [t.of(pair, **t.SAVING) for pair in GROUPS[group]]
            found[group] = gpus.run(t.launched, folder, 2, runs, gpus=4, timeout=1800)
        return found[group], folder

    return of


@pytest.mark.parametrize("group", SOME)
def test_they_train_as_the_plain_loop_does(first_runs, plain, group):
    found, _ = first_runs(group)
    assert len(found[0]) == len(GROUPS[group])
    t.agree(found, plain)


@pytest.mark.parametrize("group", SOME)
def test_they_go_on_where_they_stood_and_where_fewer_gpus_are_seen(gpus, first_runs, plain, tmp_path, group):
    _, folder = first_runs(group)
    runs = [t.of(pair, resume_from_checkpoint=t.saved(folder, pair)) for pair in GROUPS[group]]
    t.agree(gpus.run(t.launched, tmp_path, 2, runs, gpus=2, timeout=1800), plain, from_step=t.SAVED_AT)


@pytest.mark.long
def test_more_ranks_go_on_with_another_strategy_and_engine(gpus, first_runs, plain, tmp_path):
    _, folder = first_runs("some")
    layout = {"global_batch_size": parity.GLOBAL_ROWS, "batch_size": 2, "gradient_accumulation_steps": 1}
    runs = [t.of(after, resume_from_checkpoint=t.saved(folder, before), **layout) for before, after in ACROSS]
    t.agree(gpus.run(t.launched, tmp_path, 3, runs, gpus=3, timeout=1200), plain, from_step=t.SAVED_AT)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 4])
def test_any_number_of_ranks_goes_on_from_deepspeed_and_from_accelerate(gpus, first_runs, plain, tmp_path, ranks):
    saved = [(first_runs(group)[1], pair) for group in ("deepspeed", "accelerate") for pair in GROUPS[group]]
    runs = [
        (t.name_of(pair), {"strategy": "zero2", "engine": "scratch", "resume_from_checkpoint": t.saved(folder, pair)})
        for folder, pair in saved
    ]
    assert len(runs) == 4
    t.agree(gpus.run(t.launched, tmp_path, ranks, runs, gpus=ranks, timeout=1200), plain, from_step=t.SAVED_AT)


def without_a_launcher(folder, runs):
    assert "RANK" not in os.environ
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
    runs = [t.of(pair) for pair in pairs]
    t.agree([gpus.run(without_a_launcher, tmp_path, runs, gpus=1, timeout=1200)], plain)


# --- a whole run ---


def watched_run(folder):
    """A run whose baselines look whether anyone could be waiting for them."""
    own, groups = run.score_baselines, []

    def score(*args):
        groups.append(dist.is_initialized())
        return own(*args)

    with mock.patch.object(run, "score_baselines", score):
        return *t.whole_run(folder, {"strategy": "fsdp", "batch_size": 4}), groups


def watched_runs(folder):
    return launch(watched_run, folder, num_processes=2, device="cuda", start_method="fork", timeout=800, stream=False)


def test_a_whole_run_and_nobody_waits_while_rank_0_scores_baselines(gpus, tmp_path):
    (summary, findings, groups), (_, others, none) = gpus.run(watched_runs, tmp_path / "run", timeout=1000)
    assert findings == others == [] and (groups, none) == ([False], [])
    assert summary["device"] == "cuda" and summary["train"]["steps"] == 3 and summary["eval"]["rows"] == 16
    assert set(summary["baselines"]) == {"majority_class", "tfidf_logistic_regression"}
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


# --- the process group ---


def connected(folder, watchdog):
    """An engine's group as it is made, and the GPU that was current when the first question was put to CUDA."""
    import gpu_sim.cuda

    torch.cuda.set_device(0)  # as in a rank that torchrun has started
    asked, own = [], torch.cuda.is_bf16_supported
    with mock.patch.object(
        torch.cuda, "is_bf16_supported", lambda *a, **k: (asked.append(torch.cuda.current_device()), own(*a, **k))[1]
    ):
        build_engine(parity.task(folder, 2, device="cuda", mixed_precision="auto", watchdog=watchdog))
    made_with = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    process_group.have_patience(watchdog)
    return dist.get_backend_config(), asked, made_with, gpu_sim.cuda.timeouts


def connections(folder, watchdog):
    return launch(
        connected, folder, watchdog, num_processes=2, device="cuda", start_method="fork", timeout=240, stream=False
    )


@pytest.mark.parametrize("watchdog, minutes", [(300.0, 55), (0.0, 30)])
def test_groups_carry_the_hosts_tensors_too_and_outlast_the_watchdog(gpus, tmp_path, watchdog, minutes):
    for rank, (backends, asked, made_with, later) in enumerate(gpus.run(connections, tmp_path, watchdog)):
        assert backends == "cpu:gloo,cuda:nccl"
        assert asked and set(asked) == {rank}
        assert {made_with, *later} == {datetime.timedelta(minutes=minutes)} and later


# --- the random streams ---


def streams():
    torch.cuda.set_device(1)
    device = torch.device("cuda", 1)
    old = {**seeding.rng_state(torch.device("cpu")), "cuda": [torch.cuda.get_rng_state(i) for i in (0, 1)] * 2}
    mine = seeding.rng_state(device)
    first = torch.rand(3, device=device).cpu()
    again = []
    for state in (mine, old, {**old, "cuda": old["cuda"][1:2]}):
        seeding.set_rng_state(state, device)
        again.append(torch.equal(torch.rand(3, device=device).cpu(), first))
    seeding.set_rng_state({**old, "cuda": []}, device)  # saved on a CPU
    return len(mine["cuda"]), again


def test_a_rank_stores_its_own_gpus_stream_and_reads_the_files_that_hold_all(gpus):
    assert gpus.run(streams, gpus=2) == (1, [True, True, True])


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
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sharding.ROOM = 24  # the ranks' own
    with mock.patch.object(dist, "send"), mock.patch.object(dist, "recv"):  # which would open a communicator each
        found = sharding.gather_whole(shards)
    peak = torch.cuda.max_memory_allocated() - before
    wanted = {
        "on GPUs": a.view(4, 5),
        "on the host": a.view(4, 5),
        "here and there": a.view(4, 5),
        "on one": b,
        "on all": c.view(2, 3),
        "twice": c.view(2, 3),
    }
    same = (
        [
            torch.equal(found[name], whole) and found[name].dtype == whole.dtype and not found[name].is_cuda
            for name, whole in wanted.items()
        ]
        if found
        else []
    )
    return same, peak, list(found) == (list(shards) if rank == 0 else [])


def wholes():
    return launch(whole_from_shards, num_processes=3, device="cuda", start_method="fork", timeout=240, stream=False)


def test_whole_tensors_come_by_gathers_of_bounded_size(gpus):
    (same, peak, in_order), *others = gpus.run(wholes, gpus=3)
    assert same == [True] * 6 and in_order and all(each[2] and each[0] == [] for each in others)
    assert 0 < peak <= 8 * 1024  # blocks of 512 bytes: chunks alone


# --- the collectives from messages ---


def uneven(group_size):
    dist.init_process_group("nccl")
    few = torch.full((2,), dist.get_rank() + 1.0, device="cuda")
    collectives.all_reduce(few)  # the first call of the group: some ranks have nothing to send
    collectives.barrier()
    return few.tolist(), group_size


def all_reduced():
    return launch(uneven, 3, num_processes=3, device="cuda", start_method="fork", timeout=240, stream=False)


def test_fewer_elements_than_ranks_are_reduced_in_a_groups_first_call(gpus):
    assert gpus.run(all_reduced, gpus=3, environment={"GPU_SIM_TIMEOUT": "10"}) == [([6.0, 6.0], 3)] * 3


def one_left_out():
    """Rank 2 has nothing for anybody, and nobody has anything for it."""
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    sent = [torch.full((0 if 2 in (rank, to) else 2,), 10.0 * rank + to, device="cuda") for to in range(3)]
    received = [torch.empty_like(each) for each in sent]
    collectives.all_to_all(received, sent)  # the first call of the group
    return [each.tolist() for each in received]


def all_to_all_but_one():
    return launch(one_left_out, num_processes=3, device="cuda", start_method="fork", timeout=240, stream=False)


def test_a_rank_with_nothing_to_send_or_receive_comes_to_a_groups_first_call(gpus):
    found = gpus.run(all_to_all_but_one, gpus=3, environment={"GPU_SIM_TIMEOUT": "10"})
    assert found == [[[0.0] * 2, [10.0] * 2, []], [[1.0] * 2, [11.0] * 2, []], [[], [], []]]


# --- fp16 ---


def learning_rates(folder, training_type, ranks, logging_steps, infinite_at):
    """The learning rate at each log of a run in fp16, one of whose steps overflows; and the schedule's place."""
    rates, places = [], []

    def begin(self, trainer):
        (trainer.stored.scaler)._init_scale = 1024.0
        calls = iter(range(10**6))
        weight = next(p for p in trainer.model.parameters() if p.requires_grad)
        per_step = trainer.sampler.accumulation
        weight.register_hook(lambda g: g * float("inf") if next(calls) // per_step == infinite_at else g)

    def log(self, trainer, values):
        if "loss" in values:
            rates.append(values["learning_rate"])
            places.append(trainer.scheduler.last_epoch)

    with mock.patch.multiple(parity._Keep, on_train_begin=begin, on_log=log):
        t.found_on(
            folder,
            ranks,
            [
                (
                    "fp16",
                    {
                        "training_type": training_type,
                        "mixed_precision": "fp16",
                        "max_steps": 4,
                        "warmup_steps": 0,
                        "logging_steps": logging_steps,
                        "save_steps": logging_steps,
                        "save_total_limit": None,
                        "eval_steps": 0,
                    },
                )
            ],
        )
    return rates, places


def rates_of(folder, training_type, ranks, *rest):
    if training_type == "basic":
        return learning_rates(folder, training_type, ranks, *rest)
    return launch(
        learning_rates,
        folder,
        training_type,
        ranks,
        *rest,
        num_processes=ranks,
        device="cuda",
        start_method="fork",
        timeout=400,
        stream=False,
    )[0]


@pytest.mark.parametrize("training_type, ranks", [pytest.param("basic", 1, marks=pytest.mark.long), ("accelerated", 2)])
def test_the_learning_rate_stays_where_fp16_skips_a_step(gpus, tmp_path, training_type, ranks):
    rates, places = gpus.run(rates_of, tmp_path / "each", training_type, ranks, 1, 1)
    assert places == [1, 1, 2, 3] and rates[0] > rates[1] == rates[2] > rates[3], "the step after it has its rate"
    assert gpus.run(rates_of, tmp_path / "seldom", training_type, ranks, 4, 1) == (rates[3:], [3])
    assert gpus.run(rates_of, tmp_path / "none", training_type, ranks, 4, 9)[1] == [4]


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
        with (
            mock.patch.object(torch.cuda, "is_bf16_supported", lambda *_, capable=capable, **__: capable),
            mock.patch.object(torch.cuda, "get_device_capability", lambda *_, capability=capability: capability),
        ):
            found.append(precision.hint(config, torch.device("cuda", 0)))
    return found


def test_a_gpu_without_bfloat16_says_what_would_use_it(gpus, tmp_path):
    ddp, fsdp, basic, *nothing = gpus.run(hints, tmp_path, gpus=1)
    assert ddp == basic and ddp.endswith("training in float32; its tensor cores take --mixed_precision fp16")
    assert fsdp == ddp + ", which --strategy ddp and --engine deepspeed have"
    assert nothing == [None, None, None]


# --- devices without ---


def doubles():
    """Dtypes of what an evaluation makes on the device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made = set()

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            made.update(
                each.dtype
                for each in torch.utils._pytree.tree_leaves(out)
                if isinstance(each, torch.Tensor) and each.is_cuda
            )
            return out

    def scores(batch):
        return (torch.ones(len(batch["labels"]), 2, device="cuda"),)

    with Look():
        found = evaluation.evaluate_split(
            None,
            [{"labels": torch.ones(3, 4)}],
            "causal_lm",
            None,
            scores=scores,
            device=torch.device("cuda"),
            precision=precision.autocast("no", "cuda"),
        )
    return found["loss"], torch.float64 in made, torch.float32 in made


def test_an_evaluation_needs_no_float64_of_the_device(gpus):
    assert gpus.run(doubles) == (1.0, False, True)


def test_a_device_that_the_launcher_keeps_off_is_not_picked(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert precision.pick_device("auto").type == "mps"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert precision.pick_device("auto").type == precision.pick_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="device is mps, and ACCELERATE_USE_CPU keeps this process on the CPU"):
        precision.pick_device("mps")
