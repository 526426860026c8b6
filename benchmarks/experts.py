"""Experts on several ranks: our layer beside DeepSpeed's and beside Transformers' own block, on the same tokens.

    python benchmarks/experts.py                     # 2 ranks
    python benchmarks/experts.py --num_processes 4 --experts 16

A system is one forward and one backward of a layer; all have the same weights. Every rank has tokens of its own. Ours
and DeepSpeed's spread the experts over the ranks; Transformers' block has all of them on every rank and is trained with
data parallelism, so that it sends all experts' gradients instead of tokens. Each dropless system gives the outputs,
the tokens' gradients and the experts' gradients of one process before it is timed. All live in the same ranks and take
turns, forward and back through the list; a ratio is the median of the rounds' ratios. Beside the time of the clock
stands that of the processor, which others on the machine do not lengthen, nor does waiting for another rank. Writes
benchmarks/experts.md.
"""

import contextlib
import io
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from benchmarks.harness import join_ranks, milliseconds, options, publish, ratios, seconds, spread, table
from course_lib.launching.launch import launch
from course_lib.lessons.turns import in_turns
from course_lib.metering.meter import Meter
from course_lib.parallel.expert_dispatch import bytes_sent
from course_lib.parallel.expert_router import TopKRouter, balance_loss, z_loss
from course_lib.parallel.experts import Experts, MoELayer, expert_groups, keep_own_experts
from course_lib.training.engines.with_deepspeed import leave_shared_memory_operator_out

K, FACTOR, CLOSE = 2, 1.0, 2e-5
OURS, CAPPED = "ours, dropless", f"ours, capacity factor {FACTOR:g}"
PEER, PEER_CAPPED = "DeepSpeed, dropless", f"DeepSpeed, capacity factor {FACTOR:g}"
WHOLE = "Transformers' block, data parallel"
AGAINST = {OURS: PEER, PEER: "", CAPPED: PEER_CAPPED, PEER_CAPPED: "", WHOLE: PEER}
"""The peer of each system."""
Found = tuple[Tensor, Tensor, Tensor]
"""Output (tokens, width), the tokens' gradient, and that of this rank's down projections."""


class Expert(nn.Module):
    """One expert as DeepSpeed wants it: a module of its own."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(…, width) -> the same."""
        gate, up = self.gate_up(tokens).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def weights(args: Namespace) -> tuple[TopKRouter, Experts]:
    """The same on every rank and for every system."""
    torch.manual_seed(0)
    return (
        TopKRouter(args.width, args.experts, K, "before", normalized=True, with_bias=True),
        Experts(args.experts, args.width, args.inner),
    )


def ours(args: Namespace, factor: float | None) -> tuple[MoELayer, Callable[[], Tensor]]:
    """The layer, and its down projections' gradient."""
    router, experts = weights(args)
    groups = expert_groups(dist.get_world_size())
    layer = MoELayer(router, keep_own_experts(experts, groups.sharing), groups.sharing, factor)
    return layer, lambda: gradient_of(layer.experts.down_proj)


def gradient_of(parameter: Tensor) -> Tensor:
    """Its gradient, which is there."""
    assert parameter.grad is not None
    return parameter.grad


