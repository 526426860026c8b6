"""LocalSGD: every rank trains by itself for H steps, then all take the mean of their weights.

One period with H = 3; data parallelism sends at each of its steps::

    rank 0   step  step  step  |mean|  step  step  step  |mean|
    rank 1   step  step  step  |mean|  step  step  step  |mean|

Between two means the ranks' weights are different, and so are the gradients that they compute: it is no longer the
training of one process, unless H = 1 and the optimizer is SGD without momentum.

Source: Stich, "Local SGD Converges Fast and Communicates Little" (arXiv 1805.09767), algorithm 1; Lin et al., "Don't
Use Large Mini-batches, Use Local SGD" (arXiv 1808.07217).
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.errors import ConfigError
from course_lib.parallel.wrapping import check_ranks_agree


class LocalTraining(nn.Module):
    """A module that each rank trains by itself: backward sends nothing, and some steps end with an agreement.

    All ranks begin with the first one's parameters and buffers. Buffers and the optimizer's states stay a rank's own.

    ```python
    loss.backward()
    optimizer.step()
    model.after_step()  # here the ranks communicate, or don't
    ```

    Args:
        module: the same on all ranks.
        sync_every: H, optimizer steps from one agreement to the next.
        group: the ranks that train together; None is all ranks.
    Attributes:
        steps: optimizer steps made.
    Raises:
        ConfigError: H is below 1.
        ModelError: the ranks' models differ.
    """

    def __init__(self, module: nn.Module, sync_every: int, group: dist.ProcessGroup | None):
        super().__init__()
        if sync_every < 1:
            raise ConfigError(f"ranks that agree every {sync_every} steps", "use 1 or more")
        check_ranks_agree(module, group)
        self.module, self.sync_every, self.group = module, sync_every, group
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.steps = 0
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: no backward sends anything."""
        return contextlib.nullcontext()

    def after_step(self) -> None:
        """To be called after each step of the optimizer, on all ranks."""
        raise NotImplementedError

    def consensus(self) -> list[Tensor]:
        """Weights that the ranks agree on at this moment, a new tensor per trained parameter. A collective call."""
        raise NotImplementedError

    def adopt(self) -> None:
        """Take the parameters as they are now, alike on all ranks, for what the ranks agree on."""

    def state_dict_of_rank(self) -> dict[str, Tensor]:
        """This rank's state beside its parameters: where in the period it is."""
        return {"steps": torch.tensor(self.steps)}

    def load_state_dict_of_rank(self, state: Mapping[str, Tensor]) -> None:
        """Put :meth:`state_dict_of_rank` back; the parameters are loaded by themselves."""
        self.steps = int(state["steps"])

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Within it all ranks' parameters are the consensus, for an evaluation or a save; then again their own."""
        own = [parameter.detach().clone() for parameter in self.trained]
        overwrite(self.trained, self.consensus())
        try:
            yield
        finally:
            overwrite(self.trained, own)


class LocalSGD(LocalTraining):
    """H local steps, then the mean of the weights; see :class:`LocalTraining`."""

    def __init__(self, module: nn.Module, *, sync_every: int, group: dist.ProcessGroup | None):
        super().__init__(module, sync_every, group)

    def after_step(self) -> None:
        """Take the mean of the weights, after every H-th step."""
        self.steps += 1
        if self.steps % self.sync_every == 0:
            overwrite(self.trained, self.consensus())

    def consensus(self) -> list[Tensor]:
        """The mean over the ranks of each trained parameter."""
        mean = flatten(self.trained)  # (E,): one message
        dist.all_reduce(mean, group=self.group)
        return unflatten(mean / dist.get_world_size(self.group), self.trained)


@torch.no_grad()
def overwrite(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    """Give parameters other values, in place."""
    torch._foreach_copy_(list[Tensor](parameters), values)


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors one after another in a new one, (E,), in float32 or what is wider among them."""
    tensors = [tensor.detach() for tensor in tensors]
    wide = torch.float32
    for tensor in tensors:
        wide = torch.promote_types(wide, tensor.dtype)
    return torch.cat([tensor.reshape(-1).to(wide) for tensor in tensors])


def unflatten(flat: Tensor, like: list[nn.Parameter]) -> list[Tensor]:
    """The inverse of :func:`flatten`: views of the parameters' shapes, in the flat tensor's dtype."""
    sizes = [parameter.numel() for parameter in like]
    return [part.view(parameter.shape) for part, parameter in zip(flat.split(sizes), like, strict=True)]
