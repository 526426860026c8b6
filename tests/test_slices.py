"""Slices of the long tests: together all of them, each once, and none longer than its share allows."""

import random
from types import SimpleNamespace

import pytest

from tests.slices import LARGEST, TESTS, measured, order, parts, pytest_configure, units


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_parts_have_every_unit_once_and_differ_by_no_more_than_the_longest(count):
    rng = random.Random(count)
    seconds = {f"unit {i}": rng.uniform(1, 60) for i in range(50)}
    found = parts(seconds, count)
    assert sorted(unit for part in found for unit in part) == sorted(seconds) and len(found) == count
    loads = [sum(seconds[unit] for unit in part) for part in found]
    assert max(loads) - min(loads) <= max(seconds.values())
    assert parts(dict(reversed(seconds.items())), count) == found, "every machine deals the same way"


def test_a_file_stays_whole_unless_it_takes_too_long():
    names = ["a.py::one", "a.py::two", "b.py::one", "b.py::two", "b.py::new"]
    of, seconds = units(names, {"a.py::one": 3.0, "a.py::two": 4.0, "b.py::one": LARGEST, "b.py::two": 1.0})
    assert of == {"a.py::one": "a.py", "a.py::two": "a.py"} | {name: name for name in names[2:]}
    assert seconds["a.py"] == 7.0 and seconds["b.py::one"] == LARGEST and seconds["b.py::new"] > 1


def test_files_that_wait_run_beside_files_that_compute():
    seconds = {f"computes {i}": 10.0 + i for i in range(6)} | {f"waits {i}": 5.0 + i for i in range(3)}
    found = order(list(seconds), seconds, {name for name in seconds if "waits" in name})
    assert sorted(found) == sorted(seconds) and order(found[::-1], seconds, {"waits 0", "waits 1", "waits 2"}) == found
    assert [name for name in found if "computes" in name] == [f"computes {i}" for i in range(5, -1, -1)]
    at = [found.index(f"waits {i}") for i in (2, 1, 0)]
    assert order(["quick", "as quick"], {"quick": 0.0, "as quick": 0.0}, ()) == ["as quick", "quick"]
    assert at == sorted(at) and min(later - earlier for earlier, later in zip(at, at[1:], strict=False)) > 1


def test_what_was_measured_is_there():
    known = measured()
    files = {*known["files"], *(name.split("::")[0] for name in known["long"])}
    assert len(files) > 100 and not [name for name in files if not (TESTS.parent / name).exists()]


@pytest.mark.parametrize("wrong", ["13/12", "0/12", "3", "a/b"])
def test_a_slice_that_is_none_is_refused_before_anything_is_collected(wrong):
    config = SimpleNamespace(option=SimpleNamespace(quick=False, slice=wrong))
    with pytest.raises(pytest.UsageError, match=f"--slice {wrong}: give K/N with K from 1 to N, such as 3/12"):
        pytest_configure(config)
