"""Value of a parameter's ``.grad`` under ZeRO and FSDP: a tensor without storage that stands for all ranks' shards.

After a backward the mean gradient of a parameter lies in shards on N ranks, and ``nn.utils.clip_grad_norm_`` over the
module's parameters would find nothing, and clip nothing. So each parameter is given a tensor of its own shape that
knows its shards::

    nn.utils.clip_grad_norm_     what it calls            what happens
    norm of each gradient        linalg.vector_norm(g)    this rank's shards, then one all-reduce for all parameters
    scale each gradient          g.mul_(factor)           this rank's shard is scaled

Whoever sets ``.grad`` to None throws the gradient away, as ``module.zero_grad()`` does. Everything else that looks at
elements, or puts others there, is refused in a line. FSDP2 has its ``DTensor`` there, for the same reason.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from course_lib.errors import ConfigError, ModelError
from course_lib.parallel.absence import zero_present_
from course_lib.parallel.clipping import norm_dtype

aten = torch.ops.aten
IN_PLACE = {
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten.clamp_.default,
    aten.clamp_min_.default,
    aten.clamp_max_.default,
}
"""What is done to each element by itself, with numbers: a shard is changed as the whole would be."""
FOREACH = {
    aten._foreach_norm.Scalar: aten.linalg_vector_norm.default,
    aten._foreach_mul_.Tensor: aten.mul_.Tensor,
    aten._foreach_mul_.Scalar: aten.mul_.Scalar,
    aten._foreach_div_.Tensor: aten.div_.Tensor,
    aten._foreach_div_.Scalar: aten.div_.Scalar,
    aten._foreach_clamp_min_.Scalar: aten.clamp_min_.default,
    aten._foreach_clamp_max_.Scalar: aten.clamp_max_.default,
}
"""What ``foreach=True`` calls for many gradients at once, and what it is for each."""


class ShardedGradient(Tensor):
    """A parameter's gradient whose elements are on several ranks; its shape and dtype are the parameter's.

    Norms of order 0 < p <= inf are those of the mean gradient over all ranks, 0-D and in fp32 (float64 of float64), and
    collective: every rank asks for them, in the same order.

    Raises:
        ModelError: anything else is asked of its elements.
    """

    owner: "ShardedGradients"
    of: str
    """The parameter's name."""
    whole: Tensor | None
    """ZeRO-1's: what this rank's backwards have added up and nobody has reduced."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own

    @staticmethod
    def __new__(cls, owner: "ShardedGradients", name: str, like: Tensor) -> "ShardedGradient":
        made = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device, storage_size=0)
        made.owner, made.of, made.whole = owner, name, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient({self.of!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no `cls`
        cls,
        operator: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        gradient = args[0] if args else None
        if operator in FOREACH:
            results = [FOREACH[operator](one, *args[1:], **given) for one in args[0]]
            return results if operator is aten._foreach_norm.Scalar else None
        if isinstance(gradient, cls):
            others = (*args[1:], *given.values())
            if operator is aten.detach.default:  # of `.data` and `.detach()`: the same gradient
                return cls(gradient.owner, gradient.of, gradient)
            if operator is aten.linalg_vector_norm.default and len(args) < 3 and not given:
                return gradient.owner.norm(gradient.of, float(args[1]) if len(args) > 1 else 2.0)
            if operator is aten.zero_.default:
                gradient.owner.change(gradient.of, zero_present_)
                return gradient
            if operator in IN_PLACE and all(not isinstance(other, Tensor) or other.ndim == 0 for other in others):
                gradient.owner.change(gradient.of, lambda shard: operator(shard, *args[1:], **given))
                return gradient
        named = next(a for a in tree_leaves((args, given)) if isinstance(a, cls))
        raise ModelError(
            f"the gradient of `{named.of}` lies in shards on all ranks, and {operator} wants its elements",
            "clip with nn.utils.clip_grad_norm_ or engine.clip_grad_norm_, take .norm() of it, or read "
            "this rank's shard in engine.shards()[name].data.grad before engine.step()",
        )


class ShardedGradients:
    """The gradients of an engine's trainable parameters, as their ``.grad`` shows them.

    Args:
        names: of the trainable parameters, the same order on every rank.
        shards: gives this rank's part of each parameter's mean gradient, reduced if it has not been; None or nothing
            where there is none. Called on every rank.
        pending: whether there are gradients that only a backward outside ``no_sync`` will reduce.
        forget: drops this rank's part of one parameter's gradient.
        group: of the ranks; the default group by default.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        shards: Callable[[], Mapping[nn.Parameter, Tensor | None]],
        pending: Callable[[], bool],
        forget: Callable[[nn.Parameter], None],
        group: dist.ProcessGroup | None,
    ):
        self.shards, self.pending, self.forget, self.group = shards, pending, forget, group
        self.parameters = {name: parameter for parameter, name in names.items()}
        self.shown = {parameter: ShardedGradient(self, name, parameter) for parameter, name in names.items()}
        self.dtype = norm_dtype(names)
        self._order, self._norms = 0.0, dict[str, Tensor]()
        self._on_show: set[nn.Parameter] = set()
        # Before autograd adds to a gradient, what it adds to has to be a plain one. On the nodes: a hook of the tensor
        # would run in `autograd.grad`, too, which adds nothing.
        with torch.enable_grad():
            self._nodes: list[Any] = [p.view_as(p).grad_fn.next_functions[0][0] for p in names]  # type: ignore[union-attr]
        for parameter, node in zip(names, self._nodes, strict=True):
            node.register_prehook(lambda _, parameter=parameter: self.unveil(parameter))

    def show(self) -> None:
        """After a backward: every trainable parameter has its gradient, reached by this rank or by another."""
        self.changed()
        for parameter, shown in self.shown.items():
            if parameter.grad is not shown:
                shown.whole, parameter.grad = parameter.grad, shown
        self._on_show.update(self.shown)

    def changed(self) -> None:
        """The engine has changed the shards: norms are asked anew."""
        self._norms.clear()

    def forgotten(self) -> None:
        """The engine has dropped all of them: nothing is on show, and None says nothing."""
        self._on_show.clear()
        self.changed()

    def unveil(self, parameter: nn.Parameter) -> None:
        """Let ``.grad`` be what this rank holds whole: a plain tensor, or None."""
        if self._on_show:  # the first of this backward; one that only other ranks reach is not told of it
            self.heed()
            self._on_show.clear()
        parameter.grad = take(parameter)

    def heed(self) -> None:
        """Before gradients are used or added to: what was done to ``.grad`` while it was on show is done to the shards.

        Raises:
            ModelError: another tensor was put there.
        """
        for parameter in [p for p in self._on_show if p.grad is not self.shown[p]]:
            shown = self.shown[parameter]
            if parameter.grad is not None:
                raise ModelError(
                    f"`.grad` of `{shown.of}` was set to a tensor, and its gradient lies in shards on all ranks",
                    "change it in place by mul_, div_, clamp_ or zero_, or set it to None",
                )
            self._on_show.discard(parameter)
            shown.whole = None
            self.forget(parameter)

    def norm(self, name: str, order: float) -> Tensor:
        """Of one parameter's mean gradient over all ranks. All parameters' are reduced together, in the first call."""
        if not order > 0:
            raise ModelError(
                f"a norm of order {order} cannot be added up from the ranks' shards", "take an order above 0"
            )
        if name not in self._norms or order != self._order:
            self._order, self._norms = order, self._all_norms(order)
        # Each is given once: who asks again may have changed the shards by hand, and gets new ones, on every rank.
        return self._norms.pop(name)

    def _all_norms(self, order: float) -> dict[str, Tensor]:
        device = next(iter(self.parameters.values())).device
        shards = self._reduced()
        held = [
            (at, shard)
            for at, parameter in enumerate(self.shown)
            if (shard := shards.get(parameter)) is not None and shard.numel()
        ]
        norms = torch.zeros(len(self.shown), dtype=self.dtype, device=device)
        if held:
            within = torch.float64 if device.type == "cpu" else self.dtype  # as in `clipping.sum_of_squares`
            taken = torch._foreach_norm([shard for _, shard in held], order, dtype=within)
            norms[torch.tensor([at for at, _ in held], device=device)] = torch.stack(taken).to(self.dtype)
        # Each element is on one rank: powers of the shards' norms add up to that of the whole.
        if math.isinf(order):
            dist.all_reduce(norms, op=dist.ReduceOp.MAX, group=self.group)
        else:
            norms = norms.pow_(order)
            dist.all_reduce(norms, group=self.group)
            norms = norms.pow_(1 / order)
        return dict(zip(self.parameters, norms.unbind(), strict=True))

    def change(self, name: str, update: Callable[[Tensor], Any]) -> None:
        """Change this rank's shard of one gradient in place."""
        shard = self._reduced().get(self.parameters[name])
        self._norms.pop(name, None)
        if shard is not None and shard.numel():
            update(shard)

    def _reduced(self) -> Mapping[nn.Parameter, Tensor | None]:
        shards = self.shards()
        if self.pending():
            raise ModelError(
                "gradients of a backward within no_sync are this rank's alone, and cannot be clipped",
                "clip after the backward outside no_sync",
            )
        return shards


