"""Context parallelism: attention over a sequence on several ranks; ours beside torch's ring and DeepSpeed's Ulysses.

    python benchmarks/context.py                     # 2 ranks
    python benchmarks/context.py --num_processes 4 --length 8192

A system is one forward and one backward of causal attention, with the same numbers in each; every system gives the
outputs and gradients of one process before it is timed. All live in the same ranks and take turns, forward and back
through the list; a ratio is the median of the rounds' ratios. Writes benchmarks/context.md.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.harness import join_ranks, milliseconds, options, publish, ratios, seconds, spread, table
from course_lib.launching.launch import launch
from course_lib.lessons.turns import in_turns
from course_lib.metering.meter import Meter
from course_lib.parallel.context import Method, bytes_sent, context_attention
from course_lib.parallel.sequence_layout import SequenceLayout, next_tokens, share_of_mean
from course_lib.training.engines.with_deepspeed import leave_shared_memory_operator_out

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
CLOSE = 2e-5
"""Largest difference of a number from one process's, float32, numbers of about 1."""


class TorchRing(torch.autograd.Function):
    """torch's own ring with its flash kernel for CPUs, which `context_parallel` does not reach on a CPU."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, zigzag: bool) -> Tensor:
        """(rows, heads, tokens, width)."""
        _attention._cp_options.enable_load_balance = zigzag
        output, log_sum, *_ = _attention._templated_ring_attention(
            dist.group.WORLD, 2, FLASH, query, key, value, is_causal=True
        )
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        """Of the three inputs."""
        query, key, value, output, log_sum = ctx.saved_tensors
        gradients = _attention._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            FLASH_BACKWARD,
            gradient.contiguous(),
            "grad_out",
            query,
            key,
            value,
            output,
            log_sum,
            is_causal=True,
            dropout_p=0.0,
        )
        return *gradients[:3], None


def torchs(zigzag: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The ring of torch, in torch's order of dealing or in contiguous parts."""
    return TorchRing.apply(query, key, value, zigzag)


