"""Architectures of transformers × tasks × ways to train, each beside one process.

    python benchmarks/architectures.py [--architectures bert llama …] [--ways "ddp torch" …] [--out architectures.md]
    DS_ACCELERATOR=cpu python benchmarks/architectures.py --ways "zero3 deepspeed" --add    # beside what the page has

Each model is built small from its config class, saved, loaded, and trained for a few steps on two CPU ranks in fp32.
What is compared are the losses of all steps and the final weights with those of the plain loop on the same batches.
"""

import argparse
import datetime
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from course_lib.writing import write_text  # noqa: E402
from testing.architectures import ARCHITECTURES, STEPS, TOLERANCE, WAYS, Outcome, outcomes  # noqa: E402

Rows = dict[tuple[str, str], dict[str, Outcome]]


def page_rows(page: str) -> Rows:
    """The rows of a page that :func:`table` wrote; of a cell that agrees it has the loss alone."""
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


def table(rows: Rows, date: str) -> str:
    """The page: one row per architecture and task, and the lines of what was refused."""
    ways = [way for way in WAYS if any(way in row for row in rows.values())]
    cells = [outcome for row in rows.values() for outcome in row.values()]
    agree, refused = sum(cell.agrees for cell in cells), sum(bool(cell.line) and not cell.crashed for cell in cells)
    lines = [
        "# Architectures × tasks × ways to train",
        "",
        f"`python benchmarks/architectures.py`, {date}: transformers {transformers.__version__}, torch "
        f"{torch.__version__}, two CPU ranks, fp32, {STEPS} steps of models built small from their config classes.",
        "",
        f"A number is the largest difference of a step's loss (nats) from the plain loop on one process; losses and "
        f"final weights are within {TOLERANCE:g}, or both differences stand there in bold. Of {len(cells)} cells "
        f"{agree} agree, {refused} are refused in one line (below), {len(cells) - agree - refused} are neither.",
        "",
        f"| model / task | {' | '.join(ways)} |",
        "|---" * (len(ways) + 1) + "|",
    ]
    lines += [
        f"| {name} / {task} | {' | '.join(str(row[way]) if way in row else '' for way in ways)} |"
        for (name, task), row in rows.items()
    ]
    said: dict[str, list[str]] = {}
    for (name, task), row in rows.items():
        for way, outcome in row.items():
            if outcome.line:
                said.setdefault(outcome.line, []).append(f"{name} / {task}, {way}")
    lines += ["", "## What was refused, and how", ""]
    lines += [f"- {'; '.join(places)}: {line}" for line, places in said.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--tasks", nargs="+", default=["classification", "causal_lm", "masked_lm"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, default=HERE / "architectures.md")
    parser.add_argument("--add", action="store_true", help="keep what the page has for other ways")
    parser.add_argument("--rows", type=Path, help="a file of rows to go on with, and to add to")
    args = parser.parse_args()
    rows: Rows = {}
    if args.rows and args.rows.exists():
        for line in args.rows.read_text().splitlines():
            name, task, row = json.loads(line)
            rows[name, task] = {way: Outcome(**fields) for way, fields in row.items()}
    for name in args.architectures:
        for task in ARCHITECTURES[name][2]:
            if task in args.tasks and (name, task) not in rows:
                with tempfile.TemporaryDirectory() as folder:
                    rows[name, task] = outcomes(Path(folder), name, task, args.ways)
                print(name, task, {way: str(outcome) for way, outcome in rows[name, task].items()}, flush=True)
                if args.rows:
                    row: dict[str, Any] = {way: vars(outcome) for way, outcome in rows[name, task].items()}
                    with args.rows.open("a") as file:
                        file.write(json.dumps([name, task, row]) + "\n")
    date = datetime.date.today().isoformat()
    if args.add:
        page = args.out.read_text()
        made_with = f"transformers {transformers.__version__}, torch {torch.__version__}"
        if made_with not in page:
            parser.error(f"{args.out} was not made with {made_with}: make it anew, without --add")
        made = re.search(r"^`python benchmarks/architectures.py`, (.*?):", page, re.M)
        date = f"{made[1] if made else ''}, and {', '.join(args.ways)} {date}"
        for place, row in page_rows(page).items():
            rows[place] = row | rows.get(place, {})
    in_order = {
        (name, task): rows[name, task]
        for name in ARCHITECTURES
        for task in ARCHITECTURES[name][2]
        if (name, task) in rows
    }
    write_text(args.out, table(in_order, date))


if __name__ == "__main__":
    main()
