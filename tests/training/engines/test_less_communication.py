"""`--communication` through the trainer on real ranks: what it comes to, what it sends, and exact resume."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.lessons import parity
from course_lib.metering.meter import Meter
from course_lib.training.callbacks import Callback
from course_lib.training.checkpoints import checkpoint
from course_lib.training.engines import engine_class
from course_lib.training.engines.less_communication import Compressing, Local
from course_lib.training.trainer import Trainer
from tests.fresh_accelerator import forget_accelerator
from tests.narrow_presets import narrowed

PLAIN = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1, "max_grad_norm": 0.0, "adam_epsilon": 1e-8}
"""A step that is linear in the gradient."""
WAYS = {
    "all_reduce": {"engine": "scratch"},
    "topk of all": {"communication": "topk", "topk_density": 1.0},
    "topk": {"communication": "topk", "topk_density": 0.05},
    "powersgd": {"communication": "powersgd", "powersgd_rank": 2},
    "int8": {"communication": "int8"},
    "int4": {"communication": "int4"},
    "local_sgd at 1": {"communication": "local_sgd", "sync_every": 1},
    "local_sgd": {"communication": "local_sgd", "sync_every": 4},
    "diloco at 1": {"communication": "diloco", "sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
    "diloco": {"communication": "diloco", "sync_every": 4},
}


@pytest.fixture(scope="module", autouse=True)
def small_model():
    """The preset with two narrow layers and few words, for which one thread is enough."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with narrowed(words=300, width=16, num_hidden_layers=2):
        yield
    torch.set_num_threads(threads)


class Crash(Exception):
    """What ends a run without a word."""


class Watch(Callback):
    """Keeps losses and validation losses; may end the run after a step."""

    def __init__(self, crash_at=None):
        self.crash_at, self.losses, self.evaluations = crash_at, [], []

    def on_log(self, trainer, values):
        if "loss" in values:
            self.losses.append(values["loss"])

    def on_evaluate(self, trainer, metrics):
        self.evaluations.append((trainer.state.step, metrics["loss"]))

    def on_step_end(self, trainer):
        if trainer.state.step == self.crash_at:
            raise Crash


def trained(folder, crash_at=None, **options):
    """One run in this rank: what it logged and sent, the whole weights, and what this rank alone has at the end."""
    forget_accelerator()
    config = parity.task(folder, 2, **options)
    loaded, data, processor = parity.prepared(config.data, config.model, config.run.seed)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    watch = Watch(crash_at)
    trainer = Trainer(config, dataclasses.replace(loaded, model=copy.deepcopy(loaded.model)), data, processor, [watch])
    with Meter() as meter:
        try:
            trainer.train()
        except Crash:
            return None
    engine = trainer.engine
    return SimpleNamespace(
        losses=watch.losses,
        evaluations=watch.evaluations,
        sent=meter.bytes_sent,
        weights={name: tensor.clone() for name, tensor in trainer.stored.whole_weights().items()},
        model=dict(engine.model.state_dict()),
        own=[dict(engine.model.state_dict()), engine.optimizer.state_dict()["state"], trainer.stored.rank_state()],
        described=engine.describe(),
    )


def interrupted(folder, **options):
    """A run undisturbed; and one that ended after step 7 and went on from step 6."""
    assert trained(folder / "broken", crash_at=7, **SAVES, **options) is None
    last = str(folder / "broken" / checkpoint.name(6))
    return trained(folder / "through", **SAVES, **options), trained(
        folder / "broken", **SAVES, **options, resume_from_checkpoint=last
    )


def went_on_to_the_bit(undisturbed, resumed):
    assert resumed.losses == undisturbed.losses[6:]
    assert_close(resumed.own, undisturbed.own, rtol=0, atol=0)
    assert_close(resumed.weights, undisturbed.weights, rtol=0, atol=0)


def differ(one, other):
    return any(not torch.equal(one[name], other[name]) for name in one)


def all_ways(folder):
    return {name: trained(folder / name, eval_steps=3, **PLAIN, **options) for name, options in WAYS.items()}


@pytest.fixture(scope="module")
def ways(folder, ranks):
    """Of both ranks, each way's run."""
    return ranks(2)(all_ways, folder)


def apart(ways, name):
    """The largest difference of the final weights from those of plain data parallelism."""
    mine, plain = ways[0][name].weights, ways[0]["all_reduce"].weights
    return max((mine[key] - plain[key]).abs().max().item() for key in plain)


def test_where_nothing_is_left_out_it_is_data_parallelism_and_else_it_is_not(ways):
    for name in ("topk of all", "local_sgd at 1", "diloco at 1"):
        assert apart(ways, name) < 1e-6, name
        assert ways[0][name].losses == pytest.approx(ways[0]["all_reduce"].losses, abs=1e-5)
    for name in ("topk", "powersgd", "int8", "int4", "local_sgd", "diloco"):
        assert apart(ways, name) > 1e-5, name
    assert apart(ways, "int8") < apart(ways, "int4") < 0.05


