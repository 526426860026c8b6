"""Every layout that `course plan` prints for up to eight ranks: what it says can be trained is trained."""

import argparse
import functools
import itertools
import math
import operator
import random
import shlex
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch

from course_lib.commands import plan_files, train
from course_lib.commands.options import config_from
from course_lib.config.files import load
from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.modeling import mixtures, presets
from course_lib.modeling.context import ATTENTION
from course_lib.modeling.layouts import LAYOUTS
from course_lib.parallel.tensor_plans import PLANS
from course_lib.planning import hardware, models, strategy, to_launchers
from course_lib.planning import layouts as proposed
from course_lib.planning.plan import OPTIMIZERS, Plan
from course_lib.training.engines import engine_class
from course_lib.training.run import build_trainer
from tests.forked_process import import_deepspeed
from tests.fresh_accelerator import forget_accelerator
from tests.modeling.test_stages import FOUND
from tests.narrow_presets import narrow_presets  # noqa: F401  what is trained

SMALL = {"vocab_size": presets.VOCABULARY_SIZE, "max_position_embeddings": presets.MAX_POSITIONS}
TINY = {
    name: models.load({"model_type": preset.model_type, "_name_or_path": name, **preset.sizes, **SMALL})
    for name, preset in presets.TINY.items()
}
LENGTH = 32
OF_A_LAYOUT = operator.attrgetter(
    *("engine", "stage", "data", "tensor", "pipeline", "schedule", "virtual", "replicas", "expert"),
    *("checkpointing", "offload"),
)
planned = functools.partial(Plan, LENGTH)


def layouts(model, gpu, ranks):
    """What the search finds: each layout once, however many micro-batches there are of it."""
    found = strategy.search(model, hardware.cluster(gpu, ranks), LENGTH, 8 * ranks)
    return found, list({OF_A_LAYOUT(each.plan): each.plan for each in reversed(found.candidates)}.values())


def sizes(grid):
    return grid.dp, grid.pp, grid.cp, grid.tp


def grid_of(plan):
    return plan.data, plan.pipeline, plan.context, plan.tensor


def config_of(plan, model, gpus_per_node, **options):
    """The config that the command makes which `course plan` prints; options as typed behind it."""
    _, _, typed = to_launchers.launch_line(plan, gpus_per_node, model).partition(" -m course_lib.cli train ")
    assert typed
    parser = argparse.ArgumentParser()
    train.register(parser)
    more = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return config_from(parser.parse_args(shlex.split(typed) + more))


def accepted(plan, model, gpus_per_node, device="cuda"):
    """Config and engine of the printed command, which nothing refuses, and the grid, which is the plan's."""
    config = config_of(plan, model, gpus_per_node, num_processes=plan.gpus)
    engine = engine_class(config)
    engine.refuse(config, torch.device(device), config.run.mixed_precision)
    grid = engine.make_grid(config, plan.gpus)
    assert sizes(grid) == grid_of(plan)
    return config, engine, grid


@pytest.mark.parametrize(
    "names", [("tiny-bert", "tiny-olmoe"), pytest.param(tuple(TINY), marks=pytest.mark.long)], ids=["some", "all"]
)
def test_the_printed_command_of_every_layout_is_a_run_that_nothing_refuses(names):
    assert set(to_launchers.SPLITTABLE) == set(PLANS)
    cut = {*models.families(), *to_launchers.SPREAD} - {"t5"}
    assert cut <= set(LAYOUTS) | set(FOUND), "the trainer cuts all of them into stages"
    seen, elsewhere = Counter(), Counter()
    machines = (("CPU", "cpu"), ("H100", "cuda"), ("T4", "cuda"))
    for name, (gpu, device), ranks in itertools.product(names, machines, (2, 4, 8)):
        model = TINY[name]
        found, plans = layouts(model, gpu, ranks)
        for plan in plans:
            reason = to_launchers.why_not(plan, model)
            if reason:
                elsewhere[reason, model.experts > 1] += 1
                with pytest.raises(ConfigError, match="`course train` "):
                    to_launchers.options(plan, model)
                assert reason in to_launchers.launch_line(plan, ranks, model)
                continue
            config, engine, grid = accepted(plan, model, found.cluster.gpus_per_node, device)
            if plan.pipeline > 1:
                precision = config.run.mixed_precision
                here = SimpleNamespace(grid=grid, device=torch.device(device), precision=precision)
                stages = plan.pipeline * (2 if plan.schedule == "zbv" else plan.virtual)
                assert engine(config, here).schedule.stages == stages <= model.layers
            seen[gpu, ranks, plan.tensor > 1, plan.pipeline > 1] += 1
    # All kinds of grid, on all machines; on a T4, which has fp16 alone, neither.
    assert len(seen) == 2 * (3 + 4 + 4) + 3 and sum(seen.values()) > 80 * len(names), seen
    others = [each for each in elsewhere if "needs a loss scaler" not in each[0]]
    assert all(mixture and "does not split single layers" in reason for reason, mixture in others), others
    unscaled = sum(count for (reason, _), count in elsewhere.items() if "needs a loss scaler" in reason)
    assert unscaled > 10 * len(names), elsewhere


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_emit_writes_the_run_of_the_fastest_that_runs_here(tmp_path, ranks):
    for name, model in TINY.items():
        found = strategy.search(model, hardware.cluster("H100", 8 if ranks == 8 else ranks), LENGTH, 8 * ranks)
        plan_files.write(found, tmp_path / name)
        chosen = next(each.plan for each in found.candidates if to_launchers.runs_here(each.plan, model))
        written = load([tmp_path / name / "course.yaml"])
        assert written == config_of(chosen, model, found.cluster.gpus_per_node, num_processes=ranks)


