"""Cuts a Hugging Face model into pipeline stages.

A stage is the model itself, in which everything that other stages hold has been replaced: blocks by modules that let
the hidden states pass, the embedding by one that returns what the stage before sent. Hugging Face's own forward then
makes the masks, the positions and the head's choice of token, on each stage from the same batch; parameters keep
their names; and nothing here depends on what a block does inside.
"""

import copy
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.errors import ConfigError, nearest
from course_lib.modeling import balance
from course_lib.modeling.dealing import deal_out
from course_lib.modeling.inputs import padding_known
from course_lib.modeling.layouts import Layout
from course_lib.modeling.structure import layout_of
from course_lib.parallel.blocks import blocks
from course_lib.parallel.pipeline.partition import blocks_per_stage

EMBEDDINGS, HEAD = "embeddings", "head"
"""The first and the last unit of a model; the blocks are between them."""
COUNT_FROM_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "mpnet", "longformer")
"""Types of models whose first token is at the position after the padding token's number."""


@dataclass(frozen=True)
class Split:
    """Places where a model is cut.

    Attributes:
        units: ``embeddings``, the names of the blocks, ``head``.
        cuts: the first unit of each stage but the first, by number.
        costs: of each unit, in ``measure``; parameters where none were asked for.
        measure: ``parameters`` or ``flops``.
    """

    units: tuple[str, ...]
    cuts: tuple[int, ...]
    costs: tuple[float, ...]
    measure: str

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    def units_of(self, stage: int) -> tuple[str, ...]:
        first, end = [0, *self.cuts, len(self.units)][stage : stage + 2]
        return self.units[first:end]

    @property
    def stage_costs(self) -> tuple[float, ...]:
        cost = dict(zip(self.units, self.costs, strict=True))
        return tuple(sum(cost[unit] for unit in self.units_of(stage)) for stage in range(self.stages))

    @property
    def excess(self) -> float:
        """Excess of the dearest stage's cost over the mean: 0 is even, and a pipeline is as slow as that stage."""
        return max(self.stage_costs) * self.stages / sum(self.stage_costs) - 1

    def __str__(self) -> str:
        total = sum(self.costs)
        lines = [
            f"stage {stage}: {units[0]}{f' to {units[-1]}' if len(units) > 1 else ''}, {cost / total:.1%} of "
            f"{self.measure}"
            for stage, cost in enumerate(self.stage_costs)
            for units in [self.units_of(stage)]
        ]
        return "\n".join([*lines, f"the largest stage has {self.excess:.1%} more than the mean"])


def split_evenly(model: nn.Module, stages: int, by: str = "flops", length: int = 128) -> Split:
    """Cut a model so that the dearest stage costs least; embeddings and head count too.

    Args:
        model: of transformers, with a head.
        stages: how many.
        by: ``flops`` of a forward, ``parameters``, or ``blocks``, of which each stage has as many as the planner gives
            it, whatever the ends cost.
        length: tokens of the sequence that flops are counted with, or as many as the model can place.
    Raises:
        ConfigError: a model that cannot be cut, or not into so many stages.
    """
    layout, names = _layout(model), list(blocks(model))
    prefix, length = model.base_model_prefix, min(length, _positions(model))
    if by == "blocks":
        cuts = itertools.accumulate(blocks_per_stage(len(names), stages)[:-1], initial=1)  # after the embeddings
        return Split((EMBEDDINGS, *names, HEAD), tuple(cuts)[1:], tuple(_parameters(model)), "parameters")
    if by == "parameters":
        costs = _parameters(model)
    elif by == "flops":
        front = [f"{prefix}.{name}" for name in (layout.embedding, *layout.added, *layout.front)]
        costs = balance.count_flops(model, front, names, length)
    else:
        raise ConfigError(f"cannot balance by `{by}`", "choose from flops, parameters, blocks")
    return Split((EMBEDDINGS, *names, HEAD), deal_out(costs, stages), tuple(costs), by)