def deepspeeds() -> Attention:
    """DeepSpeed's Ulysses around torch's attention."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    leave_shared_memory_operator_out()
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)

    def local(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = (part.transpose(1, 2) for part in (query, key, value))
        return scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    ulysses = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ulysses(*(part.transpose(1, 2) for part in (query, key, value)), 0).transpose(1, 2)

    return attention


def ours(method: Method, zigzag: bool, width: int) -> Attention:
    """`context_attention` over all ranks."""
    return partial(
        context_attention,
        method=method,
        causal=True,
        zigzag=zigzag,
        documents=None,
        group=dist.group.WORLD,
        scale=width**-0.5,
    )


SYSTEMS: dict[str, tuple[bool, Method | None, str | None]] = {
    "ring, torch's": (False, None, None),
    "ring": (False, "ring", "ring, torch's"),
    "ring, zigzag, torch's": (True, None, None),
    "ring, zigzag": (True, "ring", "ring, zigzag, torch's"),
    "all-gather": (False, "allgather", "ring, torch's"),
    "all-gather, zigzag": (True, "allgather", "ring, zigzag, torch's"),
    "Ulysses, DeepSpeed's": (False, None, None),
    "Ulysses": (False, "ulysses", "Ulysses, DeepSpeed's"),
}
"""Whether it deals in zigzag; our method; the peer that its ratio is taken against."""


def measure(args: Namespace) -> tuple[dict[str, dict], tuple[float, float]]:
    """On this rank, by system: seconds of every round, bytes of a step, the largest difference from one process.

    And the losses of packed documents.
    """
    join_ranks(cpu=True)
    rank, ranks, heads = dist.get_rank(), dist.get_world_size(), args.heads
    torch.manual_seed(0)
    whole = [torch.randn(args.rows, count, args.length, args.width) for count in (heads, heads, heads)]
    upstream = torch.randn(args.rows, heads, args.length, args.width)
    alone = [part.clone().requires_grad_() for part in whole]
    expected = scaled_dot_product_attention(*alone, is_causal=True)
    expected.backward(upstream)
    wanted = [expected.detach(), *(part.grad for part in alone)]

    steps, found = {}, {}
    for name, (zigzag, method, _) in SYSTEMS.items():
        layout = SequenceLayout(args.length, ranks, zigzag)
        mine = [layout.shard(part, rank, 2).contiguous().requires_grad_() for part in whole]
        attention = (
            ours(method, zigzag, args.width)
            if method
            else partial(torchs, zigzag)
            if name.startswith("ring")
            else deepspeeds()
        )
        step = partial(one_step, attention, mine, layout.shard(upstream, rank, 2).contiguous())
        got = step()
        off = max(
            float((one - layout.shard(right, rank, 2)).abs().max()) for one, right in zip(got, wanted, strict=True)
        )
        if off > CLOSE:
            raise RuntimeError(f"{name}: {off:.1e} off one process")
        with Meter() as meter:
            step()
        found[name] = {"off": off, "bytes": meter.bytes_sent, "pairs": layout.pairs(rank, causal=True)}
        steps[name] = partial(seconds, step, args.steps)
    for name, rounds in in_turns(steps, args.rounds).items():
        found[name]["seconds"] = rounds
    losses = packed_losses(args)
    dist.destroy_process_group()
    return found, losses


def packed_losses(args: Namespace) -> tuple[float, float]:
    """Next-token loss over four documents packed into a sequence: of one process, and the sum of all ranks' shares."""
    rank, ranks, words = dist.get_rank(), dist.get_world_size(), args.width
    layout = SequenceLayout(args.length, ranks, zigzag=True)
    torch.manual_seed(1)
    query, key, value = (torch.randn(args.rows, args.heads, args.length, args.width) for _ in range(3))
    documents = (torch.arange(args.length) * 4 // args.length).expand(args.rows, -1)
    targets = next_tokens(torch.randint(words, (args.rows, args.length)), documents)

    def total(output: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(output.sum(1).flatten(0, 1), wanted.flatten(), reduction="sum")

    sees = (documents[:, None, :, None] == documents[:, None, None, :]) & torch.ones(
        args.length, args.length, dtype=torch.bool
    ).tril()
    alone = total(scaled_dot_product_attention(query, key, value, attn_mask=sees), targets) / (targets >= 0).sum()
    mine = [layout.shard(part, rank, 2) for part in (query, key, value)]
    output = context_attention(*mine, zigzag=True, documents=layout.shard(documents, rank, 1))
    wanted = layout.shard(targets, rank, 1)
    share = share_of_mean(total(output, wanted), (wanted >= 0).sum(), group=dist.group.WORLD)
    dist.all_reduce(share)
    return float(alone), float(share)


def one_step(attention: Attention, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output and gradients of one forward and backward."""
    for part in inputs:
        part.grad = None
    output = attention(*inputs)
    output.backward(upstream)
    return [output.detach(), *(part.grad for part in inputs if part.grad is not None)]


def rows(args: Namespace, found: list[dict[str, dict]]) -> Iterator[tuple]:
    """Rows by system: step time, ratio to the peer, bytes, formula, balance."""
    shape = {
        "rows": args.rows,
        "heads": args.heads,
        "key_heads": args.heads,
        "width": args.width,
        "itemsize": 4,
        "tokens": args.length // args.num_processes,
    }
    for name, (_, method, peer) in SYSTEMS.items():
        taken, against, formula = found[0][name]["seconds"], "1 (the peer)", ""
        if peer:
            against = spread(ratios(found[0][peer]["seconds"], taken), 2, f" × {peer}")
        if method:
            sent = (bytes_sent(method, args.num_processes, **shape, backward=back) for back in (False, True))
            formula = f"{sum(sent) / 2**20:.2f}"
        pairs = [one[name]["pairs"] for one in found]
        busiest = "even, by heads" if "Ulysses" in name else f"{100 * max(pairs) / sum(pairs):.0f} %"
        counted = max(one[name]["bytes"] for one in found) / 2**20
        yield name, milliseconds(taken), against, f"{counted:.2f}", formula, busiest


def main() -> None:
    """Measure on real ranks and write the table."""
    args = options(__doc__, num_processes=2, rows=1, heads=8, width=64, length=4096, rounds=12, steps=1)
    results = launch(measure, args, num_processes=args.num_processes, timeout=1800, device="cpu")
    found, (alone, shares) = [one for one, _ in results], results[0][1]
    off = max(one[name]["off"] for one in found for name in SYSTEMS)
    publish(
        "context",
        "Context parallelism: cpu",
        ("torch", "deepspeed"),
        f"{args.num_processes} ranks, one thread each unless set otherwise; {args.rows} × {args.heads} heads × "
        f"{args.length:,} tokens × {args.width}, float32, causal, forward and backward; {args.rounds} rounds of "
        f"{args.steps} steps, in turn; no round is left out. Each system's output and gradients are those of one "
        f"process (largest difference {off:.1e}).",
        table(
            "attention | step, median (ms) | speed against the peer (range) | sent per rank, counted (MiB) | "
            "by formula (MiB) | pairs of the busiest rank, share of all",
            rows(args, found),
        ),
        f"Next-token loss over four packed documents, ring in zigzag: {alone:.6f} on one process, {shares:.6f} as "
        f"the sum of the ranks' shares.",
    )


if __name__ == "__main__":
    main()
