"""Distributed training of transformers: a course that is also a library and a trainer."""

import os

# torch then asks the driver's management library whether there is a GPU. To ask CUDA itself, as torch does otherwise,
# is to use it: a process that has only looked could no longer fork ranks that use one.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

__version__ = "0.1.0"
