"""The rank grid: which ranks share a batch, a pipeline and a layer, as one small value that is handed around.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(arXiv 2104.04473), section 3: tensor parallelism within a machine, pipelines between machines, data parallelism around.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from course_lib.errors import ConfigError
from course_lib.parallel.groups import device_of, meet

AXES = ("dp", "pp", "tp")
"""Data, pipeline, tensor parallelism: the grid's dimensions, from the outermost to the innermost."""
AXES_WITH_CONTEXT = ("dp", "pp", "cp", "tp")
"""The same where ranks share the tokens of a sequence, too."""


class Coordinates(NamedTuple):
    """Place of a rank along each axis of the grid, from 0."""

    dp: int
    pp: int
    tp: int
    cp: int = 0


class AxisGroups(NamedTuple):
    """This rank's process group along each axis: the ranks that differ from it in that coordinate alone."""

    dp: dist.ProcessGroup
    pp: dist.ProcessGroup
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup | None = None
    """None where every rank has whole sequences."""


@dataclass(frozen=True)
class RankGrid:
    """Ranks 0 to dp · pp · cp · tp - 1 in a box, in the order of ``arange(world_size).view(dp, pp, cp, tp)``.

    The innermost axis has neighbouring ranks, which sit in one machine: tensor parallelism, which communicates twice
    in each layer. Context parallelism, around it, communicates once in each layer's attention, and hides that. The
    outermost has the farthest: data parallelism, which communicates once per step and can hide it.

    Attributes:
        dp: copies of the model, each on its own rows.
        pp: stages that a copy is cut into.
        tp: ranks that share the matrices of a stage.
        cp: ranks that share the tokens of each row, with whole matrices or the same shards of them; of one rank it is
            no axis of the grid.
    Raises:
        ConfigError: a size below 1.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES_WITH_CONTEXT:
            if (size := getattr(self, axis)) < 1:
                raise ConfigError(f"the rank grid's {axis} size is {size}", "each of dp, pp, cp and tp is at least 1")

    @classmethod
    def over(cls, world_size: int, *, pp: int, tp: int, cp: int = 1) -> "RankGrid":
        """The grid that fills ``world_size`` ranks; what the other axes leave over is data parallelism.

        Raises:
            ConfigError: pp · cp · tp does not divide the number of ranks.
        """
        dp, left = divmod(world_size, max(1, pp * cp * tp))  # a size of 0 is refused below, by the grid itself
        if left or not dp:
            shared = f" x {cp} context-parallel ranks" if cp > 1 else ""
            raise ConfigError(
                f"{pp} pipeline stages{shared} x {tp} tensor-parallel ranks do not divide {world_size} ranks",
                f"choose pp{', cp' * (cp > 1)} and tp whose product divides the number of ranks",
            )
        return cls(dp, pp, tp, cp)

    @property
    def axes(self) -> tuple[str, ...]:
        """The grid's dimensions, from the outermost to the innermost."""
        return AXES if self.cp == 1 else AXES_WITH_CONTEXT

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    @property
    def ranks(self) -> Tensor:
        """The rank at each place, as int64 of the shape of :attr:`axes`."""
        # For 2 x 2 x 2: tensor-parallel groups 01 23 45 67, pipelines 02 13 46 57, data-parallel groups 04 15 26 37.
        return torch.arange(self.world_size).view([getattr(self, axis) for axis in self.axes])

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a rank.

        Raises:
            ConfigError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} is not in a grid of {self.world_size}", f"ranks go from 0 to {self.world_size - 1}"
            )
        # (dp, pp, tp) of booleans, one of them true -> (1, 3) -> its three indices
        places = (self.ranks == rank).nonzero()[0].tolist()
        return Coordinates(**dict(zip(self.axes, places, strict=True)))

    def lines(self, *axes: str) -> list[list[int]]:
        """The ranks in sets whose members differ along the given axes alone, each set and the list in rising order.

        ``lines("tp")`` are the tensor-parallel groups, ``lines("pp", "tp")`` the ranks that hold one copy of the model.

        Raises:
            ConfigError: an axis that the grid does not have.
        """
        for axis in axes:
            if axis not in self.axes:
                raise ConfigError(f"the rank grid has no axis {axis!r}", f"choose from {', '.join(self.axes)}")
        kept = [place for place, axis in enumerate(self.axes) if axis not in axes]
        along = [place for place, axis in enumerate(self.axes) if axis in axes]
        # (dp, pp, tp) -> (…kept, …along) -> (number of sets, ranks of a set): what varies along the axes comes last.
        return self.ranks.permute(*kept, *along).reshape(-1, self._length(axes)).tolist()

    def _length(self, axes: tuple[str, ...]) -> int:
        length = 1
        for axis in set(axes):
            length *= getattr(self, axis)
        return length

    def new_group(self, *axes: str) -> dist.ProcessGroup:
        """This rank's group along the given axes; a collective call of all ranks.

        ``dist.new_group`` wants to be called on every rank for every group, its own or not, in one order.

        Raises:
            ConfigError: the grid has another number of ranks than there are.
        """
        if self.world_size != dist.get_world_size():
            sizes = " x ".join(str(getattr(self, axis)) for axis in self.axes)
            raise ConfigError(
                f"a grid of {sizes} is {self.world_size} ranks, and there are {dist.get_world_size()}",
                "choose sizes whose product they are",
            )
        # A rank that made only its own group would wait for ranks that are in none of it.
        groups = {tuple(line): dist.new_group(line) for line in self.lines(*axes)}
        own = next(group for line, group in groups.items() if dist.get_rank() in line)
        meet(own)  # a pipeline's first message is between two of its ranks; NCCL wants all of them in the first call
        return own

    def groups(self) -> AxisGroups:
        """This rank's group along each axis; a collective call of all ranks, once per run."""
        return AxisGroups(**{axis: self.new_group(axis) for axis in self.axes})

    def mesh(self, groups: AxisGroups) -> DeviceMesh:
        """The same grid and the same groups as torch's ``DeviceMesh``, with dimensions named as :attr:`axes`.

        Its device is the groups' own (:func:`~course_lib.parallel.groups.device_of`): GPUs where they have NCCL.
        """
        held = [getattr(groups, axis) for axis in self.axes]
        return DeviceMesh.from_group(held, device_of(groups.dp).type, mesh=self.ranks, mesh_dim_names=self.axes)
