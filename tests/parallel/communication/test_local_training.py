"""LocalSGD and DiLoCo on real ranks, each against its definition in one process, data parallelism and torch's.

In float64, so that the order of a sum shows in the 16th digit only.
"""

import pytest
import torch

from course_lib.launching.launch import launch
from course_lib.parallel.communication.diloco import strided_fragments
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


def outer_steps(every, ranks, fragments=1, overlap=0, keep=0.0):
    """DiLoCo with torch's own SGD as the outer optimizer, and every fragment by itself."""
    shared = model()
    names = {parameter: name for name, parameter in shared.named_parameters()}
    parts = [[names[p] for p in part] for part in strided_fragments(shared, fragments)]
    outers = [
        torch.optim.SGD([shared.get_parameter(name) for name in part], lr=0.7, momentum=0.9, nesterov=True)
        for part in parts
    ]
    under_way = {}

    @torch.no_grad()
    def agree(models, step):
        for number, (part, outer) in enumerate(zip(parts, outers, strict=True)):
            place = (step + number * every // fragments) % every
            if place == 0:
                under_way[number] = [
                    sum(shared.get_parameter(name) - net.get_parameter(name) for net in models) / ranks for name in part
                ]
            if place == overlap and number in under_way:
                for name, change in zip(part, under_way.pop(number), strict=True):
                    shared.get_parameter(name).grad = change
                outer.step()
                for net in models:
                    for name in part:
                        own = net.get_parameter(name)
                        own.copy_(keep * own + (1 - keep) * shared.get_parameter(name))

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


@pytest.mark.parametrize(("fragments", "overlap", "keep"), [(2, 0, 0.0), (2, 2, 0.5), (4, 1, 0.0), (1, 3, 0.5)])
def test_streaming_diloco_is_its_definition(fragments, overlap, keep):
    options = {"sync_every": 4, "overlap": overlap, "keep": keep, "fragments": fragments}
    mine = run(local_cases.diloco, options, adamw, 13)
    theirs = in_one_process(2, adamw, 13, outer_steps(4, 2, fragments, overlap, keep))
    assert max(map(furthest, mine, theirs)) < 1e-12
    whole = run(local_cases.diloco, {"sync_every": 4}, adamw, 13)
    assert furthest(mine[0], whole[0]) > 1e-3


def test_in_one_fragment_without_overlap_it_is_diloco():
    whole = run(local_cases.diloco, {"sync_every": 3}, adamw, 7)
    one = run(local_cases.diloco, {"sync_every": 3, "keep": 0.5}, adamw, 7)
    assert max(map(furthest, whole, one)) < 1e-13


def test_quantized_outer_gradients_are_near_and_the_ranks_agree():
    plain = run(local_cases.diloco, {"sync_every": 3}, adamw, 6)
    for bits, near in ((8, 1e-3), (4, 3e-2)):
        rounded = run(local_cases.diloco, {"sync_every": 3, "bits": bits}, adamw, 6)
        assert torch.equal(rounded[0][-1], rounded[1][-1])
        assert 0 < (rounded[0][-1] - plain[0][-1]).abs().max().item() < near


def test_fragments_are_strided():
    net = model()
    parts = strided_fragments(net, 2)
    names = {parameter: name for name, parameter in net.named_parameters()}
    assert [[names[p].removesuffix(".weight") for p in part if p.ndim == 2] for part in parts] == [
        ["blocks.0", "blocks.2"],
        ["first", "blocks.1", "blocks.3", "last"],
    ]
    assert sum(map(len, parts)) == 12


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
        for sent, (elements,) in run(local_cases.bytes_of_steps, {"sync_every": 3} | kind, 7, ranks=ranks):
            assert sent == [all_reduce_bytes(8 * elements, ranks) if step in (2, 5) else 0 for step in range(7)]
    # Fragment 0 at steps 4, 8, …, fragment 1 half a period later; a peak of half the bytes.
    streaming = {"sync_every": 4, "overlap": 1, "keep": 0.5, "fragments": 2}
    for sent, (first, second) in run(local_cases.bytes_of_steps, streaming, 8, ranks=ranks):
        one, two = (all_reduce_bytes(8 * elements, ranks) for elements in (first, second))
        assert sent == [0, two, 0, one, 0, two, 0, one]


@pytest.mark.parametrize("options", [{"averaging": True}, {}, {"overlap": 2, "keep": 0.5, "fragments": 2}])
def test_what_was_saved_in_the_middle_of_a_period_goes_on_with_the_same_bits(options):
    # After 5 steps of a period of 4, a fragment sent at step 4 is still under way with an overlap of 2.
    for undisturbed, loaded, without in run(local_cases.resumed, {"sync_every": 4} | options, 5):
        assert torch.equal(undisturbed, loaded)
        assert (undisturbed - without).abs().max() > 1e-4


def test_what_cannot_be_is_refused():
    for said in run(local_cases.refusals):
        assert [line.partition(":")[0] for line in said] == [
            "ranks that agree every 0 steps",
            "an overlap of 3 steps in a period of 3",
            "fragments with 1 parameters for a model that trains 12",
            "5 fragments of a model with 4 blocks",
        ], said
