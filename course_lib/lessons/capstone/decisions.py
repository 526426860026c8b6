"""The capstone: the learner's decisions about one project, and the plans that follow from them.

:mod:`course_lib.lessons.capstone.rehearsal` carries the project out on this machine's ranks,
:mod:`course_lib.lessons.capstone.rubric` judges it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from course_lib import modeling
from course_lib.config import Config, build
from course_lib.data import DataConnector, TextData
from course_lib.errors import ConfigError, nearest
from course_lib.lessons.planning.lab import known_errors
from course_lib.parallel.blocks import blocks
from course_lib.planning import cost, hardware, memory, models, strategy, to_launchers
from course_lib.planning.from_run import LAYOUTS
from course_lib.planning.plan import Plan
from course_lib.training.baselines import class_shares_loss, majority_class

TRAINING_ROWS = 1000
"""Of a language model's training split, whose tokens are counted."""
LEAST_STEPS = 5
"""Of a run: one without optimizer states, two that are metered, and two to take the speed from."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """The learner's decisions: what is rehearsed on this machine, how it is broken and compared, and what is rented.

    Attributes:
        dataset: as ``course train --dataset`` takes it.
        recipe: further fields of the config, ``task`` and ``learning_rate`` for example.
        model: a preset, a folder or a name on the Hub, small enough for this machine.
        strategy: how the ranks share the model's state; here, and on what is rented.
        world_size: ranks here.
        device: of the ranks here.
        global_batch: rows of an optimizer step, here and on what is rented.
        steps: optimizer steps of a run here.
        save_steps: optimizer steps between two checkpoints, here.
        kill_step: the step at whose end the last rank is killed.
        other: fields of the config that make the other arm of the comparison.
        seeds: one run of each arm for each.
        rented: fields of the config that change for the rented machines, ``model`` among them.
        rows: of the rented run's training split.
        instance_type: SageMaker's name of the rented machine, for every launcher.
        instance_count: of them.
        hours: after which the job is stopped.
        budget: dollars.
    """

    dataset: str
    recipe: Mapping[str, Any]
    model: str
    strategy: str
    world_size: int
    device: str
    global_batch: int
    steps: int
    save_steps: int
    kill_step: int
    other: Mapping[str, Any]
    seeds: Sequence[int]
    rented: Mapping[str, Any]
    rows: int
    instance_type: str
    instance_count: int
    hours: float
    budget: float

    @classmethod
    def of(cls, names: Mapping[str, Any]) -> "Project":
        """The project whose decisions stand in a notebook's variables of the same names.

        Raises:
            ConfigError: one is missing, or impossible whatever follows.
        """
        if missing := [f.name for f in fields(cls) if f.name not in names]:
            raise ConfigError(f"no decision about {', '.join(missing)}", "put it back into the cell of parameters")
        project = cls(**{f.name: names[f.name] for f in fields(cls)})
        if project.strategy not in LAYOUTS:
            raise ConfigError(f"strategy `{project.strategy}`", nearest(project.strategy, LAYOUTS))
        if project.world_size < 2 or project.global_batch % (project.world_size * project.accumulation):
            raise ConfigError(
                f"global_batch {project.global_batch} on {project.world_size} ranks",
                "take two ranks or more, and a multiple of them (and of their accumulation)",
            )
        if "model" not in project.rented:
            raise ConfigError("`rented` names no model", 'write rented = {"model": "gpt2-xl", ...}')
        return project

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step, here."""
        return self.recipe.get("gradient_accumulation_steps", 1)

    @property
    def lost(self) -> int:
        """Steps that the kill should cost: those since the last checkpoint before the killed step's own."""
        saved = (self.kill_step - 1) // self.save_steps * self.save_steps if self.save_steps else 0
        return self.kill_step - saved

    def config(self, folder: Path, **options: Any) -> Config:
        """A run of the project on this machine, in that folder."""
        quiet = {
            "logging_steps": 1,
            "eval_steps": 0,
            "max_eval_samples": 200,
            "keep_best": False,
            "baselines": False,
            "progress_bar": False,
            "tracker": "jsonl",
            "mixed_precision": "no",
            "cpu_kernels": "torch",
        }
        if self.strategy.startswith("zero") or str(self.other.get("strategy")).startswith("zero"):
            quiet["lean_buffers"] = True  # what a rank holds and sends is compared with the formulas of ZeRO
        return build(
            quiet
            | dict(self.recipe)
            | {
                "dataset": self.dataset,
                "model": self.model,
                "strategy": self.strategy,
                "device": self.device,
                "batch_size": self.global_batch // self.world_size // self.accumulation,
                "max_steps": self.steps,
                "seed": self.seeds[0],
                "save_steps": self.save_steps,
                "output_dir": str(folder),
                "overwrite_output_dir": True,
            }
            | options
        )

    def arms(self, folder: Path) -> list[Config]:
        """The compared runs, ``chosen-1``, ``other-1``, ``chosen-2`` ..., each arm with every seed.

        An arm with another global batch takes more or fewer steps, so that both see the same number of rows.

        Raises:
            ConfigError: fewer than :data:`LEAST_STEPS`, or fields that the trainer refuses.
        """
        chosen = [
            self.config(folder / f"chosen-{number}", seed=seed, save_steps=0)
            for number, seed in enumerate(self.seeds, 1)
        ]
        rows = [config.replace(**self.other) for config in chosen]
        steps = [round(self.steps * self.global_batch / rows_of_a_step(config, self.world_size)) for config in rows]
        others = [
            config.replace(**{"max_steps": count} | dict(self.other) | {"output_dir": str(folder / f"other-{number}")})
            for number, (config, count) in enumerate(zip(rows, steps, strict=True), 1)
        ]
        if (fewest := min(config.run.max_steps or 0 for config in chosen + others)) < LEAST_STEPS:
            raise ConfigError(f"a run of {fewest} steps", f"take at least {LEAST_STEPS} in both arms: two are metered")
        return [config for pair in zip(chosen, others, strict=True) for config in pair]


