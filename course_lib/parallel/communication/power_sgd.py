"""PowerSGD: each matrix of a gradient travels as the product of two thin ones, which one step of power iteration finds.

For a gradient M of shape (n, m), the mean of the ranks' M_i, and Q of shape (m, r), the same on all ranks::

    P = mean of M_i Q       all-reduce, r n elements
    P = orthonormal basis of P's columns
    Q = mean of M_i^T P     all-reduce, r m elements; kept for the next step, which begins nearer the answer
    P Q^T                   what all ranks take for the mean gradient: P P^T M, M's projection on P's columns

Both are linear in M_i: N ranks get what one process gets from the mean gradient. What the projection leaves out stays
on its rank and is added to its next gradient.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD" (arXiv 1905.13727), algorithms 1 and 2.
"""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.errors import ConfigError
from course_lib.parallel.communication.hooks import ErrorFeedback, TwoPhaseReduction, all_reduce_bytes
from course_lib.parallel.ddp import Bucket, ReductionHandle


class PowerSGD:
    """Communication hook: matrices in rank r where that is less, all else plainly. A kernel (o, i, h, w) counts as
    (o, i h w), as in the paper.

    Args:
        rank: r of all matrices; 1 to 4 in the paper, up to 32 for a language model.
        error_feedback: add what was left out to the next gradient. Without it, what lies outside of the projection is
            lost for good.
    Raises:
        ConfigError: a rank below 1.
    Attributes:
        q: (m, r) of each matrix by its parameter's name; the same on all ranks.
    """

    def __init__(self, rank: int, *, error_feedback: bool):
        if rank < 1:
            raise ConfigError(f"PowerSGD with matrices of rank {rank}", "use 1 or more")
        self.rank, self.q = rank, dict[str, Tensor]()
        self.feedback = ErrorFeedback() if error_feedback else None
        self._numbers = torch.Generator().manual_seed(0)  # of the first Q, the same on all ranks

    def compresses(self, shape: Iterable[int]) -> bool:
        """Whether r (n + m) is less than n m."""
        rows, columns = matrix_shape(shape)
        return self.rank * (rows + columns) < rows * columns

    def __call__(self, bucket: Bucket) -> ReductionHandle:
        """Begin; the second all-reduce needs the first one's result, and follows at the end of backward."""
        # --- phase 1: what the last step left out comes on top ---
        left_out = self.feedback.add_to(bucket) if self.feedback else None
        thin = {
            name: view.reshape(matrix_shape(view.shape))
            for name, view in bucket.views.items()
            if self.compresses(view.shape)
        }
        plain = [view for name, view in bucket.views.items() if name not in thin]
        # --- phase 2: P = M Q. One message holds the P of all matrices, and what is not compressed ---
        message = torch.cat(
            [(matrix @ self._q_of(name, matrix)).view(-1) for name, matrix in thin.items()]
            + [view.reshape(-1) for view in plain]
        )
        first = dist.all_reduce(message, group=bucket.group, async_op=True)
        return TwoPhaseReduction(first, partial(self._second_half, bucket, thin, plain, message, left_out))

    def _second_half(
        self, bucket: Bucket, thin: dict[str, Tensor], plain: list[Tensor], message: Tensor, left_out: Tensor | None
    ) -> None:
        sizes = [matrix.shape[0] * self.rank for matrix in thin.values()] + [view.numel() for view in plain]
        summed = message.split(sizes)
        # --- phase 3: an orthonormal basis of the columns that the ranks found together; the same on all of them ---
        wide = torch.promote_types(message.dtype, torch.float32)  # there is no QR of bf16
        bases = {
            name: torch.linalg.qr(part.view(-1, self.rank).to(wide)).Q.to(part.dtype)
            for name, part in zip(thin, summed[: len(thin)], strict=True)
        }
        # --- phase 4: Q = M^T P. This rank's own share is what it sends, so M - P Q^T is what it does not send ---
        shares = {name: matrix.T @ bases[name] for name, matrix in thin.items()}  # (m, r)
        if left_out is not None:
            left_out.copy_(bucket.flat)
            for view in plain:
                _part_of(left_out, bucket.flat, view).zero_()
            for name in thin:
                sent = bases[name] @ shares[name].T
                _part_of(left_out, bucket.flat, bucket.views[name]).sub_(sent.view(bucket.views[name].shape))
        if thin:
            message = torch.cat([share.view(-1) for share in shares.values()])
            dist.all_reduce(message, group=bucket.group)
            parts = message.split([share.numel() for share in shares.values()])
            self.q |= {name: part.view(-1, self.rank) for name, part in zip(thin, parts, strict=True)}
        # --- phase 5: P Q^T, the same bits on all ranks ---
        for name in thin:
            view = bucket.views[name]
            view.copy_((bases[name] @ self.q[name].T).view(view.shape))
        for view, part in zip(plain, summed[len(thin) :], strict=True):
            view.copy_(part.view(view.shape))

    def _q_of(self, name: str, matrix: Tensor) -> Tensor:
        if name not in self.q:
            drawn = torch.randn(matrix.shape[1], self.rank, generator=self._numbers, dtype=torch.float64)
            self.q[name] = drawn.to(matrix)
        return self.q[name]

    def bytes_per_step(self, shapes: Iterable[torch.Size], ranks: int, itemsize: int) -> int:
        """Bytes that a rank sends each step for gradients of these shapes in one bucket: two ring all-reduces.

        Args:
            shapes: of the gradients.
            ranks: in the ring.
            itemsize: bytes of an element.
        """
        first = second = 0
        for shape in shapes:
            rows, columns = matrix_shape(shape)
            first += self.rank * rows if self.compresses(shape) else shape.numel()
            second += self.rank * columns if self.compresses(shape) else 0
        return all_reduce_bytes(first * itemsize, ranks) + all_reduce_bytes(second * itemsize, ranks)

    def state_dict(self) -> dict[str, Tensor]:
        """Q, the same on all ranks, and this rank's error feedback."""
        return {f"q.{name}": q for name, q in self.q.items()} | (self.feedback.state_dict() if self.feedback else {})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put :meth:`state_dict` back."""
        self.q = {name.removeprefix("q."): q.clone() for name, q in state.items() if name.startswith("q.")}
        if self.feedback:
            self.feedback.load_state_dict(state)


def matrix_shape(shape: Iterable[int]) -> tuple[int, int]:
    """(n, m): the first dimension, and all others together; (n, 1) of a vector."""
    rows, *others = tuple(shape) or (1,)
    columns = 1
    for size in others:
        columns *= size
    return rows, columns


def _part_of(whole: Tensor, flat: Tensor, view: Tensor) -> Tensor:
    """The part of ``whole`` that lies where ``view`` lies in ``flat``, with its shape and strides."""
    return whole.as_strided(view.shape, view.stride(), view.storage_offset() - flat.storage_offset())
