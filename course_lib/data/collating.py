"""Collates rows of token ids into padded batches, with the labels of each task."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

IGNORE = -100
"""Label of a position, or of a row, that is not predicted (torch's default ignore_index)."""

KEEP, RANDOM = 0.1, 0.1
"""Shares of the predicted tokens that stay as they are, and that another token replaces (BERT)."""


class Batch(dict[str, torch.Tensor]):
    """The tensors of a batch by name, and what its maker knew of them without looking.

    Loaders that pin it and move it (torch's and Accelerate's) keep what it knows.

    Attributes:
        unpadded: for each row whether it has no padding; None where that is not known.
        lengths: tokens of each row that is no filler.
        place: of a stream, its state after this batch; None elsewhere.
    """

    unpadded: tuple[bool, ...] | None = None
    lengths: tuple[int, ...] = ()
    place: Mapping[str, int] | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The batch on a device; ``non_blocking``: from pinned memory, without waiting for it."""
        moved = type(self)({name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.items()})
        moved.unpadded, moved.lengths, moved.place = self.unpadded, self.lengths, self.place
        return moved


def moved(batch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """A batch of any kind on a device, with what it knows; from pinned memory without waiting."""
    return (batch if isinstance(batch, Batch) else Batch(batch)).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Collator:
    """Makes a batch of rows; holds no tokenizer, so that it travels to worker processes in no time.

    A row is a mapping with `input_ids` and, for classification, `labels`. It may have `documents`: the lengths of the
    texts that share it; `answers`: for each token whether it is learnt; ``ignore``: where true, none of
    its labels count; and ``mask_seed``, a tuple of integers that decides what is masked: see :meth:`mask`. Without it,
    the row's tokens decide, alike in each epoch.
    """

    task: str
    pad_token_id: int
    padding_side: str = "right"
    pad_to: int | None = None
    """Tokens to pad every batch to; None for the longest row of each."""
    pad_to_multiple_of: int | None = None
    """Round the padded length up to a multiple."""
    max_positions: int | None = None
    """Tokens that the model can place: rounding up stops there."""
    mlm_probability: float = 0.15
    mask_token_id: int | None = None
    ordinary: np.ndarray | None = None
    """int64 [n], ascending: tokens that are not special, the ones to mask and to draw from. For masked_lm."""

    @functools.cached_property
    def _is_ordinary(self) -> np.ndarray:
        """bool [vocabulary], with a last False for tokens beyond it."""
        assert self.ordinary is not None
        flags = np.zeros(self.ordinary[-1] + 2, bool)
        flags[self.ordinary] = True
        return flags

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """`input_ids` and `attention_mask` int64 [B, L]; `labels` int64 [B] for classification, else [B, L].

        Labels are IGNORE where nothing is predicted. In causal language modelling they are the tokens themselves, not
        shifted: the logits at position t are to be compared with the label at t + 1. Where texts share a row,
        `position_ids` int64 [B, L] begin anew at each text, and in padding, which is a text of its own; nothing
        predicts the first token of a text.
        """
        tokens = [row["input_ids"] for row in rows]
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        columns = np.arange(self._width(int(lengths.max())))
        if self.padding_side == "left":
            columns = columns[::-1]
        real = columns < lengths[:, None]
        input_ids = np.full(real.shape, self.pad_token_id, np.int64)
        input_ids[real] = np.fromiter(itertools.chain.from_iterable(tokens), np.int64, int(lengths.sum()))
        ignored = np.array([bool(row.get("ignore")) for row in rows])
        if self.task == "classification":
            labels = np.array([row["labels"] for row in rows], np.int64)
        elif self.task == "causal_lm":
            labels = np.where(real, input_ids, IGNORE)
            if "answers" in rows[0]:
                learnt = np.concatenate([np.asarray(row["answers"], bool) for row in rows])
                labels[real] = np.where(learnt, input_ids[real], IGNORE)
        else:
            labels = np.full_like(input_ids, IGNORE)
            seeds = [
                row["mask_seed"] if "mask_seed" in row else list(map(int, ids))
                for row, ids in zip(rows, tokens, strict=True)
            ]
            input_ids[real], labels[real] = self.mask(input_ids[real], lengths, seeds)
        labels[ignored] = IGNORE
        arrays = {"input_ids": input_ids, "attention_mask": real.astype(np.int64), "labels": labels}
        if "documents" in rows[0]:
            arrays["position_ids"] = places = np.cumsum(~real, 1) - 1
            documents = np.concatenate([np.asarray(row["documents"], np.int64) for row in rows])
            places[real] = np.arange(documents.sum()) - np.repeat(np.cumsum(documents) - documents, documents)
            labels[places == 0] = IGNORE
        batch = Batch({name: torch.from_numpy(array) for name, array in arrays.items()})
        batch.unpadded = tuple((lengths == real.shape[1]).tolist())
        batch.lengths, batch.place = tuple(lengths[~ignored].tolist()), rows[-1].get("place")
        return batch

    def _width(self, longest: int) -> int:
        width = max(longest, self.pad_to or 0)
        if self.pad_to_multiple_of:
            rounded = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
            width = max(width, min(rounded, self.max_positions or rounded))
        return width

    def mask(
        self, tokens: np.ndarray, lengths: np.ndarray, seeds: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Hide some tokens of each row (Devlin et al. 2019, arXiv 1810.04805, section 3.1).

        Each token is predicted with probability mlm_probability, and at least one in a row is; of these, 80 % become
        the mask token, 10 % a random token, and 10 % stay. Special tokens are neither predicted nor drawn. A row's seed
        alone decides, so that masks do not depend on the rest of the batch, the number of processes, the worker, or
        where a run was resumed.

        Args:
            tokens: int64 [n], the rows one after another, without padding.
            lengths: tokens of each row, which sum to n.
            seeds: for each row integers of 0 or more, which name the row and the epoch.
        Returns:
            The tokens to read and the labels, each int64 [n].
        """
        assert self.ordinary is not None and self.mask_token_id is not None
        draws = [
            np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).random((3, length))
            for seed, length in zip(seeds, lengths, strict=True)
        ]
        score, action, word = np.concatenate(draws, axis=1)
        usable = self._is_ordinary[np.minimum(tokens, self.ordinary[-1] + 1)]
        score = np.where(usable, score, np.inf)
        lowest = np.minimum.reduceat(score, np.cumsum(lengths) - lengths)
        predicted = usable & (score <= np.repeat(np.maximum(lowest, self.mlm_probability), lengths))
        drawn = self.ordinary[(word * len(self.ordinary)).astype(np.int64)]
        read = np.where(predicted & (action >= KEEP), self.mask_token_id, tokens)
        read = np.where(predicted & (action >= 1 - RANDOM), drawn, read)
        return read, np.where(predicted, tokens, IGNORE)
