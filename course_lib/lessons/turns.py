"""Several ways to do a thing, tried in turns: what else the machine does meets all of them alike."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


def in_turns(ways: Mapping[Name, Callable[[], Result]], tries: int, warm_up: int = 0) -> dict[Name, list[Result]]:
    """Results by name of the way, one per try; no try is left out.

    The ways are called forward and back through the list, try by try, so that a drift of the machine meets them all.

    Args:
        ways: what to call, by name.
        tries: number of times that each is called.
        warm_up: number of tries before these, whose results are not kept.
    """
    results: dict[Name, list[Result]] = {name: [] for name in ways}
    for attempt in range(-warm_up, tries):
        for name in list(ways)[:: -1 if attempt % 2 else 1]:
            result = ways[name]()
            if attempt >= 0:
                results[name].append(result)
    return results
