"""A stream of training text from a config, for a loop of one's own."""

from typing import TYPE_CHECKING, Any

from course_lib.config import DataConfig
from course_lib.data.connector import DataConnector
from course_lib.data.processing import DataProcessor
from course_lib.data.streaming import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_stream(config: DataConfig, tokenizer: "PreTrainedTokenizerBase", **options: Any) -> TextStream:
    """The training files that a config names as a stream, for a loop of one's own.

    Args:
        config: `dataset`, a file or folder, and how its texts become rows; `stream_window`, unless ``window`` is given.
        tokenizer: of the model.
        options: those of :class:`TextStream`.
    Raises:
        DataError: it is no local data set of a kind that is streamed, or has no column of texts.
        ModelError: the tokenizer lacks a token or a template that is needed.
    """
    shards = DataConnector(config).open_training_shards()
    make_rows = DataProcessor(config, tokenizer).window_rows(shards.conversations)
    return TextStream(shards, make_rows, **{"window": config.stream_window} | options)
