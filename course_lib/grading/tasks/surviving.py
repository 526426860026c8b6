"""Lesson 10, to build: checkpoints of which, whenever the machine fails, one is whole and is found again."""

import random
from collections.abc import Callable
from typing import Any

from course_lib.grading.rules import Seen, items, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import in_turn

MOST_OPERATIONS = 400
DAMAGES = 12
"""Places in which each file is damaged in turn."""


class PowerCut(BaseException):
    """The machine has lost its power; no `except Exception` catches it."""


class Disk:
    """Files in memory that behave as on a disk: what is not synced may be lost, a rename is all or nothing.

    Args:
        rng: decides how much of a file that was not synced is left after a power cut.
        cut_after: operations that change something until the power cut; None: never.
    """

    def __init__(self, rng: random.Random, cut_after: int | None = None):
        self._files: dict[str, bytes] = {}
        self._unsynced: set[str] = set()
        self._rng, self._left = rng, cut_after
        self.operations = 0

    def write(self, path: str, data: bytes) -> None:
        """Write a whole file; until `sync` a power cut may leave any beginning of it."""
        self._files[path] = bytes(data)
        self._unsynced.add(path)
        self._change()

    def sync(self, path: str) -> None:
        """Bring a file to the medium."""
        self._files[path]  # an absent file raises KeyError
        self._change()
        self._unsynced.discard(path)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of a file that has it; it is on the medium at once."""
        self._change()
        self._files[new] = self._files.pop(old)
        self._unsynced.discard(new)
        if old in self._unsynced:
            self._unsynced.discard(old)
            self._unsynced.add(new)

    def delete(self, path: str) -> None:
        """Remove a file."""
        self._change()
        del self._files[path]
        self._unsynced.discard(path)

    def read(self, path: str) -> bytes:
        """A file's content; KeyError where there is none."""
        return self._files[path]

    def list(self) -> list[str]:
        """The paths of all files, sorted."""
        return sorted(self._files)

    def _change(self) -> None:
        self.operations += 1
        if self.operations > MOST_OPERATIONS:
            raise ValueError(f"more than {MOST_OPERATIONS} operations")
        if self._left is not None and self.operations > self._left:
            raise PowerCut

    def after_power_cut(self) -> "Disk":
        """The disk as the next process finds it."""
        disk = Disk(self._rng)
        for path, data in self._files.items():
            disk._files[path] = data[: self._rng.randrange(len(data))] if path in self._unsynced and data else data
        return disk

    def damage(self, path: str) -> None:
        """Change a byte of a file, as a failing medium does."""
        data = bytearray(self._files[path])
        data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        self._files[path] = bytes(data)


def saving_case(rng: random.Random, place: int) -> dict:
    """Three checkpoints of one or more files; the third number of files differs from the others."""

    def parts(count: int) -> dict[str, str]:
        return {f"rank{i}.pt": "".join(rng.choices("0123456789abcdef", k=rng.randrange(8, 40))) for i in range(count)}

    steps = sorted(rng.sample(range(5, 200), 3))
    return {
        "steps": steps,
        "parts": [parts(place % 3 + 1) for _ in steps],
        "keep": place % 2 + 1,
        "seed": rng.randrange(10**6),
    }


def saved(function: Callable[..., Any], case: Case, disk: Disk) -> int:
    """Save all checkpoints of a case; the number of saves that returned before a power cut."""
    done = 0
    try:
        store = function(disk, case.inputs["keep"])
        for step, parts in zip(case.inputs["steps"], case.inputs["parts"], strict=True):
            store.save(step, {name: text.encode() for name, text in parts.items()})
            done += 1
    except PowerCut:
        pass
    return done


def read_back(function: Callable[..., Any], case: Case, disk: Disk) -> list[Any]:
    """Newest checkpoint of a new store: [step, whether its files are those that were saved]; [None, True]: nothing."""
    newest = function(disk, case.inputs["keep"]).newest()
    if newest is None:
        return [None, True]
    step, files = newest
    wanted = dict(zip(case.inputs["steps"], case.inputs["parts"], strict=True)).get(step, {})
    return [
        plain(step),
        {name: bytes(data) for name, data in files.items()} == {name: text.encode() for name, text in wanted.items()},
    ]


