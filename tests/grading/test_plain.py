"""What crosses the border: plain values come back as they were, and hostile bytes are refused within their size."""

import json
import struct
import tracemalloc

import numpy as np
import pytest

from course_lib.grading import wire_check
from course_lib.grading.serialize import DTYPES, MAX_JSON_BYTES, NotPlain, pack, unpack
from tests.grading.conftest import same


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -1.5, "é", [], {}, [1, [2, {"a": None}]], 10**300, float("inf")),
        *(np.arange(6).astype(name).reshape(2, 3) for name in DTYPES),
        np.zeros((0, 3)),
        np.array(2.5),
        {"a": [np.arange(3), {"b": np.ones((2, 2), "float32")}], "c": np.arange(4)},
    ],
)
def test_plain_values_come_back(value):
    assert same(value, unpack(pack(value)))


def test_numpy_numbers_become_numbers_and_tuples_lists():
    assert same(
        unpack(pack({"a": np.int64(3), "b": (1, np.float32(0.5)), "c": np.bool_(True)})),
        {"a": 3, "b": [1, 0.5], "c": True},
    )


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"x", np.array(["x"]), np.array([object()]), 1j, np.zeros(2, "complex64"), {"a": print}]
    + ["x" * MAX_JSON_BYTES],
)
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(NotPlain):
        pack(value)


def frame(text, rest=b""):
    return struct.pack("<Q", len(text)) + text + rest


def array(*about):
    return frame(json.dumps({"$array": about}).encode(), bytes(8))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 1 << 60),
        frame(b"{"),
        frame(b"[" * 500_000),
        frame(b"1", b"rest"),
        frame(b"9" * 5000),
        frame(b"\xff"),
        struct.pack("<Q", MAX_JSON_BYTES + 1) + bytes(MAX_JSON_BYTES + 1),
        *(array("float64", shape) for shape in ([2], [1 << 40], [-1], [True], "1", [1] * 9, [1.0])),
        *(array("float64", [0, 1 << 62, 1 << 62]), array("float64"), array(["float64"], [1]), array("object", [1])),
        frame(b'{"$array": ["float64", [1]], "more": 1}', bytes(8)),
    ],
)
def test_hostile_bytes_are_refused_without_taking_memory(data):
    tracemalloc.start()
    with pytest.raises(NotPlain):
        unpack(data)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("events", "least"),
    [
        ([], 0),
        (["wait", "backward"], 0),
        (["all_reduce 100"], 166),
        (["all_gather 100", "send 10 to 1"], 50 + 66 + 76),
        (["all_to_all 100"], 66),
        (["all_reduce -5", "all_reduce x", "all_reduced 9", 3, None], 0),
        ("all_reduce 9", 0),
        (None, 0),
    ],
)
def test_least_bytes_of_what_was_noted(events, least):
    assert wire_check.least_bytes([{"events": events}]) == least
    assert wire_check.least_bytes([{"events": events}] * 3) == 3 * least


def test_what_was_noted_has_to_be_on_the_wire():
    noted = [{"events": ["all_reduce 1000"]}] * 2
    assert wire_check.not_on_the_wire(["a"], noted, 2132) == []
    (finding,) = wire_check.not_on_the_wire(["a"], noted, 2131)
    assert not finding.holds and finding.property == "a"
