"""Lesson 19: each rank reads its own rows of a model's files, and nothing else."""

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, dtype_of, items, made_by, same, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import LAST, each_world, numbers

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EVEN, UNEVEN, FEW = "even", "uneven", "few rows"
DTYPES = ("float32", "bfloat16", "int8")
SIZES = {"float32": 4, "bfloat16": 2, "int8": 1}


# --- lora.sharded_load ---


def load_case(rng: random.Random, world: int, kind: str, files: int) -> dict:
    """Matrices, tensors of three dimensions, norms and a number, of several dtypes; the layers' files take turns."""
    tensors: dict[str, np.ndarray] = {}
    dtypes, places = {}, {}
    for layer in range(4):
        rows = world * rng.randrange(2, 5)
        if kind == UNEVEN and world > 1:
            rows += rng.randrange(1, world)
        if kind == FEW and layer < 2:
            rows = rng.randrange(1, world) if layer else world - 1
        width = rng.randrange(2, 5)
        names = {f"layers.{layer}.up.weight": (rows, width), f"layers.{layer}.norm.weight": (rng.randrange(1, 7),)}
        if layer == 1:
            names[f"layers.{layer}.experts"] = (rows, 2, width)
        if layer == 2:
            names[f"layers.{layer}.scale"] = ()
        for name, shape in names.items():
            dtypes[name] = DTYPES[len(tensors) % 3]
            tensors[name] = np.asarray(np.clip(np.round(8 * numbers(rng, *shape)), -100, 100), dtype=np.float32)
            places[name] = rng.randrange(files) if len(tensors) > files else len(tensors) - 1
    return {"kind": kind, "files": files, "tensors": tensors, "dtypes": dtypes, "places": places}


draw_loads = each_world(load_case, (2, EVEN, 2), (LAST, FEW, 2), (LAST, UNEVEN, 1), usual=(UNEVEN, 3))
"""Each number of ranks, with rows that do not divide; rows that do; fewer rows than ranks; and a single file."""


class Files:
    """Opens files as ``safe_open(path, "pt")`` does, and notes what is opened, and how many bytes of what are read."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.read: dict[str, int] = {}

    def __call__(self, path: str | Path) -> "Opened":
        from safetensors import safe_open  # `course check` of other exercises does without

        self.opened.append(Path(path).name)
        return Opened(self, safe_open(str(path), "pt"))

    def note(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Add a read; what is handed out is a copy."""
        self.read[name] = self.read.get(name, 0) + tensor.nbytes
        return tensor.clone()


class Opened:
    """A file of `Files`."""

    def __init__(self, files: Files, file: Any):
        self._files, self._file = files, file

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *why: Any) -> None:
        self._file.__exit__(*why)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._files.note(name, self._file.get_tensor(name))

    def get_slice(self, name: str) -> "Slice":
        return Slice(self._files, name, self._file.get_slice(name))


class Slice:
    """A tensor of a file that has not been read."""

    def __init__(self, files: Files, name: str, part: Any):
        self._files, self._name, self._part = files, name, part

    def get_shape(self) -> list[int]:
        return self._part.get_shape()

    def get_dtype(self) -> str:
        return self._part.get_dtype()

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._files.note(self._name, self._part[key])


