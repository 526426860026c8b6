"""Distributed training of transformers: a course that is also a library and a trainer."""

__version__ = "0.1.0"