def split_at(model: nn.Module, spec: Mapping[str, str]) -> Split:
    """Cut a model at named blocks.

    Args:
        model: of transformers, with a head.
        spec: by a block's name, ``beginning`` to cut before it or ``end`` to cut after it, as in
            ``{"transformer.h.5": "end"}``.
    Raises:
        ConfigError: a model that cannot be cut; a name that is no block's, another word, one place twice.
    """
    _layout(model)
    names = list(blocks(model))
    cuts: dict[int, str] = {}
    for name, where in spec.items():
        if where not in ("beginning", "end"):
            raise ConfigError(f"the split at {name} is `{where}`", "choose from `beginning`, `end`")
        if name not in names:
            raise ConfigError(*_no_block(model, name, names))
        place = names.index(name) + (1 if where == "beginning" else 2)
        if place in cuts:
            raise ConfigError(f"the splits at {cuts[place]} and {name} are in one place", "leave one of them out")
        cuts[place] = name
    return Split((EMBEDDINGS, *names, HEAD), tuple(sorted(cuts)), tuple(_parameters(model)), "parameters")


def parse_spec(text: str) -> dict[str, str]:
    """A split spec from ``transformer.h.5:end,transformer.h.8:beginning``, or from a JSON object.

    Raises:
        ConfigError: neither of the two.
    """
    if text.lstrip().startswith("{"):
        try:
            spec = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"split_spec is no JSON ({error})", 'write {"transformer.h.5": "end"}') from None
        return {str(name): str(where) for name, where in spec.items()}
    pairs = [part.strip().rpartition(":") for part in text.split(",") if part.strip()]
    for name, colon, where in pairs:
        if not (name and colon and where):
            raise ConfigError(
                f"split_spec has `{name or where}`, and a place is BLOCK:end or BLOCK:beginning",
                "write transformer.h.5:end,transformer.h.8:beginning",
            )
    return {name.strip(): where.strip() for name, _, where in pairs}


class Stage(nn.Module):
    """One stage; the first takes ``**batch``, the others what the stage before returned, and ``**batch``.

    All of them are given the batch's ``input_ids`` and ``attention_mask``; see :func:`cut`. They may be given
    ``unpadded`` besides, bool [B] in the host's memory, true for rows without padding: then no stage asks its device.

    Attributes:
        model: the model with only this stage's parameters, under the model's own names.
    """

    def __init__(self, model: nn.Module, first: bool, last: bool, received: "Received"):
        super().__init__()
        self.model, self.first, self.last = model, first, last
        self._received = [received]  # in a list: it is a part of the model, not of this module
        self._options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def forward(self, *received: Tensor, **batch: Tensor) -> Tensor:
        """Hidden states [B, L, H]; of the last stage the logits, as the model's."""
        if not self.first:
            (self._received[0].hidden,) = received
            batch.pop("token_type_ids", None)  # they belong to the embeddings
        unpadded = batch.pop("unpadded", None)
        try:
            with padding_known(None if unpadded is None else unpadded.tolist()):
                if self.last:
                    return self.model(**batch, **self._options).logits
                base: Any = self.model.base_model
                return base(**batch, **self._options).last_hidden_state
        finally:
            self._received[0].hidden = None


class Received(nn.Module):
    """Replaces the embeddings on a later stage: gives what the stage before sent."""

    hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self.hidden is not None
        return self.hidden


