"""Measurements of lesson 08: tensor and sequence parallelism, exactness, bytes that move, memory.

The functions run on ranks (:func:`course_lib.launching.launch.launch`) and return plain numbers.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import GPT2LMHeadModel

from course_lib.lessons.lab_gpt2 import affine_chains, gpt2
from course_lib.metering.meter import Meter
from course_lib.parallel.tensor_parallel import vocab_parallel_cross_entropy
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.parallel.topology import AXES, RankGrid
from course_lib.parallel.torch_engines.tensor_parallel import TorchTensorParallel
from course_lib.parallel.tp_collectives import gather, gathered, scatter


@dataclass(frozen=True)
class Shape:
    """Of a small GPT-2 and its batch; tokens, vocabulary and heads divide by 2 and 4."""

    layers: int = 4
    width: int = 64
    rows: int = 4
    tokens: int = 32
    heads: int = 4
    vocabulary: int = 256

    @property
    def hidden_bytes(self) -> int:
        """Of one hidden state, (rows, tokens, width) in float32."""
        return 4 * self.rows * self.tokens * self.width

    def model(self, dropout: float = 0.0) -> GPT2LMHeadModel:
        """The same weights on every call, on the CPU."""
        return gpt2(
            self.layers, self.width, self.tokens, self.vocabulary, heads=self.heads, dropout=dropout, use_cache=False
        )

    def loss(self, model: nn.Module, step: int = 0) -> Tensor:
        """Mean cross-entropy of chains of tokens that an affine map continues, the same rows on every rank."""
        tokens = affine_chains(self.rows, self.tokens, self.vocabulary, seed=step).to(Accelerator().device)
        return F.cross_entropy(model(input_ids=tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def pair(
    column: Callable[[nn.Linear], nn.Module],
    row: Callable[[nn.Linear], nn.Module],
    width: int = 16,
) -> dict[str, tuple[Tensor, Tensor]]:
    """A split pair of linear layers beside the whole two: the output, and the gradients of X, A and B.

    Args:
        column: makes this rank's columns of the first layer from the whole one.
        row: makes this rank's rows of the second.
        width: of input and output; four times as much lies between.

    Returns:
        Each as (of the split pair, of the whole one), on the CPU; of the matrices' gradients this rank's part, in
        ``nn.Linear``'s layout.
    """
    device, ranks, rank = Accelerator().device, dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    first, second = nn.Linear(width, 4 * width).to(device), nn.Linear(4 * width, width).to(device)
    whole_in = torch.randn(2, 3, width, device=device, requires_grad=True)
    split_in = whole_in.detach().clone().requires_grad_()
    columns, rows = column(deepcopy(first)), row(deepcopy(second))
    whole, split = second(F.gelu(first(whole_in))), rows(F.gelu(columns(split_in)))
    for output in (whole, split):
        output.square().sum().backward()
    wanted: dict[str, Any] = {
        "A": first.weight.grad.chunk(ranks, 0)[rank],  # type: ignore[union-attr]
        "B": second.weight.grad.chunk(ranks, 1)[rank],  # type: ignore[union-attr]
    }
    mine: dict[str, Any] = {"A": columns.get_parameter("weight").grad, "B": rows.get_parameter("weight").grad}
    both: dict[str, Any] = {"output": (split.detach(), whole.detach()), "gradient of X": (split_in.grad, whole_in.grad)}
    both |= {f"gradient of {name}": (mine[name], wanted[name]) for name in wanted}
    return {name: (ours.cpu(), theirs.cpu()) for name, (ours, theirs) in both.items()}


def distance(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors, as a share of the second one's largest number."""
    return ((mine - theirs).abs().max() / theirs.abs().max()).item()


def spread(tensor: Tensor) -> float:
    """The largest distance of any rank's numbers from the first rank's; a collective call."""
    everyones = gathered(tensor.detach()[None], None, 0)
    return (everyones - everyones[0]).abs().max().item()


def train(shape: Shape, steps: int, seed_by_rank: bool = False, dropout: float = 0.0) -> tuple[list[float], float]:
    """Train a split model on some batches; this rank's losses, and how far the ranks' final norms have drifted apart.

    Args:
        shape: of the model and its batches.
        steps: batches to train on.
        seed_by_rank: give each rank its own dropout masks.
        dropout: probability of it.
    """
    model: Any = _engine("scratch", shape.model(dropout))
    torch.manual_seed(1 + seed_by_rank * dist.get_rank())
    optimizer = AdamW(model.parameters(), lr=3e-3, eps=1e-5)  # eps: Adam would blow up the noise of tiny gradients
    losses = []
    for step in range(steps):
        loss = shape.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, spread(next(p for name, p in model.named_parameters() if name.endswith("ln_f.weight")))


