"""Base of ZeRO-3 and FSDP: gathers a block's parameters before it computes and frees them after, in both directions.

Each rank keeps 1/N of every parameter, of its gradient and of its optimizer state. Hooks around each block move its
:class:`~course_lib.parallel.sharded_unit.ShardedUnit` from state to state; the diagram is there. ZeRO-3 and FSDP stand
beside each other upon this file, and differ in how a unit lies in memory. N is the number of ranks::

    method of the unit   zero3.PerParamUnit                         fsdp.FlatParamGroup
    lay_out              each parameter padded to N chunks          all end to end, padded once
    local_part           a chunk of each parameter                  the r-th N-th of the whole
    locate               every rank has a part of every parameter   a rank may have nothing of one
    receive_buffer       a second buffer, (N, E / N)                `flat` itself
    unpack               copies each parameter's chunks together    nothing: they arrive in order
    pack                 copies the gradient, rank by rank          nothing
    padding              up to N - 1 elements per parameter         up to N - 1 elements per unit
    peak                 two buffers of (E,) while it unpacks       one

Except for the padding, the two kinds send equal bytes: an all-gather of E elements per unit in the forward, one in the
backward, and a reduce-scatter. :mod:`course_lib.parallel.minimal.fsdp` is the shortest form.

Sources: Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), section 5.3; Zhao et al. 2023, *PyTorch FSDP* (arXiv
2304.11277), sections 3 and 4.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from course_lib.errors import ModelError
from course_lib.parallel import blocks as partition
from course_lib.parallel.absence import zero_present_
from course_lib.parallel.clipping import norm_dtype, scale_down_, sum_of_squares
from course_lib.parallel.sharded_gradient import ShardedGradients, held, refuse_grad_scaler, take
from course_lib.parallel.sharded_unit import Reduction, ShardedUnit
from course_lib.parallel.sharding import Shard, check_elementwise, names_of, repoint
from course_lib.parallel.trees import map_tensors, tensors_of
from course_lib.parallel.wrapping import UnchangedModule, check_kinds, check_ranks_agree, run_hooks_always


class _AfterBackward(torch.autograd.Function):
    """Hands its inputs on, and calls a function when the gradients of all of them are there.

    Then the weights' gradients are there, too: autograd takes the node that was made last first, this one was made
    before the block's own, and gradients of leaves are accumulated at once.
    """

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        ctx.set_materialize_grads(False)  # an input that was not used has no gradient, and zeros would cost memory
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.then()
        return None, *gradients


class ShardedModule(nn.Module):
    """A module whose parameters, gradients and optimizer states are split over a group of ranks.

    The weights and buffers of the group's first rank are what all start from. Gradients are averaged over the ranks.
    A trainable parameter that no rank's backward reaches has none, and is left alone as on one process; where only
    some ranks reach it the others count as having zeros.

    ``optimizer.step()`` and ``optimizer.zero_grad()`` are the engine's own, and ``nn.utils.clip_grad_norm_`` over its
    parameters clips as :meth:`clip_grad_norm_`: ``.grad`` shows a
    :class:`~course_lib.parallel.sharded_gradient.ShardedGradient`. Setting it to None forgets the gradient, as
    ``module.zero_grad()`` does; another tensor there and a GradScaler raise.

    Args:
        module: changed in place: outside its forward and backward its parameters read as NaN. One that is at several
            places among the units is one unit.
        optimizer: over the module's parameters, before its first step; repointed to this rank's shards.
        units: modules that are gathered each by itself, in the order of the forward; the rest of the model is the
            root unit, which stays gathered from its forward to the end of its backward. By default the blocks that
            :func:`course_lib.parallel.blocks.blocks` finds.
        group: of the ranks; the default group by default.
        reshard_after_forward: free a unit after its forward and gather it again for its backward, or keep it.
        prefetch: begin to gather the next unit before this one computes.
        param_dtype: of the gathered parameters, of floating-point inputs, and so of the computation; by default the
            parameters' own. The shards keep theirs.
        reduce_dtype: in which gradients are added up, over micro-batches and ranks; ``param_dtype`` by default.
        filled_later: the parameters have no values yet, and lie on the meta device; this rank's :meth:`shards` are
            filled afterwards, on the device of the buffers, else on the CPU, and :meth:`refresh` is called.
    Raises:
        ConfigError: an optimizer that is not elementwise, has made steps, or has another module's parameters; units
            that overlap; no units found.
        ModelError: the ranks' models differ, parameters that are complex, sparse gradients; or, in forward, the module
            was changed since.
    """

    strategy: str
    unit_type: type[ShardedUnit]

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        units: Collection[nn.Module] | None = None,
        group: dist.ProcessGroup | None = None,
        reshard_after_forward: bool = True,
        prefetch: bool = True,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        filled_later: bool = False,
    ):
        super().__init__()
        if filled_later:
            without_values(module, optimizer)
        check_elementwise(optimizer, self.strategy)
        check_kinds(module, type(self).__name__)
        check_ranks_agree(module, group)
        # --- phase 1: the units, and buffers as the first rank has them ---
        chosen = list(dict.fromkeys(partition.blocks(module).values() if units is None else units))
        partition.check_disjoint(chosen)
        self.module, self.optimizer, self.group, self.prefetch = module, optimizer, group, prefetch
        self.param_dtype, self.synchronise = param_dtype, True
        self.names = names_of(module)
        self.device = next(module.parameters()).device
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)

        # --- phase 2: shard. The root first, as its forward begins first. A unit is of one dtype, all trainable or all
        # frozen: a block with adapters is two units, of which one has a gradient, is reduced, and stepped. The root is
        # kept: its forward ends with the whole model's, and its backward begins right after it. ---
        owner = partition.owners(module, chosen)
        self.units = [
            self.unit_type(
                member,
                parameters,
                group,
                param_dtype,
                reduce_dtype,
                keep_after_forward=member is module or not reshard_after_forward,
                filled_later=filled_later,
            )
            for member in [module, *chosen]
            for parameters in partition.alike(p for p in owner if owner[p] is member)
        ]
        self._shards = {parameter: shard for unit in self.units for parameter, shard in unit.shards.items()}
        repoint(optimizer, {parameter: shard.data for parameter, shard in self._shards.items()})

        # Which units to gather ahead of which: those of the next block, or of the one before in backward, when the last
        # unit of a block is whole.
        members = ([unit for unit in self.units if unit.module is member] for member in [module, *chosen])
        stages = [units for units in members if units]
        self._next = {first[-1]: second for first, second in itertools.pairwise(stages)}
        self._before = {second[-1]: first for first, second in itertools.pairwise(stages)}
        self._reduction: Reduction | None = None
        self._backward_runs = False
        self._hook_units(chosen)
        self._hook_loop(optimizer)
        self._unchanged = UnchangedModule(module, type(self).__name__)

    def _hook_units(self, chosen: Collection[nn.Module]) -> None:
        """Phase 3: hooks around the forward of each unit; those of the backward are set anew in each forward, on the
        tensors that go into the unit and come out of it.
        """
        for index, unit in enumerate(self.units):
            unit.module.register_forward_pre_hook(functools.partial(self._pre_forward, index), with_kwargs=True)
            unit.module.register_forward_hook(functools.partial(self._post_forward, index))
        for block in chosen:
            run_hooks_always(block)

    def _hook_loop(self, optimizer: Optimizer) -> None:
        """Phase 4: what the caller's loop does with its optimizer, with the gradients, and with a state_dict."""
        self._gradients = ShardedGradients(
            {parameter: name for parameter, name in self.names.items() if parameter.requires_grad},
            lambda: {parameter: shard.data.grad for parameter, shard in self._shards.items()},
            lambda: any(unit.gradient is not None for unit in self.units),
            self._forget_one,
            self.group,
        )
        refuse_grad_scaler(optimizer)
        optimizer.register_step_pre_hook(lambda *_: self._gradients.heed())
        optimizer.register_step_post_hook(lambda *_: self.refresh())
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        # Whole weights would be NaN in a state_dict, and go nowhere if loaded.
        self.module.register_state_dict_pre_hook(_refuse)
        self.module.register_load_state_dict_pre_hook(_refuse)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._unchanged.is_unchanged():
            self._unchanged.refuse()
        return self.module(*args, **kwargs)

    # --- what happens around a unit's forward and backward -----------------------------------------------------------

    def _pre_forward(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather this unit, begin to gather the next, and ask to be told when its backward is over."""
        unit = self.units[index]
        # --- SHARDED or GATHERING -> WHOLE ---
        unit.gather()
        unit.wait()
        # Prefetch, after the wait: what is needed now has had the link for itself. In a backward, where activation
        # checkpointing runs the forward again, the unit after this one has been done already.
        if self.prefetch and not unit.in_backward:
            for following in self._next.get(unit, ()):
                following.gather()
        if self.param_dtype is not None:
            args, kwargs = map_tensors(self._cast, (args, kwargs))
        # Backward is over when the gradients of all inputs are there, which may lie in tuples, dicts and dataclasses.
        # Where none needs a gradient (the root's are token ids), `_end_backward` does what is left.
        inputs = [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]
        if not inputs:
            return args, kwargs
        watched = iter(_AfterBackward.apply(functools.partial(self._post_backward, index), *inputs))
        return map_tensors(lambda tensor: next(watched) if tensor.requires_grad else tensor, (args, kwargs))

    def _post_forward(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        """Free the unit, and ask to be told when its backward begins."""
        unit = self.units[index]
        if unit.in_backward:  # activation checkpointing runs the forward again, and the backward follows at once
            return
        # A hook on each output's gradient, since any of them may come first; the others find the unit WHOLE.
        leaves = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        for leaf in leaves:
            leaf.register_hook(functools.partial(self._pre_backward, index))
        unit.awaits_backward |= bool(leaves)
        # --- WHOLE -> SHARDED. In an evaluation also what is kept otherwise: no backward will come and free it ---
        if not (unit.keep_after_forward and torch.is_grad_enabled()):
            unit.free()

    def _pre_backward(self, index: int, gradient: Tensor) -> None:
        """Gather this unit again, and begin to gather the one whose backward comes next."""
        unit = self.units[index]
        if not self._backward_runs:  # the first hook of a backward asks autograd to be told of its end
            self._backward_runs = True
            Variable._execution_engine.queue_callback(self._end_backward)
        unit.awaits_backward, unit.in_backward, unit.owes_gradient = False, True, unit.trainable
        # --- SHARDED or GATHERING -> WHOLE ---
        unit.gather()
        unit.wait()
        # Prefetch, in reverse. Only what had a forward in this step: a block that was left out has no backward.
        for before in self._before.get(unit, ()) if self.prefetch else ():
            if before.awaits_backward:
                before.gather()

    def _post_backward(self, index: int) -> None:
        """Free the unit and send its gradient on its way."""
        unit = self.units[index]
        unit.in_backward = False
        # --- WHOLE -> SHARDED, and the gradient leaves: (E,) -> (E / N,) ---
        unit.free()
        if unit.has_gradients():
            self._reduce(unit)

    def _end_backward(self) -> None:
        """What is left: the root unit, and units whose inputs needed no gradient, so that no hook was called."""
        for unit in reversed(self.units):  # the same order on all ranks: collectives are matched by it
            if unit.owes_gradient or unit.has_gradients():
                self._reduce(unit)
            unit.free()
            unit.in_backward = unit.awaits_backward = False
        self._finish_reduction()
        self._gradients.show()
        self._backward_runs = False

    def _reduce(self, unit: ShardedUnit) -> None:
        """One reduce-scatter runs while the next unit's backward computes; a second one waits for it, so that no more
        than two whole gradients are there at once."""
        unit.owes_gradient = False
        unit.collect()
        if self.synchronise:  # within no_sync the sum stays here, whole
            self._finish_reduction()
            self._reduction = unit.reduce_scatter()

    def _finish_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.finish()
            self._reduction = None

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() else tensor

    # --- what a trainer calls ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication of gradients.

        As in FSDP, each rank then holds the sum of its own *whole* gradients, in ``reduce_dtype``, until the first
        backward outside: memory for all the parameters against one reduce-scatter a unit and micro-batch.
        """
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a global L2 norm of at most ``max_norm``; returns the norm before."""
        self._gradients.heed()
        gradients = [shard.data.grad for shard in self._shards.values() if shard.data.grad is not None]
        # Each element is on one rank: the ranks' sums of squares add up to that of the whole gradient. 0-D.
        square = sum_of_squares(gradients, self.device, norm_dtype(unit.shard for unit in self.units if unit.trainable))
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        scale_down_(gradients, norm, max_norm)
        self._gradients.changed()
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shards; the next gather brings the new weights. Gives what ``closure`` gave."""
        return self.optimizer.step(closure)  # then `refresh`: a unit that was kept, or prefetched, has the old weights

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, of shards and of what ``no_sync`` keeps, or let them be zeros."""
        if not set_to_none:
            self._gradients.changed()
            kept = [unit.gradient for unit in self.units] + [shard.data.grad for shard in self._shards.values()]
            for gradient in kept:
                if gradient is not None:
                    zero_present_(gradient)
            return
        for unit in self.units:
            unit.gradient = None  # of `no_sync`
            unit.used.clear()
        for parameter, shard in self._shards.items():
            take(parameter)
            shard.data.grad = None
        self._gradients.forgotten()

    def _forget_one(self, parameter: nn.Parameter) -> None:
        next(unit for unit in self.units if parameter in unit.shards).forget_one(parameter)

    def shards(self) -> dict[str, Shard]:
        """This rank's shard of every parameter, by its first name, in module order."""
        return {name: self._shards[parameter] for parameter, name in self.names.items()}

    def refresh(self) -> None:
        """Let the shards' present values count: free whatever was gathered from earlier ones."""
        for unit in self.units:
            unit.free()

    def resident(self) -> dict[str, list[Tensor]]:
        """The tensors alive on this rank by kind; those of freed storage count 0 bytes."""
        gradients = [shard.data.grad for shard in self._shards.values()]
        gradients += [unit.gradient for unit in self.units] + [held(parameter) for parameter in self.names]
        travelling = [self._reduction.whole, self._reduction.local] if self._reduction is not None else []
        return {
            "parameters": [tensor for unit in self.units for tensor in (unit.shard, unit.flat)],
            "gradients": [gradient for gradient in gradients if gradient is not None],
            "optimizer states": [t for t in tree_leaves(dict(self.optimizer.state)) if isinstance(t, Tensor)],
            "communication buffers": travelling + [tensor for unit in self.units for tensor in unit.buffers()],
        }


def without_values(module: nn.Module, optimizer: Optimizer) -> None:
    """Put parameters of one number, spread over their shapes, into the place of those on the meta device, in place."""
    device = next((buffer.device for buffer in module.buffers() if buffer.device.type != "meta"), torch.device("cpu"))
    spread = {
        parameter: nn.Parameter(
            torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape), parameter.requires_grad
        )
        for parameter in module.parameters()
        if parameter.is_meta
    }
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in spread:
                setattr(part, name, spread[parameter])
    repoint(
        optimizer,
        {
            parameter: spread.get(parameter, parameter)  # type: ignore[call-overload]
            for group in optimizer.param_groups
            for parameter in group["params"]
        },
    )


def _refuse(*_: Any) -> NoReturn:
    raise ModelError(
        "a sharded module has no whole weights in it: each rank holds shards",
        "use sharding.gather_whole(engine.shards()), or scatter_whole and engine.refresh() to load",
    )
