"""Removes what Accelerate wraps around a model and its forward."""

import contextlib
import sys
from collections.abc import Iterator

import accelerate
from torch import nn

from course_lib.replacing import replaced


@contextlib.contextmanager
def deepspeed_left_alone() -> Iterator[None]:
    """Keep Accelerate's ``unwrap_model`` from importing DeepSpeed, which takes seconds, to ask whether it wrapped it.

    Where nobody has imported it, it did not wrap anything. ``save_pretrained`` unwraps without being asked.
    """
    with replaced(accelerate.utils.other, "is_deepspeed_available", lambda: "deepspeed" in sys.modules):
        yield


def take_back_forward(model: nn.Module) -> None:
    """Give a model its own forward back, which ``Accelerator.prepare`` replaced under mixed precision.

    That one casts the outputs to float32 (``convert_outputs_to_fp32``), for a language model a copy of all logits, and
    enters an autocast that a trainer's step is under anyway. ``unwrap_model(keep_fp32_wrapper=False)`` is no way to be
    without it: it takes the decorators of the model's own forward off as well.
    """
    own = vars(model).pop("_original_forward", None)
    if own is not None:
        del model.forward  # the instance's; the class's is there again
        if model.forward != own:
            model.forward = own