def rows_of_a_step(config: Config, ranks: int) -> int:
    """Rows of an optimizer step over so many ranks."""
    return config.run.batch_size * config.run.gradient_accumulation_steps * ranks


@dataclass(frozen=True)
class Rented:
    """The plan for the rented machines.

    Attributes:
        why: what the planner says of it, also where nothing fits.
        layout: its name for the layout, None where nothing fits; then all that follows is None, too.
        fields: of ``course train`` for that layout.
        needed: bytes of a GPU with which it fits.
        capacity: bytes of a GPU.
        step_seconds: of one optimizer step.
        hours: of the whole run, as the planner has it.
        late: hours, if it errs like the worst tenth of the published runs that it was compared with.
    """

    why: str
    layout: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    needed: float | None = None
    capacity: float | None = None
    step_seconds: float | None = None
    hours: float | None = None
    late: float | None = None


def plan_rented(project: Project) -> Rented:
    """The fastest layout of the project's strategy on the rented machines, its time and its memory.

    Raises:
        CourseError: the model, the machine or the length is unknown or impossible.
    """
    here = project.config(Path())
    model = models.load(project.rented["model"], head=here.data.task != "classification")
    node = hardware.cluster(project.instance_type)
    cluster = hardware.cluster(project.instance_type, node.gpus * project.instance_count)
    length = project.rented.get("max_length", here.data.max_length)
    engine, stage = LAYOUTS[project.strategy]
    try:
        result = strategy.search(
            model, cluster, length, project.global_batch, families=[strategy.family(Plan(1, engine, stage))]
        )
    except strategy.NothingFits as why:
        return Rented(str(why))
    best = result.best
    hours = best.cost.hours(project.rows * project.rented.get("num_epochs", here.run.num_epochs) * length)
    if reason := to_launchers.why_not(best.plan, model):
        return Rented(f"{best.plan.strategy}: `course train` {reason}")
    fields = to_launchers.options(best.plan, model)
    del fields["task"]  # a guess by the kind of model: the project has its own
    return Rented(
        strategy.explain(result)[0],
        best.plan.strategy,
        fields,
        strategy.needed(best.memory),
        cluster.accelerator.memory,
        best.cost.step,
        hours,
        hours * (1 + planner_error()),
    )


