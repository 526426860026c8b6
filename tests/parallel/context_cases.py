"""What each rank does in the tests of context parallelism: it returns what was found, the tests judge."""

import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.metering.meter import Meter
from course_lib.parallel import ring_attention as ring
from course_lib.parallel.context import METHODS, context_attention
from course_lib.parallel.ring_attention import NOWHERE
from course_lib.parallel.sequence_layout import SequenceLayout, next_tokens, share_of_mean

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


def differences(cases):
    """The largest difference from one process in output and each gradient, by case."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for method, zigzag, causal, heads, text in cases:
        layout = SequenceLayout(LENGTH, ranks, zigzag)
        (query, key, value), upstream, documents = parted(heads, text, layout, rank)
        output = context_attention(query, key, value, method=method, causal=causal, zigzag=zigzag, documents=documents)
        output.backward(upstream)
        mine = (output.detach(), query.grad, key.grad, value.grad)
        right = [layout.shard(tensor, rank, 2) for tensor in by_one_process(heads, text, causal)]
        found[method, zigzag, causal, heads, text] = max(
            float((one - other).abs().max()) for one, other in zip(mine, right, strict=True)
        )
    return found


def without_the_ring():
    """As `differences` of one case, on ranks that attend to their own tokens alone."""
    with mock.patch.object(
        ring.Sight,
        "blocks",
        lambda self, rank, owner, blocks=ring.Sight.blocks: blocks(self, rank, owner) if rank == owner else iter(()),
    ):
        return differences([("ring", False, True, "grouped", "packed")])


def metered():
    """By method: bytes sent in forward and backward, and the most bytes at one time in what each sends."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for method in METHODS:
        (query, key, value), upstream, _ = parted(
            "grouped", "one document", SequenceLayout(LENGTH, ranks), rank, torch.float32
        )
        with Meter() as forward:
            output = context_attention(query, key, value, method=method)
        with Meter() as backward:
            output.backward(upstream)
        found[method] = (
            forward.bytes_sent,
            backward.bytes_sent,
            *(meter.peak["communication buffers"] for meter in (forward, backward)),
        )
    return found


def events():
    """What the ring does in a forward and a backward, in order."""
    dist.init_process_group("gloo")
    happened = []
    pass_on, blocks, arrived = ring.Ring.pass_on, ring.Sight.blocks, ring.Coming.arrived

    def passes(self, tensor):
        happened.append(f"send {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
        return pass_on(self, tensor)

    def computes(self, rank, owner):
        happened.append("compute")
        return blocks(self, rank, owner)

    def comes(self):
        happened.append("arrived")
        return arrived(self)

    layout = SequenceLayout(LENGTH, dist.get_world_size())
    (query, key, value), upstream, _ = parted("grouped", "one document", layout, dist.get_rank(), torch.float32)
    with (
        mock.patch.object(ring.Ring, "pass_on", passes),
        mock.patch.object(ring.Sight, "blocks", computes),
        mock.patch.object(ring.Coming, "arrived", comes),
    ):
        output = context_attention(query, key, value)
        forward = list(happened)
        happened.clear()
        output.backward(upstream)
    return forward, list(happened)


def precision():
    """The largest error of bfloat16 inputs, of ours and of one process' attention by torch, against float64."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout(LENGTH, ranks, True)
    (query, key, value), upstream, _ = parted("grouped", "one document", layout, rank, torch.bfloat16)
    output = context_attention(query, key, value, zigzag=True)
    output.backward(upstream)
    right = by_one_process("grouped", "one document", True)
    leaves = [tensor.clone().requires_grad_() for tensor in whole("grouped", "one document", torch.bfloat16)[:3]]
    torchs = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    torchs.backward(whole("grouped", "one document", torch.bfloat16)[3])
    ours = (output.detach(), query.grad, key.grad, value.grad)
    theirs = (torchs.detach(), *(leaf.grad for leaf in leaves))
    return [
        (
            float((mine.double() - layout.shard(exact, rank, 2)).abs().max()),
            float((other.double() - exact).abs().max()),
            mine.dtype,
        )
        for mine, other, exact in zip(ours, theirs, right, strict=True)
    ]


def trained(cut_first, averaged, zigzag=True):
    """Losses of four steps of a small causal model on sequences that are spread over the ranks; then its weights.

    Args:
        cut_first: labels are shifted in each rank's part, not before it is cut.
        averaged: the loss is a mean of the ranks' means.
        zigzag: how the tokens are dealt.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    layout = SequenceLayout(LENGTH, ranks, zigzag)
    width, vocabulary = 16, 11
    embed, place, out = (
        torch.nn.Embedding(vocabulary, width),
        torch.nn.Embedding(LENGTH, width),
        torch.nn.Linear(width, vocabulary),
    )
    project = torch.nn.Linear(width, 3 * width)
    parameters = [p for module in (embed, place, out, project) for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    losses = []
    for step in range(4):
        tokens = torch.randint(vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        labels = tokens.clone()
        labels[0, : LENGTH // 2 + 1] = -100  # a prompt: the ranks have different numbers of targets
        mine = layout.shard(tokens, rank, 1)
        target = next_tokens(layout.shard(labels, rank, 1)) if cut_first else layout.shard(next_tokens(labels), rank, 1)
        hidden = embed(mine) + place(layout.positions(rank))
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in project(hidden).chunk(3, -1))
        attended = context_attention(query, key, value, zigzag=zigzag)
        logits = out(hidden + attended.transpose(1, 2).flatten(2))
        summed = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        targets = (target != -100).sum()
        loss = summed / targets / ranks if averaged else share_of_mean(summed, targets)
        optimizer.zero_grad()
        loss.backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses, torch.cat([parameter.detach().flatten() for parameter in parameters])
