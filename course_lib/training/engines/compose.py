"""Composition of the axes of parallelism around one model: their order, and the reason for it."""

from collections.abc import Callable

from torch import nn

from course_lib.modeling.lora import frozen_names
from course_lib.training.compiling import compile_blocks
from course_lib.training.engines.base import StepEngine
from course_lib.training.optimization import make_optimizer
from course_lib.training.precision import DTYPES


def keep_low(model: nn.Module, precision: str) -> frozenset[str]:
    """Keep the frozen weights beside adapters in the low precision that they are multiplied in; gives their names.

    No optimizer adds small steps to them, which fp32 would be for.

    Args:
        model: changed in place.
        precision: ``no``, ``fp16`` or ``bf16``.
    """
    frozen = frozen_names(model)
    for name in frozen if precision != "no" else ():
        parameter = model.get_parameter(name)
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(DTYPES[precision])
    return frozen


def compose(engine: StepEngine, whole: nn.Module, before_wrapping: Callable[[], None], *, trains: bool) -> None:
    """Give a rank its share of a model, ready to train: ``engine.model``, ``engine.wrapped`` and ``engine.optimizer``.

    Each step changes what the next one has to see; an axis of one rank changes nothing. Activation checkpointing has
    no step of its own: it is a mark on each block since the model was loaded, which its forward asks for. So what
    later steps hang on a block's call stays outside of what is computed again, and the exchanges of tensor parallelism
    inside, where all ranks of a group repeat them alike.

    Args:
        engine: has joined its ranks.
        whole: the same on all ranks, on the CPU; changed in place.
        before_wrapping: called when the rank has its share of the parameters, and no collective depends on them yet.
        trains: False: the model is only evaluated, and there is no optimizer.
    Raises:
        ConfigError: the model cannot be laid out so.
        ModelError: there is no plan for its layers, or it has no blocks.
    """
    config = engine.config
    engine.stored = engine.stored_class(engine.ranks, whole, keep_low(whole, engine.precision))
    # Tensor parallelism replaces the parameters themselves, by shards. Whoever keeps a list of parameters comes later;
    # and while the model is still in one, an embedding that is the head too is split once, and stays one weight.
    engine.split_layers(whole)
    # A pipeline keeps some blocks of a rank's shards. From here on nothing needs the whole, and the rest may go.
    engine.model = engine.stored.model = engine.take_part(whole).to(engine.device)
    before_wrapping()
    engine.examine(engine.model)
    # Context parallelism replaces attention, and no parameter. Whole rows, as those before this line, it does not take.
    engine.share_tokens(engine.model)
    # Compiled are the blocks alone, before hooks of data parallelism are around them: a graph would break at each.
    if config.model.torch_compile:
        compile_blocks(engine.blocks(), dynamic=None if config.data.has_one_length else True)
    if not trains:
        return engine.score_with(engine.model)
    # The optimizer is made over what is left on this rank, and data parallelism repoints it to its shards of that.
    engine.optimizer = make_optimizer(engine.model, config.optim)
    engine.stored.remember_order(engine.optimizer)
    # Data parallelism is outermost: it sums gradients over ranks that hold the same shards, and hides that behind a
    # backward whose inner exchanges nothing can hide.
    engine.wrap(engine.model, engine.optimizer)
    engine.stored.take(engine.model, engine.wrapped, engine.optimizer)