@pytest.mark.parametrize("name", WAYS)
def test_each_learns_and_the_ranks_evaluate_the_same_weights(ways, name):
    first, other = (of_rank[name] for of_rank in ways)
    assert first.evaluations == other.evaluations and len(first.evaluations) == 3
    assert first.evaluations[-1][1] < first.evaluations[0][1] < first.losses[0]
    assert differ(first.model, other.model) == (name in ("local_sgd", "diloco") and parity.STEPS % 4 != 0)
    assert name == "all_reduce" or first.described["communication"] == name.split()[0]


def test_less_is_sent(ways):
    share = {name: of.sent / ways[0]["all_reduce"].sent for name, of in ways[0].items()}
    assert share["int8"] < 0.3 and share["int4"] < 0.2 and share["topk"] < 0.15 and share["powersgd"] < 0.5
    # Two of eight steps; and LocalSGD takes the mean for each of three evaluations.
    assert share["diloco"] < 0.45 and share["local_sgd"] < 0.8


# --- resume ---

SAVES = {"save_steps": 3, "save_total_limit": None, "max_steps": 8, "eval_steps": 4}


@pytest.mark.parametrize("name", ["topk", "powersgd", "local_sgd", "diloco"])
def test_a_resumed_run_is_the_undisturbed_one_to_the_bit_on_every_rank(tmp_path, ranks, capfd, name):
    of_ranks = ranks(2, stream=True)(interrupted, tmp_path, **WAYS[name])
    for undisturbed, resumed in of_ranks:
        went_on_to_the_bit(undisturbed, resumed)
    (_, _, first), (_, _, second) = (undisturbed.own for undisturbed, _ in of_ranks)
    with pytest.raises(AssertionError, match="not equal"):  # what a rank has alone is different on each
        assert_close(first, second, rtol=0, atol=0)
    files = (tmp_path / "broken" / checkpoint.name(6)).glob("rank-*")
    assert sorted(path.name for path in files) == ["rank-0.safetensors", "rank-1.safetensors"]
    assert "left out" not in capfd.readouterr().out


def changed(folder, first, then):
    """Losses of what goes on with other options from the checkpoint of step 3."""
    assert trained(folder / "first", crash_at=4, **SAVES, **first) is None
    last = str(folder / "first" / checkpoint.name(3))
    return [
        trained(folder / str(i), resume_from_checkpoint=last, **SAVES, **options).losses
        for i, options in enumerate(then)
    ]


@pytest.mark.parametrize(("first", "then"), [("diloco", ["all_reduce", "local_sgd", "topk"]), ("powersgd", ["diloco"])])
def test_another_communication_goes_on_from_what_was_agreed_and_says_so(tmp_path, ranks, capfd, first, then):
    for runs in ranks(2, stream=True)(changed, tmp_path, WAYS[first], [WAYS[name] for name in then]):
        # Step 4 is taken from what was agreed at step 3, by all ways alike.
        assert [losses[0] for losses in runs] == pytest.approx([runs[0][0]] * len(then), abs=1e-6)
        assert {len(losses) for losses in runs} == {5}
    assert capfd.readouterr().out.count("all begin with the weights that they agreed on") == len(then)


# --- Muon ---

MUON = {"optimizer": "muon", "learning_rate": 0.01}


def test_muon_trains_matrices_of_blocks_resumes_and_is_that_of_one_process(tmp_path, ranks):
    one = ranks(1)(trained, tmp_path / "one", **SAVES, **MUON, training_type="basic", batch_size=4)[0]
    for undisturbed, resumed in ranks(2)(interrupted, tmp_path, **MUON, engine="scratch"):
        assert undisturbed.losses == pytest.approx(one.losses, abs=2e-3)  # in bf16 sums round by their order
        assert undisturbed.losses[-1] < undisturbed.losses[0] - 0.2
        went_on_to_the_bit(undisturbed, resumed)
    for inside in ranks(2)(trained, tmp_path / "diloco", **SAVES, **MUON, **WAYS["diloco"]):
        assert inside.losses[-1] < one.losses[0] - 0.2


# --- rules ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"communication": "local_sgd", "bucket_mb": 1.0}, "bucket_mb 1.0 has no effect"),
        ({"communication": "topk", "sync_every": 3}, "it applies to --communication local_sgd and diloco"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        build(options)


@pytest.mark.parametrize(
    ("name", "kind"), [("int8", Compressing), ("powersgd", Compressing), ("local_sgd", Local), ("diloco", Local)]
)
def test_the_engine_is_the_courses_own_without_being_named(name, kind):
    config = build({"communication": name})
    assert config.parallel.engine == "scratch" and engine_class(config) is kind