def write_model(case: Case, folder: Path) -> None:
    """The model's files: one, or several and their index."""
    from safetensors.torch import save_file

    count, places = case.inputs["files"], case.inputs["places"]
    files = [f"model-{place + 1:05}-of-{count:05}.safetensors" for place in range(count)] if count > 1 else [SINGLE]
    tensors = {
        name: kit.tensor(values).to(getattr(torch, case.inputs["dtypes"][name]))
        for name, values in case.inputs["tensors"].items()
    }
    for place, file in enumerate(files):
        save_file({name: values for name, values in tensors.items() if places[name] == place}, folder / file)
    if count > 1:
        where = {name: files[place] for name, place in places.items()}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def observe_load(function: Callable[..., Any], case: Case, rank: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        write_model(case, Path(folder))
        files = Files()
        with Recorder() as record:
            pieces = function(Path(folder), files)
        dtypes = {name: dtype_of(piece) for name, piece in pieces.items()}
        named = {f"piece {name}": piece for name, piece in pieces.items()}
        return kit.noted(record, names=sorted(pieces), dtypes=dtypes, opened=files.opened, read=files.read, **named)


def piece_of(case: Case, name: str, rank: int) -> np.ndarray:
    """A rank's rows, of which each has as many, until there are none left; of one dimension or none the whole."""
    whole = case.inputs["tensors"][name]
    if whole.ndim < 2:
        return whole
    per_rank = -(-len(whole) // case.world_size)
    return whole[rank * per_rank : (rank + 1) * per_rank]


def known(case: Case, seen: Seen, rank: int) -> dict[str, np.ndarray]:
    """By name what this rank has to hold, once all names are there.

    Raises:
        Malformed: others are.
    """
    right = {name: piece_of(case, name, rank) for name in case.inputs["tensors"]}
    actual = items(seen, rank, "names", str)
    if sorted(right) != actual:
        apart = sorted(set(right) ^ set(actual))
        raise Malformed(Miss(f"{len(right)} tensors by name", f"{len(actual)}; apart: {short(apart)}", rank))
    return right


def pieces(few: bool) -> Rule:
    """A rule: every piece, but of matrices with fewer rows than ranks; or these: a row, or no row at all."""

    @kit.each_rank
    def rule(case: Case, seen: Seen, rank: int) -> Miss | None:
        for name, right in known(case, seen, rank).items():
            if few != (right.ndim > 1 and len(case.inputs["tensors"][name]) < case.world_size):
                continue
            differs = array(seen, rank, f"piece {name}", right.shape) != right
            if np.any(differs):
                rows = [row for row, part in enumerate(differs) if np.any(part)] if right.ndim else "all"
                return Miss(f"{name}, {right.shape}, as in the file", f"other numbers in rows: {short(rows)}")
        return None

    return rule


@kit.each_rank
def same_dtypes(case: Case, seen: Seen, rank: int) -> Miss | None:
    known(case, seen, rank)
    return kit.on_rank(same(seen[rank:], "dtypes", [case.inputs["dtypes"]]), rank)


@kit.each_rank
def bytes_read(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Of each tensor the bytes of the rank's own piece."""
    mine, read = known(case, seen, rank), seen[rank].get("read")
    if not isinstance(read, dict) or not all(type(count) is int for count in read.values()):
        raise Malformed(Miss("bytes that were read, by name", short(read), rank))
    for name, piece in mine.items():
        width, actual = SIZES[case.inputs["dtypes"][name]], read.get(name, 0)
        if actual != piece.size * width:
            note = f"the whole tensor has {case.inputs['tensors'][name].size * width}"
            return Miss(f"{piece.size * width} bytes of {name} read", f"{actual}", note=note)
    return None


@kit.each_rank
def each_file_once(case: Case, seen: Seen, rank: int) -> Miss | None:
    known(case, seen, rank)
    opened = items(seen, rank, "opened", str)
    fits = opened and len(opened) == len(set(opened))
    return kit.unless(fits, f"each of {case.inputs['files']} files opened once", f"{len(opened)} times")


@kit.each_rank
def no_collective(case: Case, seen: Seen, rank: int) -> Miss | None:
    known(case, seen, rank)
    made = made_by(seen, rank)
    return kit.unless(not made, "no collective", kit.listed(made))


LOAD = Task(
    **kit.about("lora.sharded_load"),
    draw=draw_loads,
    observe=observe_load,
    essential=("pieces", "bytes read"),
    properties={
        "pieces": Property(2, pieces(few=False)),
        "fewer rows than ranks": Property(1, pieces(few=True)),
        "dtypes": Property(1, same_dtypes),
        "bytes read": Property(3, bytes_read),
        "each file once": Property(1, each_file_once),
        "no collective": Property(1, no_collective),
    },
)
