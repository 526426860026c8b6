"""Tensor parallelism for whole models: a plan says by name which layer of a block is split, and how.

Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3, figures 3 and 4: attention by heads, the MLP by
its inner width, embedding and head by the vocabulary.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.errors import ModelError
from course_lib.parallel.clipping import scale_down_, sum_of_squares
from course_lib.parallel.tensor_parallel import (
    ANOTHER_SIZE,
    ColumnParallelLinear,
    ParameterSplit,
    RowParallelLinear,
    VocabParallelEmbedding,
    sequence_parallel_norm,
)
from course_lib.parallel.tensor_plan_table import PLANS, Role, TensorPlan, from_transformers
from course_lib.parallel.tp_collectives import (
    SEQUENCE,
    Group,
    all_gather,
    check_divides,
    copy,
    gather,
    scatter,
    sum_gradients,
)
from course_lib.parallel.wrapping import check_ranks_agree


class TensorParallel(nn.Module):
    """A model whose matrices are split over the ranks of a group, which all see the same rows.

    All ranks take the parameters and buffers of the group's first. Gradients are right as ``backward()`` returns: of
    the own shard where a parameter is split, the same whole on every rank where it is not. Around it goes
    :class:`course_lib.parallel.ddp.DataParallel` over another axis of the rank grid.

    Every rank seeds torch's generator alike; see :mod:`course_lib.parallel.tensor_parallel` for dropout.

    Args:
        module: a Hugging Face model, or a stage with its blocks; changed in place.
        group: the ranks to split over; None is all ranks.
        plan: by default that of the model's type in ``PLANS``.
        sequence: sequence parallelism: between the split layers each rank has its slice of the tokens, whose number
            divides by that of the ranks. What comes before the first block and after the final norm sees all tokens.
        split_vocabulary: split the embedding and the head too.
    Attributes:
        splits: how the split parameters lie over the ranks, by their names, which are those of the whole model.
    Raises:
        ConfigError: heads, widths or a vocabulary that the ranks cannot share evenly; an option that the model lacks.
        ModelError: the ranks' models differ, there is no plan, or a block has parameters that the plan does not know.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        *,
        plan: TensorPlan | None = None,
        sequence: bool = False,
        split_vocabulary: bool = True,
    ):
        super().__init__()
        self.plan, config = plan_of(module, plan)
        self.module, self.group, self.sequence, self.ranks = module, group, sequence, dist.get_world_size(group)
        # --- phase 1: refuse what cannot be split, while nothing is changed; begin alike ---
        blocks = self.plan.blocks_of(module)
        check_splittable(self.plan, blocks, config, self.ranks, sequence)
        take_over_first(module, group)
        # --- phase 2: split the blocks, what runs between them, embedding and head; ties last, they need the shards ---
        self._shards: dict[nn.Parameter, nn.Parameter] = {}  # whole parameter: what this rank keeps of it
        self._splits: dict[nn.Parameter, ParameterSplit] = {}
        for name, block in blocks.items():
            self._split_block(name, block)
        if sequence:
            self._slice_between(list(blocks.values()))
        if split_vocabulary:
            self._split_vocabulary()
        self._tie()
        # --- phase 3: what is split, by name, for checkpoints, clipping and whoever wants the whole ---
        self.splits = {
            name: self._splits[parameter]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if parameter in self._splits
        }
        del self._shards, self._splits  # and with them the whole parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, on every rank, from parameters' values or gradients by name; a collective call."""
        return {
            name: self.splits[name].whole(tensor.detach(), self.group) if name in self.splits else tensor.detach()
            for name, tensor in tensors.items()
        }

    def whole_weights(self) -> dict[str, Tensor]:
        """The whole model's state, on every rank, under the names and in the shapes that it had; a collective call."""
        return self.whole(self.module.state_dict())

    def whole_gradients(self) -> dict[str, Tensor]:
        """The gradients of the whole model's parameters, on every rank; a collective call."""
        return self.whole(
            {name: parameter.grad for name, parameter in self.module.named_parameters() if parameter.grad is not None}
        )

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients down to an L2 norm over the whole model of at most ``max_norm``; returns the norm before.

        Each element counts once: of a split gradient on the rank that has it, of a replicated one on the first.
        """
        gradients = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        counted = [g for name, g in gradients.items() if name in self.splits or dist.get_rank(self.group) == 0]
        weight = next(self.module.parameters())
        square = sum_of_squares(counted, weight.device, torch.promote_types(weight.dtype, torch.float32))
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        scale_down_(list(gradients.values()), norm, max_norm)
        return norm

    def _split_block(self, name: str, block: nn.Module) -> None:
        """Give each named module of a block its role."""
        # Query, key and value take the same hidden states. One exchange before all three: each of its own would gather
        # (or sum the gradient of) the same tensor three times.
        entered = tuple(f"{part}." for part, role in self.plan.roles.items() if role is Role.ENTER)
        for part, role in self.plan.roles.items():
            whole, full = block.get_submodule(part), f"{name}.{part}"
            if role is Role.ENTER:
                enter = all_gather if self.sequence else copy
                whole.register_forward_pre_hook(functools.partial(exchange_hidden, enter, self.group), with_kwargs=True)
            elif role in (Role.COLUMN, Role.QKV):
                self._replace(
                    full,
                    ColumnParallelLinear(
                        whole,
                        self.group,
                        fused=3 if role is Role.QKV else 1,
                        sequence=self.sequence,
                        entered=part.startswith(entered),
                    ),
                )
            elif role is Role.ROW:
                self._replace(full, RowParallelLinear(whole, self.group, sequence=self.sequence))
            elif self.sequence or role is Role.HEADS:
                sum_gradients(whole.parameters(), self.group)
        self.plan.divide(block, self.ranks)

    def _slice_between(self, blocks: list[nn.Module]) -> None:
        """Give the first block slices of the sequence, and put them together after the last, or the final norm."""
        # --- in: (rows, tokens, width) -> (rows, tokens / N, width) ---
        blocks[0].register_forward_pre_hook(
            functools.partial(exchange_hidden, lambda hidden, group: scatter(hidden, group, SEQUENCE), self.group),
            with_kwargs=True,
        )
        # --- out: (rows, tokens / N, width) -> (rows, tokens, width), after the final norm, which takes slices too ---
        last = blocks[-1]
        if (name := named(self.module, self.plan.final_norm)) is not None:
            last = sequence_parallel_norm(self.module.get_submodule(name), self.group)
        last.register_forward_hook(lambda module, args, hidden: gather(hidden, self.group, SEQUENCE))

    def _split_vocabulary(self) -> None:
        """Split embedding and head, as far as the module has them. The logits are gathered: a model's own loss, and
        whoever reads them, wants them whole."""
        if (name := named(self.module, self.plan.embedding)) is not None:
            embedding = self.module.get_submodule(name)
            assert isinstance(embedding, nn.Embedding)
            self._replace(name, VocabParallelEmbedding(embedding, self.group))
        if (name := named(self.module, self.plan.head)) is not None:
            self._replace(name, ColumnParallelLinear(self.module.get_submodule(name), self.group, gather_output=True))

    def _replace(self, name: str, split: ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding) -> None:
        """Put a split layer in a whole one's place, and note what became of its parameters."""
        for attribute, parameter in self.module.get_submodule(name).named_parameters(recurse=False):
            # The second layer of a tied pair (embedding and head) takes the shard that the first one made: both cut the
            # vocabulary, the rows of one matrix, at the same places.
            shard = self._shards.setdefault(parameter, split.get_parameter(attribute))
            setattr(split, attribute, shard)
            if attribute in split.splits:
                self._splits[shard] = split.splits[attribute]
        self.module.set_submodule(name, split)

    def _tie(self) -> None:
        """Where a parameter that was split had another name, the shard has it now."""
        # For a name in a module that is not split itself: BERT's `predictions.bias`, beside that of its decoder.
        for module in self.module.modules():
            for name, parameter in module._parameters.items():
                if parameter in self._shards:
                    module._parameters[name] = self._shards[parameter]


