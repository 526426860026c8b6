"""Throughput of a run: rows and tokens per second, and the share of the hardware's peak that it uses (MFU)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from course_lib.data.ordering import lengths_at
from course_lib.errors import CourseError
from course_lib.planning import hardware, models
from course_lib.training.state import TrainState


class Throughput:
    """Counts what a run computes, and relates it to the time and the hardware.

    A row's tokens are counted without padding, and filler rows are not: only what is learnt from. Model FLOPs are those
    of these tokens by the planner's formula (:meth:`course_lib.planning.models.Model.flops`), forward and backward;
    what activation checkpointing computes again is not in them. MFU, model FLOPs utilisation, is their rate by the peak
    of all accelerators together, by the datasheet (PaLM, arXiv 2204.02311, appendix B). Where the
    planner cannot count the model, or does not know the hardware, there is no MFU.

    Args:
        lengths: tokens of each row of the training split.
        architecture: of the model, as transformers has it; None where it has none.
        task: ``classification``, ``causal_lm`` or ``masked_lm``.
        device: of this rank.
        precision: ``no``, ``fp16`` or ``bf16``.
        adapters: of each weight's three products the one that gives its gradient is left out; those of the adapters
            are not counted.

    Attributes:
        model: as the planner knows it; None where it does not.
        name: of the hardware.
        peak: FLOP/s of one accelerator in the run's precision; None where it is not known.
        note: of what MFU is the share, or why there is none.
        streamed: of the steps that are not counted yet, rows, tokens and the sum of the squared lengths, int64 [3].
    """

    def __init__(
        self,
        lengths: Sequence[int] | pa.ChunkedArray,
        architecture: Any,
        task: str,
        device: torch.device,
        precision: str,
        adapters: bool = False,
    ):
        self.lengths, self.adapters, self.streamed = lengths, adapters, list[torch.Tensor]()
        self.name, self.peak, self.note = peak_of(device, precision)
        self.model: models.Model | None = None
        try:
            self.model = models.from_config(
                {} if architecture is None else architecture.to_dict(), head=task != "classification"
            )
        except CourseError as error:
            self.peak, self.note = None, f"no MFU: {error.what}"

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """Ranks of different hardware have no common peak. A collective call."""
        names = sorted(set(gather(self.name)))
        if len(names) > 1:
            self.peak, self.note = None, f"no MFU: the ranks' hardware differs ({', '.join(names)})"

    def count(self, state: TrainState, rows: np.ndarray) -> None:
        """Add the rows of a global batch, by number."""
        lengths = lengths_at(self.lengths, rows)
        self.add(state, len(rows), int(lengths.sum()), float(np.square(lengths, dtype=np.float64).sum()))

    def add(self, state: TrainState, rows: int, tokens: int, squares: float) -> None:
        """Add so many rows, their tokens, and the sum of the squares of their lengths."""
        state.samples += rows
        state.tokens += tokens
        if self.model:
            # linear in the length except for attention, whose FLOPs grow with its square
            a_token, a_pair = self.model.flops(0), self.model.flops(1) - self.model.flops(0)
            if self.adapters:
                a_token *= 2 / 3
            state.flops += a_token * float(tokens) + a_pair * squares

    def settle(self, state: TrainState) -> None:
        """Add the rows of a stream since the last call; the device has to have been waited for."""
        for rows, tokens, squares in map(torch.Tensor.tolist, self.streamed):
            self.add(state, rows, tokens, squares)
        self.streamed.clear()

    def rates(self, state: TrainState, ranks: int) -> dict[str, float]:
        """Rows and tokens per second of all ranks together since the run began, and MFU where it is known."""
        if not state.seconds:
            return {}
        rates = {"samples_per_second": state.samples / state.seconds, "tokens_per_second": state.tokens / state.seconds}
        return rates | ({"mfu": state.flops / state.seconds / (ranks * self.peak)} if self.peak else {})


def peak_of(device: torch.device, precision: str) -> tuple[str, float | None, str]:
    """A device's name, its peak in FLOP/s where the catalogue has it, and of what that is the peak, or why not.

    Args:
        device: of this machine.
        precision: ``no``, ``fp16`` or ``bf16``; without, matmuls are in tf32 where torch may use it.
    """
    if device.type != "cuda":
        name = {"cpu": "a CPU", "mps": "an Apple GPU"}.get(device.type, device.type)
        return name, None, f"no MFU: no peak is known for {name}"
    name = torch.cuda.get_device_name(device)
    chip = hardware.of_device(name)
    if chip is None:
        return name, None, f"no MFU: unknown hardware {name}"
    rounded = torch.get_float32_matmul_precision() != "highest" and "tf32" in chip.peak
    dtype = precision if precision != "no" else "tf32" if rounded else "fp32"
    if dtype not in chip.peak:
        return name, None, f"no MFU: no peak is known for {dtype} on {name}"
    return name, chip.peak[dtype], f"of {chip.peak[dtype] / 1e12:g} TFLOP/s per GPU: {chip.name}, {dtype}, dense"
