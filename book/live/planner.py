"""The planner: what `course plan` finds, as JSON for the page.

It runs in the browser, by Pyodide, and in the tests, by Python.
"""

import argparse
import json
import shlex
from typing import Any, NoReturn

from course_lib.commands import plan, plan_page
from course_lib.errors import ConfigError, CourseError
from course_lib.planning import hardware, margins, models, strategy
from course_lib.planning.memory import RUNTIME

WIDTH = 80
"""Characters of a line of the command."""
NEAR = 2
"""GPUs with less memory, and with more, that "what if" tries."""


class _Options(argparse.ArgumentParser):
    """The options of `course plan`; what is wrong with them is said and ends nothing."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def choices() -> str:
    """JSON of what the page's fields offer; of a GPU, how many are in a node."""
    nodes = {name: hardware.cluster(name).gpus for name in hardware.accelerators()}
    return json.dumps({"models": models.names(), "gpus": nodes, "optimizers": plan.OPTIMIZERS})


def planned(asked: str) -> str:
    """JSON of the plans: what `course plan --json` prints, its margins in words, and what its page says and draws.

    Args:
        asked: JSON of options of `course plan` by name; those that are empty are left out.
    """
    try:
        args = _options(json.loads(asked))
        result = plan.find(args)
    except CourseError as error:
        return json.dumps({"error": str(error)})
    lines = plan_page.command(result, args.tokens, args.dataset, WIDTH)
    found = plan_page.as_json(result, args.tokens, args.dataset)
    del found["error"]  # the planner's margins, which are said in words; an answer with an error is none
    return json.dumps(
        found
        | {
            "said": [line for line in lines if line and line[0] != " "],
            "command": "\n".join(line[2:] for line in lines if line.startswith(" ")),
            "bill": plan_page.bill(result, args.tokens) if args.tokens else "",
            "margins": margins.said(),
            "asked": "course plan " + shlex.join(_words(json.loads(asked))),
            "bars": [
                *(_bar(one.plan, one.memory) | {"chance": one.chance} for one in result.best_of_each()),
                *(_bar(one.plan, one.memory) | {"remedy": one.remedy} for one in result.failed),
            ],
            "what_if": _alternatives(result, args),
        }
    )


def varied(asked: str, what: str) -> str:
    """JSON of the best plan where one thing is another: rows as `course plan --what_if` has them.

    Args:
        asked: as for :func:`planned`.
        what: ``gpus=16``.
    """
    try:
        return json.dumps(plan.vary(_options(json.loads(asked) | {"what_if": what}))[1])
    except CourseError as error:
        return json.dumps({"error": str(error)})


def _words(asked: dict[str, Any]) -> list[str]:
    return [word for name, value in asked.items() if value not in ("", None) for word in (f"--{name}", str(value))]


def _options(asked: dict[str, Any]) -> argparse.Namespace:
    parser = _Options(prog="course plan", add_help=False)
    plan.register(parser)
    return parser.parse_args(_words(asked))


def _bar(layout: Any, held: Any) -> dict[str, Any]:
    """A rank's memory by kind, with what the runtime takes, which is not in the total."""
    return {"strategy": layout.strategy, "bytes": held.at_peak() | {"runtime": RUNTIME}, "total": held.total}


def _alternatives(result: strategy.Search, args: argparse.Namespace) -> list[str]:
    """What lies nearest to what was asked for: fewer and more GPUs, other kinds of them, other lengths."""
    gpus, length = result.cluster.gpus, result.best.plan.sequence_length
    own = result.cluster.accelerator.name
    kinds = sorted(
        (chip for chip in hardware.accelerators().values() if chip.has_host),
        key=lambda chip: (chip.memory, chip.peak[chip.half_precision()]),
    )
    place = [chip.name for chip in kinds].index(own) if own != "CPU" else 0
    near = [chip.name for chip in kinds[max(0, place - NEAR) : place + NEAR + 1] if chip.name != own]
    most = result.model.context or 10**9
    return [
        *(f"gpus={count}" for count in (gpus // 2, 2 * gpus, 4 * gpus) if count),
        *(f"gpu={name}" for name in near if not result.cluster.instance),
        *(f"sequence_length={tokens}" for tokens in (length // 2, 2 * length) if 1 <= tokens <= most),
    ]