@pytest.mark.parametrize(
    ("plan", "family", "reason"),
    [
        (planned("megatron", tensor=2), "opt", "does not split single layers of opt"),
        (planned("megatron", pipeline=2), "bloom", None),
        (planned("ddp", data=2), "t5", "no task for an encoder with a decoder"),
        (planned("ddp", context=2), "gpt2", None),
        (planned("ddp", context=2), "opt", "does not split sequences of opt, only of bert, gpt2,"),
        (planned("megatron", context=2, pipeline=2), "gpt2", "pipelines send whole rows from stage to stage"),
        (Plan(LENGTH + 1, "ddp", context=2), "gpt2", "does not cut 33 tokens into 2 equal chunks"),
        (planned("ddp", context=5, context_by="ulysses"), "gpt2", "cannot deal 12 heads with 12 key heads to 5 ranks"),
        (planned("fsdp", 3, data=2, precision="fp16"), "gpt2", "a loss scaler that knows the shards of fsdp"),
        (planned("ddp", data=2, precision="fp8"), "gpt2", "does not compute in fp8"),
        (planned("ddp", data=2, checkpointing="selective"), "gpt2", "recomputes whole blocks or nothing"),
        (planned("fsdp", 3, data=2), "mistral", None),
        (planned("fsdp", 3, data=2, pipeline=2), "gpt2", "gathers whole stages in pipelines"),
        (planned("fsdp", 3, data=4, replicas=2), "gpt2", None),
        (planned("megatron", 1, data=4, expert=2), "mixtral", None),
        (planned("megatron", data=2, expert=2), "qwen3_moe", "does not share experts of qwen3_moe, only of mixtral"),
        (planned("megatron", data=2, expert=2, precision="fp16"), "olmoe", "a loss scaler that knows all ranks"),
        (planned("megatron", pipeline=2, optimizer="muon"), "gpt2", "muon looks for the blocks of a whole model"),
        (planned("fsdp", 3, data=4, replicas=2, tensor=2), "gpt2", "has shard_group_size beside tensor_parallel_size"),
        (planned("deepspeed", 2, data=2, offload="parameters"), "gpt2", "zero2 keeps whole parameters"),
    ],
)
def test_what_is_not_trained_here_says_why(plan, family, reason):
    model = models.load({"model_type": family})
    said = to_launchers.why_not(plan, model)
    assert (said is None) == (reason is None) == to_launchers.runs_here(plan, model)
    if reason:
        assert reason in said and reason in to_launchers.launch_line(plan, 8, model)
        with pytest.raises(ConfigError, match=reason):
            to_launchers.options(plan, model)


def a_plan(draw):
    """Any combination of a plan's fields; ConfigError where there is no such plan."""
    stages = [("ddp", 0), ("fsdp", 3), *(("megatron", stage) for stage in (0, 1, 2))]
    engine, stage = draw.choice(stages + [("deepspeed", stage) for stage in (1, 2, 3)])
    sizes = {name: draw.choice((1, 1, 1, 2)) for name in ("tensor", "pipeline", "context", "replicas", "expert")}
    return Plan(
        LENGTH,
        engine,
        stage,
        **sizes,
        data=draw.choice((1, 2, 4, 8)),
        virtual=draw.choice((1, 1, 2)),
        context_by=draw.choice(("ring", "gather", "ulysses")),
        accumulation=draw.choice((1, 2, 4)),
        checkpointing=draw.choice(("none", "none", "full")),
        compiled=draw.random() < 0.4,
        offload=draw.choice(("none", "none", "optimizer", "parameters")),
        optimizer=draw.choice(OPTIMIZERS),
        precision=draw.choice(("bf16", "fp32", "fp16")),
        schedule=draw.choice(("1f1b", "gpipe", "zb_h1", "interleaved")),
    )


