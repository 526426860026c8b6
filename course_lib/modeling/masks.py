"""Makes attention masks from what the host knows of a batch's padding, without waiting for the device.

transformers leaves a mask out where it hides nothing, which lets faster kernels run. To find out, it looks at the
mask's elements (``padding_mask.all()``, transformers.masking_utils), and on a GPU the host stands still until
everything queued before has been computed: once for each forward pass. Who made the batch knew.

The mask itself is still handed to the model: without one, transformers looks at the positions instead, for sequences
that were packed into one row, and waits just as long. Where texts do share rows, that is what is wanted.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

_has_padding: bool | None = None
"""Of the batch whose forward pass is under way; None where nobody has said."""


@contextlib.contextmanager
def padding_known(unpadded: Sequence[bool] | None) -> Iterator[None]:
    """Forward passes in the block are of a batch whose padding is known.

    The masks are those that transformers would make without it, for ``sdpa`` and ``eager`` attention.

    Args:
        unpadded: for each row whether it has no padding; None where it is not known: the masks are looked at.
    """
    global _has_padding
    before, _has_padding = _has_padding, None if unpadded is None else not all(unpadded)
    try:
        yield
    finally:
        _has_padding = before


def _decided(make: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of masks that looks at none where the padding is known."""

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        if _has_padding is None:
            return make(*args, **options)
        if _has_padding:
            return make(*args, **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        return make(*args, **options | {"attention_mask": None})

    return made


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of transformers' log says what nobody knows: a batch of packed texts has no mask on purpose."""
    return _has_padding is None or "passing in an `attention_mask`" not in record.getMessage()


logging.getLogger("transformers.modeling_utils").addFilter(_is_news)
AttentionMaskInterface.register("sdpa", _decided(sdpa_mask))
AttentionMaskInterface.register("eager", _decided(eager_mask))
