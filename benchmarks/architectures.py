"""Architectures of transformers × tasks × ways to train, each beside one process.

    python benchmarks/architectures.py [--architectures bert llama …] [--ways "ddp torch" …] [--out architectures.md]
    DS_ACCELERATOR=cpu python benchmarks/architectures.py --ways "zero3 deepspeed" --add    # beside what the page has

Each model is built small from its config class, saved, loaded, and trained for a few steps on two CPU ranks in fp32.
What is compared are the losses of all steps and the final weights with those of the plain loop on the same batches.
"""

import datetime
import re
import tempfile
from pathlib import Path

import torch
import transformers

from benchmarks.harness import HERE, options, table
from course_lib.writing import write_text
from testing.architectures import ARCHITECTURES, STEPS, TOLERANCE, WAYS, Outcome, outcomes

Rows = dict[tuple[str, str], dict[str, Outcome]]


def page_rows(page: str) -> Rows:
    """The rows of a page that :func:`page_of` wrote; of a cell that agrees it has the loss alone."""
    said = {}
    for places, line in re.findall(rf"^- (.+?, (?:{'|'.join(WAYS)})): (.*)$", page, re.M):
        said |= dict.fromkeys(places.split("; "), line)
    header, _, *lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    rows: Rows = {}
    for place, *cells in lines:
        name, task = place.split(" / ")
        for way, cell in zip(header[1:], cells, strict=True):
            numbers = [float(number) for number in re.findall(r"[\d.]+e[-+]\d+", cell)]
            rows.setdefault((name, task), {})[way] = (
                Outcome(loss=numbers[0], weight=numbers[-1])
                if numbers
                else Outcome(line=said[f"{place}, {way}"], crashed=cell == "**crash**")
            )
    return rows


def page_of(rows: Rows, date: str) -> str:
    """The page: one row per architecture and task, and the lines of what was refused."""
    ways = [way for way in WAYS if any(way in row for row in rows.values())]
    cells = [outcome for row in rows.values() for outcome in row.values()]
    agree, refused = sum(cell.agrees for cell in cells), sum(bool(cell.line) and not cell.crashed for cell in cells)
    said: dict[str, list[str]] = {}
    for (name, task), row in rows.items():
        for way, outcome in row.items():
            if outcome.line:
                said.setdefault(outcome.line, []).append(f"{name} / {task}, {way}")
    parts = [
        "# Architectures × tasks × ways to train",
        f"`python benchmarks/architectures.py`, {date}: {made_with()}, two CPU ranks, fp32, {STEPS} steps of models "
        "built small from their config classes.",
        f"A number is the largest difference of a step's loss (nats) from the plain loop on one process; losses and "
        f"final weights are within {TOLERANCE:g}, or both differences stand there in bold. Of {len(cells)} cells "
        f"{agree} agree, {refused} are refused in one line (below), {len(cells) - agree - refused} are neither.",
        table(
            " | ".join(["model / task", *ways]),
            ((f"{name} / {task}", *(row.get(way, "") for way in ways)) for (name, task), row in rows.items()),
        ),
        "## What was refused, and how",
        "\n".join(f"- {'; '.join(places)}: {line}" for line, places in said.items()),
    ]
    return "\n\n".join(parts) + "\n"


def made_with() -> str:
    """The versions that matter."""
    return f"transformers {transformers.__version__}, torch {torch.__version__}"


def main() -> None:
    """Train all that was asked for, and write the page."""
    args = options(
        __doc__,
        architectures={"nargs": "+", "choices": list(ARCHITECTURES), "default": list(ARCHITECTURES)},
        tasks={"nargs": "+", "default": ["classification", "causal_lm", "masked_lm"]},
        ways={"nargs": "+", "choices": list(WAYS), "default": list(WAYS)},
        out=HERE / "architectures.md",
        add={"default": False, "help": "keep what the page has for other ways"},
    )
    rows, date, page = {}, datetime.date.today().isoformat(), args.out.read_text() if args.add else ""
    if args.add and made_with() not in page:
        raise SystemExit(f"{args.out} was not made with {made_with()}: make it anew, without --add")
    for name in args.architectures:
        for task in ARCHITECTURES[name][2]:
            if task in args.tasks:
                with tempfile.TemporaryDirectory() as folder:
                    rows[name, task] = outcomes(Path(folder), name, task, args.ways)
                print(name, task, {way: str(outcome) for way, outcome in rows[name, task].items()}, flush=True)
    if args.add:
        made = re.search(r"^`python benchmarks/architectures.py`, (.*?):", page, re.M)
        date = f"{made[1] if made else ''}, and {', '.join(args.ways)} {date}"
        for place, row in page_rows(page).items():
            rows[place] = row | rows.get(place, {})
    places = [(name, task) for name in ARCHITECTURES for task in ARCHITECTURES[name][2]]
    write_text(args.out, page_of({place: rows[place] for place in places if place in rows}, date))


if __name__ == "__main__":
    main()
