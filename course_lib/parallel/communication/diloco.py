"""DiLoCo: every rank trains by itself for H steps, and an outer optimizer makes one step of their mean change.

One period of H steps; W are the weights that all ranks share, ``w`` those of one rank::

    w = W                    all begin alike
    w: H inner steps         AdamW, say, on this rank's rows; nothing is sent
    D = mean over ranks of W - w      the outer gradient: it has a gradient's sign, so that W - D is the mean
    V = momentum * V + D              Nesterov's momentum,
    W = W - lr * (D + momentum * V)   as in torch.optim.SGD(nesterov=True)

With lr = 1 and momentum = 0 it is LocalSGD. In the streaming form the model is cut into P fragments whose periods end
at different steps, so that the peak of what is sent is 1 / P; and a rank goes on for some steps while a fragment's
change is under way. What it has learned since is mixed with what comes.

Source: Douillard et al., "DiLoCo" (arXiv 2311.08105), algorithm 1; "Streaming DiLoCo with overlapping communication"
(arXiv 2501.18512), algorithm 2 and sections 2.2 to 2.4.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.errors import ConfigError
from course_lib.parallel.blocks import blocks
from course_lib.parallel.communication.local_sgd import LocalTraining, flatten, unflatten
from course_lib.parallel.ddp import ReductionHandle

Sum = Callable[[Tensor, dist.ProcessGroup | None], ReductionHandle]
"""Begins to sum a flat tensor over ranks, in place."""


def plain_sum(flat: Tensor, group: dist.ProcessGroup | None) -> ReductionHandle:
    """All-reduce in the tensor's own dtype."""
    return dist.all_reduce(flat, group=group, async_op=True)


class OuterOptimizer:
    """SGD with Nesterov's momentum on weights that all ranks share; its gradient is how far they went from there.

    Args:
        parameters: what the ranks train; they hold the shared weights now.
        lr: step size.
        momentum: 0 is plain SGD.
        group: the ranks.
        sum_over_ranks: :func:`plain_sum`, or one that sends less.
    Attributes:
        shared: W, (E,), float32 or wider: the same bits on all ranks.
        velocity: V, (E,).
        change: what is under way; None between a period's :meth:`receive` and the next :meth:`send`.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        lr: float,
        momentum: float,
        group: dist.ProcessGroup | None,
        sum_over_ranks: Sum,
    ):
        self.parameters, self.lr, self.momentum = parameters, lr, momentum
        self.group, self.sum_over_ranks = group, sum_over_ranks
        self.shared = flatten(parameters)
        self.velocity = torch.zeros_like(self.shared)
        self.change: Tensor | None = None
        self.work: ReductionHandle | None = None

    def send(self) -> None:
        """Begin to sum the ranks' changes; training may go on meanwhile."""
        self.change = (self.shared - flatten(self.parameters)) / dist.get_world_size(self.group)
        self.work = self.sum_over_ranks(self.change, self.group)

    @torch.no_grad()
    def receive(self, keep: float) -> None:
        """Wait for the mean change, make the outer step, and hand its result to the parameters.

        Args:
            keep: share of the parameters' present values that stays, where they were trained since :meth:`send`.
        """
        assert self.change is not None and self.work is not None, "receive() without send()"
        self.work.wait()
        self.velocity.mul_(self.momentum).add_(self.change)
        self.shared.sub_(self.change.add_(self.velocity, alpha=self.momentum), alpha=self.lr)
        self.change = self.work = None
        for parameter, shared in zip(self.parameters, unflatten(self.shared, self.parameters), strict=True):
            parameter.copy_(torch.lerp(shared, parameter.to(shared.dtype), keep))


