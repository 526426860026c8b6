"""Helpers of the rules: they read observations, which may be of any form, and compare them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from course_lib.grading.task import Malformed, Miss, Observation, Plain, is_array

if TYPE_CHECKING:
    import numpy as np

Seen = Sequence[Observation]


def array(seen: Seen, rank: int, key: str, shape: tuple[int, ...] | None = None) -> "np.ndarray":
    """A rank's array of numbers, as float64.

    Raises:
        Malformed: something else, or another shape.
    """
    import numpy as np  # here: rules of plain arithmetic do without

    value = seen[rank].get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise Malformed(Miss(f"numbers as {key}", kind(value), rank))
    if shape is not None and value.shape != shape:
        raise Malformed(Miss(f"{key} of shape {shape}", f"shape {value.shape}", rank))
    return value.astype(np.float64)


def raised(seen: Seen) -> str:
    """The error that rank 0's answer raised, as it is told to the learner; empty where it raised none."""
    said = seen[0].get("raised")
    return said if isinstance(said, str) else ""


def number(seen: Seen, rank: int, key: str) -> float:
    """A rank's number.

    Raises:
        Malformed: something else.
    """
    value = seen[rank].get(key)
    if is_array(value):
        return float(array(seen, rank, key, ()))
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63):
        return float(value)
    raise Malformed(Miss(f"numbers as {key}", kind(value), rank))


def items(seen: Seen, rank: int, key: str, of: type | tuple[type, ...] = object) -> list[Any]:
    """A rank's list, whose members are all of one type.

    Raises:
        Malformed: something else.
    """
    value = seen[rank].get(key)
    if not isinstance(value, list) or not all(isinstance(item, of) for item in value):
        raise Malformed(Miss(f"a list as {key}", kind(value), rank))
    return value


def kind(value: Any) -> str:
    """Kind of a thing, in a few words."""
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return "a list of " + (", ".join(sorted({type(item).__name__ for item in value})) or "nothing")
    return f"a {type(value).__name__}"


def near(
    seen: Seen, key: str, expected: Sequence[Plain], tolerance: float = 1e-4, first_step: int | None = None
) -> Miss | None:
    """The first miss where a rank's array is not its expected one; None where all are.

    Args:
        seen: all ranks' observations, by rank.
        key: name of the array in them.
        expected: the right arrays, by rank.
        tolerance: relative to each number plus the array's largest one (0.001 if that is smaller).
        first_step: number of the first step, where the arrays have an entry for each: the first that is wrong is told.
    """
    import numpy as np

    rights = [np.asarray(right, dtype=np.float64) for right in expected]
    pairs = [
        (array(seen, rank, key, right.shape), right, tolerance * max(1e-3, float(np.abs(right).max(initial=0.0))))
        for rank, right in enumerate(rights)
    ]
    for step in range(1 if first_step is None else len(rights[0])):
        for rank, (actual, right, margin) in enumerate(pairs):
            if first_step is not None:
                actual, right = actual[step], right[step]
            if np.allclose(actual, right, rtol=tolerance, atol=margin):
                continue
            worst = np.unravel_index(int(np.argmax(np.nan_to_num(np.abs(actual - right), nan=np.inf))), right.shape)
            where = f"{key}[{', '.join(map(str, worst))}]" if worst else key
            note = ratio(actual, right, len(expected))
            if first_step is None:
                return Miss(f"{where} = {right[worst]:.5g}", f"{actual[worst]:.5g}", rank, note)
            number = first_step + step
            return Miss(f"{where} = {right[worst]:.5g} in step {number}", f"{actual[worst]:.5g}", rank, note, number)
    return None


def suspected(
    miss: Miss | None, seen: Seen, key: str, suspects: Mapping[str, Callable[[], Sequence[Plain]]]
) -> Miss | None:
    """A miss with the first note whose wrong numbers are the ones that were found."""
    if miss is None or miss.note:
        return miss
    note = next((note for note, wrong in suspects.items() if near(seen, key, wrong(), 1e-5) is None), "")
    return replace(miss, note=note)


