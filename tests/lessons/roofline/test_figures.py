"""Figures of lesson 17: lanes of a trace join what no eye tells apart, and keep the gap that is their finding."""

from course_lib.lessons.roofline import figures as roofline


def event(cat, name, begin_ms, ms):
    return {"ph": "X", "pid": 0, "cat": cat, "name": name, "ts": 1e3 * begin_ms, "dur": 1e3 * ms}


def test_operators_that_follow_each_other_are_one_span_and_a_wait_stays_a_gap():
    events = [event("step", "step", begin, 100) for begin in (0, 100)] + [
        event("phase", "forward", 100, 40),
        event("host", "mm", 5, 1),  # of the first step
        event("host", "mm", 101, 9.8),
        event("host", "add", 111, 19),
        event("host", "mul", 112, 1),
        event("host", "mm", 160, 40),
        event("collective", "all_reduce", 131, 20),
        event("collective", "all_reduce", 140, 15),
    ]
    (axes,) = roofline.lanes(events, "waits").axes
    boxes = {lane.get_label(): [path.get_extents() for path in lane.get_paths()] for lane in axes.collections}
    drawn = {name: [(round(box.x0, 6), round(box.x1, 6)) for box in of_lane] for name, of_lane in boxes.items()}
    assert drawn == {"forward": [(0, 40)], "an operator": [(1, 30), (60, 100)], "all_reduce": [(31, 51), (40, 55)]}
