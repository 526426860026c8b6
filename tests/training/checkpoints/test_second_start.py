"""A resumed run does what it is told: every field × engines is applied, or refused, and said in one line."""

import itertools
import json
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from course_lib.config import flatten, option, options, resumed
from course_lib.config.resumed import ADAPTER, APPLIED, BATCH, ELSEWHERE, JUDGING, LOOKED, MODEL, ROWS, RULES, SAME
from course_lib.errors import CheckpointError, ConfigError
from course_lib.lessons import parity
from course_lib.training.checkpoints import checkpoint, manifest, safetensors_tree, second_start
from course_lib.training.checkpoints.stored_state import StoredState
from course_lib.training.engines.with_deepspeed import DeepSpeedState
from tests.forked_process import import_deepspeed
from tests.fresh_accelerator import forget_accelerator
from tests.long_cases import some
from tests.ranks import on_ranks
from tests.training import quick

pytestmark = pytest.mark.usefixtures("own_accelerator")
ROOT = Path(__file__).resolve().parents[3]
STEP = 2
"""After which the first run is stopped."""
BASE = {
    "max_steps": 4,
    "save_steps": STEP,
    "eval_steps": STEP,
    "save_total_limit": None,
    "max_train_samples": 24,
    "tracker": "none",
    "warmup_steps": 1,
    "keep_best": True,
    "adam_epsilon": 1e-8,
}
LATER = {
    "learning_rate": 2e-5,
    "weight_decay": 0.5,
    "max_grad_norm": 0.25,
    "max_steps": 9,
    "warmup_steps": 0,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}',
}
"""What every optimizer is told at the second start."""
OPTIMIZERS = {
    "adamw": {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-4},
    "sgd": {"momentum": 0.5},
    "adafactor": {},
    "muon": {"momentum": 0.5, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-4},
}
"""Beside it, what only some read."""


def trainer_of(folder, **choices):
    """A trainer of a small model, on the ranks that are here."""
    forget_accelerator()
    return quick.trainer_of(parity.task(folder, 1, **BASE | choices))


def saved(folder, **choices):
    """The checkpoint of a run's middle, by a run whose end is its middle."""
    trainer = trainer_of(folder, **choices)
    trainer.state.max_steps = STEP
    trainer.train()
    return folder / checkpoint.name(STEP)


