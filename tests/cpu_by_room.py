"""Pytest plugin: CPU-seconds per room, in a table at the end of a run; ``--times FILE`` writes those of each test.

Counted are the processes of the tests and all that they start and wait for. It fails nothing.
"""

import collections
import json
import os
from pathlib import Path

import pytest

OUTSIDE = "importing, collecting"
cpu = collections.Counter()
wall = collections.Counter()
are_long = set()
last = 0.0
beside = []
"""Functions: CPU-seconds of a process that serves the tests and is not their child, which `time` does not see."""


def used():
    """CPU-seconds of this process, of the children that it has waited for, and of what serves it."""
    return sum(os.times()[:4]) + sum(seconds() for seconds in beside)


def pytest_addoption(parser):
    parser.addoption("--times", type=Path, help="write wall and CPU seconds of each test to this file, as JSON")


def pytest_collection_finish():
    global last
    last = used()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    global last
    report = yield
    now = used()
    report.cpu, last = now - last, now  # a plain attribute travels from a worker with the report
    return report


def pytest_runtest_logreport(report):
    cpu[report.nodeid] += report.cpu
    wall[report.nodeid] += report.duration
    if "long" in report.keywords:
        are_long.add(report.nodeid)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu"] = used()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    cpu[OUTSIDE] += getattr(node, "workeroutput", {}).get("cpu", 0.0)


def pytest_terminal_summary(terminalreporter, config):
    tests = {name: seconds for name, seconds in cpu.items() if name != OUTSIDE}
    if config.option.times:
        config.option.times.parent.mkdir(parents=True, exist_ok=True)
        config.option.times.write_text(
            json.dumps({name: [wall[name], seconds, name in are_long] for name, seconds in tests.items()}, indent=0)
        )
    rooms = collections.Counter()
    for name, seconds in tests.items():
        folders = name.split("::")[0].split("/")
        rooms["/".join(folders[:2]) if len(folders) > 2 else "tests"] += seconds
    rooms[OUTSIDE] = (cpu[OUTSIDE] or used()) - sum(tests.values())
    terminalreporter.section("CPU-seconds by room")
    for room, seconds in rooms.most_common():
        terminalreporter.write_line(f"{seconds:8.1f}  {room}")
    terminalreporter.write_line(f"{sum(rooms.values()):8.1f}  in all, {sum(rooms.values()) / 60:.1f} minutes")