class DiLoCo(LocalTraining):
    """H inner steps per rank, then one outer step of all; see :class:`LocalTraining` for how it is used.

    Costs memory for W and V, twice the weights in float32, which may lie on the host between the outer steps.

    Args:
        module: the same on all ranks.
        fragments: P lists of parameters, which hold all trained ones once; see :func:`strided_fragments`.
        sync_every: H; 50 to 500 in the papers.
        outer_lr: of the outer optimizer; 0.7 in both papers.
        outer_momentum: likewise; 0.9.
        overlap: inner steps between the sending of a fragment's change and its outer step; below H.
        keep: what a fragment keeps of its own values when it gets the outer step's; the paper's alpha, 0.5. Without
            overlap it is taken for 0: the rank has learned nothing since.
        group: the ranks; None is all.
        sum_over_ranks: how changes are summed: :func:`plain_sum`, or a quantized sum, which sends an eighth.
    Raises:
        ConfigError: fragments that leave out or repeat a parameter, or an overlap of H or more.
    """

    def __init__(
        self,
        module: nn.Module,
        fragments: Iterable[list[nn.Parameter]],
        *,
        sync_every: int,
        outer_lr: float,
        outer_momentum: float,
        overlap: int,
        keep: float,
        group: dist.ProcessGroup | None,
        sum_over_ranks: Sum,
    ):
        super().__init__(module, sync_every, group)
        parts = list(fragments)
        members = [parameter for part in parts for parameter in part]
        if len(members) != len(self.trained) or set(members) != set(self.trained):
            raise ConfigError(
                f"fragments with {len(members)} parameters for a model that trains {len(self.trained)}",
                "put each trained parameter into one fragment",
            )
        if not 0 <= overlap < sync_every:
            raise ConfigError(
                f"an overlap of {overlap} steps in a period of {sync_every}",
                "let it be from 0 to one step less than the period",
            )
        self.overlap, self.keep = overlap, keep if overlap else 0.0
        self.outers = [OuterOptimizer(part, outer_lr, outer_momentum, group, sum_over_ranks) for part in parts]

    def after_step(self) -> None:
        """Send the fragments whose period ends with this step, and finish those sent ``overlap`` steps ago."""
        self.steps += 1
        for number, outer in enumerate(self.outers):
            # Fragment p ends its periods p * H / P steps before fragment 0: they take turns on the link.
            place = (self.steps + number * self.sync_every // len(self.outers)) % self.sync_every
            if place == 0:
                outer.send()
            if place == self.overlap and outer.change is not None:
                outer.receive(self.keep)

    def consensus(self) -> list[Tensor]:
        """The shared weights after the outer steps so far; sends nothing."""
        by_parameter = {
            parameter: shared.clone()
            for outer in self.outers
            for parameter, shared in zip(outer.parameters, unflatten(outer.shared, outer.parameters), strict=True)
        }
        return [by_parameter[parameter] for parameter in self.trained]

    def adopt(self) -> None:
        """Take the parameters as they are for the shared weights; momentum is 0, what is under way is dropped."""
        for outer in self.outers:
            if outer.work is not None:
                outer.work.wait()
            outer.work = outer.change = None
            outer.shared.copy_(flatten(outer.parameters))
            outer.velocity.zero_()

    def state_dict_of_rank(self) -> dict[str, Tensor]:
        """This rank's state beside its parameters: shared weights, velocities, what is under way. A collective call.

        Ends what is under way, and keeps its result to be handed to the parameters at the step that is due.
        """
        state = super().state_dict_of_rank()
        for number, outer in enumerate(self.outers):
            state |= {f"{number}.shared": outer.shared, f"{number}.velocity": outer.velocity}
            if outer.change is not None and outer.work is not None:
                outer.work.wait()
                outer.work = Arrived()
                state[f"{number}.change"] = outer.change
        return {name: tensor.clone() for name, tensor in state.items()}

    def load_state_dict_of_rank(self, state: Mapping[str, Tensor]) -> None:
        """Put it back; the parameters are loaded by themselves."""
        super().load_state_dict_of_rank(state)
        for number, outer in enumerate(self.outers):
            outer.shared.copy_(state[f"{number}.shared"])
            outer.velocity.copy_(state[f"{number}.velocity"])
            change = state.get(f"{number}.change")
            outer.change = None if change is None else change.to(outer.shared.device, copy=True)
            outer.work = None if change is None else Arrived()


class Arrived:
    """In place of the work of a sum that has ended."""

    def wait(self) -> None:
        """Return at once."""


def strided_fragments(module: nn.Module, number: int) -> list[list[nn.Parameter]]:
    """Fragments of blocks that lie apart: of P, the p-th has blocks p, p + P, p + 2 P, …; what is in no block joins
    the last. One fragment is the whole model.

    Neighbouring blocks then get new values at different times; the paper's better pattern (arXiv 2501.18512, 2.2).

    Raises:
        ConfigError: fewer blocks than fragments, or none.
    """
    if number == 1:
        return [[parameter for parameter in module.parameters() if parameter.requires_grad]]
    layers = list(blocks(module).values())
    if not 1 <= number <= len(layers):
        raise ConfigError(f"{number} fragments of a model with {len(layers)} blocks", f"use 1 to {len(layers)}")
    owner = {parameter: place % number for place, layer in enumerate(layers) for parameter in layer.parameters()}
    parts: list[list[nn.Parameter]] = [[] for _ in range(number)]
    for parameter in module.parameters():
        if parameter.requires_grad:
            parts[owner.get(parameter, number - 1)].append(parameter)
    return parts
