"""Slices of the long tests: together all of them, each once, and none longer than its share allows."""

import random

import pytest

from tests.slices import LARGEST, TESTS, measured, parts, units


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


def test_what_was_measured_is_there():
    known = measured()
    files = {*known["files"], *(name.split("::")[0] for name in known["long"])}
    assert len(files) > 100 and not [name for name in files if not (TESTS.parent / name).exists()]
