"""A resumed run does what it is told: every field × engines is applied, or refused, and said in one line."""

import copy
import dataclasses
import functools
import json
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from course_lib import modeling
from course_lib.config import flatten, option, options, resumed
from course_lib.config.resumed import ADAPTER, APPLIED, BATCH, ELSEWHERE, JUDGING, LOOKED, MODEL, ROWS, RULES, SAME
from course_lib.data import DataConnector, DataProcessor
from course_lib.errors import CheckpointError, ConfigError
from course_lib.launching.launch import launch
from course_lib.lessons import parity
from course_lib.training.checkpoints import checkpoint, manifest, safetensors_tree, second_start
from course_lib.training.checkpoints.stored_state import StoredState
from course_lib.training.engines.with_deepspeed import DeepSpeedState
from course_lib.training.trainer import Trainer
from tests.forked_process import import_deepspeed
from tests.fresh_accelerator import forget_accelerator

pytestmark = pytest.mark.usefixtures("own_accelerator")
ROOT = Path(__file__).resolve().parents[3]
STEP = 2
"""After which the first run is stopped."""
BASE = {
    "max_steps": 4,
    "save_steps": STEP,
    "save_total_limit": None,
    "max_train_samples": 24,
    "tracker": "none",
    "warmup_steps": 1,
    "keep_best": True,
    "eval_steps": STEP,
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


@functools.lru_cache(maxsize=8)
def prepared(data, model, seed):
    """Data and the untrained model, made once."""
    text = DataConnector(data, seed).load()
    loaded = modeling.load(
        model,
        data.task,
        label_names=text.label_names,
        texts=text.splits["train"]["text"],
        seed=seed,
        max_length=data.max_length,
    )
    processor = DataProcessor(data, loaded.tokenizer, max_positions=loaded.max_positions)
    return loaded, processor.process(text), processor


def trainer_of(folder, **choices):
    """A trainer of a small model, on the ranks that are here."""
    forget_accelerator()
    config = parity.task(folder, 1, **BASE | choices)
    loaded, data, processor = prepared(config.data, config.model, config.run.seed)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    return Trainer(config, dataclasses.replace(loaded, model=copy.deepcopy(loaded.model)), data, processor)


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


def gone_on(folder, **choices):
    """A run that has read its checkpoint, and what it said then."""
    trainer, said = trainer_of(folder, **choices), []
    trainer.say = said.append
    trainer.go_on()
    return trainer, said


# --- how a step is made, over all engines ---

ENGINES = (
    {"basic": {"training_type": "basic"}}
    | {f"{strategy} {engine}": {"strategy": strategy, "engine": engine} for strategy, engine in parity.PAIRS}
    | {way: {"communication": way} for way in option("communication").choices if way != "all_reduce"}
    | {
        f"pipeline {strategy} {engine}": {
            "training_type": "pipeline",
            "batch_size": 4,
            "strategy": strategy,
            "engine": engine,
        }
        for strategy in ("ddp", "zero1")
        for engine in ("scratch", "torch")
    }
)
SHARDING, WHOLE = ("zero", "fsdp", "pipeline"), ("adafactor", "muon")


def begun(folder, optimizers, rows):
    """Checkpoints of each form, by optimizer and form; collective."""
    found = {}
    for optimizer in optimizers:
        first = {"optimizer": optimizer, "batch_size": rows}
        found[optimizer] = {"whole": saved(folder / optimizer / "whole", **first)}
        if optimizer not in WHOLE:
            found[optimizer]["sharded"] = saved(
                folder / optimizer / "sharded", **first, strategy="zero1", engine="scratch"
            )
    return found


def compared(folder, engines, origins, rows):
    """What differs between a fresh trainer and one that went on, from each checkpoint and from its own; collective."""
    found = {}
    for optimizer, kept in origins.items():
        first, second = {"optimizer": optimizer}, {"optimizer": optimizer} | LATER | OPTIMIZERS[optimizer]
        for name, engine in engines.items():
            if optimizer in WHOLE and name.startswith(SHARDING):
                continue
            place, own = folder / optimizer / name, {"batch_size": rows} | engine
            wanted = fresh(place / "fresh", **second, **own)
            for origin, file in (kept | {"own": saved(place / "own", **first, **own)}).items():
                trainer, said = gone_on(place / origin, **second, **own, resume_from_checkpoint=str(file))
                actual = settings(trainer)
                wrong = {key: (actual.get(key), value) for key, value in wanted.items() if actual.get(key) != value}
                trainer.train()
                found[optimizer, name, origin] = wrong, said, trainer.learning_rate, trainer.state.step, len(wanted)
    return found


def check_compared(found, cases):
    assert len(found) == cases
    for (optimizer, *_), (wrong, said, last_rate, steps, items) in found.items():
        assert not wrong and items > 20
        assert said[-1].count("resumed from") == 1 and steps == LATER["max_steps"]
        assert "learning_rate 2e-05 (was 0.001), weight_decay 0.5 (was 0.01)" in said[-1]
        assert 2e-6 < last_rate < 1e-5, "the schedule's end, of a rate of which a tenth is the least"
        assert all(f"{name} {value} (was" in said[-1] for name, value in OPTIMIZERS[optimizer].items())


def chosen(*names):
    return {name: options for name, options in ENGINES.items() if name in names}


OURS = {name: options for name, options in ENGINES.items() if "deepspeed" not in name}
DEEPSPEED = {name: options for name, options in ENGINES.items() if "deepspeed" in name}


@pytest.mark.parametrize(
    ("engines", "optimizers", "ranks", "cases"),
    [
        pytest.param(chosen("basic", "zero3 scratch", "diloco"), ("adamw",), 1, 9, id="some"),
        pytest.param(
            {name: each for name, each in OURS.items() if "pipeline" not in name},
            tuple(OPTIMIZERS),
            1,
            2 * 17 * 3 + 2 * 9 * 2,
            id="one rank",
            marks=pytest.mark.long,
        ),
        pytest.param(OURS, ("adamw", "sgd"), 2, 2 * 20 * 3, id="two ranks", marks=pytest.mark.long),
        pytest.param(DEEPSPEED, ("adamw", "sgd"), 1, 2 * 3 * 3, id="deepspeed", marks=pytest.mark.long),
    ],
)
def test_a_second_start_steps_as_it_is_told(tmp_path, engines, optimizers, ranks, cases):
    """By the whole state of what steps: rates, decay, moments, schedule; whichever way the checkpoint was written."""
    import_deepspeed()
    engines = {name: each for name, each in engines.items() if ranks == 1 or name != "basic"}
    origins = launch(begun, tmp_path, optimizers, 4 // ranks, num_processes=ranks, timeout=600)[0]
    found = launch(compared, tmp_path, engines, origins, 4 // ranks, num_processes=ranks, timeout=2000)[0]
    check_compared(found, cases)


# --- every field ---

VALUES = {
    "dataset": "pydocs",
    "task": "classification",
    "model": "tiny-llama",
    "max_length": 16,
    "seed": 3,
    "learning_rate": 2e-5,
    "warmup_steps": 0,
    "save_steps": 1,
    "eval_steps": 1,
    "max_train_samples": 20,
    "max_eval_samples": 6,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_processes": 2,
    "device": "auto",
    "tf32": "off",
    "momentum": 0.5,
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "attention_dropout": 0.3,
    "outer_momentum": 0.5,
    "router_aux_loss_coef": 0.5,
    "memory_alert": 0.5,
    "save_total_limit": 3,
    "max_steps": 3,
    "validation_split": "test",
    "train_split": "test",
    "project": "another",
    "output_dir": None,
    "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}',
    "keep_best": False,
    "label_smoothing_factor": 0.3,
    "warmup_ratio": 0.5,
    "mixed_precision": "bf16",
    "best_metric": "perplexity",
    "tracker": "jsonl",
    "pipeline_parallel_size": 2,
    "topk_density": 0.5,
    "powersgd_rank": 2,
    "num_epochs": 7.5,
    "weight_decay": 0.3,
    "max_grad_norm": 3.0,
    "adam_epsilon": 1e-5,
    "watchdog": 90.0,
    "imbalance_alert": 3.0,
    "validation_fraction": 0.3,
    "resume_from_checkpoint": None,
    "clean_text": False,
}
"""Second values of fields for which the first that comes to mind would be the same, or refused."""
DILOCO = {"communication": "diloco"}
BESIDE = {
    "lr_scheduler_kwargs": {"lr_scheduler": "cosine_with_min_lr"},
    "global_batch_size": {"gradient_accumulation_steps": 1},
    "sync_every": DILOCO,
    "outer_lr": DILOCO,
    "outer_momentum": DILOCO,
    "powersgd_rank": {"communication": "powersgd"},
    "topk_density": {"communication": "topk"},
    "error_feedback": {"communication": "topk"},
    "watch": {"tracker": "jsonl"},
    "watch_steps": {"tracker": "jsonl", "watch": "parameters"},
    "log_model": {"tracker": "jsonl"},
    "track_every_rank": {"tracker": "jsonl"},
    "memory_alert": {"memory_steps": 1},
    "imbalance_alert": {"memory_steps": 1},
    "profile_wait": {"profile_steps": 1},
    "profile_warmup": {"profile_steps": 1},
    "hub_private": {"push_to_hub": "x"},
}
"""What a field has to be told with, to be read."""


BASE_LEAVES = flatten(parity.task("x", 1, **BASE)) | {"num_processes": 1}


def second_value(name, now=BASE_LEAVES):
    known = option(name)
    if name == "engine":  # DeepSpeed would take the process to itself
        return "torch" if now["engine"] == "scratch" else "scratch"
    if name in VALUES:
        return VALUES[name]
    if known.is_flag:
        return not known.default
    return next((choice for choice in known.choices if choice != known.default), 3)


RULE = {name: rule for rule in RULES for name in rule.fields}


def test_every_field_stands_in_one_rule_and_every_rule_tells_its_kind():
    """Over all fields: a second value is found, and with it the run is refused or the value said."""
    assert sorted(name for rule in RULES for name in rule.fields) == sorted(o.name for o in options())
    assert set(resumed.KEEPS_RANK_STATE) < set(APPLIED.fields)
    for o in options():
        value = second_value(o.name) if o.name != "cpu_kernels" else "fast"
        changes = resumed.changed(BASE_LEAVES, BASE_LEAVES | {o.name: value})
        if RULE[o.name] is ELSEWHERE or value == BASE_LEAVES[o.name]:
            assert changes == {} and (RULE[o.name] is ELSEWHERE or o.name == "data_seed")
            continue
        assert changes == {o.name: (resumed.effective(BASE_LEAVES)[o.name], value)}
        refused = {
            (rows, batch): resumed.refused(changes, same_rows=rows, same_batch=batch) == changes
            for rows in (True, False)
            for batch in (True, False)
        }
        assert refused == {
            (rows, batch): RULE[o.name] in (SAME, MODEL, ADAPTER)
            or (RULE[o.name] is ROWS and not rows)
            or (RULE[o.name] is BATCH and not batch)
            for rows, batch in refused
        }
        assert resumed.told(changes).startswith(f"{o.name} {resumed.shown(value)} (was ")


def test_the_documentation_names_what_is_not_simply_applied():
    page = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `") and "`" in line]
    for rule in (JUDGING, BATCH, ROWS, MODEL, ADAPTER, SAME):
        assert [row for row in rows if set(re.findall(r"`(\w+)`", row)) == set(rule.fields)], rule.does


OF_ANOTHER_RUN = (
    "num_processes",
    "tensor_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "shard_group_size",
    "router_aux_loss_coef",
    "separator",
    "quoting",
    "encoding",
    "momentum",
    "mlm_probability",
    "offload",
)
"""Fields whose other value takes more ranks, a model with experts, a file of data, another optimizer or task, a GPU."""


def walked(folder, engine):
    """What becomes of each field's second value at a second start, of those that this engine reads on one rank."""
    kept, found = saved(folder / "first", **engine), {}
    left_out = (*ELSEWHERE.fields, *OF_ANOTHER_RUN, *(["engine"] if "deepspeed" in engine.values() else []))
    for name in RULE:
        if name not in left_out:
            given = engine | BESIDE.get(name, {}) | {name: second_value(name, {"engine": engine.get("engine")})}
            try:
                value = parity.task(folder, 1, **BASE | given)[name]
            except ConfigError:
                continue
            if value == parity.task(folder, 1, **BASE | engine)[name]:
                continue
            try:
                trainer, said = gone_on(folder / name, **given, resume_from_checkpoint=str(kept))
            except CheckpointError as error:
                found[name] = value, str(error), error.cure
            else:
                wanted, actual = fresh(folder / name / "fresh", **given), settings(trainer)
                assert {key: (actual.get(key), wanted[key]) for key in wanted if actual.get(key) != wanted[key]} == {}
                found[name] = value, said, [name for each in trainer.changes for name in each["changed"]]
    return found


@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        pytest.param({"training_type": "basic"}, 70, id="whole"),
        pytest.param({"strategy": "zero3", "engine": "scratch"}, 70, id="sharded"),
        *(
            pytest.param(
                {"strategy": strategy, "engine": engine}, 60, id=f"{strategy} {engine}", marks=pytest.mark.long
            )
            for strategy, engine in parity.PAIRS
            if (strategy, engine) != ("zero3", "scratch")
        ),
    ],
)
def test_every_field_is_applied_or_refused_in_one_line(tmp_path, engine, fields):
    import_deepspeed()
    found = launch(walked, tmp_path, engine, num_processes=1, timeout=2000)[0]
    assert len(found) >= fields
    for name, (value, told, kept) in found.items():
        if isinstance(told, str):
            assert RULE[name] in (SAME, MODEL, ADAPTER, ROWS, BATCH) and name in kept and "\n" not in told
            was, now = told.partition(" was saved with ")[2].split(", and this run has ")
            assert name in was and resumed.shown(value) in now
        else:
            assert RULE[name] in (APPLIED, LOOKED, JUDGING, BATCH, ROWS) and len(told) <= 1 + (RULE[name] is JUDGING)
            assert f"{name} {resumed.shown(value)} (was" in told[-1] and (name in kept) != (RULE[name] is LOOKED)


# --- what is beside the options ---

PLAIN = {"training_type": "basic", "watchdog": 0.0}


def edited(folder, name, change):
    """Change one file of a checkpoint as if another version had written it, and sum anew."""
    read, write = (json.loads, json.dumps) if name.endswith(".json") else (yaml.safe_load, yaml.safe_dump)
    held = read((folder / name).read_text())
    change(held)
    (folder / name).write_text(write(held))
    manifest.seal(folder)


def test_the_history_outlives_several_second_starts(tmp_path):
    last, told = saved(tmp_path / "0", **PLAIN), []
    for number, (rate, more) in enumerate([(1e-4, {}), (1e-4, {"logging_steps": 2}), (1e-5, {"weight_decay": 0.5})], 1):
        trainer, said = gone_on(
            tmp_path / str(number), **PLAIN, **more, learning_rate=rate, resume_from_checkpoint=str(last)
        )
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


def test_a_checkpoint_of_an_older_version_is_compared_by_what_it_holds(tmp_path):
    kept = saved(tmp_path / "first", **PLAIN)
    edited(
        kept,
        "config.yaml",
        lambda held: (
            held["optim"].pop("adam_beta2"),
            held["data"].pop("dataset"),
            held["run"].update(of_long_ago=1),
            held.update(older={"gone": 2}),
        ),
    )
    edited(
        kept,
        "state.json",
        lambda held: (
            held.pop("changes"),
            held.pop("ranks"),
            held["run"].pop("architecture"),
            held["run"].update(seed=42),
        ),
    )
    trainer, said = gone_on(
        tmp_path / "again", **PLAIN, adam_beta2=0.5, learning_rate=1e-5, resume_from_checkpoint=str(kept)
    )
    assert said[-1].endswith("(step 2 of 4) with learning_rate 1e-05 (was 0.001)")
    assert trainer.optimizer.param_groups[0]["betas"] == (0.9, 0.5)


def test_other_rows_a_step_are_refused_also_where_a_version_did_not_count_its_ranks(tmp_path):
    kept = saved(tmp_path / "first", **PLAIN)
    edited(kept, "state.json", lambda held: (held.pop("ranks"), held["run"].update(global_batch_size=16)))
    with pytest.raises(CheckpointError, match="global_batch_size 16, and this run has 8: give --global_batch_size 16"):
        gone_on(tmp_path / "again", **PLAIN, resume_from_checkpoint=str(kept))


def test_another_architecture_and_other_rows_under_the_same_options_are_refused(tmp_path):
    kept = saved(tmp_path / "first", **PLAIN)
    for change, told in (
        (lambda held: held["run"]["architecture"].update(n_head=3), "a model of n_head 3, and this"),
        (lambda held: held["run"].update(data="others"), "tokens of tweets are not those"),
    ):
        shutil.copytree(kept, tmp_path / kept.name, dirs_exist_ok=True)
        edited(tmp_path / kept.name, "state.json", change)
        with pytest.raises(CheckpointError, match=told):
            gone_on(tmp_path / "again", **PLAIN, resume_from_checkpoint=str(tmp_path / kept.name))


def test_an_end_before_the_checkpoint_is_refused(tmp_path):
    kept = saved(tmp_path / "first", **PLAIN)
    with pytest.raises(CheckpointError, match="is of step 2, and this run ends after 1: give a larger --max_steps"):
        gone_on(tmp_path / "again", **PLAIN, max_steps=1, resume_from_checkpoint=str(kept))
    assert gone_on(tmp_path / "again", **PLAIN, max_steps=2, resume_from_checkpoint=str(kept))[0].state.finished


def test_a_model_may_have_moved_and_no_other_takes_its_place(tmp_path):
    loaded = prepared(*(getattr(parity.task("x", 1, **BASE), section) for section in ("data", "model")), 42)[0]
    for place in ("a/net", "b/net", "a/other"):
        loaded.model.save_pretrained(tmp_path / place)
        loaded.tokenizer.save_pretrained(tmp_path / place)
    kept = saved(tmp_path / "first", **PLAIN, model=str(tmp_path / "a/net"))
    _, said = gone_on(tmp_path / "moved", **PLAIN, model=str(tmp_path / "b/net"), resume_from_checkpoint=str(kept))
    assert f"model {tmp_path / 'b/net'} (was {tmp_path / 'a/net'}); the weights are the checkpoint's" in said[-1]
    with pytest.raises(CheckpointError, match="a/net, and this run has .*a/other"):
        gone_on(tmp_path / "other", **PLAIN, model=str(tmp_path / "a/other"), resume_from_checkpoint=str(kept))


def test_a_best_evaluation_that_was_judged_otherwise_does_not_count(tmp_path):
    masked = PLAIN | {"task": "masked_lm", "model": "tiny-bert"}
    kept = saved(tmp_path / "first", **masked)
    for more, counts in (
        ({}, True),
        ({"learning_rate": 1e-5}, True),
        ({"mlm_probability": 0.3}, False),
        ({"best_metric": "perplexity"}, False),
        ({"best_metric": "loss"}, True),
    ):
        trainer, said = gone_on(tmp_path / "again", **masked, **more, resume_from_checkpoint=str(kept))
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


def outer_state(folder):
    """What a rank of DiLoCo alone had, before and after a second start with another outer rate, or another period."""
    first = {"communication": "diloco", "sync_every": 2}
    kept, found = saved(folder / "first", **first), {}
    own = safetensors_tree.load(kept / "rank-0.safetensors")["local"]["0.velocity"]
    for name, more in (("rate", {"outer_lr": 0.3}), ("period", {"sync_every": 3})):
        trainer, said = gone_on(folder / name, **first | more, resume_from_checkpoint=str(kept))
        outer = trainer.wrapped.outer
        found[name] = len(said), outer.lr, bool(own.any()), torch.equal(outer.velocity, own)
    return found


def test_an_outer_rate_is_told_without_the_loss_of_what_ranks_alone_had(tmp_path):
    found = launch(outer_state, tmp_path, num_processes=1, timeout=600)[0]
    assert found == {"rate": (1, 0.3, True, True), "period": (2, 0.7, True, False)}


@pytest.mark.parametrize(
    ("now", "cure"),
    [
        ({"num_processes": 2}, {"global_batch_size": "8", "gradient_accumulation_steps": "1"}),
        ({"num_processes": 2, "gradient_accumulation_steps": 1, "seed": 3}, {"global_batch_size": "8", "seed": "42"}),
        ({"batch_size": 1}, {"batch_size": "4"}),
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
