"""Context parallelism against one process: ring, all-gather and Ulysses; layouts, documents, bytes and order."""

import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.testing import assert_close

from course_lib.errors import ConfigError
from course_lib.metering.meter import Meter
from course_lib.parallel import ring_attention as ring
from course_lib.parallel.context import METHODS, bytes_sent, context_attention
from course_lib.parallel.ring_attention import NOWHERE
from course_lib.parallel.sequence_layout import IGNORED, SequenceLayout, next_tokens, share_of_mean
from tests.parallel.between_ranks import here
from tests.ranks import on_ranks

ROWS, LENGTH, WIDTH = 2, 16, 8
HEADS = {"heads of their own": (4, 4), "grouped": (4, 2), "one key head": (4, 1)}
TEXTS = {
    "one document": None,
    "packed": (0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3),
    "padded": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE),
}


@functools.cache
def whole(heads, text, dtype=torch.float64):
    """Queries, keys, values, the gradient that comes back, and documents of whole sequences."""
    numbers = torch.Generator().manual_seed(7)
    of_query, of_key = HEADS[heads]
    shapes = [(ROWS, each, LENGTH, WIDTH) for each in (of_query, of_key, of_key, of_query)]
    tensors = [torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype) for shape in shapes]
    documents = None if TEXTS[text] is None else torch.tensor([TEXTS[text], TEXTS[text][:1] * LENGTH])
    return *tensors, documents


def by_one_process(heads, text, causal):
    """Output and gradients by the formula, of whole sequences: (rows, heads, LENGTH, WIDTH) each."""
    query, key, value, upstream, documents = whole(heads, text)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    query, key, value = leaves
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    seen = (seen.tril() if causal else seen)[None].expand(ROWS, -1, -1)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None]) & (documents != NOWHERE)[:, :, None]
    scores = (query @ key.mT * WIDTH**-0.5).masked_fill(~seen[:, None], -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1))
    output = weights @ value
    output.backward(torch.where(seen.any(-1)[:, None, :, None], upstream, torch.zeros_like(upstream)))
    return output.detach(), *(leaf.grad for leaf in leaves)


