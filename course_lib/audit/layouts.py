"""Layout of ranks: the size of each axis, and the groups of ranks along it."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_lib.errors import ConfigError

AXES = ("pp", "dp", "shard", "cp", "ep", "tp")
"""Pipeline, data, sharded data, context, expert and tensor parallelism. Of ranks that follow each other the last one
differs first."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; their product is the number of ranks."""

    pp: int = 1
    dp: int = 1
    shard: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def used(self) -> dict[str, int]:
        """The axes with more than one rank, and their sizes."""
        return {axis: size for axis, size in zip(AXES, self.sizes, strict=True) if size > 1}

    def __str__(self) -> str:
        return " × ".join(f"{axis}{size}" for axis, size in self.used.items()) or "one process"

    def mesh(self, device: str = "cpu") -> DeviceMesh:
        """All six axes as torch's mesh, with their names; every rank calls it."""
        return init_device_mesh(device, self.sizes, mesh_dim_names=AXES)

    def place(self, rank: int) -> dict[str, int]:
        """Place of a rank on each axis."""
        where = {}
        for axis, size in reversed(list(zip(AXES, self.sizes, strict=True))):
            rank, where[axis] = divmod(rank, size)
        return where

    def together(self, axes: Sequence[str]) -> list[list[int]]:
        """The groups of ranks that differ on these axes alone."""
        groups: dict[tuple, list[int]] = {}
        for rank in range(self.ranks):
            place = self.place(rank)
            groups.setdefault(tuple(place[axis] for axis in AXES if axis not in axes), []).append(rank)
        return list(groups.values())


def layouts(ranks: int, axes: Sequence[str] = AXES) -> list[Layout]:
    """Every layout of 2 to ``ranks`` ranks over some axes, those first whose axes have different sizes.

    With dp 2 and tp 3 a factor of 2 or 3 tells its axis, with dp 2 and tp 2 it does not.

    Raises:
        ConfigError: an unknown axis, or fewer than 2 ranks.
    """
    if unknown := [axis for axis in axes if axis not in AXES]:
        raise ConfigError(f"unknown axis {unknown[0]!r} of a layout", f"use {', '.join(AXES)}")
    if ranks < 2:
        raise ConfigError(f"layouts of up to {ranks} ranks", "take 2 or more")
    fitting = [
        Layout(**dict(zip(axes, sizes, strict=True)))
        for sizes in itertools.product(range(1, ranks + 1), repeat=len(axes))
        if 2 <= math.prod(sizes) <= ranks
    ]

    def ambiguous(layout: Layout) -> bool:
        return len(set(layout.used.values())) < len(layout.used)

    return sorted(fitting, key=lambda layout: (len(layout.used), ambiguous(layout), layout.ranks, layout.sizes))
