"""Tensor and sequence parallelism with torch's own engine, ``parallelize_module``, by the same plans.

A split parameter is a ``DTensor``: a shard that knows its placement. The engine derives the exchanges from placements,
forward and backward, where :mod:`course_lib.parallel.tp_collectives` writes each of them down.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from course_lib.parallel.tensor_parallel import check_vocabulary
from course_lib.parallel.tensor_plans import (
    Role,
    TensorPlan,
    check_splittable,
    exchange_hidden,
    named,
    plan_of,
    take_over_first,
)
from course_lib.parallel.tp_collectives import PAD_SEQUENCES, SEQUENCE, check_divides


class TorchTensorParallel(nn.Module):
    """The same model, plan and face as :class:`course_lib.parallel.tensor_plans.TensorParallel`, on ``DTensor``s.

    With sequence parallelism the gradient of a norm's weight is left as a sum that is still to be made (placement
    ``Partial``), which ``full_tensor()`` makes; the one from scratch makes it in the backward.

    ``parallelize_module`` knows ``nn.Linear`` and ``nn.Embedding`` alone, and splits in contiguous runs: GPT-2's
    ``Conv1D`` layers become linear ones, with the rows of the joint query, key and value in the order of the ranks.

    Args:
        module: changed in place.
        mesh: 1-D, the ranks to split over.
        plan: by default that of the model's type.
        sequence: sequence parallelism.
        split_vocabulary: split the embedding and the head too; the logits are gathered.
    Raises:
        ConfigError: heads, widths or a vocabulary that the ranks cannot share evenly.
        ModelError: the ranks' models differ, there is no plan, or a block has parameters that the plan does not know.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        plan: TensorPlan | None = None,
        sequence: bool = False,
        split_vocabulary: bool = True,
    ):
        super().__init__()
        self.plan, config = plan_of(module, plan)
        self.module, self.mesh = module, mesh
        self.between: Placement = Shard(SEQUENCE) if sequence else Replicate()
        # --- phase 1: refuse what cannot be split, while nothing is changed; begin alike ---
        blocks = self.plan.blocks_of(module)
        check_splittable(self.plan, blocks, config, mesh.size(), sequence)
        self.start_alike()

        # --- phase 2: a style for each module, by name; one call splits them all ---
        self._fused: dict[str, int] = {}  # names of the layers that were Conv1D: matrices side by side in each
        ties = _ties(module)
        styles: dict[str, ParallelStyle] = {}
        for name, block in blocks.items():
            styles |= self._block_styles(name, block)
        styles |= self._outer_styles(sequence, split_vocabulary)
        parallelize_module(module, mesh, styles)
        # --- phase 3: what the styles do not do: ties, and exchanges that several layers share ---
        for names in ties:
            _tie(module, names)
        self._hook(blocks)

    def start_alike(self) -> None:
        """Let all ranks begin with the weights of the mesh's first; a collective call."""
        take_over_first(self.module, self.mesh.get_group())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def whole_weights(self) -> dict[str, Tensor]:
        """The whole model's state, on every rank, as it was before it was split; a collective call."""
        return {name: self._whole(name, tensor) for name, tensor in self.module.state_dict().items()}

    def whole_gradients(self) -> dict[str, Tensor]:
        """The gradients of the whole model's parameters, on every rank; a collective call."""
        return {
            name: self._whole(name, parameter.grad)
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None
        }

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor put together, and back in the order and the shape that Conv1D had."""
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        layer, _, attribute = name.rpartition(".")
        if self._fused.get(layer, 1) > 1:  # rank by rank back to matrix by matrix
            whole = whole[by_rank(len(whole), self._fused[layer], self.mesh.size()).argsort()]
        if layer in self._fused and attribute == "weight":
            whole = whole.t()
        return whole.detach()

    def _block_styles(self, name: str, block: nn.Module) -> dict[str, ParallelStyle]:
        """A style for each split layer and sliced norm of a block, by full name."""
        entered = tuple(f"{part}." for part, role in self.plan.roles.items() if role is Role.ENTER)
        styles: dict[str, ParallelStyle] = {}
        for part, role in self.plan.roles.items():
            full, layer = f"{name}.{part}", block.get_submodule(part)
            if role in (Role.COLUMN, Role.QKV, Role.ROW) and not isinstance(layer, nn.Linear):
                self._fused[full] = 3 if role is Role.QKV else 1
                block.set_submodule(part, as_linear(layer, self._fused[full], self.mesh.size()))
            if role in (Role.COLUMN, Role.QKV):
                styles[full] = ColwiseParallel(input_layouts=Replicate() if part.startswith(entered) else self.between)
            elif role is Role.ROW:
                styles[full] = RowwiseParallel(output_layouts=self.between)
            elif role is Role.NORM and self.between.is_shard():
                styles[full] = SequenceParallel(use_local_output=True)
        self.plan.divide(block, self.mesh.size())
        return styles

    def _outer_styles(self, sequence: bool, split_vocabulary: bool) -> dict[str, ParallelStyle]:
        """A style for the final norm, the embedding and the head, as far as the model has them."""
        styles: dict[str, ParallelStyle] = {}
        if sequence and (norm := named(self.module, self.plan.final_norm)) is not None:
            styles[norm] = SequenceParallel(use_local_output=True)
        if split_vocabulary:
            # An embedding is split by rows, so its outputs are a sum over the ranks; a head by columns, and gathered.
            if (embedding := named(self.module, self.plan.embedding)) is not None:
                check_vocabulary(self.module.get_submodule(embedding), self.mesh.size())
                styles[embedding] = RowwiseParallel(input_layouts=Replicate())
            if (head := named(self.module, self.plan.head)) is not None:
                styles[head] = ColwiseParallel(output_layouts=Replicate())
        return styles

    def _hook(self, blocks: Mapping[str, nn.Module]) -> None:
        """Place the hidden states where several layers take them, and at both ends of the blocks."""
        enter = functools.partial(_placed, before=self.between, after=Replicate())
        for block in blocks.values():
            for part, role in self.plan.roles.items():
                if role is Role.ENTER:
                    block.get_submodule(part).register_forward_pre_hook(
                        functools.partial(exchange_hidden, enter, self.mesh), with_kwargs=True
                    )
        if not self.between.is_shard():
            return
        first, last = list(blocks.values())[0], list(blocks.values())[-1]
        first.register_forward_pre_hook(functools.partial(exchange_hidden, self._slice, self.mesh), with_kwargs=True)
        if (norm := named(self.module, self.plan.final_norm)) is not None:
            last = self.module.get_submodule(norm)
        last.register_forward_hook(
            lambda module, args, hidden: _placed(hidden, self.mesh, self.between, Replicate()).to_local()
        )

    def _slice(self, hidden: Tensor, mesh: DeviceMesh) -> Tensor:
        check_divides("the number of tokens", hidden.shape[SEQUENCE], mesh.size(), PAD_SEQUENCES)
        return _placed(hidden, mesh, Replicate(), self.between).to_local()


def by_rank(rows: int, fused: int, ranks: int) -> Tensor:
    """Order in which each rank's share of every fused matrix lies together; int64, shape (rows,)."""
    # (rows,) -> (fused, ranks, own rows) -> (ranks, fused, own rows) -> (rows,). For q and k, 2 rows each, and 2 ranks:
    # q0 q1 k0 k1 -> q0 k0 q1 k1, so that a contiguous half is a share of both.
    return torch.arange(rows).view(fused, ranks, rows // fused // ranks).transpose(0, 1).reshape(-1)


def as_linear(conv: nn.Module, fused: int, ranks: int) -> nn.Linear:
    """An ``nn.Linear`` that does what a ``Conv1D`` does, its outputs in the order of the ranks where some are fused."""
    weight, bias = conv.get_parameter("weight"), conv.get_parameter("bias")
    order = by_rank(len(bias), fused, ranks) if fused > 1 else torch.arange(len(bias))
    linear = nn.Linear(weight.shape[0], weight.shape[1], device="meta")
    # (in, out) -> (out, in), rows in the order of the ranks
    linear.weight = nn.Parameter(weight.detach().t()[order].contiguous(), weight.requires_grad)
    linear.bias = nn.Parameter(bias.detach()[order], bias.requires_grad)
    return linear


def _placed(tensor: Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> DTensor:
    """A local tensor of one placement as a ``DTensor`` of another; backward it is the other way round."""
    # Shard -> Replicate is an all-gather, Replicate -> Shard a slice, Partial -> Replicate an all-reduce, Partial ->
    # Shard a reduce-scatter. `run_check` would compare the ranks' tensors in each forward.
    return DTensor.from_local(tensor, mesh, [before], run_check=False).redistribute(placements=[after])


def _ties(module: nn.Module) -> list[list[str]]:
    """All names of each parameter that has several; ``parallelize_module`` parts them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [aliases for aliases in names.values() if len(aliases) > 1]


def _tie(module: nn.Module, names: list[str]) -> None:
    """Give the first split parameter of these names, if there is one, all of them again."""
    parameters = [module.get_parameter(name) for name in names]
    shared = next((parameter for parameter in parameters if isinstance(parameter, DTensor)), parameters[0])
    for name in names:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, shared)
