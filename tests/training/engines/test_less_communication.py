"""`--communication` through the trainer on real ranks: what it comes to, what it sends, and exact resume."""

import copy
import dataclasses
import functools
import json
import re

import pytest
import torch

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
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


def bits(node):
    """A tree with the bits of its tensors in their place."""
    if isinstance(node, torch.Tensor):
        return str(node.dtype), node.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(node, dict):
        return {str(key): bits(value) for key, value in node.items()}
    return [bits(value) for value in node] if isinstance(node, list | tuple) else node


def trained(folder, crash_at=None, **options):
    """One run in this rank: losses, evaluations, bytes sent, whole weights, and what this rank alone has at the end."""
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
    state = {
        "model": engine.model.state_dict(),
        "optimizer": engine.optimizer.state_dict()["state"],
        "own": trainer.stored.rank_state(),
    }
    return {
        "losses": watch.losses,
        "evaluations": watch.evaluations,
        "sent": meter.bytes_sent,
        "weights": {name: tensor.clone() for name, tensor in trainer.stored.whole_weights().items()},
        "own": bits(state),
        "described": engine.describe(),
    }


def all_ways(folder):
    return {name: trained(folder / name, eval_steps=3, **PLAIN, **options) for name, options in WAYS.items()}


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """Of both ranks, each way's run."""
    return launch(all_ways, tmp_path_factory.mktemp("ways"), num_processes=2, timeout=600)


def apart(ways, name):
    """The largest difference of the final weights from those of plain data parallelism."""
    mine, plain = ways[0][name]["weights"], ways[0]["all_reduce"]["weights"]
    assert set(mine) == set(plain) and len(plain) > 10
    return max((mine[key] - plain[key]).abs().max().item() for key in plain)


def test_where_nothing_is_left_out_it_is_data_parallelism_and_else_it_is_not(ways):
    for name in ("topk of all", "local_sgd at 1", "diloco at 1"):
        assert apart(ways, name) < 1e-6, name
        assert ways[0][name]["losses"] == pytest.approx(ways[0]["all_reduce"]["losses"], abs=1e-5)
    for name in ("topk", "powersgd", "int8", "int4", "local_sgd", "diloco"):
        assert apart(ways, name) > 1e-5, name
    assert apart(ways, "int8") < apart(ways, "int4") < 0.05


def test_each_learns_and_the_ranks_evaluate_the_same_weights(ways):
    for name in WAYS:
        first, other = (of_rank[name] for of_rank in ways)
        assert first["evaluations"] == other["evaluations"] and len(first["evaluations"]) == 3
        assert first["evaluations"][-1][1] < first["evaluations"][0][1] < first["losses"][0]
        differ = first["own"]["model"] != other["own"]["model"]
        assert differ == (name in ("local_sgd", "diloco") and parity.STEPS % 4 != 0)
        if name != "all_reduce":
            assert first["described"]["communication"] == name.split()[0]


def test_less_is_sent(ways):
    sent = {name: of["sent"] for name, of in ways[0].items()}
    assert sent["int8"] < sent["all_reduce"] * 0.3 and sent["int4"] < sent["all_reduce"] * 0.2
    assert sent["topk"] < sent["all_reduce"] * 0.15 and sent["powersgd"] < sent["all_reduce"] * 0.5
    # Two of eight steps; and LocalSGD takes the mean for each of three evaluations.
    assert sent["diloco"] < sent["all_reduce"] * 0.45 and sent["local_sgd"] < sent["all_reduce"] * 0.8


# --- resume ---

SAVES = {"save_steps": 3, "save_total_limit": None, "max_steps": 8, "eval_steps": 4}
RESUMED = {name: WAYS[name] for name in ("topk", "powersgd", "local_sgd", "diloco")}


def interrupted(folder):
    """Each way undisturbed; ended after step 7 and resumed from step 6; and then without the ranks' own files."""
    ends = {}
    for name, options in RESUMED.items():
        run = functools.partial(trained, **SAVES, **options)
        undisturbed = run(folder / "through" / name)
        place = folder / "broken" / name
        assert run(place, crash_at=7) is None
        resumed = run(place, resume_from_checkpoint=str(place / checkpoint.name(6)))
        ends[name] = undisturbed, resumed
    return ends


