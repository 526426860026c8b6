"""Tensor and sequence parallelism from scratch: layers whose matrices the ranks share.

A column-parallel layer, what lies between, and a row-parallel layer make a region of split work, with an exchange at
each end; see :mod:`course_lib.parallel.tp_collectives`. Each layer is built from a whole one, of which it keeps its
shard. For N ranks, rows of tokens, and an MLP from width D to H and back::

    tensor parallelism     X (rows, tokens, D) -copy-> X A_r (…, H / N) -> Y_r B_r (…, D) -reduce-> Z (rows, tokens, D)
    sequence parallelism   X (rows, tokens / N, D) -all_gather-> the same -reduce_scatter-> Z (rows, tokens / N, D)

The second moves the same bytes, since an all-reduce is a reduce-scatter and an all-gather, and holds 1/N of what lies
between the regions.

Outside the regions every rank does the same, on the same numbers (tensor parallelism), or on its own slice of the
sequence (sequence parallelism). So the ranks of a group take the same rows and seed torch's generator alike: dropout
on a replicated tensor then has the same mask on all of them, without which they would drift apart; heads at the same
place on two ranks share their mask too, and with sequence parallelism the slices do.

Sources: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4.2.2. Unlike theirs, an input that was gathered
along the sequence is kept for the backward, not gathered once more.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.errors import ModelError
from course_lib.parallel.tp_collectives import (
    Group,
    all_gather,
    check_divides,
    copy,
    gather,
    gathered,
    reduce,
    reduce_scatter,
    sum_gradients,
)

ANOTHER_SIZE = "choose a tensor-parallel size that divides it"
IGNORED = -100
"""Target that counts for nothing: of padding, and of tokens that are not asked for."""


@dataclass(frozen=True)
class ParameterSplit:
    """Distribution of a whole parameter over the ranks.

    Attributes:
        dim: of the whole tensor, that is divided.
        fused: matrices side by side along ``dim``, each of which is divided: 3 for a joint query, key and value.
    """

    dim: int
    fused: int = 1

    def shard(self, whole: Tensor, group: Group = None) -> Tensor:
        """This rank's shard, a copy.

        Raises:
            ConfigError: the size along ``dim`` does not divide.
        """
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        check_divides(
            f"dimension {self.dim} of a {tuple(whole.shape)} parameter",
            whole.shape[self.dim] // self.fused,
            ranks,
            ANOTHER_SIZE,
        )
        # Fused: this rank's part of each matrix, not of all of them together, which would give the first ranks the
        # queries and the last ones the values. [q q | k k | v v] -> rank 0: [q k v]
        return torch.cat([part.chunk(ranks, self.dim)[rank] for part in whole.chunk(self.fused, self.dim)], self.dim)

    def whole(self, shard: Tensor, group: Group = None) -> Tensor:
        """The whole tensor from all ranks' shards, on every rank; a collective call."""
        return torch.cat([gathered(part, group, self.dim) for part in shard.chunk(self.fused, self.dim)], self.dim)

    def parameter(self, whole: Tensor, group: Group = None) -> nn.Parameter:
        """This rank's shard as a parameter that is trained if the whole one is."""
        return nn.Parameter(self.shard(whole.detach(), group), whole.requires_grad)


def check_vocabulary(embedding: nn.Module, ranks: int) -> None:
    """Refuse an embedding whose rows the ranks cannot share evenly; Megatron-LM pads the vocabulary (section 5.1)."""
    check_divides(
        "the vocabulary",
        len(embedding.get_parameter("weight")),
        ranks,
        f"pad it with model.resize_token_embeddings(pad_to_multiple_of={ranks}), or don't split it",
    )


