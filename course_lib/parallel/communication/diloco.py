"""DiLoCo: every rank trains by itself for H steps, and an outer optimizer makes one step of their mean change.

One period of H steps; W are the weights that all ranks share, ``w`` those of one rank::

    w = W                    all begin alike
    w: H inner steps         AdamW, say, on this rank's rows; nothing is sent
    D = mean over ranks of W - w      the outer gradient: it has a gradient's sign, so that W - D is the mean
    V = momentum * V + D              Nesterov's momentum,
    W = W - lr * (D + momentum * V)   as in torch.optim.SGD(nesterov=True)

With lr = 1 and momentum = 0 it is LocalSGD.

Source: Douillard et al., "DiLoCo" (arXiv 2311.08105), algorithm 1.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.parallel.communication.local_sgd import LocalTraining, flatten, overwrite, unflatten
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

    @torch.no_grad()
    def step(self) -> None:
        """Sum the ranks' changes, make the outer step, and hand its result to the parameters."""
        change = (self.shared - flatten(self.parameters)) / dist.get_world_size(self.group)
        self.sum_over_ranks(change, self.group).wait()
        self.velocity.mul_(self.momentum).add_(change)
        self.shared.sub_(change.add_(self.velocity, alpha=self.momentum), alpha=self.lr)
        overwrite(self.parameters, unflatten(self.shared, self.parameters))


class DiLoCo(LocalTraining):
    """H inner steps per rank, then one outer step of all; see :class:`LocalTraining` for how it is used.

    Costs memory for W and V, twice the weights in float32, which may lie on the host between the outer steps.

    Args:
        module: the same on all ranks.
        sync_every: H; 50 to 500 in the paper.
        outer_lr: of the outer optimizer; 0.7 in the paper.
        outer_momentum: likewise; 0.9.
        group: the ranks; None is all.
        sum_over_ranks: how changes are summed: :func:`plain_sum`, or a quantized sum, which sends an eighth.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        sync_every: int,
        outer_lr: float,
        outer_momentum: float,
        group: dist.ProcessGroup | None,
        sum_over_ranks: Sum,
    ):
        super().__init__(module, sync_every, group)
        self.outer = OuterOptimizer(self.trained, outer_lr, outer_momentum, group, sum_over_ranks)

    def after_step(self) -> None:
        """Make the outer step if this inner step ends a period."""
        self.steps += 1
        if self.steps % self.sync_every == 0:
            self.outer.step()

    def consensus(self) -> list[Tensor]:
        """The shared weights after the outer steps so far; sends nothing."""
        return [shared.clone() for shared in unflatten(self.outer.shared, self.trained)]

    def adopt(self) -> None:
        """Take the parameters as they are for the shared weights; momentum is 0."""
        self.outer.shared.copy_(flatten(self.trained))
        self.outer.velocity.zero_()

    def state_dict_of_rank(self) -> dict[str, Tensor]:
        """This rank's state beside its parameters: shared weights and velocity."""
        own = {"0.shared": self.outer.shared.clone(), "0.velocity": self.outer.velocity.clone()}
        return super().state_dict_of_rank() | own

    def load_state_dict_of_rank(self, state: Mapping[str, Tensor]) -> None:
        """Put it back; the parameters are loaded by themselves."""
        super().load_state_dict_of_rank(state)
        self.outer.shared.copy_(state["0.shared"])
        self.outer.velocity.copy_(state["0.velocity"])
