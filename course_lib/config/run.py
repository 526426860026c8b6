"""The configuration of a run: frozen dataclasses, validated as a whole.

A run is twelve sections of plain fields. Leaf names are unique over the sections, so that
``learning_rate`` means one thing in a YAML file, flat or sectioned, and on the command line
(:mod:`course_lib.config.files` reads both). This module imports no torch.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from course_lib.config import combinations, lr_schedules, service_names
from course_lib.config.fields import Strict
from course_lib.config.learning import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    OutputConfig,
    RunConfig,
    check_adapters,
)
from course_lib.config.monitoring import TRACKERS, GuardConfig, MonitorConfig, TrackingConfig, check_profile
from course_lib.config.parallel import CommunicationConfig, ParallelConfig, PipelineConfig
from course_lib.config.sizes import check_ranks, lengths_to_cut
from course_lib.config.unread import first_unread
from course_lib.errors import ConfigError, near, nearest


@dataclass(frozen=True, kw_only=True)
class Config(Strict):
    """One run, complete."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    run: RunConfig = field(default_factory=RunConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

    @property
    def output_dir(self) -> Path:
        """The run's folder, with the braces of ``output.output_dir`` filled in."""
        values = {o.name: str(self[o.name]).rstrip("/").split("/")[-1] for o in options() if o.name != "output_dir"}
        try:
            return Path(self.output.output_dir.format_map(values)).expanduser()
        except (KeyError, ValueError, IndexError) as error:
            raise ConfigError(
                f"output_dir `{self.output.output_dir}` has a brace that names no field ({error})",
                "use names of config fields, for example {model}",
            ) from None

    def __getitem__(self, leaf: str) -> Any:
        return getattr(getattr(self, option(leaf).section), leaf)

    def replace(self, **leaves: Any) -> "Config":
        """A copy with some leaf fields changed, validated anew: ``config.replace(max_steps=3)``."""
        return build({**flatten(self), **leaves}, where="replace()")


@dataclass(frozen=True)
class Option:
    """One leaf field, as the command line and the documentation see it."""

    name: str
    section: str
    type: Any
    default: Any
    help: str

    @property
    def choices(self) -> tuple[str, ...]:
        """The strings allowed, for a Literal; else empty."""
        members = typing.get_args(self.type) if type(None) in typing.get_args(self.type) else (self.type,)
        return tuple(v for m in members if typing.get_origin(m) is Literal for v in typing.get_args(m))

    @property
    def is_flag(self) -> bool:
        """True for a boolean, which may stand on the command line without a value."""
        return self.type in (bool, bool | None)


def _field_docs(cls: type) -> dict[str, str]:
    """The string literal under each field of a class, as PEP 257 has it."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    return {
        ast.unparse(field_.target): ast.literal_eval(text.value)
        for field_, text in itertools.pairwise(body)
        if isinstance(field_, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


@functools.cache
def options() -> tuple[Option, ...]:
    """Every leaf field of :class:`Config`, in order."""
    listed = []
    for section in dataclasses.fields(Config):
        docs = _field_docs(section.type)  # type: ignore[arg-type]
        listed += [
            Option(f.name, section.name, f.type, f.default, docs[f.name])
            for f in dataclasses.fields(section.type)  # type: ignore[arg-type]
        ]
    return tuple(listed)


def option(name: str) -> Option:
    """The leaf field of that name.

    Raises:
        ConfigError: there is none; the nearest names are given.
    """
    for opt in options():
        if opt.name == name:
            return opt
    raise ConfigError(f"unknown option `{name}`", nearest(name, [o.name for o in options()]))


def flatten(config: Config) -> dict[str, Any]:
    """All leaf fields of a config by name."""
    return {o.name: config[o.name] for o in options()}


def build(leaves: Mapping[str, Any], where: str | Mapping[str, str] = "config") -> Config:
    """A validated :class:`Config` from leaf fields.

    Args:
        leaves: values by leaf name, of the field's type or as text.
        where: what to name in an error, for example a file; or that by leaf name.
    Raises:
        ConfigError: unknown name, wrong type or value out of range.
    """
    from pydantic import ValidationError  # 0.1 s, which --help need not pay

    sections: dict[str, dict[str, Any]] = {s.name: {} for s in dataclasses.fields(Config)}
    for name, value in leaves.items():
        known = option(name)
        if name == "split_spec" and isinstance(value, Mapping):
            value = ",".join(f"{block}:{where_}" for block, where_ in value.items())
        text = value.strip().lower() if isinstance(value, str) else None
        nothing = text in ("none", "null", "") and type(None) in typing.get_args(known.type)
        sections[known.section][known.name] = None if nothing else value
    try:
        return _check_together(_validator().validate_python(sections))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][1]) if len(first["loc"]) > 1 else str(first["loc"][0])
        known = option(name)
        rule = first["msg"].replace("Input", "it", 1)
        wanted = nearest(str(first["input"]), known.choices) if known.choices else rule
        if isinstance(first["input"], bool) and known.choices:  # YAML takes no, off, yes and on for truth values
            wanted += "; in YAML in quotes, as in 'no'"
        likely = near(str(first["input"]), known.choices)
        place = where if isinstance(where, str) else where.get(name, "config")
        raise ConfigError(
            f"{place}: `{name}` cannot be {first['input']!r}",
            wanted,
            cure={name: likely[0]} if len(likely) == 1 else None,
        ) from None


@functools.cache
def _validator() -> Any:
    """Pydantic's validator of :class:`Config`; making it takes longer than validating."""
    from pydantic import TypeAdapter

    return TypeAdapter(Config)


