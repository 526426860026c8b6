"""The stored recordings: one of each scene, small enough for a page, of the code as it is now."""

import json

import pytest

from course_lib.metering import recording
from tools import recordings


def stored(name):
    return json.loads((recordings.FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def test_each_scene_has_its_recording_and_no_other_is_there():
    assert {path.stem for path in recordings.FOLDER.iterdir()} == set(recordings.SCENES)


@pytest.mark.parametrize("name", recordings.SCENES)
def test_a_recording_is_small_and_shows_the_code_that_runs_now(name):
    scene, entry = recordings.SCENES[name], stored(name)
    assert (recordings.FOLDER / f"{name}.json").stat().st_size < recording.LIMIT_BYTES
    again = f"its code has changed: run `python tools/recordings.py {name}`"
    assert entry["code"] == [recording.section(function) for function in scene.functions], again
    assert entry["paint"] == recordings.painted(scene, entry["code"]), again
    assert (entry["title"], entry["says"], entry["variables"]) == (scene.title, scene.says, list(scene.variables))
    assert 2 <= len(entry["ranks"]) == scene.ranks <= 4
    for lane in entry["ranks"]:
        for _, place, number in lane["lines"]:
            assert place < 0 or 0 <= number - entry["code"][place]["first"] < len(entry["code"][place]["lines"])


def test_each_lesson_s_ranks_return_and_talk_and_a_fault_shows_whom_the_others_wait_for():
    for name in recordings.SCENES:
        entry = stored(name)
        how = [lane["end"]["how"] for lane in entry["ranks"]]
        if name in ("10_leaves_the_loop", "10_exception"):
            assert [how[0], how[2]] == ["never returned"] * 2
            assert [entry["ranks"][rank]["end"]["waits_for"] for rank in (0, 2)] == [[1], [1]]
        elif name in ("10_mismatched_collectives", "10_deadlocked_pipeline"):
            assert how == ["never returned"] * 3 and all(lane["end"]["waits_for"] for lane in entry["ranks"])
        else:
            assert set(how) == {"returned"} and all(link["fits"] for link in entry["links"])
            assert len(entry["links"]) >= 2 and all(
                call[1] is not None for lane in entry["ranks"] for call in lane["calls"]
            )
