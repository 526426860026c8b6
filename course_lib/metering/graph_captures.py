"""Keeps captures of CUDA graphs and questions to CUDA's events apart.

While a thread captures a graph in the default mode, cudaEventQuery is forbidden to every thread of the process and
would spoil the capture (CUDA runtime API, cudaThreadExchangeStreamCaptureMode; ATen/cuda/CUDAGraph.cpp: "event
queries are not allowed during a graph capture in the default capture mode"). torch's own NCCL watchdog takes its
thread out of that rule (ProcessGroupNCCL.cpp, Watchdog::runLoop: cudaStreamCaptureModeThreadLocal), for which Python
has no call. So here nobody asks between ``capture_begin`` and ``capture_end``.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_lock = threading.Lock()
_under_way = 0


@contextlib.contextmanager
def may_ask() -> Iterator[bool]:
    """Whether events may be asked inside this ``with``; no capture begins before it is left."""
    with _lock:
        yield not _under_way


def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.cuda.CUDAGraph.capture_begin``: waits for those who ask, and lets nobody ask from then on."""

    def capture_begin(graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> Any:
        _count(1)
        try:
            return original(graph, *args, **kwargs)
        except BaseException:
            _count(-1)
            raise

    return capture_begin


def ending(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.cuda.CUDAGraph.capture_end``."""

    def capture_end(graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(graph, *args, **kwargs)
        finally:
            _count(-1)

    return capture_end


def _count(change: int) -> None:
    global _under_way
    with _lock:
        _under_way = max(0, _under_way + change)  # a capture may have begun before anybody listened
