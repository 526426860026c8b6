"""From a data set's name to batches of tensors: loading, cleaning, tokenizing, collating; or as a stream."""

from course_lib.data.collating import Collator
from course_lib.data.connector import DataConnector, TextData
from course_lib.data.opening import open_stream
from course_lib.data.packing import best_fit
from course_lib.data.processing import DataProcessor, ProcessedData
from course_lib.data.streaming import TextStream

__all__ = [
    "Collator",
    "DataConnector",
    "DataProcessor",
    "ProcessedData",
    "TextData",
    "TextStream",
    "best_fit",
    "open_stream",
]