class ColumnParallelLinear(nn.Module):
    """Y = XA + b with A's columns over the ranks: the whole X in, this rank's columns of Y out.

    Args:
        linear: the whole layer, an ``nn.Linear`` or transformers' ``Conv1D``, whose weight has the shape (in, out).
        group: the ranks that share it.
        fused: matrices that ``linear`` has side by side.
        sequence: the input is this rank's slice of the sequence, to be gathered; otherwise it is the whole, replicated.
        entered: the input has passed the exchange already, one for several layers.
        gather_output: give every rank all columns.
    Attributes:
        splits: how each of its parameters lies over the ranks.
    Raises:
        ConfigError: the columns don't divide by the number of ranks.
    """

    def __init__(
        self,
        linear: nn.Module,
        group: Group = None,
        *,
        fused: int = 1,
        sequence: bool = False,
        entered: bool = False,
        gather_output: bool = False,
    ):
        super().__init__()
        self.group, self.sequence, self.entered, self.gather_output = group, sequence, entered, gather_output
        # nn.Linear keeps (out, in), so that A's columns are its rows; Conv1D keeps (in, out).
        self.transposed = not isinstance(linear, nn.Linear)
        self.splits = {
            "weight": ParameterSplit(dim=1 if self.transposed else 0, fused=fused),
            "bias": ParameterSplit(dim=0, fused=fused),
        }
        self.weight = self.splits["weight"].parameter(linear.get_parameter("weight"), group)
        self.bias = None if linear.bias is None else self.splits["bias"].parameter(linear.get_parameter("bias"), group)

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, in), or (rows, tokens / N, in) with ``sequence``, to (…, out / N), or (…, out) if gathered."""
        if not self.entered:  # forward nothing, or (rows, tokens / N, in) -> (rows, tokens, in)
            hidden = all_gather(hidden, self.group) if self.sequence else copy(hidden, self.group)
        # (…, in) -> (…, out / N). Each rank adds its own part of the bias: the columns are finished here.
        columns = F.linear(hidden, self.weight.t() if self.transposed else self.weight, self.bias)
        return gather(columns, self.group) if self.gather_output else columns


class RowParallelLinear(nn.Module):
    """Y = XA + b with A's rows over the ranks: this rank's columns of X in, the whole Y out, a sum over the ranks.

    Args:
        linear: the whole layer, an ``nn.Linear`` or transformers' ``Conv1D``.
        group: the ranks that share it.
        sequence: leave each rank the sum for its slice of the sequence; otherwise the whole sum.
    Attributes:
        splits: how the weight lies over the ranks; the bias is on every rank, and is added once, after the sum.
    Raises:
        ConfigError: the rows don't divide by the number of ranks.
    """

    def __init__(self, linear: nn.Module, group: Group = None, *, sequence: bool = False):
        super().__init__()
        self.group, self.sequence, self.transposed = group, sequence, not isinstance(linear, nn.Linear)
        self.splits = {"weight": ParameterSplit(dim=0 if self.transposed else 1)}
        self.weight = self.splits["weight"].parameter(linear.get_parameter("weight"), group)
        self.bias = None if linear.bias is None else linear.get_parameter("bias")
        if sequence and self.bias is not None:  # each rank adds it to its own tokens only
            sum_gradients([self.bias], group)

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, in / N) to (…, out), or to (rows, tokens / N, out) with ``sequence``."""
        # (…, in / N) -> (…, out), one summand of N: X A = X_0 A_0 + X_1 A_1 + …, over the ranks
        partial = F.linear(hidden, self.weight.t() if self.transposed else self.weight)
        # The bias comes after the sum, or it would be added N times. (…, out) -> the same, or (rows, tokens / N, out)
        whole = reduce_scatter(partial, self.group) if self.sequence else reduce(partial, self.group)
        return whole if self.bias is None else whole + self.bias


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are over the ranks: each looks up the tokens that it has, and the rest are zeros.

    Args:
        embedding: the whole one.
        group: the ranks that share it.
    Attributes:
        splits: how its weight lies over the ranks.
    Raises:
        ConfigError: the rows don't divide by the number of ranks.
        ModelError: an embedding with ``max_norm``, ``scale_grad_by_freq`` or ``sparse``.
    """

    def __init__(self, embedding: nn.Embedding, group: Group = None):
        super().__init__()
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            raise ModelError(
                "an embedding with max_norm, scale_grad_by_freq or sparse cannot be split by rows",
                "leave these options out",
            )
        check_vocabulary(embedding, dist.get_world_size(group))
        self.group, self.splits = group, {"weight": ParameterSplit(dim=0)}
        self.weight = self.splits["weight"].parameter(embedding.weight, group)
        # The padding's embedding gets no gradient: on the rank that has its row, under that row's number there.
        padding, elsewhere = _own_rows(torch.tensor(embedding.padding_idx or 0), len(self.weight), group)
        self.padding_idx = None if embedding.padding_idx is None or elsewhere else int(padding)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (…) to embeddings (…, width), the same on every rank."""
        own, elsewhere = _own_rows(tokens, len(self.weight), self.group)
        # --- phase 1: look up what this rank has; (…) -> (…, width), of row 0 where it lies elsewhere ---
        embedded = F.embedding(own, self.weight, self.padding_idx)
        # --- phase 2: the sum over the ranks. One has the row, the others add 0, and 0 is the gradient there ---
        return reduce(embedded.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)


def _own_rows(ids: Tensor, rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """Ids of the whole vocabulary as rows of this rank's shard, and which of them lie elsewhere; these become row 0.

    What is below or above the vocabulary stays so, on the first or the last rank, for the look-up to refuse.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    own = ids - rank * rows
    elsewhere = (own < 0) & (rank > 0) | (own >= rows) & (rank < ranks - 1)
    return own.masked_fill(elsewhere, 0), elsewhere


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, group: Group) -> Tensor:
    """Cross-entropy of logits whose vocabulary is over the ranks, without gathering them.

    What travels are three numbers per token: its largest logit, its target's, and the sum of the exponentials.

    Args:
        logits: (…, vocabulary / ranks), this rank's columns.
        targets: (…), int64 ids of the whole vocabulary, the same on every rank.
        group: the ranks that the vocabulary is split over; None: all ranks.
    Returns:
        (…), each token's loss, the same on every rank; 0 where the target is -100, as in ``F.cross_entropy``.
    """
    # --- phase 1: the largest logit, so that no exponential overflows. The loss does not depend on it: no gradient is
    # needed, and a plain all-reduce does, which autograd does not see. ---
    largest = logits.detach().amax(-1)  # (…, V / N) -> (…)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest.unsqueeze(-1)  # (…, V / N)
    # --- phase 2: the target's logit, which one of the ranks has ---
    ignored = targets == IGNORED
    own, elsewhere = _own_rows(targets.masked_fill(ignored, 0), logits.shape[-1], group)
    target = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)  # (…)
    # --- phase 3: both sums in one message, (2, …): -log softmax(logits)[target] = log(sum of exponentials) - target's
    # logit. Backward nothing travels: each rank makes the softmax of its own columns. ---
    exponentials, target = reduce(torch.stack([shifted.exp().sum(-1), target]), group)
    return (exponentials.log() - target).masked_fill(ignored, 0)


def sequence_parallel_norm(norm: nn.Module, group: Group = None) -> nn.Module:
    """Let a norm work on this rank's slice of the sequence; changed in place.

    It looks at one token at a time, so its forward stays as it is. Its weights, whole on every rank, have seen this
    rank's tokens only: their gradients are added up.
    """
    sum_gradients(norm.parameters(), group)
    return norm
