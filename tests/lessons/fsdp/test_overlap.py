"""What a trace of ``fully_shard`` says, read from events as torch's profiler names them."""

from types import SimpleNamespace

import pytest

from course_lib.lessons.fsdp.overlap import fsdp_events


def events(*named):
    """(name, begin, end) in ms, as the profiler has them: in microseconds, in no order."""
    return [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=1e3 * begin, end=1e3 * end))
        for name, begin, end in reversed(named)
    ]


TWO_BLOCKS = events(
    ("aten::mm", 0, 50),
    ("FSDP::root_pre_forward", 10, 11),
    ("FSDP::all_gather", 11, 12),
    ("FSDP::all_gather_copy_out", 13, 14),
    *(
        (f"FSDP::{event} (model.h.{block})", begin + 6 * block, end + 6 * block)
        for block in (0, 1)
        for event, begin, end in (
            ("all_gather", 15, 16),
            ("all_gather_copy_out", 17, 18),
            ("pre_forward", 15, 18),
            ("post_forward", 20, 21),
        )
    ),
    ("FSDP::all_gather (model.h.1)", 28, 29),
    ("FSDP::all_gather_copy_out (model.h.1)", 30, 31),
    ("FSDP::all_gather (model.h.0)", 31, 32),
    ("FSDP::pre_backward (model.h.1)", 30, 32),
    ("FSDP::post_backward_accumulate (model.h.1)", 36, 37),
    ("FSDP::post_backward_reduce (model.h.1)", 37, 39),
    ("FSDP::all_gather_copy_out (model.h.0)", 40, 41),
    ("FSDP::pre_backward (model.h.0)", 40, 41),
    ("FSDP::post_backward_accumulate (model.h.0)", 45, 46),
    ("FSDP::post_backward_reduce (model.h.0)", 46, 47),
)


def test_spans_of_the_three_lanes_begin_with_the_first_event_of_the_engine():
    found = fsdp_events(TWO_BLOCKS)
    assert [(event.block, event.begin) for event in found if event.early] == [(0, pytest.approx(21))]
    assert [(event.lane, event.block, event.begin, event.end) for event in found] == [
        ("all-gather", None, 1, 3),
        ("all-gather", 0, 5, 7),
        ("compute", 0, 8, 10),
        ("all-gather", 1, 11, 13),
        ("compute", 1, 14, 16),
        ("all-gather", 1, 18, 20),
        ("all-gather", 0, 21, 30),
        ("compute", 1, 22, 26),
        ("reduce-scatter", 1, 27, 29),
        ("compute", 0, 31, 35),
        ("reduce-scatter", 0, 36, 37),
    ]