def _check_together(config: Config) -> Config:
    """Rules that join two fields; the config with the engine filled in, and lengths that divide."""
    leaves = flatten(config)
    engine = config.parallel.engine or combinations.default_engine(leaves)
    if engine != config.parallel.chosen_engine:
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, engine=engine))
    leaves["engine"] = engine
    combinations.check(leaves)
    check_ranks(config.parallel, config.pipeline, config.run)
    check_adapters(config.adapter)
    lr_schedules.arguments(config.optim.lr_scheduler, config.optim.lr_scheduler_kwargs)
    _check_run(config)
    check_profile(config.monitor, config.run)
    _check_evaluation(config)
    if config.output.resume_from_checkpoint and config.output.overwrite_output_dir:
        raise ConfigError("resume_from_checkpoint and overwrite_output_dir exclude each other", "keep one of them")
    if config.output.push_to_hub:
        service_names.check_repository(config.output.push_to_hub)
    _check_tracking(config)
    _check_all_is_read(leaves)
    return dataclasses.replace(config, data=lengths_to_cut(config.parallel, config.data))


def _check_run(config: Config) -> None:
    """Rules of steps and batches."""
    run = config.run
    if config.data.streaming and not run.max_steps:
        raise ConfigError(
            "streaming reads files as they are needed, so nobody knows how many steps an epoch has",
            "say how many to make: --max_steps",
        )
    if run.global_batch_size and (run.gradient_accumulation_steps > 1 or run.training_type == "pipeline"):
        raise ConfigError(
            "global_batch_size decides gradient_accumulation_steps, and is not for pipelines",
            "give one of the two, or batch_size as rows per pipeline",
        )
    if run.global_batch_size and (run.split_batches or run.loss_weighting == "micro_batch"):
        raise ConfigError(
            "global_batch_size is for any number of processes, and split_batches and loss_weighting "
            "micro_batch make the step depend on it",
            "leave them out",
        )


def _check_evaluation(config: Config) -> None:
    """Whether there is what the best weights are chosen by."""
    run, task = config.run, config.data.task
    if run.best_metric in ("accuracy", "macro_f1") and task != "classification":
        raise ConfigError(
            f"best_metric {run.best_metric} needs classes, and the task is {task}", "use loss or perplexity"
        )
    if run.best_metric == "perplexity" and task == "classification":
        raise ConfigError("best_metric perplexity needs a language-modelling task", "use loss, accuracy or macro_f1")
    if run.early_stopping_patience and run.eval_steps == 0:
        raise ConfigError(
            "early_stopping_patience needs evaluations during training, and eval_steps is 0",
            "set eval_steps, or leave it out for one each epoch",
        )


def _check_all_is_read(leaves: Mapping[str, Any]) -> None:
    """Whether the trainer and the engine will read whatever is not as it is by default."""
    if unread := first_unread(leaves, {o.name: o.default for o in options()}):
        name, reader = unread
        raise ConfigError(
            f"{name} {leaves[name]} has no effect: it applies to {reader.only}",
            reader.instead,
            cure=reader.cure if reader.cure is not None else {name: None},
        )


def _check_tracking(config: Config) -> None:
    """Whether the trackers are there, and can show what they are asked to."""
    tracking = config.tracking
    for name in tracking.trackers:
        if name not in TRACKERS:
            raise ConfigError(f"unknown tracker `{name}`", nearest(name, (*TRACKERS, "none")))
        named = {
            "project": tracking.project,
            "run_name": tracking.run_name or config.output_dir.name,
            "run_group": tracking.run_group,
        }
        for field_, given in named.items():
            if given is not None:
                service_names.check(name, field_, given)
    if tracking.log_predictions and config.data.task != "classification":
        raise ConfigError(f"log_predictions needs classes, and the task is {config.data.task}", "leave it out")