@dataclass(frozen=True)
class WatchedSplit:
    """One forward and backward, as this rank saw it.

    Attributes:
        loss: of the batch.
        apart: the largest distance of a gradient from one process's, as a share of the largest gradient.
        forward: collectives, as (name, payload bytes).
        backward: likewise.
        sent: bytes that this rank sent, under the ring model.
        activations: the most bytes of them at one time.
        parameters: bytes that this rank holds.
    """

    loss: float
    apart: float
    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]
    sent: int
    activations: int
    parameters: int

    def count(self, name: str, size: int) -> tuple[int, int]:
        """Number of collectives of one name and size, forward and backward."""
        return self.forward.count((name, size)), self.backward.count((name, size))


def watch(shape: Shape, engine: str = "scratch", **options: Any) -> WatchedSplit:
    """One forward and backward under the meter.

    Args:
        shape: of the model and its batch.
        engine: ``whole``, ``scratch`` or ``torch``.
        **options: of :class:`TensorParallel` or :class:`TorchTensorParallel`.
    """
    whole = shape.model().to(Accelerator().device)
    shape.loss(whole).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    model: Any = _engine(engine, shape.model(), **options)
    with Meter(model) as meter:
        loss = shape.loss(model)
        stamp = meter.clock.stamp()
        loss.backward()
    turn = meter.clock.seconds(stamp)
    gradients = model.whole_gradients() if engine != "whole" else {n: p.grad for n, p in model.named_parameters()}
    apart = max((gradients[name] - gradient).abs().max().item() for name, gradient in wanted.items())
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    forward, backward = (
        [(call.name, call.bytes) for call in meter.collectives if (call.start < turn) is before]
        for before in (True, False)
    )
    held = sum(_local(p).nbytes for p in model.parameters())
    return WatchedSplit(
        loss.item(), apart / largest, forward, backward, meter.bytes_sent, meter.peak["activations"], held
    )


@dataclass(frozen=True)
class Crossed:
    """Cross-entropy of split logits in one way.

    Attributes:
        loss: the mean.
        sent: bytes that this rank sent, forward and backward.
        apart: largest distance of the logits' gradient from one process's, as a share of its largest.
    """

    loss: float
    sent: int
    apart: float


def cross_entropies(vocabulary: int, tokens: int) -> dict[str, Crossed]:
    """Cross-entropy of logits that the ranks share: gathered first, and in parallel."""
    device = Accelerator().device
    torch.manual_seed(0)
    logits = torch.randn(1, tokens, vocabulary, device=device, requires_grad=True)
    targets = torch.randint(vocabulary, (1, tokens), device=device)

    def gathering(mine: Tensor) -> Tensor:
        return F.cross_entropy(gather(mine).flatten(0, 1), targets.flatten())

    def parallel(mine: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(mine, targets, dist.group.WORLD).mean()

    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    wanted = logits.grad
    assert wanted is not None
    crossed = {}
    for name, way in (("gathered", gathering), ("parallel", parallel)):
        mine = scatter(logits.detach()).detach().requires_grad_()
        with Meter() as meter:
            loss = way(mine)
            loss.backward()
        assert mine.grad is not None
        apart = (gathered(mine.grad, None, -1) - wanted).abs().max() / wanted.abs().max()
        crossed[name] = Crossed(loss.item(), meter.bytes_sent, apart.item())
    return crossed


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _engine(name: str, model: nn.Module, **options: Any) -> nn.Module:
    """The model on this rank's device, split over all ranks; joins the ranks first."""
    model = model.to(Accelerator().device)
    if name == "scratch":
        return TensorParallel(model, **options)
    if name == "torch":
        mesh = DeviceMesh(Accelerator().device.type, torch.arange(dist.get_world_size()))
        return TorchTensorParallel(model, mesh, **options)
    return model


def axis_of(grid: RankGrid, ranks: Iterable[int]) -> str:
    """The axis that some ranks, more than one, lie along."""
    places = [grid.coordinates(rank) for rank in ranks]
    (axis,) = [axis for axis in grid.axes if len({getattr(place, axis) for place in places}) > 1]
    return axis


def sent_by_axis(grid: RankGrid, meter: Meter) -> dict[str, int]:
    """Bytes that this rank sent along each axis, under the ring model."""
    sent = dict.fromkeys(AXES, 0)
    for call in meter.collectives:
        if call.sent:
            sent[axis_of(grid, call.ranks)] += call.sent
    return sent