def settings(trainer):
    """All that a trainer steps by and that is no tensor of its state."""
    engine, scheduler, found = trainer.engine, trainer.scheduler, {}
    owners = [
        trainer.optimizer,
        getattr(engine, "state_owner", trainer.optimizer),
        getattr(getattr(engine, "zero", None), "optimizer", trainer.optimizer),
    ]
    for place, optimizer in enumerate(owners):
        for number, group in enumerate(optimizer.param_groups):
            found |= {f"{place}.{number}.{name}": value for name, value in group.items() if name != "params"}
    found["rates"] = [
        [base * factor(step) for step in range(trainer.state.max_steps)]
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    found |= {
        "scheduler": (scheduler.base_lrs, scheduler.last_epoch, scheduler.get_last_lr()),
        "max_steps": trainer.state.max_steps,
        "clips at": trainer.config.optim.max_grad_norm,
        "outers": [(outer.lr, outer.momentum) for outer in getattr(trainer.wrapped, "outers", ())],
    }
    if trainer.config.parallel.chosen_engine == "deepspeed":
        found["DeepSpeed clips at"] = trainer.wrapped.gradient_clipping()
    return found


def fresh(folder, **choices):
    """The settings of a run that was always told so, as they are after as many steps."""
    trainer = trainer_of(folder, **choices)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer makes no step here
        for _ in range(STEP):
            trainer.scheduler.step()
    return settings(trainer)


def gone_on(folder, kept, **choices):
    """A run that has read a checkpoint, and what it said then."""
    trainer, said = trainer_of(folder, **choices, resume_from_checkpoint=str(kept)), []
    trainer.say = said.append
    trainer.go_on()
    return trainer, said


# --- how a step is made, over all engines ---

BOTH = [{"strategy": strategy, "engine": engine} for strategy in ("ddp", "zero1") for engine in ("scratch", "torch")]
ENGINES = (
    {"basic": {"training_type": "basic"}}
    | {f"{strategy} {engine}": {"strategy": strategy, "engine": engine} for strategy, engine in parity.PAIRS}
    | {way: {"communication": way} for way in option("communication").choices if way != "all_reduce"}
    | {f"pipeline {' '.join(way.values())}": {"training_type": "pipeline", "batch_size": 4} | way for way in BOTH}
)
OURS = {name: options for name, options in ENGINES.items() if "deepspeed" not in name}
DEEPSPEED = {name: options for name, options in ENGINES.items() if "deepspeed" in name}
SHARDING, WHOLE = ("zero", "fsdp", "pipeline"), ("adafactor", "muon")


def check_second_starts(folder, engines, optimizers, rows):
    """From checkpoints of both forms and from its own, an engine goes on as one that was always told so; collective."""
    for optimizer in optimizers:
        first, second = {"optimizer": optimizer}, {"optimizer": optimizer} | LATER | OPTIMIZERS[optimizer]
        kept = {"whole": saved(folder / optimizer / "whole", **first, batch_size=rows)}
        if optimizer not in WHOLE:
            zero1 = {"strategy": "zero1", "engine": "scratch", "batch_size": rows}
            kept["sharded"] = saved(folder / optimizer / "sharded", **first, **zero1)
        for name, engine in engines.items():
            if optimizer in WHOLE and name.startswith(SHARDING):
                continue
            place, own = folder / optimizer / name, {"batch_size": rows} | engine
            wanted = fresh(place / "fresh", **second, **own)
            for origin, file in (kept | {"own": saved(place / "own", **first, **own)}).items():
                case = f"{optimizer} by {name} from {origin}"
                trainer, said = gone_on(place / origin, file, **second, **own)
                actual = settings(trainer)
                assert {key: actual.get(key) for key in wanted} == wanted, case
                assert said[-1].count("resumed from") == 1, case
                assert "learning_rate 2e-05 (was 0.001), weight_decay 0.5 (was 0.01)" in said[-1], case
                for option_name, value in OPTIMIZERS[optimizer].items():
                    assert f"{option_name} {value} (was" in said[-1], case
                trainer.train()
                assert trainer.state.step == LATER["max_steps"], case
                assert 2e-6 < trainer.learning_rate < 1e-5, "the schedule's end; a tenth of the rate is the least"


@pytest.mark.parametrize(
    ("engines", "optimizers", "number"),
    [
        pytest.param({name: ENGINES[name] for name in ("basic", "zero3 scratch", "diloco")}, ["adamw"], 1, id="some"),
        pytest.param(OURS, [*OPTIMIZERS], 1, id="one rank", marks=pytest.mark.long),
        pytest.param(OURS, ["adamw", "sgd"], 2, id="two ranks", marks=pytest.mark.long),
        pytest.param(DEEPSPEED, ["adamw", "sgd"], 1, id="deepspeed", marks=pytest.mark.long),
    ],
)
def test_a_second_start_steps_as_it_is_told(tmp_path, ranks, engines, optimizers, number):
    """By the whole state of what steps: rates, decay, moments, schedule; whichever way the checkpoint was written."""
    import_deepspeed()
    only_elsewhere = "pipeline" if number == 1 else "basic"
    engines = {name: each for name, each in engines.items() if only_elsewhere not in name}
    ranks(number, timeout=2600)(check_second_starts, tmp_path, engines, optimizers, 4 // number)


# --- every field ---

VALUES = {
    "dataset": "pydocs",
    "clean_text": False,
    "task": "classification",
    "model": "tiny-llama",
    "attention_dropout": 0.3,
    "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}',
    "pipeline_parallel_size": 2,
    "mixed_precision": "bf16",
    "device": "auto",
    "tf32": "off",
    "batch_size": 1,
    "best_metric": "perplexity",
    "output_dir": None,
    "resume_from_checkpoint": None,
    "tracker": "jsonl",
    "imbalance_alert": 3.0,
}
"""Second values of fields for which that by the kind of the first would be the same, or refused."""
BESIDE = {
    "lr_scheduler_kwargs": {"lr_scheduler": "cosine_with_min_lr"},
    "global_batch_size": {"gradient_accumulation_steps": 1},
    "powersgd_rank": {"communication": "powersgd"},
    "watch_steps": {"tracker": "jsonl", "watch": "parameters"},
    "hub_private": {"push_to_hub": "x"},
    **dict.fromkeys(("sync_every", "outer_lr", "outer_momentum"), {"communication": "diloco"}),
    **dict.fromkeys(("topk_density", "error_feedback"), {"communication": "topk"}),
    **dict.fromkeys(("watch", "log_model", "track_every_rank"), {"tracker": "jsonl"}),
    **dict.fromkeys(("memory_alert", "imbalance_alert"), {"memory_steps": 1}),
    **dict.fromkeys(("profile_wait", "profile_warmup"), {"profile_steps": 1}),
}
"""What a field has to be told with, to be read."""
BASE_LEAVES = flatten(parity.task("x", 1, **BASE)) | {"num_processes": 1}


def second_value(name, engine=None):
    known, now = option(name), BASE_LEAVES[name]
    if name == "engine":  # DeepSpeed would take the process to itself
        return "torch" if engine == "scratch" else "scratch"
    if name in VALUES:
        return VALUES[name]
    if known.is_flag:
        return not known.default
    if known.choices:
        return next(choice for choice in known.choices if choice not in (known.default, now))
    if isinstance(now, str):
        return "validation" if now == "test" else "test"
    return now / 2 or 0.5 if isinstance(now, float) else (now or 2) + 1


RULE = {name: rule for rule in RULES for name in rule.fields}


def test_every_field_stands_in_one_rule_and_every_rule_tells_its_kind():
    """Over all fields: a second value is found, and with it the run is refused or the value said."""
    assert sorted(name for rule in RULES for name in rule.fields) == sorted(o.name for o in options())
    assert set(resumed.KEEPS_RANK_STATE) < set(APPLIED.fields)
    for name, rule in RULE.items():
        value = second_value(name)
        changes = resumed.changed(BASE_LEAVES, BASE_LEAVES | {name: value})
        if rule is ELSEWHERE:
            assert changes == {}
            continue
        assert changes == {name: (resumed.effective(BASE_LEAVES)[name], value)}
        assert resumed.told(changes).startswith(f"{name} {resumed.shown(value)} (was ")
        for rows, batch in itertools.product([True, False], repeat=2):
            refused = resumed.refused(changes, same_rows=rows, same_batch=batch) == changes
            wanted = rule in (SAME, MODEL, ADAPTER, *([] if rows else [ROWS]), *([] if batch else [BATCH]))
            assert refused == wanted, (name, rows, batch)


def test_the_documentation_names_what_is_not_simply_applied():
    page = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `") and "`" in line]
    for rule in (JUDGING, BATCH, ROWS, MODEL, ADAPTER, SAME):
        assert [row for row in rows if set(re.findall(r"`(\w+)`", row)) == set(rule.fields)], rule.does


RANKS = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size", "shard_group_size", "num_processes")
OF_OTHERS = ("router_aux_loss_coef", "separator", "quoting", "encoding", "momentum", "mlm_probability", "offload")
"""Fields whose other value takes a model with experts, a file of data, another optimizer or task, a GPU."""


def check_every_field(folder, engine):
    """What becomes of each field's second value at a second start; gives how many this engine reads on one rank."""
    kept, looked_at = saved(folder / "first", **engine), 0
    left_out = {*ELSEWHERE.fields, *RANKS, *OF_OTHERS} | ({"engine"} if "deepspeed" in engine.values() else set())
    for name in RULE:
        if name in left_out:
            continue
        given = engine | BESIDE.get(name, {}) | {name: second_value(name, engine.get("engine"))}
        try:
            value = parity.task(folder, 1, **BASE | given)[name]
        except ConfigError:
            continue
        if value == parity.task(folder, 1, **BASE | engine)[name]:
            continue
        looked_at += 1
        try:
            trainer, said = gone_on(folder / name, kept, **given)
        except CheckpointError as error:
            assert RULE[name] in (SAME, MODEL, ADAPTER, ROWS, BATCH) and name in error.cure, name
            was, now = str(error).partition(" was saved with ")[2].split(", and this run has ")
            assert name in was and resumed.shown(value) in now and "\n" not in now
        else:
            wanted, actual = fresh(folder / name / "fresh", **given), settings(trainer)
            assert {key: actual.get(key) for key in wanted} == wanted, name
            assert RULE[name] in (APPLIED, LOOKED, JUDGING, BATCH, ROWS), name
            assert len(said) <= 1 + (RULE[name] is JUDGING) and f"{name} {resumed.shown(value)} (was" in said[-1]
            held = [field for each in trainer.changes for field in each["changed"]]
            assert (name in held) != (RULE[name] is LOOKED), name
    return looked_at


@pytest.mark.parametrize(
    "engine",
    some(
        [{"training_type": "basic"}, *({"strategy": strategy, "engine": engine} for strategy, engine in parity.PAIRS)],
        {"training_type": "basic"},
        {"strategy": "zero3", "engine": "scratch"},
    ),
    ids=lambda engine: " ".join(engine.values()),
)
def test_every_field_is_applied_or_refused_in_one_line(tmp_path, ranks, engine):
    import_deepspeed()
    assert ranks(1, timeout=2000)(check_every_field, tmp_path, engine)[0] >= 60


# --- what is beside the options ---

PLAIN = {"training_type": "basic", "watchdog": 0.0}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The checkpoint of a plain run."""
    return saved(tmp_path_factory.mktemp("first"), **PLAIN)


@pytest.fixture
def edited(kept, tmp_path):
    """A function that changes a file of a copy of that checkpoint, as if another version had written it."""
    copied = shutil.copytree(kept, tmp_path / "copied" / kept.name)

    def edit(name, change):
        read, write = (json.loads, json.dumps) if name.endswith(".json") else (yaml.safe_load, yaml.safe_dump)
        held = read((copied / name).read_text())
        change(held)
        (copied / name).write_text(write(held))
        manifest.seal(copied)
        return copied

    return edit


def test_the_history_outlives_several_second_starts(tmp_path, kept):
    last, told = kept, []
    for number, (rate, more) in enumerate([(1e-4, {}), (1e-4, {"logging_steps": 2}), (1e-5, {"weight_decay": 0.5})], 1):
        trainer, said = gone_on(tmp_path / str(number), last, **PLAIN, **more, learning_rate=rate)
        told.append(said[-1].partition(")")[2])
        trainer.state.max_steps, trainer.config = STEP + number, trainer.config.replace(save_steps=1)
        trainer.train()
        last = tmp_path / str(number) / checkpoint.name(STEP + number)
    assert told[0] == " with learning_rate 0.0001 (was 0.001)"
    assert "learning_rate" not in told[1] and "logging_steps 2 (was 1)" in told[1]
    assert second_start.history(trainer.changes) == [
        "From step 3: learning_rate 0.0001 (before: 0.001)",
        "From step 5: learning_rate 1e-05 (before: 0.0001), weight_decay 0.5 (before: 0.01)",
    ]


def test_a_checkpoint_of_an_older_version_is_compared_by_what_it_holds(tmp_path, edited):
    def older_config(held):
        del held["optim"]["adam_beta2"], held["data"]["dataset"]
        held["run"]["of_long_ago"], held["older"] = 1, {"gone": 2}

    def older_state(held):
        del held["changes"], held["ranks"], held["run"]["architecture"]
        held["run"]["seed"] = 42

    edited("config.yaml", older_config)
    older = edited("state.json", older_state)
    trainer, said = gone_on(tmp_path / "again", older, **PLAIN, adam_beta2=0.5, learning_rate=1e-5)
    assert said[-1].endswith("(step 2 of 4) with learning_rate 1e-05 (was 0.001)")
    assert trainer.optimizer.param_groups[0]["betas"] == (0.9, 0.5)


def rows_of_ranks_not_counted(held):
    del held["ranks"]
    held["run"]["global_batch_size"] = 16


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (rows_of_ranks_not_counted, "global_batch_size 16, and this run has 8: give --global_batch_size 16"),
        (lambda held: held["run"]["architecture"].update(n_head=3), "a model of n_head 3, and this"),
        (lambda held: held["run"].update(data="others"), "tokens of tweets are not those"),
    ],
)
def test_other_rows_and_another_architecture_under_the_same_options_are_refused(tmp_path, edited, change, told):
    with pytest.raises(CheckpointError, match=told):
        gone_on(tmp_path / "again", edited("state.json", change), **PLAIN)


def test_an_end_before_the_checkpoint_is_refused(tmp_path, kept):
    with pytest.raises(CheckpointError, match="is of step 2, and this run ends after 1: give a larger --max_steps"):
        gone_on(tmp_path / "again", kept, **PLAIN, max_steps=1)
    assert gone_on(tmp_path / "again", kept, **PLAIN, max_steps=2)[0].state.finished


def test_a_model_may_have_moved_and_no_other_takes_its_place(tmp_path):
    config = parity.task("x", 1, **BASE)
    loaded, *_ = quick.prepared(config.data, config.model, config.run.seed)
    for place in ("a/net", "b/net", "a/other"):
        loaded.model.save_pretrained(tmp_path / place)
        loaded.tokenizer.save_pretrained(tmp_path / place)
    kept = saved(tmp_path / "first", **PLAIN, model=str(tmp_path / "a/net"))
    _, said = gone_on(tmp_path / "moved", kept, **PLAIN, model=str(tmp_path / "b/net"))
    assert f"model {tmp_path / 'b/net'} (was {tmp_path / 'a/net'}); the weights are the checkpoint's" in said[-1]
    with pytest.raises(CheckpointError, match="a/net, and this run has .*a/other"):
        gone_on(tmp_path / "other", kept, **PLAIN, model=str(tmp_path / "a/other"))


def test_a_best_evaluation_that_was_judged_otherwise_does_not_count(tmp_path):
    masked = PLAIN | {"task": "masked_lm", "model": "tiny-bert"}
    kept = saved(tmp_path / "first", **masked)
    for more, counts in (
        ({"learning_rate": 1e-5}, True),
        ({"mlm_probability": 0.3}, False),
        ({"best_metric": "perplexity"}, False),
        ({"best_metric": "loss"}, True),
    ):
        trainer, said = gone_on(tmp_path / "again", kept, **masked, **more)
        assert (trainer.state.best_step == STEP) == counts == (len(said) == 1)
        assert counts or f"was judged with {next(iter(more))} " in said[0]


def test_a_scaler_begins_anew_where_the_run_had_none():
    """As when --mixed_precision fp16 is told to a run that had another: the checkpoint holds no scale."""
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0), SimpleNamespace(cur_scale=8.0, last_overflow_iter=-1)
    deepspeed = SimpleNamespace(zero=SimpleNamespace(dynamic_loss_scale=True, loss_scaler=scales))
    for engine, load, nothing in (
        (SimpleNamespace(scaler=scaler), StoredState.load_extra_state, {"scaler": {}}),
        (deepspeed, DeepSpeedState.load_extra_state, {}),
        (deepspeed, DeepSpeedState.load_extra_state, {"loss_scale": 1.0, "last_overflow": -1}),
    ):
        load(engine, nothing)
    assert scaler.get_scale() == scales.cur_scale == 8.0
    DeepSpeedState.load_extra_state(deepspeed, {"loss_scale": 4.0, "last_overflow": 2})
    assert (scales.cur_scale, scales.last_overflow_iter) == (4.0, 2)


@on_ranks(1, timeout=600)
def test_an_outer_rate_is_told_without_the_loss_of_what_ranks_alone_had(tmp_path):
    """Of DiLoCo; another period begins anew."""
    first = {"communication": "diloco", "sync_every": 2}
    kept = saved(tmp_path / "first", **first)
    own = safetensors_tree.load(kept / "rank-0.safetensors")["local"]["0.velocity"]
    assert own.any()
    for more, lines, rate, goes_on in (({"outer_lr": 0.3}, 1, 0.3, True), ({"sync_every": 3}, 2, 0.7, False)):
        trainer, said = gone_on(tmp_path / "again", kept, **first | more)
        outer = trainer.wrapped.outer
        assert (len(said), outer.lr, torch.equal(outer.velocity, own)) == (lines, rate, goes_on)


@pytest.mark.parametrize(
    ("now", "cure"),
    [
        ({"num_processes": 2}, {"global_batch_size": "8", "gradient_accumulation_steps": "1"}),
        ({"num_processes": 2, "gradient_accumulation_steps": 1, "seed": 3}, {"global_batch_size": "8", "seed": "42"}),
        ({"batch_size": 1, "drop_last": True}, {"drop_last": "false", "batch_size": "4"}),
        ({"num_processes": 2, "loss_weighting": "micro_batch"}, {}),
        ({"training_type": "pipeline", "num_processes": 2}, {}),
    ],
    ids=str,
)
def test_the_cure_of_a_refusal_is_a_config(now, cure):
    """Beside the rows that its ranks would make of a step."""
    config = parity.task("x", 1, **BASE | now)
    changes = resumed.changed(BASE_LEAVES, flatten(config) | {"num_processes": now.get("num_processes", 1)})
    found = resumed.refused(changes, same_rows=True, same_batch=False)
    assert second_start._cure(config, found, resumed.Change(8, 4)) == cure
    config.replace(**cure)