def deepspeeds(args: Namespace, factor: float | None) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The same of DeepSpeed, all of whose ranks share the experts."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    leave_shared_memory_operator_out()
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    router, experts = weights(args)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with contextlib.redirect_stdout(io.StringIO()):
        layer = MoE(
            args.width,
            Expert(args.width, args.inner),
            args.experts,
            ep_size=ranks,
            k=K,
            capacity_factor=factor or 1.0,
            min_capacity=0,
            drop_tokens=factor is not None,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        layer.set_deepspeed_parallelism()
    inside = layer.deepspeed_moe
    inside.gate.wg.weight.data.copy_(router.weight)
    own = list(inside.experts.deepspeed_experts)
    for place, expert in enumerate(own):
        expert.gate_up.weight.data.copy_(experts.gate_up_proj[rank * len(own) + place])
        expert.down.weight.data.copy_(experts.down_proj[rank * len(own) + place])
    return layer, lambda: torch.stack([gradient_of(expert.down.weight) for expert in own])


def transformers_block(args: Namespace) -> MixtralSparseMoeBlock:
    """Mixtral's, with all experts."""
    router, experts = weights(args)
    sizes = {"hidden_size": args.width, "intermediate_size": args.inner, "num_local_experts": args.experts}
    config = MixtralConfig(**sizes, num_experts_per_tok=K, experts_implementation="grouped_mm")
    block = MixtralSparseMoeBlock(config)
    block.gate.weight = router.weight
    block.experts.gate_up_proj, block.experts.down_proj = experts.gate_up_proj, experts.down_proj
    return block


def whole(args: Namespace) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Transformers' block, whose gradients are summed over the ranks."""
    block, rank, ranks = transformers_block(args), dist.get_rank(), dist.get_world_size()

    def gradient() -> Tensor:
        return gradient_of(block.experts.down_proj).chunk(ranks)[rank]

    return block, gradient


def measure(args: Namespace) -> dict[str, dict[str, Any]]:
    """On this rank, by system: seconds of every round, bytes, difference from one process, dropped, tokens by rank."""
    join_ranks(cpu=True)
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = torch.Generator().manual_seed(1)
    all_tokens = torch.randn(ranks, 1, args.tokens, args.width, generator=numbers)
    all_tokens += 0.5 * torch.randn(args.width, generator=numbers)  # a common part: some experts are popular
    upstream = torch.randn(all_tokens.shape, generator=numbers)
    alone, one = transformers_block(args), all_tokens.flatten(0, 1).requires_grad_()
    alone(one).backward(upstream.flatten(0, 1))
    right = (alone(one).detach()[rank], gradient_of(one)[rank], gradient_of(alone.experts.down_proj).chunk(ranks)[rank])

    systems = {
        OURS: ours(args, None),
        PEER: deepspeeds(args, None),
        CAPPED: ours(args, FACTOR),
        PEER_CAPPED: deepspeeds(args, FACTOR),
        WHOLE: whole(args),
    }
    mine, back = all_tokens[rank].detach().clone().requires_grad_(), upstream[rank]

    def step(name: str) -> Found:
        layer, gradient = systems[name]
        layer.zero_grad()
        mine.grad = None
        result = layer(mine)
        output = result[0] if isinstance(result, tuple) else result
        output.backward(back)
        if name == WHOLE:
            for parameter in layer.parameters():
                dist.all_reduce(gradient_of(parameter))
        else:  # the router's is summed over all ranks; the experts' is whole, as no other rank has the same ones
            dist.all_reduce(next(gradient_of(p) for name, p in layer.named_parameters() if "gate.w" in name))
        return output.detach(), gradient_of(mine), gradient()

    found: dict[str, dict[str, Any]] = {}
    for name, (layer, _) in systems.items():
        got = step(name)
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, right, strict=True))
        if off > CLOSE and name in (OURS, PEER, WHOLE):
            raise RuntimeError(f"{name}: {off:.1e} off one process")
        with Meter() as meter:
            step(name)
        found[name] = {"off": off, "bytes": meter.bytes_sent, "cpu": []}
        if isinstance(layer, MoELayer):
            router = 2 * (ranks - 1) * layer.gate.weight.nbytes // ranks  # its all-reduce
            away, shape = layer.load.away, (ranks, args.experts, args.width, 4)
            found[name] |= {
                "formula": bytes_sent(away, *shape) + bytes_sent(away, *shape, backward=True) + router,
                "dropped": layer.load.dropped,
                "worked": sum(layer.load.per_expert),
            }

    def stretch(name: str) -> None:
        """The steps of a round; notes the processor's seconds, without those of waiting for the other ranks to end."""
        begin = time.process_time()
        for _ in range(args.steps):
            step(name)
        found[name]["cpu"].append((time.process_time() - begin) / args.steps)

    stretches = {name: partial(seconds, partial(stretch, name)) for name in systems}
    for name, taken in in_turns(stretches, args.rounds).items():
        found[name]["seconds"] = [each / args.steps for each in taken]
    found["balance"] = balance(args, mine.detach())
    dist.destroy_process_group()
    return found


