"""What each rank does in the tests of expert parallelism: it returns what was found, the tests judge."""

import functools
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.metering.meter import Meter
from course_lib.parallel import expert_dispatch
from course_lib.parallel.expert_router import TopKRouter, balance_loss, z_loss
from course_lib.parallel.experts import Experts, MoELayer, average_gradients, expert_groups, keep_own_experts

TOKENS, WIDTH, INNER, EXPERTS, ROWS = 24, 6, 5, 8, 2
BALANCE, Z = 0.1, 0.05


class Case(NamedTuple):
    """A way to route."""

    scoring: str
    normalized: bool
    k: int
    capacity: float | None = None
    shared: bool = False
    biased: bool = False


def model(case, group=None):
    """The layer with all experts, in float64; the same on every rank."""
    torch.manual_seed(5)
    router = TopKRouter(WIDTH, EXPERTS, case.k, case.scoring, case.normalized, with_bias=case.biased)
    if case.biased:
        router.bias += torch.randn(EXPERTS)
    shared = torch.nn.Linear(WIDTH, WIDTH) if case.shared else None
    of_all = Experts(EXPERTS, WIDTH, INNER)
    return router.double(), of_all.double(), shared.double() if shared else None


@functools.cache
def whole():
    """Tokens, and the gradient of each token's output: (TOKENS, WIDTH)."""
    numbers = torch.Generator().manual_seed(7)
    # a common part makes some experts popular
    common = torch.randn(WIDTH, generator=numbers, dtype=torch.float64)
    return (
        torch.randn(TOKENS, WIDTH, generator=numbers, dtype=torch.float64) + common,
        torch.randn(TOKENS, WIDTH, generator=numbers, dtype=torch.float64),
    )


def chosen_by_hand(case, router, logits):
    """(tokens, k) experts and weights, token by token."""
    experts_of, weights_of = [], []
    for row in logits:
        scores = {"before": row.softmax(0), "after": row, "sigmoid": row.sigmoid()}[case.scoring]
        favour = scores if router.bias is None else scores + router.bias
        best = sorted(range(EXPERTS), key=lambda expert, favour=favour: -float(favour[expert]))[: case.k]
        weights = scores[best]
        weights = weights.softmax(0) if case.scoring == "after" else weights
        weights_of.append(weights / weights.sum() if case.normalized else weights)
        experts_of.append(best)
    return experts_of, weights_of


def by_one_process(case, ranks):
    """Output and gradients by name, token by token; the capacity is that of `ranks` ranks with their own tokens."""
    router, of_all, shared = model(case)
    tokens, upstream = whole()
    tokens = tokens.clone().requires_grad_()
    logits = tokens @ router.weight.T
    experts_of, weights_of = chosen_by_hand(case, router, logits)
    output, each = [torch.zeros(WIDTH, dtype=torch.float64) for _ in range(TOKENS)], TOKENS // ranks
    room = torch.inf if case.capacity is None else expert_dispatch.capacity(each, case.k, EXPERTS, case.capacity)
    taken, dropped = {}, [0] * ranks
    for choice in range(case.k):
        for token in range(TOKENS):
            expert, rank = experts_of[token][choice], token // each
            taken[rank, expert] = taken.get((rank, expert), 0) + 1
            if taken[rank, expert] > room:
                dropped[rank] += 1
                continue
            gate, up = (of_all.gate_up_proj[expert] @ tokens[token]).chunk(2)
            output[token] = output[token] + weights_of[token][choice] * (of_all.down_proj[expert] @ (F.silu(gate) * up))
    output = torch.stack(output)
    if shared:
        output = output + shared(tokens)
    share = torch.bincount(torch.tensor(experts_of).flatten(), minlength=EXPERTS).double() / TOKENS
    aux = EXPERTS * (share * logits.softmax(-1).mean(0)).sum()
    loss = (output * upstream).sum(-1).mean() + BALANCE * aux + Z * logits.logsumexp(-1).square().mean()
    loss.backward()
    gradients = {
        "gate.weight": router.weight.grad,
        "experts.gate_up_proj": of_all.gate_up_proj.grad,
        "experts.down_proj": of_all.down_proj.grad,
        "tokens": tokens.grad,
    }
    if shared:
        gradients |= {f"shared.{name}": parameter.grad for name, parameter in shared.named_parameters()}
    return float(loss), output.detach(), gradients, dropped