def test_a_resumed_run_is_the_undisturbed_one_to_the_bit_on_every_rank(tmp_path, capfd):
    of_ranks = launch(interrupted, tmp_path, num_processes=2, timeout=760)
    for name in RESUMED:
        first, second = (of_rank[name][0]["own"] for of_rank in of_ranks)
        assert first["own"] != second["own"], f"{name}: what a rank has alone is different on each"
        for of_rank in of_ranks:
            undisturbed, resumed = of_rank[name]
            assert resumed["losses"] == undisturbed["losses"][6:]
            assert resumed["own"] == undisturbed["own"]
            assert all(
                torch.equal(resumed["weights"][key], undisturbed["weights"][key]) for key in undisturbed["weights"]
            )
        folder = tmp_path / "broken" / name / checkpoint.name(6)
        assert sorted(path.name for path in folder.glob("rank-*")) == ["rank-0.safetensors", "rank-1.safetensors"]
    assert "left out" not in capfd.readouterr().out


def changed(folder, first, then):
    """A run of 6 steps, and what goes on from its checkpoint of step 3 with other options."""
    assert trained(folder / "first", crash_at=4, **SAVES, **first) is None
    return [
        trained(folder / str(i), resume_from_checkpoint=str(folder / "first" / checkpoint.name(3)), **SAVES, **options)[
            "losses"
        ]
        for i, options in enumerate(then)
    ]


def test_another_communication_goes_on_from_what_was_agreed_and_says_so(tmp_path, capfd):
    for first, then in (
        (WAYS["diloco"], [WAYS["all_reduce"], WAYS["local_sgd"], WAYS["topk"]]),
        (WAYS["powersgd"], [WAYS["diloco"]]),
    ):
        for runs in launch(changed, tmp_path / first["communication"], first, then, num_processes=2, timeout=600):
            assert all(len(losses) == 5 for losses in runs)
            # Step 4 is taken from what was agreed at step 3, by all ways alike.
            assert [losses[0] for losses in runs] == pytest.approx([runs[0][0]] * len(then), abs=1e-6)
    said = capfd.readouterr().out
    assert said.count("all begin with the weights that they agreed on") == 4


# --- Muon ---


def with_muon(folder):
    run = functools.partial(trained, **SAVES, optimizer="muon", learning_rate=0.01)
    found = {"ranks": run(folder / "ranks", engine="scratch")}
    assert run(folder / "broken", engine="scratch", crash_at=7) is None
    found["resumed"] = run(
        folder / "broken", engine="scratch", resume_from_checkpoint=str(folder / "broken" / checkpoint.name(6))
    )
    found["diloco"] = run(folder / "diloco", **WAYS["diloco"])
    return found


def test_muon_trains_matrices_of_blocks_resumes_and_is_that_of_one_process(tmp_path):
    alone = launch(
        trained,
        tmp_path / "one",
        num_processes=1,
        timeout=400,
        **SAVES,
        optimizer="muon",
        learning_rate=0.01,
        training_type="basic",
        batch_size=4,
    )[0]
    for of_rank in launch(with_muon, tmp_path, num_processes=2, timeout=600):
        ranks, resumed = of_rank["ranks"], of_rank["resumed"]
        assert ranks["losses"] == pytest.approx(alone["losses"], abs=2e-3)  # in bf16 sums round by their order
        assert ranks["losses"][-1] < ranks["losses"][0] - 0.2
        assert resumed["losses"] == ranks["losses"][6:] and resumed["own"] == ranks["own"]
        assert of_rank["diloco"]["losses"][-1] < ranks["losses"][0] - 0.2


# --- rules ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"communication": "local_sgd", "bucket_mb": 1.0}, "bucket_mb 1.0 has no effect"),
        ({"communication": "topk", "sync_every": 3}, "it applies to --communication local_sgd and diloco"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, words):
    with pytest.raises(ConfigError) as error:
        build(options)
    assert re.search(words, str(error.value)) and "\n" not in str(error.value)


def test_the_engine_is_the_courses_own_without_being_named():
    for name, kind in (("int8", Compressing), ("powersgd", Compressing), ("local_sgd", Local), ("diloco", Local)):
        config = build({"communication": name})
        assert config.parallel.engine == "scratch" and engine_class(config) is kind
    assert engine_class(build({"engine": "scratch"})) not in (Compressing, Local)
    assert json.dumps(build({}).communication.communication) == '"all_reduce"'
