"""Tables as text: a row for each rank, the form that torch.distributed.pipelining's schedule runtime reads.

Without sends and receives it is torch's ``compute_only`` form, with them its ``compute_comms`` form.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.actions import Action, Schedule

_BOOKKEEPING = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")
_OVERLAPPED = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")


def text(schedule: Schedule) -> str:
    """The table as CSV; pairs that may overlap are two cells, so that torch's runtime sends the first one's output
    before the second is done."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


def write(schedule: Schedule, path: str | Path) -> None:
    """Write :func:`text` to a file; torch's ``_PipelineScheduleRuntime._load_csv`` reads it.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        Path(path).write_text(text(schedule), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror})", "name a file in a folder that exists") from error


def read(path: str | Path, name: str | None = None) -> Schedule:
    """Read a table from a file; see :func:`parse`. Its name is that of the file if none is given.

    Raises:
        ConfigError: no such file, or it is no table.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the table {path} ({error})", "give a CSV file, a row for each rank") from error
    return parse(content, name or Path(path).stem)


def parse(content: str, name: str = "table") -> Schedule:
    """Read a table; where stages live and how many micro-batches there are follows from the actions.

    Empty cells are steps at which torch's tables wait, and are left out; so are the cells in which torch tells
    FSDP and data parallelism what to do (UNSHARD, RESHARD, REDUCE_GRAD).

    Raises:
        ConfigError: a cell is no action, or a stage has no rank or two.
    """
    # --- phase 1: the rows, cell by cell ---
    rows, overlapped = [], set()
    for rank, line in enumerate(content.strip("\n").splitlines()):
        row: list[Action] = []
        for cell in map(str.strip, line.split(",")):
            pair = _OVERLAPPED.fullmatch(cell)
            parts = pair.groups() if pair else (cell,) if cell and not _BOOKKEEPING.fullmatch(cell) else ()
            try:
                row += map(Action.parse, parts)
            except ConfigError as error:
                raise ConfigError(f"rank {rank} of {name}: {error.what}", error.instead) from None
            if pair:  # of forward and backward; the forward is the one that is noted
                overlapped.add(row[-2])
        rows.append(tuple(row))
    # --- phase 2: what the file does not say. A stage lives on the rank whose row has it ---
    actions = [action for row in rows for action in row]
    if not actions:
        raise ConfigError(f"{name} holds no action", "write a row for each rank, as in 0F0,0B0")
    stage_ranks = tuple(_owner(rows, stage, name) for stage in range(1 + max(action.stage for action in actions)))
    microbatches = 1 + max(action.microbatch for action in actions)
    return Schedule(name, stage_ranks, microbatches, tuple(rows), frozenset(overlapped))


def _owner(rows: Sequence[tuple[Action, ...]], stage: int, name: str) -> int:
    owners = [rank for rank, row in enumerate(rows) if any(action.stage == stage for action in row)]
    if len(owners) != 1:
        held = " and ".join(map(str, owners)) or "none"
        raise ConfigError(f"stage {stage} of {name} has rank {held}", "each stage needs one rank")
    return owners[0]