def balance(args: Namespace, tokens: Tensor) -> dict[str, list[float]]:
    """Imbalance over all ranks, as a router alone is trained for it: by the auxiliary loss, by the bias, by neither."""
    tokens, curves = tokens.flatten(0, -2), {}
    for way in ("neither", "auxiliary loss and z-loss", "bias"):
        router, _ = weights(args)
        optimizer, curves[way] = torch.optim.Adam(router.parameters(), lr=1e-3), []
        for _ in range(args.balance_steps):
            routing = router(tokens)
            counts = routing.counts
            dist.all_reduce(counts)
            curves[way].append(float(counts.max() * args.experts / counts.sum()))
            if way == "bias":
                router.move_bias(routing.counts, 0.002, group=dist.group.WORLD)
            elif way != "neither":
                optimizer.zero_grad()
                loss = balance_loss(routing, group=dist.group.WORLD) + 1e-3 * z_loss(routing, group=dist.group.WORLD)
                loss.backward()
                dist.all_reduce(gradient_of(router.weight))
                optimizer.step()
    return curves


def rows(found: list[dict[str, dict]]) -> Iterator[tuple]:
    """Rows by system: times of step and processor, ratios to the peer, bytes, formula, dropped, the busiest rank."""
    cpu = {
        name: statistics.median(map(sum, zip(*(one[name]["cpu"] for one in found), strict=True))) for name in AGAINST
    }
    for name, peer in AGAINST.items():
        taken = found[0][name]["seconds"]
        against = spread(ratios(found[0][peer]["seconds"], taken), 2, f" × {peer}") if peer else "1 (the peer)"
        sent = max(one[name]["bytes"] for one in found) / 2**20
        formula = dropped = busiest = ""
        if "formula" in found[0][name]:
            formula = f"{max(one[name]['formula'] for one in found) / 2**20:.2f}"
            dropped = str(sum(one[name]["dropped"] for one in found))
            worked = [one[name]["worked"] for one in found]
            busiest = f"{max(worked) * len(worked) / sum(worked):.2f}"
        by_cpu = f"{cpu[peer] / cpu[name]:.2f}" if peer else "1"
        own = milliseconds(taken), against, f"{1000 * cpu[name]:.1f}", by_cpu
        yield name, *own, f"{sent:.2f}", formula, dropped, busiest


def main() -> None:
    """Measure on real ranks and write the table."""
    sizes = {"tokens": 1024, "width": 256, "inner": 512, "experts": 8}
    args = options(__doc__, num_processes=2, **sizes, rounds=10, steps=1, balance_steps=101)
    found = launch(measure, args, num_processes=args.num_processes, timeout=900, device="cpu")
    off = max(one[name]["off"] for one in found for name in (OURS, PEER, WHOLE))
    waited = statistics.median(
        by_clock / max(1e-9, by_cpu)
        for name in AGAINST
        for by_clock, by_cpu in zip(found[0][name]["seconds"], found[0][name]["cpu"], strict=True)
    )
    publish(
        "experts",
        "Experts: cpu",
        ("torch", "deepspeed", "transformers"),
        f"{args.num_processes} ranks, one thread each; {args.tokens:,} tokens per rank × {args.width}, "
        f"{args.experts} experts with {args.inner} inner numbers, {K} per token, float32, forward and backward, "
        f"gradients summed where ranks share a parameter; {args.rounds} rounds of {args.steps} steps, in turn; "
        f"no round is left out. The dropless layers' outputs and gradients are those of one process (largest "
        f"difference, by the largest number, {off:.1e}). A step takes {waited:.1f} times its own processor's time "
        f"by the clock (the median of all): what is above 1 was spent waiting, for other ranks and for others on "
        f"the machine, and makes the clock's ratios uncertain where it is much.",
        table(
            "layer | step, median (ms) | speed against the peer (range) | processor's time per step, median of the "
            "ranks' sum (ms) | its peer's by it | sent by the rank that sends most, counted (MiB) | by formula (MiB) | "
            "copies dropped | copies that the busiest rank works on, by the mean",
            rows(found),
        ),
        f"Choices of the busiest expert by the mean, where a router alone is trained for balance, in "
        f"{args.balance_steps} steps:",
        table(
            "with | before | after",
            [(way, f"{curve[0]:.2f}", f"{curve[-1]:.2f}") for way, curve in found[0]["balance"].items()],
        ),
    )


if __name__ == "__main__":
    main()
