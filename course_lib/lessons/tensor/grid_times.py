"""The bytes of a rank grid over links of two speeds, computed: which order of its axes, and which grid, is quickest."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations

from course_lib.parallel.topology import AXES, RankGrid
from course_lib.planning.hardware import accelerator

H100 = accelerator("H100")


@dataclass(frozen=True)
class Machines:
    """A cluster, in the few numbers that decide here: H100s, each with a card of 400 Gbit/s, as in lesson 06.

    Attributes:
        gpus: in one machine.
        inside: bytes/s of a GPU to others of its machine, one way.
        across: bytes/s of a GPU's network card, one way.
        flops: FLOP/s that a GPU reaches in training.
        memory: bytes of a GPU.
    """

    gpus: int = 8
    inside: float = H100.bus
    across: float = 50e9
    flops: float = H100.matmul_rate("bf16")
    memory: float = H100.memory

    def speed(self, size: int, stride: int) -> float:
        """Bytes/s of a ring of ``size`` ranks that lie ``stride`` apart.

        It uses the cards of as many GPUs of a machine as it has members there.
        """
        if size * stride <= self.gpus:
            return self.inside
        return min(self.inside, self.across * max(1, self.gpus // stride))


@dataclass(frozen=True)
class Training:
    """A large GPT and its batch, in 16-bit numbers; micro-batches of one row."""

    layers: int
    width: int
    tokens: int = 2048
    rows: int = 512

    @property
    def parameters(self) -> float:
        return 12 * self.layers * self.width**2

    def fits(self, grid: RankGrid, machines: Machines) -> bool:
        """Whether weights, gradients and Adam's states, 16 bytes per parameter, and the activations fit.

        Activations are 34 bytes per token, layer and column of the width, all of them split over tp, for as many
        micro-batches as 1F1B has in flight on the first stage (arXiv 2205.05198, sections 4.2 and 4.3; the attention
        matrix is not stored).
        """
        states = 16 * self.parameters / (grid.pp * grid.tp)
        activations = 34 * self.tokens * self.width * self.layers / grid.tp
        return states + activations <= machines.memory

    def seconds(self, grid: RankGrid, machines: Machines, order: tuple[str, ...] = AXES) -> dict[str, float]:
        """Seconds of a step: of computing, of each axis' bytes with nothing hidden, and of waiting in the pipeline.

        Args:
            grid: the size of each axis.
            machines: the cluster.
            order: of the axes over the ranks, from the outermost to the innermost.
        """
        sizes, stride, speed = {axis: getattr(grid, axis) for axis in AXES}, 1, {}
        for axis in reversed(order):
            speed[axis] = machines.speed(sizes[axis], stride)
            stride *= sizes[axis]
        microbatches, share = self.rows / grid.dp, self.parameters / (grid.pp * grid.tp)
        hidden = 2 * self.tokens * self.width
        once = {
            "compute": 6 * share * self.tokens / machines.flops,
            "tp": 4 * self.layers / grid.pp * 2 * (grid.tp - 1) / grid.tp * hidden / speed["tp"],
            "pp": 2 * hidden * (grid.pp > 1) / speed["pp"],
        }
        parts = {name: microbatches * seconds for name, seconds in once.items()}
        parts["dp"] = 2 * (grid.dp - 1) / grid.dp * 2 * share / speed["dp"]
        return parts | {"idle": (grid.pp - 1) * sum(once.values())}


def orders() -> list[tuple[str, ...]]:
    """The six orders of the axes, each from the outermost to the innermost."""
    return list(permutations(AXES))


def best_grid(training: Training, gpus: int, machines: Machines) -> tuple[RankGrid, float] | None:
    """The quickest grid that fits, and its seconds per step; None where none fits."""
    candidates = [
        (sum(training.seconds(grid, machines).values()), grid)
        for grid in _grids(gpus)
        if training.layers % grid.pp == 0
        and training.width % grid.tp == 0
        and training.rows % grid.dp == 0
        and training.fits(grid, machines)
    ]
    if not candidates:
        return None
    seconds, grid = min(candidates, key=lambda pair: pair[0])
    return grid, seconds


def best_grids(sizes: Mapping[str, tuple[int, int]], gpus: Iterable[int], machines: Machines) -> dict[str, list[str]]:
    """The quickest grid as ``dp × pp × tp``, a list over the numbers of GPUs for each model of (layers, width)."""
    table = {}
    for name, (layers, width) in sizes.items():
        training = Training(layers, width)
        best = [best_grid(training, count, machines) for count in gpus]
        table[f"{name}, {training.parameters / 1e9:.1f}B"] = [
            f"{choice[0].dp} × {choice[0].pp} × {choice[0].tp}" if choice else "does not fit" for choice in best
        ]
    return table


def _grids(gpus: int) -> list[RankGrid]:
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    return [RankGrid(gpus // pp // tp, pp, tp) for pp in sizes for tp in sizes if gpus % (pp * tp) == 0]