def plan_of(module: nn.Module, plan: TensorPlan | None = None) -> tuple[TensorPlan, Any]:
    """The plan for a model or a stage of one, and its transformers config.

    Raises:
        ModelError: no module has a config, or its type has no plan.
    """
    config = next((part.config for part in module.modules() if hasattr(part, "config")), None)
    kind = getattr(config, "model_type", type(module).__name__)
    return plan or PLANS.get(kind) or from_transformers(config, kind), config


def named(module: nn.Module, name: str) -> str | None:
    """Full name of the module that ends in ``name``, if there is one."""
    # Not within a block, whose names have a number in them: Llama's `norm`, and not `layers.0.….norm`.
    return next(
        (
            full
            for full, _ in module.named_modules()
            if name and f".{full}".endswith(f".{name}") and not re.search(r"\.\d+\.", f".{full}")
        ),
        None,
    )


def check_splittable(
    plan: TensorPlan, blocks: Mapping[str, nn.Module], config: Any, ranks: int, sequence: bool
) -> None:
    """Refuse a model that the plan does not fit, before anything is changed.

    Raises:
        ConfigError: query or key-value heads that the ranks cannot share evenly.
        ModelError: no blocks, or a parameter that would see a slice of the sequence without the plan's knowing.
    """
    if not blocks:
        raise ModelError(f"the model has no blocks under `{plan.blocks}`", "hand in a Plan with its names")
    for heads in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config, heads, None) is not None:
            check_divides(heads, getattr(config, heads), ranks, ANOTHER_SIZE)
    for name, _ in next(iter(blocks.values())).named_parameters():
        if sequence and not any(
            name.startswith(f"{part}.") for part, role in plan.roles.items() if role is not Role.ENTER
        ):
            raise ModelError(
                f"the plan does not name `{name}` of a block, whose gradient would miss the other ranks' tokens",
                "name it in the Plan, or leave sequence parallelism out",
            )


def take_over_first(module: nn.Module, group: Group) -> None:
    """Parameters and buffers as the group's first rank has them; a collective call."""
    check_ranks_agree(module, group)
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def exchange_hidden(exchange: Any, ranks: Any, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Pass a module's hidden states, its first argument, through an exchange on their way in.

    A forward pre-hook, once the first two are bound: ``exchange`` takes the hidden states and ``ranks``, a process
    group or a device mesh.
    """
    if args:
        return (exchange(args[0], ranks), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": exchange(kwargs["hidden_states"], ranks)}