def ratio(actual: "np.ndarray", right: "np.ndarray", ranks: int) -> str:
    """Sentence for where all numbers are the same multiple of the right ones; empty where they are not."""
    import numpy as np

    if not np.any(right) or not np.all(np.isfinite(actual)):
        return "" if np.all(np.isfinite(actual)) else "there are numbers among them that are not finite"
    if not np.any(actual):
        return "all of it is zero"
    factor = float((actual * right).sum() / (right * right).sum())
    if np.count_nonzero(right) == 1 and not any(abs(factor - named) < 1e-3 * named for named in (ranks, 1 / ranks)):
        return ""  # of a single number every other is a multiple
    if not np.allclose(actual, factor * right, rtol=1e-3, atol=1e-5 * float(np.abs(right).max())):
        return ""
    number = _FACTORS.get(round(factor, 4), f"{factor:.4g} times")
    said = f"each number is {number} the expected one"
    if ranks > 1 and abs(factor - ranks) < 1e-3 * ranks:
        return f"{said}, on {ranks} ranks: a sum over them, not a mean?"
    if ranks > 1 and abs(factor * ranks - 1) < 1e-3:
        return f"{said}, on {ranks} ranks: divided by their number once too often?"
    if abs(factor + 1) < 1e-3:
        return "each number has the wrong sign"
    return said


_FACTORS = {2.0: "twice", 3.0: "3 times", 4.0: "4 times", 0.5: "half of", 0.25: "a quarter of"}


def dtype_of(value: Any) -> str:
    """Dtype of a tensor as an observer notes it; empty of what is none."""
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


def of_dtype(seen: Seen, key: str, dtype: str) -> Miss | None:
    """Whether each rank's tensor, as `dtype_of` noted it as ``dtype of KEY``, has the dtype of what was handed in."""
    for rank, observed in enumerate(seen):
        if (actual := observed.get(f"dtype of {key}")) != dtype:
            return Miss(f"{key} as {dtype}, as it was handed in", short(actual or "no tensor"), rank)
    return None


def same(seen: Seen, key: str, expected: Sequence[Plain]) -> Miss | None:
    """Whether each rank's plain value equals its expected one."""
    for rank, right in enumerate(expected):
        actual = seen[rank].get(key)
        if type(actual) is not type(right) or actual != right:
            return Miss(f"{key} {short(right)}", short(actual), rank)
    return None


def short(value: Any) -> str:
    """A value's text, cut where it is long."""
    text = str(value)
    return text if len(text) <= 90 else text[:87] + "..."


def calls(seen: Seen, rank: int, name: str) -> list[int]:
    """Payload bytes of each collective of one name that a rank noted, in order."""
    return [int(event.split()[1]) for event in events(seen, rank) if event.split()[0] == name]


NAMES = frozenset(
    (
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "send",
        "recv",
        "barrier",
    )
)


def events(seen: Seen, rank: int) -> list[str]:
    """Events of a rank, in order, as `Recorder.events` notes them."""
    noted = items(seen, rank, "events", str)
    for event in noted:
        words = event.split()
        if not words or (words[0] in NAMES and not (len(words) > 1 and words[1].isdecimal() and len(words[1]) < 19)):
            raise Malformed(Miss("events as they were noted", short(event), rank))
    return noted


def made_by(seen: Seen, rank: int) -> list[str]:
    """The collectives that a rank issued, in order."""
    return [event for event in events(seen, rank) if event.split()[0] in NAMES]


def waited_for(happened: Sequence[str], rank: int, where: str = "") -> Miss | None:
    """Whether each collective among a rank's events has been waited for: what has not may be over by chance."""
    made, waits = sum(event.split()[0] in NAMES for event in happened), happened.count("wait")
    return None if waits >= made else Miss(f"each of {made} messages{where} waited for", f"{waits} waits", rank)
