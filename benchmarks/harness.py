"""Shared parts of the benchmarks: options, clocks, ratios, tables, and the dated page that each writes beside itself.

    args = options(__doc__, ranks=2, rounds=12)
    found = launch(measure, args, num_processes=args.ranks)[0]
    publish("speed", "Speed", ("torch",), f"{args.ranks} ranks.", table("what | ratio", rows))

where ``measure`` runs on every rank, and gives ``in_turns({name: lambda: seconds(step), ...}, args.rounds)`` of
``course_lib.lessons.turns``.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.system import machine
from course_lib.writing import write_text

HERE = Path(__file__).resolve().parent


def options(description: str | None, **arguments: Any) -> argparse.Namespace:
    """Read the command line.

    Args:
        description: the module's docstring, which ``--help`` shows.
        **arguments: of each option its default, whose type it has; False is a flag's. A dict is handed to argparse's
            ``add_argument``; without a ``default`` the argument is positional.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in arguments.items():
        settings = default if isinstance(default, dict) else {"default": default}
        if settings.get("default") is False:
            settings = settings | {"action": "store_true"}
        elif isinstance(settings.get("default"), (int, float, Path)):
            settings = {"type": type(settings["default"])} | settings
        parser.add_argument(f"--{name}" if "default" in settings else name, **settings)
    return parser.parse_args()


ON_GPUS = {
    "num_processes": {"default": 0, "help": "ranks; default: all GPUs, or 2 on the CPU"},
    "cpu": {"default": False, "help": "keep off the GPUs"},
}
"""Options of a benchmark that runs on the GPUs where there are any, and ranks there."""


def place_of_ranks(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """``gpu`` or ``cpu`` by the options ``ON_GPUS``, and the arguments of ``launch`` for its ranks."""
    gpus = 0 if args.cpu else torch.cuda.device_count()
    kind, device = ("gpu", "cuda") if gpus else ("cpu", "cpu")
    return kind, {"num_processes": args.num_processes or gpus or 2, "device": device}


STEPS_ALONE: dict[str, Any] = {
    "eval_steps": 0,
    "save_steps": 0,
    "keep_best": False,
    "progress_bar": False,
    "tracker": "none",
}
"""Options of `course train` for a run that has nothing around its steps."""


# --- measuring --------------------------------------------------------------------------------------------------------


def join_ranks(cpu: bool = False) -> torch.device:
    """Make this rank's process group, over NCCL on a GPU of its own or over gloo; gives its device."""
    if cpu or not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


def seconds(step: Callable[[], object], steps: int = 1) -> float:
    """Wall-clock seconds per step, over so many steps; all ranks begin and end together."""
    _wait()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    _wait()
    return (time.perf_counter() - begin) / steps


def _wait() -> None:
    """Wait for this rank's GPU, and for the other ranks."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def ratios(numbers: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratio of two systems' numbers, round by round."""
    return [number / other for number, other in zip(numbers, others, strict=True)]


def spread(
    values: Sequence[float], digits: int, what: str = "", middle: Callable[[Sequence[float]], float] = statistics.median
) -> str:
    """Median, or another middle, of some values with the least and the largest: ``0.98 of ours (0.91–1.04)``."""
    return f"{middle(values):.{digits}f}{what} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def milliseconds(values: Sequence[float], digits: int = 1) -> str:
    """Median of some seconds, in milliseconds."""
    return f"{1000 * statistics.median(values):.{digits}f}"


# --- writing ----------------------------------------------------------------------------------------------------------


def table(header: str, rows: Iterable[Iterable[object]], right: Collection[int] = ()) -> str:
    """A Markdown table.

    Args:
        header: the columns' titles, with `` | `` between them.
        rows: their cells, of which bars are escaped.
        right: numbers of the columns that are aligned to the right.
    """
    columns = header.count(" | ") + 1
    lines = [f"| {header} |", "|" + "".join("---:|" if i in right else "---|" for i in range(columns))]
    for row in rows:
        cells = [str(cell).replace("|", "\\|") for cell in row]
        assert len(cells) == columns, f"{cells} under {header}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def publish(page: str | Path, title: str, packages: Iterable[str], *parts: str) -> None:
    """Write a page, and print it.

    Args:
        page: its name, in this folder and without its ending, or its path.
        title: its heading.
        packages: whose versions the line below says, beside the date, the machine and the command; none: no line.
        *parts: its paragraphs and tables.
    """
    packages = tuple(packages)
    about = [machine.measured_on(*packages)] if packages else []
    text = "\n\n".join([f"# {title}", *about, *parts]) + "\n"
    write_text(HERE / f"{page}.md" if isinstance(page, str) else page, text)
    print(text, flush=True)