def by_ranks(case, size):
    """The same on this rank's tokens, with experts shared by `size` ranks; also its layer."""
    rank, ranks, groups = dist.get_rank(), dist.get_world_size(), expert_groups(size)
    router, of_all, shared = model(case)
    layer = MoELayer(router, keep_own_experts(of_all, groups.sharing), groups.sharing, case.capacity, shared)
    tokens, upstream = (part.chunk(ranks)[rank].clone() for part in whole())
    tokens.requires_grad_()
    output = layer(tokens.view(ROWS, -1, WIDTH)).view_as(tokens)
    # A rank's share of a mean over all tokens, times the ranks: average_gradients takes the mean over them.
    loss = (output * upstream).sum(-1).mean() + ranks * (
        BALANCE * balance_loss(layer.routing) + Z * z_loss(layer.routing)
    )
    loss.backward()
    average_gradients(layer, groups)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    return float(mean), output.detach(), gradients | {"tokens": tokens.grad / ranks}, layer


def differences(cases, sizes):
    """The largest difference from one process in loss, output and each gradient, by case and ranks that share."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for case in cases:
        loss, output, gradients, dropped = by_one_process(case, ranks)
        for size in sizes:
            mine, my_output, my_gradients, layer = by_ranks(case, size)
            assert set(my_gradients) == set(gradients)
            assert layer.load.dropped == dropped[rank]
            off = {"loss": abs(mine - loss), "output": float((my_output - output.chunk(ranks)[rank]).abs().max())}
            for name, gradient in my_gradients.items():
                right = gradients[name]
                if name == "tokens":
                    right = right.chunk(ranks)[rank]
                elif name.startswith("experts."):
                    right = right.chunk(size)[rank % size]
                off[name] = float((gradient - right).abs().max())
            found[case, size] = off
    return found


def broken(how, size):
    """As `differences` of one case with one part of the mechanism left out."""
    case = Case("before", True, 2)

    average = average_gradients

    def unscaled(layer, groups):  # the mean over the ranks that have the same experts
        average(layer, groups)
        for parameter in layer.experts.parameters():
            parameter.grad *= size

    def alone(layer, groups):  # the router's gradient of this rank's tokens
        own = layer.gate.weight.grad.clone()
        average(layer, groups)
        layer.gate.weight.grad = own

    def in_order_of_arrival(self, outputs, weights, to_tokens=expert_dispatch.Dispatch.to_tokens):
        return to_tokens(self, outputs.index_select(0, self.order), weights)

    patches = {
        "unscaled": mock.patch.dict(globals(), average_gradients=unscaled),
        "alone": mock.patch.dict(globals(), average_gradients=alone),
        "order": mock.patch.object(expert_dispatch.Dispatch, "to_tokens", in_order_of_arrival),
    }
    with patches[how]:
        return differences([case], [size])[case, size]


def metered(size):
    """Bytes of a forward and a backward in float32 by meter, and what the formula says of them."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    groups = expert_groups(size)
    found = []
    for factor in (None, 0.5):
        router, of_all, _ = model(Case("before", True, 2))
        layer = MoELayer(router, keep_own_experts(of_all, groups.sharing), groups.sharing, factor).float()
        tokens = whole()[0].chunk(dist.get_world_size())[dist.get_rank()].float().requires_grad_()
        with Meter() as forward:
            output = layer(tokens)
        with Meter() as backward:
            output.sum().backward()
        formula = [
            expert_dispatch.bytes_sent(layer.load.away, size, EXPERTS, WIDTH, 4, backward=back)
            for back in (False, True)
        ]
        found.append(([forward.bytes_sent, backward.bytes_sent], formula, layer.load.away, layer.load.dropped))
    return found


def evened(steps):
    """Imbalance before and after so many moves of the bias on tokens that all look alike."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    router, *_ = model(Case("sigmoid", True, 2, biased=True))
    router.bias.zero_()
    tokens = whole()[0].chunk(ranks)[rank]
    imbalances = []
    for _ in range(steps + 1):
        counts = router(tokens).counts
        total = counts.clone()
        dist.all_reduce(total)
        imbalances.append(float(total.max() * EXPERTS / total.sum()))
        router.move_bias(counts, 0.02)
    return imbalances, router.bias.tolist()