@pytest.mark.parametrize("draws", [2000, pytest.param(20_000, marks=pytest.mark.long)])
def test_what_is_said_to_run_here_is_refused_by_nobody(draws):
    """Of plans that no search proposes too: fields beside each other as they are drawn."""
    draw, made = random.Random(draws), Counter()
    for _ in range(draws):
        model = TINY[draw.choice(sorted(TINY))]
        try:
            plan = a_plan(draw)
        except ConfigError:
            continue
        if plan.gpus > 1 and to_launchers.runs_here(plan, model):
            accepted(plan, model, 8)
            made[plan.engine] += 1
    assert set(made) == {"ddp", "fsdp", "deepspeed", "megatron"} and sum(made.values()) > draws / 20, made


def test_copies_and_shared_experts_have_their_options():
    copies, shared = planned("fsdp", 3, data=8, replicas=4), planned("megatron", 2, data=8, expert=4)
    hybrid = to_launchers.options(copies, TINY["tiny-gpt2"])
    assert (hybrid["strategy"], hybrid["shard_group_size"]) == ("fsdp", 2)
    spread = to_launchers.options(shared, TINY["tiny-olmoe"])
    assert [spread[name] for name in ("strategy", "engine", "expert_parallel_size")] == ["zero2", "scratch", 4]
    assert set(to_launchers.SPREAD) == {kind.__module__.rpartition("modeling_")[2] for kind in mixtures.BLOCKS}
    for plan in (copies, shared):
        with pytest.raises(ConfigError, match="the Hugging Face Trainer does not run"):
            to_launchers.training_arguments(plan)


@pytest.mark.parametrize(("length", "shared"), [(33, False), (32, True)])
def test_tokens_are_shared_only_where_they_divide(length, shared):
    plan = Plan(length, "megatron", tensor=2)
    assert to_launchers.options(plan, TINY["tiny-gpt2"])["sequence_parallel"] is shared


SPLIT_SEQUENCES = [  # on four ranks
    planned("ddp", data=2, context=2, precision="fp32"),
    planned("fsdp", 3, context=4, context_by="gather", precision="fp32", checkpointing="full"),
    planned("megatron", 1, context=2, tensor=2, context_by="ulysses", precision="fp32"),
    planned("deepspeed", 3, data=2, context=2, precision="fp32"),
]


def test_split_sequences_have_their_options():
    assert set(to_launchers.SHARED_ROWS) == set(ATTENTION)
    found = [config_of(plan, TINY["tiny-llama"], 4, num_processes=4).parallel for plan in SPLIT_SEQUENCES]
    assert [
        (each.context_parallel_size, each.context_parallel, each.tensor_parallel_size, each.strategy) for each in found
    ] == [(2, "zigzag", 1, "ddp"), (4, "allgather", 1, "fsdp"), (2, "ulysses", 2, "zero1"), (2, "zigzag", 1, "zero3")]
    odd = to_launchers.options(Plan(34, "ddp", context=2), TINY["tiny-llama"])
    assert (odd["context_parallel"], odd["attention_dropout"]) == ("ring", 0.0)


def test_the_printed_commands_of_split_sequences_are_runs_that_nothing_refuses(monkeypatch):
    """As the search proposes them, with shards as short as the tiny models are."""
    monkeypatch.setattr(proposed, "CONTEXT_TOKENS", 8)
    seen = Counter()
    for name in ("tiny-llama", "tiny-gpt2"):
        _, plans = layouts(TINY[name], "H100", 4)
        for plan in (plan for plan in plans if plan.context > 1 and to_launchers.runs_here(plan, TINY[name])):
            accepted(plan, TINY[name], 4)
            seen[plan.engine, plan.stage, plan.context, plan.tensor] += 1
    flat = {("ddp", 0, 4, 1), ("fsdp", 3, 2, 1), ("deepspeed", 1, 2, 1), ("deepspeed", 3, 4, 1)}
    assert flat | {("fsdp", 3, 2, 2), ("megatron", 1, 2, 2)} <= set(seen), seen


# --- and they train


OPTIONS = {"max_steps": 2, "max_train_samples": 160, "max_eval_samples": 8, "eval_steps": 0, "save_steps": 0}
OPTIONS |= {"device": "cpu", "torch_compile": "false", "progress_bar": "false", "logging_steps": 1}


def two_steps(folder, jobs, gpus_per_node):
    """On the ranks that are here: each plan's printed command, one after the other; losses and grids."""
    found = []
    for number, (plan, model) in enumerate(jobs):
        forget_accelerator()
        config = config_of(plan, model, gpus_per_node, **OPTIONS, output_dir=folder / str(number))
        config.output_dir.mkdir(parents=True, exist_ok=True)
        trainer, _ = build_trainer(config)
        state = trainer.train()
        found.append((state.step, state.last_loss, sizes(trainer.ranks.grid)))
    return found


