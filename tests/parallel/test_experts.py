"""Expert parallelism against one process, token by token: routing, dispatch, capacity, gradients, bytes, balance."""

import functools
import itertools
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.testing import assert_close

from course_lib.errors import ConfigError
from course_lib.metering.meter import Meter
from course_lib.parallel import expert_dispatch
from course_lib.parallel.expert_dispatch import capacity
from course_lib.parallel.expert_router import TopKRouter, balance_loss, z_loss
from course_lib.parallel.experts import Experts, Load, MoELayer, average_gradients, expert_groups, keep_own_experts
from tests.parallel.between_ranks import here, spread
from tests.ranks import on_ranks

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


CASES = [
    *itertools.starmap(Case, itertools.product(("before", "after", "sigmoid"), (False, True), (1, 3))),
    Case("before", True, 2, capacity=0.5),
    Case("before", False, 2, capacity=1.25, shared=True),
    Case("sigmoid", True, 2, biased=True, shared=True),
]


def model(case):
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


@functools.cache
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
    (rank, ranks), groups = here(), expert_groups(size)
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


def differences(case, size):
    """The largest difference from one process in loss, output and each gradient, with `size` ranks that share."""
    rank, ranks = here()
    loss, output, gradients, dropped = by_one_process(case, ranks)
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
    return off


@on_ranks(1, 2, 4)
def test_loss_outputs_and_every_gradient_are_those_of_one_process():
    for case, size in itertools.product(CASES, (1, 2, 4)):
        if size <= dist.get_world_size():
            off = differences(case, size)
            assert max(off.values()) < 1e-12, (case, size, off)


def unscaled(layer, groups, average=average_gradients):
    """The mean over the ranks that have the same experts."""
    average(layer, groups)
    for parameter in layer.experts.parameters():
        parameter.grad *= 2


def alone(layer, groups, average=average_gradients):
    """The router's gradient of this rank's tokens."""
    own = layer.gate.weight.grad.clone()
    average(layer, groups)
    layer.gate.weight.grad = own


def in_order_of_arrival(self, outputs, weights, to_tokens=expert_dispatch.Dispatch.to_tokens):
    return to_tokens(self, outputs.index_select(0, self.order), weights)


@pytest.mark.parametrize(
    ("patch", "wrong"),
    [
        (mock.patch.dict(globals(), average_gradients=unscaled), {"experts.gate_up_proj", "experts.down_proj"}),
        (mock.patch.dict(globals(), average_gradients=alone), {"gate.weight"}),
        (
            mock.patch.object(expert_dispatch.Dispatch, "to_tokens", in_order_of_arrival),
            {"loss", "output", "gate.weight", "experts.gate_up_proj", "experts.down_proj", "tokens"},
        ),
    ],
    ids=["unscaled", "alone", "order"],
)
@on_ranks(2)
def test_without_a_part_of_the_mechanism_it_differs_there_and_only_there(patch, wrong):
    with patch:
        off = differences(Case("before", True, 2), 2)
    assert {name for name, distance in off.items() if distance > 1e-3} == wrong
    assert {name for name, distance in off.items() if distance > 1e-12} == wrong


@on_ranks(2, 4)
def test_what_is_sent_is_the_formula():
    """In float32; without a capacity, and with one that drops tokens."""
    (rank, size), loads, sent = here(), [], []
    groups = expert_groups(size)
    for factor in (None, 0.5):
        router, of_all, _ = model(Case("before", True, 2))
        layer = MoELayer(router, keep_own_experts(of_all, groups.sharing), groups.sharing, factor).float()
        tokens = whole()[0].chunk(size)[rank].float().requires_grad_()
        with Meter() as forward:
            output = layer(tokens)
        with Meter() as backward:
            output.sum().backward()
        load = layer.load
        formula = functools.partial(expert_dispatch.bytes_sent, load.away, size, EXPERTS, WIDTH, 4)
        assert (forward.bytes_sent, backward.bytes_sent) == (formula(backward=False), formula(backward=True))
        loads.append(load)
        sent.append(forward.bytes_sent)
    assert loads[0].dropped == 0 < loads[1].dropped and loads[1].away < loads[0].away
    # The router is uneven, and so is what it costs; between two it is one sum.
    assert size == 2 or spread([torch.tensor(sent[:1])]) > 0


@on_ranks(2)
def test_the_bias_evens_the_load_without_a_loss():
    """On tokens that all look alike."""
    rank, ranks = here()
    router, *_ = model(Case("sigmoid", True, 2, biased=True))
    router.bias.zero_()
    imbalances = []
    for _ in range(61):
        counts = router(whole()[0].chunk(ranks)[rank]).counts
        total = counts.clone()
        dist.all_reduce(total)
        imbalances.append(float(total.max() * EXPERTS / total.sum()))
        router.move_bias(counts, 0.02)
    assert imbalances[0] > 2 > 1.5 > min(imbalances[-5:])
    assert spread([router.bias]) == 0  # moved by all ranks' counts, so the same on every rank


def test_before_and_after_agree_once_the_weights_are_divided_by_their_sum():
    torch.manual_seed(0)
    before, after, plain = (
        TopKRouter(WIDTH, EXPERTS, 2, *rules).double()
        for rules in (("before", True), ("after", False), ("before", False))
    )
    after.weight = plain.weight = before.weight
    tokens = torch.randn(9, WIDTH, dtype=torch.float64)
    assert_close(before(tokens).weights, after(tokens).weights)
    assert (plain(tokens).weights.sum(-1) < 0.99).all()


def test_experts_begin_with_outputs_of_the_inputs_size():
    torch.manual_seed(0)
    experts = Experts(4, width=256, inner=512)
    assert experts.gate_up_proj.std().item() == pytest.approx(256**-0.5, rel=0.02)
    assert experts.down_proj.std().item() == pytest.approx(512**-0.5, rel=0.02)
    assert max(each.mean().abs().item() for each in experts.parameters()) < 1e-3


def test_capacity_and_imbalance():
    assert capacity(24, 2, 8, 1.0) == 6 and capacity(24, 2, 8, 1.25) == 8
    assert Load(torch.tensor([6, 2, 0, 0]), [], 0, 0).imbalance == 3.0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: expert_groups(3), "2 ranks cannot form groups of 3 that share the experts: use a size that divides 2"),
        (lambda: TopKRouter(4, 2, 3), "cannot go to 3 of 2 experts"),
        (lambda: TopKRouter(4, 2, 1).move_bias(None, 1), "has no bias to move"),
        (lambda: MoELayer(TopKRouter(4, 6, 1), Experts(2, 4, 4)), "with 2 experts each do not hold the router's 6"),
    ],
)
@on_ranks(2)
def test_what_does_not_fit_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        wrong()