def states_at_least(project: Project, parameters: float, gpus: int) -> float:
    """Bytes of model states that a rented GPU holds in mixed precision: 16, 4 + 12/N, 2 + 14/N or 16/N per parameter.

    Source: arXiv 1910.02054, table 1.
    """
    return memory.zero_model_states(parameters, gpus, LAYOUTS[project.strategy][1])


def planner_error() -> float:
    """By how much nine in ten of the planner's published comparisons are off at most, in throughput; 0.5 is half."""
    errors = known_errors()
    return float(errors[errors["kind"] == "all, tokens/s/GPU"].iloc[0]["90th percentile"].rstrip("%")) / 100


def rented_config(project: Project, plan: Rented) -> Config:
    """Config that is submitted: the rehearsed run, laid out as planned, with the fields that the project changes."""
    here = project.config(Path("runs/capstone"))
    whole = {
        "max_steps": None,
        "max_eval_samples": None,
        "logging_steps": 10,
        "device": "auto",
        "overwrite_output_dir": False,
        "lean_buffers": False,
    }
    changed = {name: value for name, value in project.rented.items() if name != "model"}  # by the planner's full name
    return here.replace(**{**whole, **plan.fields, **changed})


@dataclass(frozen=True)
class Here:
    """The plan for a rank of this machine, by formula.

    Attributes:
        states: bytes of parameters, gradients and optimizer states when backward has ended.
        sent: bytes in an optimizer step, under the ring model.
        samples_per_second: of all ranks, with the catalogue's guess of a CPU.
        constant: loss, in nats, of a constant that knows the training split's class (or token) shares and nothing
            else, on the rows that the runs are scored on.
        classes: that there are, or tokens.
        majority_macro_f1: of always answering the commonest class; None for language modelling.
    """

    states: float
    sent: float
    samples_per_second: float
    constant: float
    classes: int
    majority_macro_f1: float | None = None


def plan_here(project: Project, config: Config) -> Here:
    """Plan one of the project's runs on this machine's ranks; its model is built to read its sizes."""
    text = DataConnector(config.data, config.run.seed).load()
    loaded = modeling.load(
        config.model,
        config.data.task,
        label_names=text.label_names,
        texts=text.training_texts,
        seed=config.run.seed,
        max_length=config.data.max_length,
    )
    classes = bool(text.label_names)
    kinds = len(text.label_names) if text.label_names else loaded.tokenizer.vocab_size
    model = models.from_config(loaded.model.config.to_dict(), project.model, head=not classes)
    answers = _answers(text, loaded.tokenizer, config.data.max_length)
    ranks, (engine, stage) = project.world_size, LAYOUTS[config.parallel.strategy]
    plan = Plan(
        config.data.max_length,
        engine,
        stage,
        data=ranks,
        micro_batch=config.run.batch_size,
        accumulation=config.run.gradient_accumulation_steps,
        precision="fp32",
    )
    speed = cost.estimate(model, plan, hardware.cluster("CPU", ranks))
    volume = cost.zero_volume(stage) * model.parameters
    if engine == "fsdp":  # what lies outside its blocks is kept after the forward, and gathered once
        volume -= model.parameters - sum(
            weight.numel() for block in blocks(loaded.model).values() for weight in block.parameters()
        )
    return Here(
        memory.estimate(model, plan).states,
        4 * volume * (ranks - 1) / ranks,
        speed.tokens_per_second / config.data.max_length,
        class_shares_loss(*answers, kinds),
        kinds,
        majority_class(*answers, kinds)["macro_f1"] if classes else None,
    )


def _answers(text: TextData, tokenizer: Any, length: int) -> tuple[list[int], list[int]]:
    """What a model has to say on the training rows, and on those that it is scored on: labels, or tokens."""
    train, scored = text.splits["train"], text.splits["test" if "test" in text.splits else "validation"]
    if text.label_names:
        return list(train["label"]), list(scored["label"])

    def tokens(texts: Sequence[str]) -> list[int]:
        rows = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
        return [token for row in rows for token in row[1:]]

    return tokens(train["text"][:TRAINING_ROWS]), tokens(scored["text"][:])
