"""Inputs that a model takes of a batch, and attention masks from the padding that the host knows.

transformers leaves a mask out where it hides nothing, which lets faster kernels run. To find out, it looks at the
mask's elements (``padding_mask.all()``, transformers.masking_utils), and on a GPU the host stands still until
everything queued before has been computed: once for each forward pass. Who made the batch knew.

The mask itself is still handed to the model: without one, transformers looks at the positions instead, for sequences
that were packed into one row, and waits just as long. Where texts do share rows, that is what is wanted.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from course_lib.data.collating import Batch


def unpadded_rows(batch: Mapping[str, torch.Tensor]) -> tuple[bool, ...] | None:
    """Flags of the rows without padding, which a :class:`Batch` knows; None of any other."""
    return batch.unpadded if isinstance(batch, Batch) else None


def model_inputs(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs of a model for a batch: its tokens with their mask, or with their positions where texts share a row.

    transformers finds the documents of a row by positions that begin anew, where it is given no mask
    (``find_packed_sequence_indices`` of its masking_utils), and hides each from the others. It looks for none where the
    model fills a cache: ``config.use_cache`` has to be False, as :func:`course_lib.modeling.loading.load` sets it.
    """
    return {
        name: batch[name] for name in ("input_ids", "position_ids" if "position_ids" in batch else "attention_mask")
    }


class WholeSequences:
    """Counterpart of :class:`~course_lib.modeling.context.ContextParallel` where each rank has all tokens of its rows.

    Args:
        task: ``classification``, ``causal_lm`` or ``masked_lm``.
    Attributes:
        scored_as: the task by whose rules the logits are scored against the labels of :meth:`cut`.
    """

    def __init__(self, task: str):
        self.scored_as = task

    def cut(self, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Inputs of the model, see :func:`model_inputs`, and the labels."""
        return model_inputs(batch), batch["labels"]


_current = SimpleNamespace(has_padding=None)
"""Of the batch whose forward pass is under way; None where nobody has said."""
_OPTIONS: dict[bool | None, dict[str, Any]] = {
    None: {},
    True: {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    False: {"attention_mask": None},
}
"""Options under which transformers makes a mask and looks at none, by whether there is padding."""


class padding_known(contextlib.AbstractContextManager):
    """Forward passes in the block are of a batch whose padding is known.

    The masks are those that transformers would make without it, for ``sdpa`` and ``eager`` attention.

    Args:
        unpadded: for each row whether it has no padding; None where it is not known: the masks are looked at.
    """

    def __init__(self, unpadded: Sequence[bool] | None):
        self.now, self.before = None if unpadded is None else not all(unpadded), _current.has_padding

    def __enter__(self) -> None:
        _current.has_padding = self.now

    def __exit__(self, *error: Any) -> None:
        _current.has_padding = self.before


def _decided(make: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of masks that looks at none where the padding is known."""

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        return make(*args, **options | _OPTIONS[_current.has_padding])

    return made


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of transformers' log says what nobody knows: a batch of packed texts has no mask on purpose."""
    return _current.has_padding is None or "passing in an `attention_mask`" not in record.getMessage()


logging.getLogger("transformers.modeling_utils").addFilter(_is_news)
AttentionMaskInterface.register("sdpa", _decided(sdpa_mask))
AttentionMaskInterface.register("eager", _decided(eager_mask))