class Nothing(nn.Module):
    """Replaces what was added to the embeddings on the first stage: adds zero."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(())


class Through(nn.Module):
    """Replaces what another stage computes: gives its input back.

    Args:
        replaced: whose plain attributes it has, such as the kind of attention that a mask is made for.
        returns: how many things it returned in a tuple, of which the hidden states are first; 0 for these alone.
    """

    def __init__(self, replaced: nn.Module | None = None, returns: int = 0):
        super().__init__()
        self.returns = returns
        if replaced is not None:
            vars(self).update(
                {name: value for name, value in vars(replaced).items() if isinstance(value, str | int | float | None)}
                | vars(self)
            )

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden, *[None] * (self.returns - 1)) if self.returns else hidden


def cut(model: nn.Module, split: Split, stages: Iterable[int]) -> dict[int, Stage]:
    """Some stages of a model, by number; they share its parameters, and keep those of no other stage alive.

    Where a weight is tied between stages, as an embedding and an output head are, stages of one process share it;
    those of different processes have a copy each: see :func:`shared_weights`.

    Args:
        model: for a task, with a head; left as it is.
        split: of this model.
        stages: which of them.
    Raises:
        ConfigError: a model that cannot be cut.
    """
    return {stage: _stage(model, split.units_of(stage)) for stage in stages}


def _stage(model: nn.Module, units: Sequence[str], layout: Layout | None = None) -> Stage:
    layout, prefix = layout or _layout(model), f"{model.base_model_prefix}."
    first, last = EMBEDDINGS in units, HEAD in units
    received = Received()
    replaced: dict[str, nn.Module] = {
        name: Through(block, layout.returns) for name, block in blocks(model).items() if name not in units
    }
    if not first:
        replaced[prefix + layout.embedding] = received
        replaced |= {prefix + name: Nothing() for name in layout.added}
        replaced |= {prefix + name: Through() for name in layout.front}
    if not last:
        replaced |= {prefix + name: Through() for name in layout.back}
        replaced |= {name: Through() for name, _ in model.named_children() if f"{name}." != prefix}
    return Stage(_twin(model, replaced), first, last, received)


def _twin(module: nn.Module, replaced: Mapping[str, nn.Module], name: str = "") -> nn.Module:
    """The module with some of its parts replaced; the other parts are the module's own."""
    twin = copy.copy(module)
    twin._modules = {}
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        if child is not None and any(other.startswith(f"{path}.") for other in replaced):
            twin._modules[key] = _twin(child, replaced, path)
        else:
            twin._modules[key] = replaced.get(path, child) if child is not None else None
    return twin


def shared_weights(model: nn.Module, split: Split) -> tuple[dict[int, str], ...]:
    """Parameters that several stages hold: for each, its name in the stage (:class:`Stage`), by stage."""
    holders: dict[nn.Parameter, dict[int, str]] = {}
    for stage, part in cut(model, split, range(split.stages)).items():
        for name, parameter in part.named_parameters():
            holders.setdefault(parameter, {})[stage] = name
    return tuple(names for names in holders.values() if len(names) > 1)


def _parameters(model: nn.Module) -> list[float]:
    """Elements that each unit holds, as a stage of its own."""
    units = (EMBEDDINGS, *blocks(model), HEAD)
    return [float(sum(parameter.numel() for parameter in _stage(model, [unit]).parameters())) for unit in units]


def _positions(model: nn.Module) -> int:
    """How many tokens a model can place; RoBERTa counts positions from the one after the padding token's."""
    config: Any = model.config
    placed = getattr(config, "max_position_embeddings", None) or 2**20  # some know distances alone
    return placed - (config.pad_token_id + 1 if config.model_type in COUNT_FROM_PADDING else 0)


def _layout(model: nn.Module) -> Layout:
    """The layout of a model; see :func:`course_lib.modeling.structure.layout_of`."""
    return layout_of(model, _logits_in_turn)


def _logits_in_turn(model: nn.Module, layout: Layout, batch: dict[str, Tensor]) -> Tensor:
    """Logits by stages of a layout: one that ends within the blocks, one within, and the head alone."""
    names = list(blocks(model))
    units, middle = [EMBEDDINGS, *names, HEAD], 1 + len(names) // 2
    hidden: tuple[Tensor, ...] = ()
    for part in (units[:middle], units[middle:-1], units[-1:]):
        if part:
            hidden = (_stage(model, part, layout)(*hidden, **batch),)
    return hidden[0]


def _no_block(model: nn.Module, name: str, names: Sequence[str]) -> tuple[str, str]:
    """Why a model cannot be cut at a name, and what to do."""
    kind = type(model).__name__
    around = next((block for block in names if name.startswith(f"{block}.")), None)
    if around:
        return f"{kind} cannot be cut at {name}: it lies within {around}", f"cut at {around}, before or after it"
    if name in dict(model.named_modules()):
        return (
            f"{kind} cannot be cut at {name}: it is no block",
            f"cut at {names[0]} (beginning) to {names[-1]} (end)",
        )
    return f"{kind} has no module {name}", nearest(name, names) or f"its blocks are {names[0]} to {names[-1]}"
