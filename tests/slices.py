"""Pytest plugin: ``--slice K/N`` runs the K-th of N parts of the tests, balanced by the times that were measured last.

A part has whole files, whose tests share what they set up, but for files that take longer than LARGEST by themselves.

    make long SLICE=3/12                         which writes build/long-3-of-12.json
    python -m tests.slices build/long-*.json     takes the times of such files over
"""

import collections
import json
import sys
from pathlib import Path

import pytest

MEASURED = Path(__file__).with_name("measured_seconds.json")
"""Wall seconds of each long test by file and name, as measured beside one other."""
UNMEASURED = 20.0
LARGEST = 300.0


def parts(seconds, count):
    """Which units each of so many parts has: the longest first, each to the part that has least."""
    found = [[] for _ in range(count)]
    load = [0.0] * count
    for unit, took in sorted(seconds.items(), key=lambda pair: (-pair[1], pair[0])):
        least = load.index(min(load))
        found[least].append(unit)
        load[least] += took
    return found


def units(names, measured):
    """The unit of each test: its file, or its own name where the file takes too long; and the units' seconds."""
    per_file = collections.Counter()
    for name in names:
        per_file[name.split("::")[0]] += measured.get(name, UNMEASURED)
    of = {name: file if per_file[file := name.split("::")[0]] <= LARGEST else name for name in names}
    seconds = collections.Counter()
    for name, unit in of.items():
        seconds[unit] += measured.get(name, UNMEASURED)
    return of, seconds


def pytest_addoption(parser):
    parser.addoption("--slice", help="K/N: run the K-th of N parts")


@pytest.hookimpl(trylast=True)  # what -m leaves
def pytest_collection_modifyitems(config, items):
    if not config.option.slice:
        return
    number, _, count = config.option.slice.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--slice {config.option.slice}: give K/N with K from 1 to N, such as 3/12")
    of, seconds = units([item.nodeid for item in items], json.loads(MEASURED.read_text()))
    mine = set(parts(seconds, int(count))[int(number) - 1])
    config.hook.pytest_deselected(items=[item for item in items if of[item.nodeid] not in mine])
    items[:] = [item for item in items if of[item.nodeid] in mine]


def main(files):
    """Take over the times in files that ``--times`` wrote."""
    measured = json.loads(MEASURED.read_text())
    for file in files:
        measured |= {name: round(wall, 1) for name, (wall, _) in json.loads(Path(file).read_text()).items()}
    MEASURED.write_text(json.dumps(dict(sorted(measured.items())), indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
