"""Every config field as a command-line option, for the commands that take a config."""

import argparse
import contextlib
import gc
import sys
from collections.abc import Collection, Iterator
from typing import Any

from course_lib import config_files
from course_lib.config import Config, options


def add_config_options(parser: argparse.ArgumentParser, sections: tuple[str, ...],
                       without: Collection[str] = ()) -> None:
    """Add --config and an option for each field of the given sections but those ``without``, with its aliases."""
    parser.add_argument("--config", action="append", default=[], metavar="FILE",
                        help="YAML file of fields; later files override earlier ones, options override files")
    names = {o.name: [o.name] for o in options()}
    for alias, name in config_files.ALIASES.items():
        names[name].append(alias)
    for section in sections:
        group = parser.add_argument_group(section)
        for o in (o for o in options() if o.section == section and o.name not in without):
            optional: dict[str, Any] = {"nargs": "?", "const": "true"} if o.is_flag else {}
            shown = "|".join(o.choices) or ("true|false" if o.is_flag else "VALUE")
            group.add_argument(*(f"--{name}" for name in names[o.name]), dest=o.name, metavar=shown,
                               default=argparse.SUPPRESS, help=f"{o.help} [{o.default}]".replace("%", "%%"), **optional)
    other = parser.add_argument_group("as the Hugging Face Trainer says it")
    for name in config_files.TRANSLATED:
        if name in ("bf16", "fp16"):
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
        text for name, value in fields for text in (f"--{name}", str(value))]


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
