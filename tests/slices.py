"""Pytest plugin: parts of the tests, and the order of their files, chosen by the times that were measured last.

``--slice K/N`` runs the K-th of N parts, of about the same time. A part has whole files, whose tests share what they
set up, unless a file takes longer than LARGEST by itself. ``--quick`` runs the files that take QUICK at most,
and imports no others. Where several files run at a time, the longest come first, and those that mostly wait are spread
among those that compute.

    make long SLICE=3/12                         which writes build/long-3-of-12.json
    python -m tests.slices build/*.json          takes the times of such files over
"""

import collections
import json
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
MEASURED = TESTS / "measured_seconds.json"
"""Wall seconds, beside one or two others: of each file what `make test` runs of it, and of each test that is long.

``waiting`` names the files that wait for more than half of their time.
"""
UNMEASURED = 20.0
LARGEST = 300.0
QUICK = 2.5


def measured():
    return json.loads(MEASURED.read_text())


def parts(seconds, count):
    """Which units each of so many parts has: the longest first, each to the part that has least."""
    found = [[] for _ in range(count)]
    load = [0.0] * count
    for unit, took in sorted(seconds.items(), key=lambda pair: (-pair[1], pair[0])):
        least = load.index(min(load))
        found[least].append(unit)
        load[least] += took
    return found


def order(files, seconds, waiting):
    """The longest first, and those that wait at even distances among those that compute."""
    place = {}
    for kind in ([name for name in files if name in waiting], [name for name in files if name not in waiting]):
        took = {name: seconds.get(name, UNMEASURED) for name in kind}
        begun, whole = 0.0, sum(took.values()) or 1.0
        for name in sorted(kind, key=lambda name: (-took[name], name)):
            place[name] = begun / whole
            begun += took[name]
    return sorted(files, key=lambda name: (place[name], name))


def units(names, seconds):
    """The unit of each test, which is its file, or itself where the file takes too long; and the units' seconds."""
    per_file, per_unit = collections.Counter(), collections.Counter()
    for name in names:
        per_file[name.split("::")[0]] += seconds.get(name, UNMEASURED)
    of = {name: file if per_file[file := name.split("::")[0]] <= LARGEST else name for name in names}
    for name, unit in of.items():
        per_unit[unit] += seconds.get(name, UNMEASURED)
    return of, per_unit


def pytest_addoption(parser):
    parser.addoption("--slice", help="K/N: run the K-th of N parts")
    parser.addoption("--quick", action="store_true", help=f"run the files that take {QUICK:g} seconds at most")


def pytest_configure(config):
    config.seconds_of_files = measured()["files"] if config.option.quick else {}
    if config.option.slice:
        number, _, count = config.option.slice.partition("/")
        if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
            raise pytest.UsageError(f"--slice {config.option.slice}: give K/N with K from 1 to N, such as 3/12")


def pytest_ignore_collect(collection_path, config):
    if config.option.quick and collection_path.is_relative_to(TESTS):
        name = f"tests/{collection_path.relative_to(TESTS).as_posix()}"
        return config.seconds_of_files.get(name, 0.0) > QUICK or None
    return None


@pytest.hookimpl(trylast=True)  # what -m leaves
def pytest_collection_modifyitems(config, items):
    if config.option.slice:
        take_slice(config, items)
    elif hasattr(config, "workerinput"):  # one of several
        known, of = measured(), {item: item.nodeid.split("::")[0] for item in items}
        files = order(set(of.values()), known["files"], known["waiting"])
        place = {file: i for i, file in enumerate(files)}
        items.sort(key=lambda item: place[of[item]])


def take_slice(config, items):
    """Leave the items of the slice that is asked for, those of the longest units first."""
    number, count = map(int, config.option.slice.split("/"))
    of, seconds = units([item.nodeid for item in items], measured()["long"])
    mine = parts(seconds, count)[number - 1]
    config.hook.pytest_deselected(items=[item for item in items if of[item.nodeid] not in mine])
    items[:] = sorted((item for item in items if of[item.nodeid] in mine), key=lambda item: mine.index(of[item.nodeid]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of a slice any process takes the next unit; without it those of one file would all go to one."""
    if not config.option.slice:
        return None
    from xdist.scheduler import LoadScopeScheduling

    known = measured()["long"]
    of, _ = units(known, known)

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return of.get(nodeid, nodeid.split("::")[0])

    return ByUnit(config, log)


def main(files):
    """Take over the times in files that ``--times`` wrote."""
    known = measured()
    for file in files:
        times, per_file, cpu = json.loads(Path(file).read_text()), collections.Counter(), collections.Counter()
        for name, (wall, computed, is_long) in times.items():
            if is_long:
                known["long"][name] = round(wall, 1)
            else:
                per_file[name.split("::")[0]] += wall
                cpu[name.split("::")[0]] += computed
        known["files"] |= {name: round(wall, 1) for name, wall in per_file.items()}
        known["waiting"] = sorted(
            {*known["waiting"]} - {*per_file}
            | {name for name, wall in per_file.items() if wall > QUICK and cpu[name] < wall / 2}
        )
    known["files"], known["long"] = (dict(sorted(known[kind].items())) for kind in ("files", "long"))
    MEASURED.write_text(json.dumps(known, indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
