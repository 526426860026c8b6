"""The schedule bench: tables, their proof, their time line, from the course's own modules, as JSON for the page.

It runs in the browser, by Pyodide, and in the tests, by Python.
"""

import json
from typing import Any

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline import csv_form
from course_lib.parallel.pipeline.actions import Schedule
from course_lib.parallel.pipeline.fitted.search import NAMES, build, stage_costs, stages_for
from course_lib.parallel.pipeline.schedules import KINDS
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.parallel.pipeline.validation import check


def names() -> str:
    """JSON of the schedules that there are, and whether each takes any number of stages per rank."""
    return json.dumps({name: name in KINDS and KINDS[name].stages_per_rank is None for name in NAMES})


def made(asked: str) -> str:
    """JSON of a schedule by name.

    Args:
        asked: JSON with name, ranks, microbatches, stages (per rank), and the costs of :func:`_costs`.
    """
    wanted = json.loads(asked)
    try:
        stages = stages_for(wanted["name"], wanted["stages"] if json.loads(names())[wanted["name"]] else None)
        costs = stage_costs(_costs(wanted), stages)
        return _shown(build(wanted["name"], wanted["ranks"], wanted["microbatches"], stages, costs), costs)
    except ConfigError as error:
        return json.dumps({"error": str(error)})


def moved(table: str, asked: str, rank: int, start: int, end: int) -> str:
    """JSON of a table in which an action has gone to another place of its row.

    Args:
        table: as CSV, a row per rank.
        asked: as for :func:`made`.
        rank: whose action it is.
        start: where it was.
        end: where it is then.
    """
    rows = [line.split(",") for line in table.strip().splitlines()]
    rows[rank].insert(end, rows[rank].pop(start))
    wanted = json.loads(asked)
    try:
        schedule = csv_form.parse("\n".join(map(",".join, rows)), wanted["name"])
        return _shown(schedule, stage_costs(_costs(wanted), len(schedule.stage_ranks) // schedule.ranks))
    except ConfigError as error:
        return json.dumps({"error": str(error), "table": "\n".join(map(",".join, rows)) + "\n"})


def _costs(wanted: dict[str, Any]) -> Costs:
    """Costs of one micro-batch in all stages of a rank: forward, input, weight, and the time of a message."""
    return Costs(*(wanted[name] for name in ("forward", "input", "weight", "message")))


def _shown(schedule: Schedule, costs: Costs) -> str:
    held = check(schedule)
    line = simulate(schedule, costs)
    return json.dumps(
        {
            "table": csv_form.text(schedule),
            "step": float(line.makespan),
            "bubble": float(line.bubble),
            "peaks": [float(peak) for peak in line.peak_activations],
            "held": held,
            "rows": [
                [
                    {
                        "name": str(action),
                        "kind": action.kind,
                        "microbatch": action.microbatch,
                        "stage": action.stage,
                        "start": float(start),
                        "end": float(end),
                    }
                    for action, start, end in row
                ]
                for row in line.rows
            ],
        }
    )
