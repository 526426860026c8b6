"""LoRA: a frozen matrix W and, beside it, two thin ones that are trained, A of r x n and B of m x r.

What a layer gives is W x + (alpha / r) B A x. B begins at zero, so that training begins at the base model; r (n + m)
numbers are trained in place of n m. Hu et al. 2021, *LoRA* (arXiv 2106.09685), sections 4.1 and 4.2. On all linear
layers of the blocks: Dettmers et al. 2023, *QLoRA* (arXiv 2305.14314), section 4. Files are those of PEFT.
"""

import math
from collections.abc import Collection, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers.pytorch_utils import Conv1D

from course_lib.errors import ModelError
from course_lib.modeling.nf4 import Nf4Linear
from course_lib.parallel.blocks import blocks

LINEAR = (nn.Linear, Conv1D, Nf4Linear)
"""Layers that adapters go beside; GPT-2's Conv1D is a linear one whose weight lies the other way round."""


class LoraLinear(nn.Module):
    """A frozen linear layer, and the two matrices beside it.

    Args:
        base: the layer; its parameters are frozen. Inputs (…, n) give outputs (…, m).
        r: rank, the inner dimension of the two.
        alpha: the two count alpha / r times, so that another r needs no other learning rate.
        dropout: share of the inputs of A to drop in training.
        generator: A is drawn from it; on the CPU.
    """

    def __init__(
        self, base: nn.Module, r: int, alpha: float, dropout: float = 0.0, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.alpha = alpha
        self.dropout = nn.Dropout(dropout)
        inputs, outputs = sizes(base)
        self.lora_A = cast(nn.Linear, skip_init(nn.Linear, inputs, r, bias=False, dtype=torch.float32))
        self.lora_B = cast(nn.Linear, skip_init(nn.Linear, r, outputs, bias=False, dtype=torch.float32))
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5), generator=generator)  # as nn.Linear's own weight
        nn.init.zeros_(self.lora_B.weight)

    @property
    def scaling(self) -> float:
        """alpha / r."""
        return self.alpha / self.lora_A.out_features

    @property
    def weight(self) -> Tensor:
        """The frozen one, for code of transformers that asks a layer for its dtype."""
        return cast(Tensor, self.base.weight)

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        beside = self.lora_B(self.lora_A(self.dropout(x).to(self.lora_A.weight.dtype)))  # (…, n) -> (…, r) -> (…, m)
        return out + (self.scaling * beside).to(out.dtype)

    def merged(self) -> nn.Module:
        """The base layer with W + (alpha / r) B A for its weight, in place and in its dtype; NF4's comes out in fp32.

        The sum is made in fp32.
        """
        base = self.base.dequantized() if isinstance(self.base, Nf4Linear) else self.base
        weight = cast(Tensor, base.weight)
        with torch.no_grad():
            added = self.scaling * (self.lora_B.weight.float() @ self.lora_A.weight.float())  # (m, n)
            weight.copy_(weight.float() + (added.T if isinstance(base, Conv1D) else added))
        return base


def sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    if isinstance(layer, Conv1D):
        return layer.nx, layer.nf
    return cast(int, layer.in_features), cast(int, layer.out_features)


def add_lora(
    model: nn.Module,
    r: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Collection[str] | None = None,
    trained: Collection[str] = (),
    *,
    seed: int = 0,
) -> list[str]:
    """Freeze a model, and put adapters beside its linear layers, in place.

    The draw is by the seed alone: the same on every rank.

    Args:
        model: of transformers, with a head.
        r: rank of the adapters.
        alpha: how often they count is alpha / r; 2 r by default.
        dropout: in training, of what goes into an adapter.
        targets: ends of the names of the layers, such as ``q_proj``; by default all linear layers of the blocks.
        trained: modules beside them that are trained whole, by name, as PEFT's ``modules_to_save``; a classifier's
            head is always.
        seed: of the matrices A.
    Returns:
        Names of the layers that have an adapter now.
    Raises:
        ModelError: no layer has such a name, or one is not linear.
    """
    chosen = _chosen(model, targets)
    model.requires_grad_(False)
    for name in [*classifier_heads(model), *trained]:
        model.get_submodule(name).requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    for name, layer in chosen.items():
        replace(model, name, LoraLinear(layer, r, 2 * r if alpha is None else alpha, dropout, generator))
    return list(chosen)


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers of a model's blocks."""
    return [
        f"{block}.{name}"
        for block, module in blocks(model).items()
        for name, layer in module.named_modules()
        if isinstance(layer, LINEAR)
    ]


def _chosen(model: nn.Module, targets: Collection[str] | None) -> dict[str, nn.Module]:
    """The layers to put adapters beside, by name."""
    if targets is None:
        return {name: model.get_submodule(name) for name in linear_layers(model)}
    chosen = {
        name: module
        for name, module in model.named_modules()
        for target in targets
        if name == target or name.endswith(f".{target}")
    }
    linear = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LINEAR)})
    missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in chosen)]
    wrong = [name for name, module in chosen.items() if not isinstance(module, LINEAR)]
    if missing or wrong:
        what = (
            f"no module is called `{missing[0]}`"
            if missing
            else f"`{wrong[0]}` is a {type(chosen[wrong[0]]).__name__}, and no linear layer"
        )
        raise ModelError(f"lora_targets: {what}", f"choose from {', '.join(linear)}")
    return chosen


def classifier_heads(model: nn.Module) -> list[str]:
    """Names of the modules that a classifier of transformers has beside its base model: its head, which is new."""
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return []
    return [
        name
        for name, child in model.named_children()
        if child is not getattr(model, "base_model", None) and any(True for _ in child.parameters())
    ]


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module into the place of another."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def merge(model: nn.Module) -> None:
    """Add each adapter to the weight beside it, and leave the layers as they were without, in place."""
    for name, layer in adapted(model).items():
        replace(model, name, layer.merged())


def unpack(model: nn.Module) -> None:
    """Put layers with plain weights, fp32, into the place of those in NF4, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Nf4Linear):
            replace(model, name, module.dequantized())


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Names in the state dict of the parameters that are not trained, where a model has adapters; else none."""
    every = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, p in every if not p.requires_grad) if adapted(model) else frozenset()


def trained_names(model: nn.Module) -> list[str]:
    """Names of the trained parameters in the state dict, a tied one's under each."""
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad]


def adapter_state(model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Trained weights, in the names of PEFT's files.

    Args:
        model: with adapters.
        weights: its trained weights by name, where they are not in it; a sharded model's are in pieces.
    """
    held = dict(model.named_parameters(remove_duplicate=False)) if weights is None else weights
    return {f"base_model.model.{name}": held[name].detach().cpu().contiguous() for name in trained_names(model)}
