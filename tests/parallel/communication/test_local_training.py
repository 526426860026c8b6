"""LocalSGD and DiLoCo on real ranks, each against its definition in one process, data parallelism and torch's.

In float64, so that the order of a sum shows in the 16th digit only.
"""

import pytest
import torch

from course_lib.launching.launch import launch
from course_lib.parallel.communication.hooks import all_reduce_bytes
from tests.parallel.communication import local_cases
from tests.parallel.communication.local_cases import adamw, batch, model, sgd, weights


def run(function, *args, ranks=2, **options):
    return launch(function, *args, num_processes=ranks, timeout=240, **options)


def furthest(mine, theirs):
    return max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))


def in_one_process(ranks, make_optimizer, number, agree):
    """N models in turn; ``agree(models, step)`` after each round. The weights of each rank, step by step."""
    models = [model() for _ in range(ranks)]
    optimizers = [make_optimizer([p for p in net.parameters() if p.requires_grad]) for net in models]
    history = [[] for _ in models]
    for step in range(number):
        for rank, (net, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x, y = batch(step, rank)
            (net(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        agree(models, step + 1)
        for rank, net in enumerate(models):
            history[rank].append(weights(net))
    return history


def averaging(every):
    @torch.no_grad()
    def agree(models, step):
        if step % every == 0:
            for parameters in zip(*(net.parameters() for net in models), strict=True):
                mean = sum(parameters) / len(models)
                for parameter in parameters:
                    parameter.copy_(mean)

    return agree


# --- LocalSGD ---


@pytest.mark.parametrize("ranks", [2, 3])
def test_local_sgd_is_local_training_with_means(ranks):
    histories = run(local_cases.local_sgd, 3, adamw, 7, ranks=ranks)
    expected = in_one_process(ranks, adamw, 7, averaging(3))
    for mine, theirs in zip(histories, expected, strict=True):
        assert furthest(mine, theirs) < 1e-12
    for step in range(7):
        apart = (histories[0][step] - histories[1][step]).abs().max().item()
        assert apart == 0 if step in (2, 5) else apart > 1e-3, step


def test_at_h_1_local_sgd_is_data_parallelism_with_plain_sgd_alone():
    parallel = run(local_cases.data_parallel, sgd, 4)
    assert furthest(run(local_cases.local_sgd, 1, sgd, 4)[0], parallel[0]) < 1e-13
    assert furthest(run(local_cases.local_sgd, 2, sgd, 4)[0], parallel[0]) > 1e-3
    # AdamW's step is not linear in the gradient: the mean of two steps is not the step of the mean.
    assert furthest(run(local_cases.local_sgd, 1, adamw, 4)[0], run(local_cases.data_parallel, adamw, 4)[0]) > 1e-3


def test_local_sgd_is_torchs():
    for mine, theirs in zip(
        run(local_cases.local_sgd, 3, adamw, 7), run(local_cases.torchs_local_sgd, 3, 7), strict=True
    ):
        assert furthest(mine, theirs) < 1e-13


# --- DiLoCo ---


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_at_h_1_diloco_is_one_process_with_nesterov(momentum):
    """Sign and scale of the outer gradient: with inner SGD it is lr times the gradient of the whole batch."""
    options = {"sync_every": 1, "outer_lr": 0.7, "outer_momentum": momentum}
    for mine in run(local_cases.diloco, options, sgd, 5):
        net = model()
        outer = torch.optim.SGD(
            [p for p in net.parameters() if p.requires_grad], lr=0.02 * 0.7, momentum=momentum, nesterov=momentum > 0
        )
        theirs = []
        for step in range(5):
            sum((net(x) - y).square().mean() / 2 for x, y in (batch(step, 0), batch(step, 1))).backward()
            outer.step()
            outer.zero_grad()
            theirs.append(weights(net))
        assert furthest(mine, theirs) < 1e-13
        start = weights(model())
        assert (mine[0] - start).dot(theirs[0] - start) > 0 and (mine[0] - start).norm() > 1e-3


def outer_steps(every, ranks):
    """DiLoCo with torch's own SGD as the outer optimizer."""
    shared = model()
    trained = [name for name, parameter in shared.named_parameters() if parameter.requires_grad]
    outer = torch.optim.SGD([shared.get_parameter(name) for name in trained], lr=0.7, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def agree(models, step):
        if step % every:
            return
        for name in trained:
            parameter = shared.get_parameter(name)
            parameter.grad = sum(parameter - net.get_parameter(name) for net in models) / ranks
        outer.step()
        for net in models:
            for name in trained:
                net.get_parameter(name).copy_(shared.get_parameter(name))

    return agree


@pytest.mark.parametrize("ranks", [2, 3])
def test_diloco_is_local_training_with_torchs_nesterov_outside(ranks):
    mine = run(local_cases.diloco, {"sync_every": 3}, adamw, 7, ranks=ranks)
    theirs = in_one_process(ranks, adamw, 7, outer_steps(3, ranks))
    assert max(map(furthest, mine, theirs)) < 1e-12
    assert furthest(mine[0], run(local_cases.local_sgd, 3, adamw, 7, ranks=ranks)[0]) > 1e-2


def test_with_a_rate_of_1_and_no_momentum_diloco_is_local_sgd():
    mine = run(local_cases.diloco, {"sync_every": 3, "outer_lr": 1.0, "outer_momentum": 0.0}, adamw, 7)
    theirs = run(local_cases.local_sgd, 3, adamw, 7)
    assert max(map(furthest, mine, theirs)) < 1e-13


def test_quantized_outer_gradients_are_near_and_the_ranks_agree():
    plain = run(local_cases.diloco, {"sync_every": 3}, adamw, 6)
    for bits, near in ((8, 1e-3), (4, 3e-2)):
        rounded = run(local_cases.diloco, {"sync_every": 3, "bits": bits}, adamw, 6)
        assert torch.equal(rounded[0][-1], rounded[1][-1])
        assert 0 < (rounded[0][-1] - plain[0][-1]).abs().max().item() < near


# --- agreement, bytes, state ---


@pytest.mark.parametrize("kind", [{"averaging": True}, {}])
def test_within_agreed_all_ranks_are_alike_and_after_it_themselves(kind):
    (own, within, restored), (others_own, others, other_restored) = run(local_cases.agreement, kind)
    assert torch.equal(within, others) and restored and other_restored and not torch.equal(own, others_own)
    if kind:
        assert torch.allclose(within, (own + others_own) / 2, rtol=0, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_sent_is_the_formula(ranks):
    for kind in ({"averaging": True}, {}):
        for sent, elements in run(local_cases.bytes_of_steps, {"sync_every": 3} | kind, 7, ranks=ranks):
            assert sent == [all_reduce_bytes(8 * elements, ranks) if step in (2, 5) else 0 for step in range(7)]


@pytest.mark.parametrize("options", [{"averaging": True}, {}])
def test_what_was_saved_in_the_middle_of_a_period_goes_on_with_the_same_bits(options):
    for undisturbed, loaded, without in run(local_cases.resumed, {"sync_every": 4} | options, 5):
        assert torch.equal(undisturbed, loaded)
        assert (undisturbed - without).abs().max() > 1e-4


def test_a_period_of_no_steps_is_refused():
    assert run(local_cases.refusal) == ["ranks that agree every 0 steps: use 1 or more"] * 2