def train_jobs(folder, jobs, gpus_per_node, ranks):
    each = launch(two_steps, folder, jobs, gpus_per_node, num_processes=ranks, timeout=1120, device="cpu")[0]
    for (plan, _), (steps, loss, grid) in zip(jobs, each, strict=True):
        assert (steps, grid) == (2, grid_of(plan)), plan.strategy
        assert math.isfinite(loss) and loss < 1.5 * math.log(presets.VOCABULARY_SIZE), plan.strategy
        assert loss > 0 or plan.pipeline > 1, plan.strategy


def kind(plan):
    return plan.engine, plan.tensor > 1, plan.pipeline > 1, plan.expert > 1, plan.replicas > 1


def train_all(folder, name, ranks, one_of_a_kind):
    found, proposals = layouts(TINY[name], "CPU", ranks)
    plans = [plan for plan in proposals if to_launchers.runs_here(plan, TINY[name])]
    assert len(plans) == len(proposals) or TINY[name].experts > 1  # whose single layers are not split
    if one_of_a_kind:  # that which does most: the highest stage, several chunks a rank, recomputing
        plans.sort(key=lambda plan: (plan.stage, plan.virtual, plan.checkpointing == "full"))
        plans = list({kind(plan): plan for plan in plans}.values())
    trained = Counter()
    for engines in (["ddp", "fsdp", "megatron"], ["deepspeed"]):  # which takes a process to itself
        chosen = [plan for plan in plans if plan.engine in engines]
        if engines == ["deepspeed"]:  # each start of it is ten seconds
            chosen = [plan for plan in chosen if one_of_a_kind or plan.checkpointing == "none"]
        train_jobs(folder / engines[0], [(plan, TINY[name]) for plan in chosen], found.cluster.gpus_per_node, ranks)
        trained.update(map(kind, chosen))
    return trained


@pytest.mark.parametrize(
    ("name", "ranks", "kinds", "which"),
    [
        ("tiny-bert", 2, 5, "one of a kind"),
        ("tiny-olmoe", 2, 5, "one of a kind"),
        pytest.param("tiny-gpt2", 4, 7, "one of a kind", marks=pytest.mark.long),
        *(
            pytest.param(name, ranks, {2: 5, 4: 7, 8: 7}[ranks], "all", marks=pytest.mark.long)
            for name, sizes in {"tiny-bert": (2, 4), "tiny-llama": (2, 4), "tiny-gpt2": (4, 8)}.items()
            for ranks in sizes
        ),
    ],
)
def test_the_printed_commands_train(tmp_path, name, ranks, kinds, which):
    import_deepspeed()
    trained = train_all(tmp_path, name, ranks, which == "one of a kind")
    assert len(trained) == kinds and (which == "all") == (max(trained.values()) > 1), trained


def drawn(count, seed):
    """Plans of up to eight ranks that the search returns for machines of all sizes, and that are trained here, with
    their models and the GPUs of a machine."""
    draw, chosen = random.Random(seed), []
    while len(chosen) < count:
        name, ranks = draw.choice(sorted(TINY)), draw.choice((2, 4, 8))
        node = draw.choice([size for size in (1, 2, 4, 8) if size <= ranks])
        cluster = hardware.cluster(draw.choice(("CPU", "H100")), ranks, gpus_per_node=node)
        found = strategy.search(TINY[name], cluster, LENGTH, 8 * ranks, precision="fp32")
        kinds = defaultdict(list)
        for plan in (each.plan for each in found.candidates):
            if plan.offload == "none" and to_launchers.runs_here(plan, TINY[name]):
                kinds[kind(plan), plan.context > 1, plan.schedule].append(plan)
        chosen.append((draw.choice(kinds[draw.choice(sorted(kinds))]), TINY[name], node))
    return chosen


@pytest.mark.long
def test_forty_drawn_plans_train(tmp_path, monkeypatch):
    """Each by the command that would be printed, for two steps; the first draw in which every kind of rank is."""
    import_deepspeed()
    monkeypatch.setattr(proposed, "CONTEXT_TOKENS", 8)
    jobs = defaultdict(list)
    for plan, model, node in drawn(40, seed=1):
        jobs[plan.gpus, plan.engine == "deepspeed", node].append((plan, model))
    seen = set()
    for (ranks, alone, node), chosen in jobs.items():
        train_jobs(tmp_path / f"{ranks} {alone} {node}", chosen, node, ranks)
        for name in ("tensor", "pipeline", "context", "expert", "replicas"):
            seen.update(name for plan, _ in chosen if getattr(plan, name) > 1)
    assert len(seen) == 5, seen
