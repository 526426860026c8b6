"""The meters of a step: exact on small modules whose tensors can be counted by hand, and silent about the result."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.config import build
from course_lib.lessons.basic_loop.lab import (
    SavedForBackward,
    bytes_by_kind,
    gradient,
    padding_share,
    relative_difference,
    seconds_by_turns,
    watch_memory,
)
from course_lib.training.run import build_trainer

ROWS, WIDTH = 8, 16
FLOAT = 4


def test_bytes_of_weights_gradients_and_adam():
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    weights = FLOAT * (WIDTH * WIDTH + WIDTH)
    assert bytes_by_kind(model, optimizer) == {"parameters": weights, "gradients": 0, "optimizer states": 0}
    model(torch.ones(ROWS, WIDTH)).sum().backward()
    optimizer.step()
    steps = 2 * FLOAT  # a count of steps for the weight and one for the bias
    assert bytes_by_kind(model, optimizer) == {
        "parameters": weights,
        "gradients": weights,
        "optimizer states": 2 * weights + steps,
    }


def test_a_tied_weight_counts_once():
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)])
    apart = bytes_by_kind(model, torch.optim.SGD(model.parameters()))["parameters"]
    model[1].weight = model[0].weight
    assert bytes_by_kind(model, torch.optim.SGD(model.parameters()))["parameters"] == apart // 2


def test_saved_tensors_are_counted_once_and_let_go_by_backward():
    """Each Linear saves its input, the ReLU its output; the last two inputs and the ReLU's output are one storage."""
    model = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 3), nn.Linear(2 * WIDTH, 3)])
    saved = SavedForBackward(model)
    with saved:
        hidden = model[0](torch.ones(ROWS, WIDTH)).relu()
        loss = (model[1](hidden) + model[2](hidden)).sum()
    assert saved.bytes == FLOAT * ROWS * (WIDTH + 2 * WIDTH) == sum(size for *_, size in saved.kept)
    assert [shape for shape, *_ in saved.kept] == [(ROWS, WIDTH), (ROWS, 2 * WIDTH)]
    loss.backward()
    assert saved.bytes == 0


def test_checkpointing_leaves_the_input_only():
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    inputs = torch.ones(ROWS, WIDTH, requires_grad=True)
    plain, checkpointed = SavedForBackward(model), SavedForBackward(model)
    with plain:
        kept = model(inputs)
    with checkpointed:
        recomputed = checkpoint(model, inputs, use_reentrant=False)
    assert plain.bytes == FLOAT * ROWS * (WIDTH + 2 * 4 * WIDTH)
    assert checkpointed.bytes == FLOAT * ROWS * WIDTH
    assert torch.equal(kept, recomputed)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    options = {"model": "tiny-bert", "training_type": "basic", "max_train_samples": 48, "max_eval_samples": 16}
    options |= {"max_length": 16, "batch_size": 4, "mixed_precision": "no", "lr_scheduler": "constant"}
    return build_trainer(build(options | {"output_dir": str(tmp_path_factory.mktemp("run"))}))[0]


def two_batches(trainer):
    return [batch for batch, _ in zip(trainer.train_loader, range(2), strict=False)]


def test_the_timeline_of_two_steps(trainer):
    before, phases = {name: value.clone() for name, value in trainer.model.state_dict().items()}, trainer.phases
    torch.manual_seed(0)
    moments, losses = watch_memory(trainer, two_batches(trainer))
    assert trainer.phases is phases
    assert list(dict.fromkeys(m.phase for m in moments)) == ["forward", "backward", "optimizer"]
    assert [m.seconds for m in moments] == sorted(m.seconds for m in moments)
    weights = sum(p.nbytes for p in trainer.model.parameters())
    ends = [this for this, after in zip(moments, [*moments[1:], moments[0]], strict=True) if this.phase != after.phase]
    forward, backward, optimizer, second_forward, second_backward, _ = (m.held for m in ends)
    assert {m.held["parameters"] for m in moments} == {weights}
    assert forward["gradients"] == forward["optimizer states"] == 0 < forward["activations"]
    assert backward["gradients"] == weights and backward["activations"] == 0
    assert optimizer["gradients"] == 0 and optimizer["optimizer states"] >= 2 * weights
    assert second_forward["optimizer states"] == second_backward["optimizer states"] == optimizer["optimizer states"]

    # The meter changes nothing: the same two steps again, unwatched, from the same start.
    seen = len(moments)
    trainer.model.load_state_dict(before)
    trainer.optimizer.state.clear()
    torch.manual_seed(0)
    assert [trainer.train_step([batch])[0].item() for batch in two_batches(trainer)] == losses
    assert len(moments) == seen


def test_turns_are_taken_one_after_the_other(trainer):
    order, phases = [], trainer.phases
    first, second = two_batches(trainer)
    seconds = seconds_by_turns(trainer, {"one": [first, second], "other": [first, second]}, prepare=order.append)
    assert order == ["one", "other"] * 2 and trainer.phases is phases
    assert list(seconds) == ["one", "other"]
    for turns in seconds.values():
        assert [set(turn) for turn in turns] == [{"forward", "backward", "optimizer"}] * 2
        assert min(min(turn.values()) for turn in turns) > 0


def test_the_gradient_over_micro_batches(trainer):
    """Filler rows have no targets, so three rows and one are unlike micro-batches; two and two are alike."""
    batch = two_batches(trainer)[0]
    uneven = batch | {"labels": torch.tensor([0, 1, 2, -100])}
    halves = [{name: tensor[part] for name, tensor in uneven.items()} for part in (slice(0, 2), slice(2, 4))]
    large = gradient(trainer, [uneven])
    assert relative_difference(gradient(trainer, halves), large) < 1e-5
    assert relative_difference(gradient(trainer, halves, "micro_batch"), large) > 1e-2
    alike = [{name: tensor[part] for name, tensor in batch.items()} for part in (slice(0, 2), slice(2, 4))]
    assert relative_difference(gradient(trainer, alike, "micro_batch"), gradient(trainer, [batch])) < 1e-5
    assert trainer.config.run.loss_weighting == "token" and all(p.grad is None for p in trainer.model.parameters())


def test_padding_share_by_hand():
    lengths = np.array([2, 4, 3, 3])
    assert padding_share(lengths, [[0, 1], [2, 3]]) == pytest.approx(1 - 12 / 14)
    assert padding_share(lengths, [[0, 1, 2, 3]]) == pytest.approx(1 - 12 / 16)
    assert padding_share(lengths, [[2, 3]]) == 0