def observe_saving(function: Callable[..., Any], case: Case, rank: int) -> dict:
    rng = random.Random(case.inputs["seed"])
    disk = Disk(rng)
    saved(function, case, disk)
    at_rest, left = read_back(function, case, disk), disk.list()
    cuts = []
    for cut in range(min(disk.operations, MOST_OPERATIONS)):
        for _ in range(3):  # torn in different places
            broken = Disk(rng, cut)
            done = saved(function, case, broken)
            survived = broken.after_power_cut()
            newest = read_back(function, case, survived)
            again = function(survived, case.inputs["keep"])  # and training goes on: a save over what was left behind
            parts = case.inputs["parts"][-1]
            again.save(case.inputs["steps"][-1], {name: text.encode() for name, text in parts.items()})
            cuts.append([done, *newest, *read_back(function, case, survived)])
    damaged = []
    for path in [path for path in left for _ in range(DAMAGES)]:
        hurt = Disk(rng)
        saved(function, case, hurt)
        hurt.damage(path)
        damaged.append(read_back(function, case, hurt))
    return {"at rest": at_rest, "files": left, "cuts": cuts, "damaged": damaged}


def finds_the_last(case: Case, seen: Seen) -> Miss | None:
    newest, last = items(seen, 0, "at rest"), case.inputs["steps"][-1]
    return kit.unless(newest == [last, True], f"step {last} with its files as newest()", short(newest))


def survives(case: Case, seen: Seen) -> Miss | None:
    """After a power cut the newest is what was last saved, or what was being saved, whole."""
    steps, cuts = [None, *case.inputs["steps"]], items(seen, 0, "cuts", list)
    if not cuts or not all(len(cut) == 5 and type(cut[0]) is int and 0 <= cut[0] < len(steps) for cut in cuts):
        raise Malformed(Miss("power cuts, and what was found after each", short(cuts)))
    for number_, (done, step, whole, *_) in enumerate(cuts):
        allowed = steps[done : done + 2]
        if step not in allowed or whole is not True:
            where = f"after a power cut in operation {number_ // 3 + 1}, when {done} saves had returned"
            text = f"step {step}" + ("" if whole is True else " with other files than were saved")
            return Miss(f"step {' or '.join(map(str, allowed))} {where}", text)
    return None


def goes_on(case: Case, seen: Seen) -> Miss | None:
    """After a power cut and one more save that is the newest."""
    last, cuts = case.inputs["steps"][-1], items(seen, 0, "cuts", list)
    bad = next((number_ for number_, cut in enumerate(cuts) if cut[3:] != [last, True]), None)
    said = f"step {last}, saved after the power cut in operation {(bad or 0) // 3 + 1}"
    shown = short(cuts[bad][3:] if bad is not None else "no power cuts")
    return kit.unless(cuts and bad is None, said, shown)


def notices_damage(case: Case, seen: Seen) -> Miss | None:
    """Rule: of a damaged file, an older checkpoint that is whole, or none; never other files than were saved."""
    last_of = case.inputs["steps"][-min(case.inputs["keep"], 3) :]
    damaged = items(seen, 0, "damaged", list)
    for number_, outcome in enumerate(damaged):
        files = items(seen, 0, "files", str)
        if outcome[1:] != [True] or (outcome[0] is None and len(last_of) > 1) or outcome[0] not in (None, *last_of):
            where = files[number_ // DAMAGES] if number_ // DAMAGES < len(files) else "a file"
            return Miss(f"a whole checkpoint, with {short(where)} damaged", short(outcome))
    return kit.unless(damaged, "files of checkpoints", "none")


def keeps_few(case: Case, seen: Seen) -> Miss | None:
    """As many files as the kept checkpoints need, and one more for each."""
    kept = case.inputs["parts"][-case.inputs["keep"] :]
    limit, files = sum(len(parts) + 1 for parts in kept), items(seen, 0, "files", str)
    shown = f"{len(files)}: {short(files)}"
    return kit.unless(0 < len(files) <= limit, f"at most {limit} files at the end", shown)


SAVING = Task(
    **kit.about("faults.checkpoint"),
    draw=in_turn(saving_case, 4),
    observe=observe_saving,
    essential=("finds the last", "survives"),
    properties={
        "finds the last": Property(1, finds_the_last),
        "survives": Property(4, survives),
        "goes on": Property(1, goes_on),
        "notices damage": Property(2, notices_damage),
        "keeps few": Property(1, keeps_few),
    },
)