def held(parameter: nn.Parameter) -> Tensor | None:
    """Gradient of a parameter that this rank holds whole: a plain tensor, or None."""
    gradient = parameter.grad
    return gradient.whole if isinstance(gradient, ShardedGradient) else gradient


def put(parameter: nn.Parameter, whole: Tensor | None) -> None:
    """Replace what this rank holds whole of a parameter's gradient, before it is reduced."""
    gradient = parameter.grad
    if isinstance(gradient, ShardedGradient):
        gradient.whole = whole
        gradient.owner.changed()
    else:
        parameter.grad = whole


def take(parameter: nn.Parameter) -> Tensor | None:
    """The same, and leave nothing there."""
    gradient, whole = parameter.grad, held(parameter)
    if isinstance(gradient, ShardedGradient):
        gradient.whole = None
    parameter.grad = None
    return whole


def refuse_grad_scaler(optimizer: Optimizer) -> None:
    """Let the step of a ``torch.amp.GradScaler`` raise: a rank sees overflow in its own shards alone, and would skip a
    step that the others make.

    The scaler decides by itself whether to call ``optimizer.step()``, unless the optimizer says that it skips steps.
    """
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(_refuse_scaled)


def _refuse_scaled(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if hasattr(optimizer, "found_inf"):
        raise ConfigError(
            "a GradScaler looks for overflow in this rank's shards of the gradients alone",
            "train in bf16, which needs no scaler, or in fp16 with torch's FSDP2 or DeepSpeed",
        )