def parted(heads, text, layout, rank, dtype=torch.float64):
    """This rank's part of `whole`: three leaves, the gradient, documents."""
    *tensors, documents = whole(heads, text, dtype)
    query, key, value, upstream = (layout.shard(tensor, rank, 2) for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    return leaves, upstream, None if documents is None else layout.shard(documents, rank, 1)


def furthest(method, zigzag, causal, heads, text):
    """The largest difference from one process in output and each gradient."""
    rank, ranks = here()
    layout = SequenceLayout(LENGTH, ranks, zigzag)
    leaves, upstream, documents = parted(heads, text, layout, rank)
    output = context_attention(*leaves, method=method, causal=causal, zigzag=zigzag, documents=documents)
    output.backward(upstream)
    mine = (output.detach(), *(leaf.grad for leaf in leaves))
    right = [layout.shard(tensor, rank, 2) for tensor in by_one_process(heads, text, causal)]
    return max((one - other).abs().max().item() for one, other in zip(mine, right, strict=True))


@on_ranks(1, 2, 4)
def test_outputs_and_gradients_are_those_of_one_process():
    cases = itertools.product(METHODS, (False, True), (False, True), HEADS, TEXTS)
    apart = {case: furthest(*case) for case in cases}
    assert len(apart) == 108
    assert {case: distance for case, distance in apart.items() if not distance < 1e-12} == {}


@on_ranks(2)
def test_without_the_others_keys_it_would_differ():
    def own_blocks(self, rank, owner, blocks=ring.Sight.blocks):
        return blocks(self, rank, owner) if rank == owner else iter(())

    with mock.patch.object(ring.Sight, "blocks", own_blocks):
        apart = torch.tensor(furthest("ring", False, True, "grouped", "packed"))
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    assert apart > 0.1


@on_ranks(2, 4)
def test_what_is_sent_is_the_formula_and_the_ring_holds_two_blocks_whatever_the_ranks():
    """The one at work and the one that arrives, in its forward; with those of gradients six in its backward."""
    rank, ranks = here()
    shape = {"rows": ROWS, "heads": 4, "key_heads": 2, "tokens": LENGTH // ranks, "width": WIDTH, "itemsize": 4}
    sent = {}
    for method in METHODS:
        leaves, upstream, _ = parted("grouped", "one document", SequenceLayout(LENGTH, ranks), rank, torch.float32)
        with Meter() as forward:
            output = context_attention(*leaves, method=method)
        with Meter() as backward:
            output.backward(upstream)
        sent[method] = forward.bytes_sent
        assert forward.bytes_sent == bytes_sent(method, ranks, **shape)
        assert backward.bytes_sent == bytes_sent(method, ranks, **shape, backward=True)
        if method == "ring":
            block = 2 * ROWS * 2 * (LENGTH // ranks) * WIDTH * 4
            assert forward.peak["communication buffers"] == 2 * block
            assert backward.peak["communication buffers"] <= 6 * block
    assert sent["ring"] == sent["allgather"]


@on_ranks(2, 4)
def test_the_next_block_is_on_its_way_before_a_block_is_computed_with():
    """And no message holds more than one rank's keys and values."""
    (rank, ranks), happened = here(), []

    def noted(cls, name, what):
        method = getattr(cls, name)

        def note(self, *arguments):
            happened.append(what(*arguments))
            return method(self, *arguments)

        return mock.patch.object(cls, name, note)

    leaves, upstream, _ = parted("grouped", "one document", SequenceLayout(LENGTH, ranks), rank, torch.float32)
    with (
        noted(ring.Ring, "pass_on", lambda tensor: (tuple(tensor.shape), tensor.dtype)),
        noted(ring.Sight, "blocks", lambda rank, owner: "compute"),
        noted(ring.Coming, "arrived", lambda: "arrived"),
    ):
        output = context_attention(*leaves)
        forward = happened.copy()
        happened.clear()
        output.backward(upstream)
    block = (2, ROWS, 2, LENGTH // ranks, WIDTH), torch.float32
    assert forward == [block, "compute", "arrived"] * (ranks - 1) + ["compute"]
    first = [block, "compute", block, "arrived"]  # the gradient sets out after the block is computed with
    middle = [block, "compute", "arrived", block, "arrived"]
    assert happened == first + middle * (ranks - 2) + ["compute", "arrived", block, "arrived"]


@on_ranks(2)
def test_sums_are_in_float32_whatever_the_inputs():
    """bfloat16 has 8 bits: the error is that of its rounding, and no larger than that of torch's attention twice."""
    rank, ranks = here()
    layout = SequenceLayout(LENGTH, ranks, True)
    leaves, upstream, _ = parted("grouped", "one document", layout, rank, torch.bfloat16)
    output = context_attention(*leaves, zigzag=True)
    output.backward(upstream)
    *wholes, whole_upstream, _ = whole("grouped", "one document", torch.bfloat16)
    torchs_leaves = [tensor.clone().requires_grad_() for tensor in wholes]
    torchs = F.scaled_dot_product_attention(*torchs_leaves, is_causal=True, enable_gqa=True)
    torchs.backward(whole_upstream)
    ours = (output, *(leaf.grad for leaf in leaves))
    theirs = (torchs, *(leaf.grad for leaf in torchs_leaves))
    for mine, other, exact in zip(ours, theirs, by_one_process("grouped", "one document", True), strict=True):
        error = (mine.double() - layout.shard(exact, rank, 2)).abs().max()
        assert mine.dtype == torch.bfloat16 and error < 2 * (other.double() - exact).abs().max()


@on_ranks(1, 2, 4)
def test_a_share_of_a_mean_is_of_all_ranks_targets():
    """Not a mean of the ranks' means: they have different numbers of targets."""
    rank, ranks = here()
    losses = torch.arange(1.0, rank + 2, dtype=torch.float64).requires_grad_()  # 1 on the first rank, 1 + 2 on the next
    share = share_of_mean(losses.sum(), torch.tensor(len(losses)))
    share.backward()
    targets = ranks * (ranks + 1) // 2
    assert_close(losses.grad, torch.full_like(losses, 1 / targets))
    whole = share.detach()
    dist.all_reduce(whole)
    assert whole.item() == pytest.approx(sum(n * (n + 1) / 2 for n in range(1, ranks + 1)) / targets)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("zigzag", [False, True])
def test_every_token_is_on_one_rank_and_comes_back(ranks, zigzag):
    layout = SequenceLayout(24, ranks, zigzag)
    whole = torch.arange(24).view(1, 24, 1)
    parts = [layout.shard(whole, rank, 1) for rank in range(ranks)]
    assert [part.flatten().tolist() for part in parts] == [layout.positions(rank).tolist() for rank in range(ranks)]
    assert torch.equal(layout.join(parts, 1), whole)
    assert torch.equal(torch.cat(parts, 1)[:, layout.order()], whole)
    work = [layout.pairs(rank) for rank in range(ranks)]
    assert sum(work) == 24 * 25 // 2 and layout.pairs(0, causal=False) == 24 * 24 // ranks
    assert (len(set(work)) == 1) is (zigzag or ranks == 1)


def test_labels_end_with_their_document():
    labels, documents = torch.tensor([[4, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1]])
    assert next_tokens(labels).tolist() == [[5, 6, 7, IGNORED]]
    assert next_tokens(labels, documents).tolist() == [[5, IGNORED, 7, IGNORED]]


@on_ranks(2)
def test_what_cannot_be_shared_is_refused():
    for says, heads, key_heads, method in (
        ("3 heads cannot be shared evenly by 2 ranks.*use the ring", 3, 3, "ulysses"),
        ("4 heads cannot share 3 key heads", 4, 3, "ring"),
        ("unknown method 'rings'", 4, 4, "rings"),
    ):
        with pytest.raises(ConfigError, match=says):
            context_attention(torch.ones(1, heads, 4, 2), *torch.ones(2, 1, key_heads, 4, 2), method=method)
    with pytest.raises(ConfigError, match="10 tokens cannot be cut into 4 equal chunks: pad it to a multiple of 4"):
        SequenceLayout(10, 2, True)
