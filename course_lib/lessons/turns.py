"""Several ways to do a thing, tried in turns: what else the machine does meets all of them alike."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


def in_turns(ways: Mapping[Name, Callable[[], Result]], tries: int, warm_up: int = 0) -> dict[Name, list[Result]]:
    """Results of each try of each way, by its name.

    Args:
        ways: called one after the other, in every try.
        tries: whose results are kept.
        warm_up: tries before them.
    """
    results: dict[Name, list[Result]] = {name: [] for name in ways}
    for attempt in range(-warm_up, tries):
        for name, way in ways.items():
            result = way()
            if attempt >= 0:
                results[name].append(result)
    return results
