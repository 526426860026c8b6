"""From a data set's name to batches of tensors: loading, cleaning, tokenizing, collating."""

from course_lib.data.collating import Collator
from course_lib.data.connector import DataConnector, TextData
from course_lib.data.processing import DataProcessor, ProcessedData

__all__ = ["Collator", "DataConnector", "DataProcessor", "ProcessedData", "TextData"]
