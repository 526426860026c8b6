"""Check that the collectives which an answer's process reports can have taken place.

What `Recorder` noted was noted in the learner's process, which could have made it up. The kernel counted, in the
sandbox's own network, what really went from rank to rank, where no code of an answer reaches.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from course_lib.grading.task import Finding

# Of its payload, what one of two ranks has to send: the fewest ranks that a group can have, so the least for any. Of an
# all-to-all, which may be uneven, a rank may keep all.
SHARE = {"all_reduce": 1.0, "send": 1.0, "reduce_scatter": 0.5, "all_gather": 0.5, "all_to_all": 0.0}
HEADERS = 66  # bytes of Ethernet, IPv4 and TCP around one message: a collective sends one at least
_NOTED = re.compile(rf"({'|'.join(SHARE)}) (\d{{1,15}})(?: |$)")


def least_bytes(observations: Sequence[Mapping[str, Any]]) -> int:
    """Bytes that all ranks together have to send for the collectives in their ``events``."""
    least = 0.0
    for seen in observations:
        events = seen.get("events")
        for event in events if isinstance(events, list) else []:
            noted = _NOTED.match(event) if isinstance(event, str) else None
            least += SHARE[noted[1]] * int(noted[2]) + HEADERS if noted else 0.0
    return int(least)


def not_on_the_wire(
    properties: Sequence[str], observations: Sequence[Mapping[str, Any]], counted: int
) -> list[Finding]:
    """No finding where what was noted fits what the kernel counted; else that no property holds."""
    least = least_bytes(observations)
    if counted >= least:
        return []
    return [
        Finding(
            name, False, None, f"at least {least} bytes on the wire for the collectives that were noted", f"{counted}"
        )
        for name in properties
    ]
