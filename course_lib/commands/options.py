"""Every config field as a command-line option, for the commands that take a config."""

import argparse
import contextlib
import gc
import sys
import typing
from collections.abc import Collection, Iterator
from typing import Any

from course_lib.config import Config, Option, options
from course_lib.config import files as config_files
from course_lib.config import trainer_names as config_trainer_names

FIRST = "what matters first"
MATTER = (
    "model",
    "dataset",
    "task",
    "output_dir",
    "num_epochs",
    "batch_size",
    "learning_rate",
    "max_length",
    "num_processes",
    "strategy",
)
"""The ten options of most command lines, in the order of the help."""
SECTIONS = {
    "data": "which examples, and how text becomes batches",
    "model": "how the model is run",
    "adapter": "training of few parameters beside frozen ones (LoRA, QLoRA)",
    "optim": "how a gradient becomes a step",
    "parallel": "how ranks share one model",
    "communication": "what ranks say to each other, for slow links (--strategy ddp --engine scratch)",
    "pipeline": "stages of the model on ranks (--training_type pipeline)",
    "run": "how long, on what",
    "output": "what is kept, and where to go on from",
    "tracking": "where a run's numbers go",
    "monitor": "what is watched on the ranks",
    "guard": "what ends a run that cannot go well",
}
"""What the options of a section decide, in the help."""
WIDEST = 40
"""Characters of the choices that stand beside an option's name."""
USAGE = {"sweep": "FILE ", "submit": "--instance_type ML.NAME ", "scaling": ""}
"""What a command needs besides."""


def _shown(o: Option) -> str:
    """What stands for an option's value in the help."""
    kinds = {int: "N", float: "X", str: "TEXT"}
    plain = next((kinds[kind] for kind in kinds if kind in _parts(o.type)), "NAME")
    choices = "|".join(o.choices)
    return choices if 0 < len(choices) <= WIDEST else "true|false" if o.is_flag else plain


def _help(o: Option) -> str:
    """An option's meaning, its choices where they have no room before it, and its default."""
    choices = f" One of {', '.join(o.choices)}." if len("|".join(o.choices)) > WIDEST else ""
    return f"{o.help}{choices} [{o.default}]".replace("%", "%%")


def _parts(kind: Any) -> set[Any]:
    """The plain types that an annotation is made of."""
    inner = typing.get_args(kind)
    return {kind} if not inner else set().union(*(_parts(part) for part in inner if not isinstance(part, str)))


def add_config_options(
    parser: argparse.ArgumentParser, sections: Collection[str] = SECTIONS.keys(), without: Collection[str] = ()
) -> None:
    """Add --config and an option for each field of the sections but those ``without``, with its aliases."""
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file of fields; later files override earlier ones, options override files",
    )
    aliases: dict[str, list[str]] = {o.name: [] for o in options()}
    for alias, name in config_files.ALIASES.items():
        aliases[name].append(alias)
    groups = {section: parser.add_argument_group(section, SECTIONS.get(section)) for section in (FIRST, *sections)}
    taken = [o for o in options() if o.section in sections and o.name not in without]
    for o in sorted(taken, key=lambda o: MATTER.index(o.name) if o.name in MATTER else len(MATTER)):
        group = groups[FIRST if o.name in MATTER else o.section]
        optional: dict[str, Any] = {"nargs": "?", "const": "true"} if o.is_flag else {}
        group.add_argument(
            f"--{o.name}", dest=o.name, metavar=_shown(o), default=argparse.SUPPRESS, help=_help(o), **optional
        )
        for alias in aliases[o.name]:
            group.add_argument(f"--{alias}", dest=o.name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **optional)
    # argparse would name every option in the first lines
    parser.usage = f"{parser.prog} {USAGE.get(parser.prog.rpartition(' ')[2], '')}[--config FILE] [--OPTION VALUE ...]"
    parser.epilog = (
        "`course train --explain OPTION` tells more of one. Names of the Hugging Face Trainer work too: "
        + ", ".join(f"{alias} for {o.name}" for o in taken for alias in aliases[o.name])
        + "."
    )
    other = parser.add_argument_group("as the Hugging Face Trainer says it")
    for name in (name for name in config_files.TRANSLATED if name not in aliases):
        if name in config_trainer_names.NAMES:
            optional = {"nargs": "?", "const": "true"}
            other.add_argument(f"--{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **optional)
        elif name in ("bf16", "fp16"):
            other.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar="true|false", nargs="?", const="true")
        else:
            other.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar="no|steps|epoch")


def config_from(args: argparse.Namespace, **fixed: Any) -> Config:
    """The config of a parsed command line; ``fixed`` fields win over it.

    Raises:
        ConfigError: an unknown or unfit field, in a file or an option.
    """
    return config_files.load(args.config, given_fields(args) | fixed)


def given_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields that a parsed command line gives, as text by name."""
    known = {o.name for o in options()} | set(config_files.TRANSLATED)
    return {name: value for name, value in vars(args).items() if name in known}


def as_options(args: argparse.Namespace) -> list[str]:
    """The config of a parsed command line as the options of another ``course train``."""
    fields = given_fields(args).items()
    return [text for path in args.config for text in ("--config", path)] + [
        text for name, value in fields for text in (f"--{name}", str(value))
    ]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For what a command imports when it runs: no garbage is looked for meanwhile, and none among it ever after.

    Modules stay to the end. Looking through those of torch and transformers takes a tenth of the start, and as long
    again when Python ends.
    """
    automatic, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        if automatic:
            gc.enable()
