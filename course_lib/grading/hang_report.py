"""Report of a check whose ranks hang, by the course's own recorder and diagnosis.

Each rank notes its collectives in memory that it shares with the process that checks. So what a rank did is
known even where it died.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from course_lib.grading.own_code import of_line
from course_lib.hangs.diagnosis import diagnose
from course_lib.hangs.flight_recorder import FlightRecorder
from course_lib.hangs.rank_state import LEFT, RUNNING, SIZE, RankState, read_record

WAITED = re.compile(r"timed? ?out|Connection closed|Connection reset|Broken pipe", re.IGNORECASE)
"""What a backend says of a wait that was in vain."""
WORDS = (
    ("has ended its training before the others", "has returned from your function"),
    ("is gone: process 0 on  has ended", "has died"),
    ("; it was last seen at", ", last seen at"),
)
"""The diagnosis speaks of trainings; here a function is checked."""


@contextmanager
def recorded(record: RankState) -> Iterator[None]:
    """Note this rank's calls on an emptied record; one that leaves without an exception has returned."""
    record.memory[:] = bytes(SIZE)
    recorder = FlightRecorder(record)
    record.fields.flags.state = RUNNING
    recorder.start()
    try:
        yield
        record.fields.flags.state = LEFT
    finally:
        recorder.stop()


def explain(records: Sequence[RankState], file: str | None, dead: int | None = None) -> str:
    """Ranks that caused the hang, one sentence each; empty where the records don't tell.

    Args:
        records: of the ranks that took part, by rank.
        file: that the learner's code was compiled under.
        dead: a rank whose process has ended.
    """
    now = time.monotonic()
    seen = [read_record(bytes(record.memory), rank, 0, "", "running", now) for rank, record in enumerate(records)]
    if dead is not None and dead < len(seen):
        seen[dead] = replace(seen[dead], life="dead")
    if not any(snapshot.calls for snapshot in seen):
        return ""
    said = "; ".join(culprit.sentence for culprit in diagnose(seen))
    for theirs, ours in WORDS:
        said = said.replace(theirs, ours)
    if file:
        shown = re.compile(rf"(?:at )?{re.escape(file)}:(\d+)")
        said = shown.sub(lambda match: f"({of_line(int(match[1]), file)})", said)
    return said
