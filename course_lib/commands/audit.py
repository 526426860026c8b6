"""``course audit``: is a distributed gradient right? One process against every layout, parameter by parameter."""

import argparse
import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from course_lib.errors import ConfigError, CourseError

NAME = "audit"
HELP = "compare gradients on every layout of ranks with those of one process, and name what is wrong"
EXIT_WRONG = 1


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "subject",
        metavar="FILE.py:FUNCTION",
        nargs="?",
        help="`make(layout)`, called on each rank, gives model, optimizer, loss(model, batch), batch",
    )
    parser.add_argument(
        "--model",
        help="in place of a file: a folder, a model of `course plan`, or a type, as qwen3; "
        "built small, from its own config class",
    )
    parser.add_argument(
        "--engine",
        help="that trains --model: transformers (its own parallelism), accelerate, "
        "deepspeed, torch, or scratch, the course's own (default: transformers)",
    )
    parser.add_argument(
        "--layouts",
        choices=("auto", "all"),
        help="of an engine: two ranks per axis and 2 x 2 (auto, the default), or every one of up to "
        "--ranks; of a file, all: every axis",
    )
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        help="of --model; the tolerance follows it (default: float32)",
    )
    parser.add_argument("--ranks", type=int, default=4, help="layouts of up to so many ranks (default: 4)")
    parser.add_argument("--axes", help="comma-separated: pp, dp, shard, cp, ep, tp (default: dp)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each layout (default: 120)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the verdicts; 0 where everything agrees, 1 where something differs."""
    from course_lib.audit import audit, report

    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, where something imports it, warns of a guess
    with contextlib.redirect_stdout(sys.stderr):  # what packages and the file print on the way is no part of the table
        make, chosen = _of_file(args) if args.subject else _of_model(args)
        audited = audit(make, chosen, timeout=args.timeout)
    if not audited.verdicts:
        raise CourseError(f"{args.subject or args.model} has none of these layouts", "give other axes, or more --ranks")
    if args.json:
        print(report.as_json(audited))
    else:
        print("\n".join(report.lines(audited)))
    return 0 if audited.clean else EXIT_WRONG


def _of_file(args: argparse.Namespace) -> tuple[Any, Any]:
    from course_lib.audit import AXES, layouts

    for option in ("model", "engine", "dtype"):
        if getattr(args, option) is not None:
            raise ConfigError(f"--{option} beside {args.subject}", "give a file, or a model and an engine")
    axes = args.axes.split(",") if args.axes else AXES if args.layouts == "all" else ["dp"]
    return _make(args.subject), layouts(args.ranks, axes)


def _of_model(args: argparse.Namespace) -> tuple[Any, Any]:
    if args.model is None:
        raise ConfigError("nothing to audit", "give FILE.py:FUNCTION, or --model and --engine")
    if args.axes is not None:
        raise ConfigError("--axes beside --model: an engine has its own", "use --layouts auto or all")
    import torch

    from course_lib.training.audited_models import ModelOnEngine, chosen_layouts

    engine = args.engine or "transformers"
    chosen = chosen_layouts(engine, args.layouts or "auto", args.ranks)
    return ModelOnEngine(args.model, engine, dtype=getattr(torch, args.dtype or "float32")), chosen


def _make(subject: str) -> Any:
    """The function that a file names.

    Raises:
        ConfigError: no such file or function, or the file cannot be imported.
    """
    name, _, function = subject.rpartition(":")
    path = Path(name)
    if not name or not path.is_file():
        raise ConfigError(f"cannot read {name or subject}", "give a file and a function, as my_training.py:make")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}", "mend it first") from None
    if not callable(made := getattr(module, function, None)):
        raise ConfigError(f"{path} has no function `{function}`", "give FILE.py:FUNCTION")
    return made
