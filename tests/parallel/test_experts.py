"""Expert parallelism against one process, token by token: routing, dispatch, capacity, gradients, bytes, balance."""

import itertools

import pytest
import torch

from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.parallel.expert_dispatch import capacity
from course_lib.parallel.expert_router import TopKRouter
from course_lib.parallel.experts import Experts, Load, MoELayer, expert_groups
from tests.parallel import expert_cases
from tests.parallel.expert_cases import EXPERTS, WIDTH, Case

CASES = [
    *(
        Case(scoring, normalized, k)
        for scoring, normalized, k in itertools.product(("before", "after", "sigmoid"), (False, True), (1, 3))
    ),
    Case("before", True, 2, capacity=0.5),
    Case("before", False, 2, capacity=1.25, shared=True),
    Case("sigmoid", True, 2, biased=True, shared=True),
]
SIZES = {1: (1,), 2: (1, 2), 4: (1, 2, 4)}
"""By number of ranks: how many of them share the experts."""


@pytest.mark.parametrize("ranks", SIZES)
def test_loss_outputs_and_every_gradient_are_those_of_one_process(ranks):
    for found in launch(expert_cases.differences, CASES, SIZES[ranks], num_processes=ranks, timeout=400):
        assert len(found) == len(CASES) * len(SIZES[ranks])
        assert {case: off for case, off in found.items() if not max(off.values()) < 1e-12} == {}


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ("unscaled", {"experts.gate_up_proj", "experts.down_proj"}),
        ("alone", {"gate.weight"}),
        ("order", {"loss", "output", "gate.weight", "experts.gate_up_proj", "experts.down_proj", "tokens"}),
    ],
)
def test_without_a_part_of_the_mechanism_it_differs_there_and_only_there(how, wrong):
    for found in launch(expert_cases.broken, how, 2, num_processes=2, timeout=400):
        assert {name for name, off in found.items() if off > 1e-3} == wrong
        assert all(off < 1e-12 for name, off in found.items() if name not in wrong)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_sent_is_the_formula(ranks):
    results = launch(expert_cases.metered, ranks, num_processes=ranks, timeout=400)
    for (all_sent, formula, away, dropped), (some_sent, some_formula, fewer, lost) in results:
        assert all_sent == formula and some_sent == some_formula
        assert dropped == 0 < lost and fewer < away
    costs = {found[0][0][0] for found in results}
    assert ranks == 2 or len(costs) > 1  # the router is uneven, and so is what it costs; between two it is one sum


def test_the_bias_evens_the_load_without_a_loss():
    results = launch(expert_cases.evened, 60, num_processes=2, timeout=400)
    for imbalances, bias in results:
        assert imbalances[0] > 2 > 1.5 > min(imbalances[-5:])
        assert bias == results[0][1]  # moved by all ranks' counts, so the same on every rank


def test_before_and_after_agree_once_the_weights_are_divided_by_their_sum():
    torch.manual_seed(0)
    before, after, plain = (
        TopKRouter(WIDTH, EXPERTS, 2, *rules).double()
        for rules in (("before", True), ("after", False), ("before", False))
    )
    after.weight = plain.weight = before.weight
    tokens = torch.randn(9, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(before(tokens).weights, after(tokens).weights)
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


def refusals():
    torch.distributed.init_process_group("gloo")
    said = []
    for wrong in (
        lambda: expert_groups(3),
        lambda: TopKRouter(4, 2, 3),
        lambda: TopKRouter(4, 2, 1).move_bias(None, 1),
        lambda: MoELayer(TopKRouter(4, 6, 1), Experts(2, 4, 4)),
    ):
        with pytest.raises(ConfigError) as error:
            wrong()
        said.append(str(error.value))
    return said


def test_what_does_not_fit_is_refused():
    said = launch(refusals, num_processes=2, timeout=400)[0]
    assert "2 ranks cannot form groups of 3 that share the experts: use a size that divides 2" in said[0]
    assert "cannot go to 3 of 2 experts" in said[1] and "has no bias to move" in said[2]
    assert "2 ranks with 2 experts each do not hold the router's 6" in said[3]
