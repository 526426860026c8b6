"""Whether DDP has to look for parameters without a gradient is seen before it wraps a model."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from course_lib.training.optimization import parameter_groups
from course_lib.training.unused_parameters import leave_undecayed, may_leave_out, never_reached, reached
from testing import tiny_architectures


@pytest.mark.parametrize(
    ("architecture", "task", "leaves_out"),
    [
        ("bert", "classification", False),
        ("bert", "masked_lm", False),
        ("gpt2", "causal_lm", False),
        ("t5", "classification", False),
        ("bart", "classification", False),
        ("xlnet", "classification", True),
        ("xlnet", "causal_lm", True),
        ("roformer", "masked_lm", True),
        ("squeezebert", "masked_lm", True),
        ("mixtral", "causal_lm", True),
        ("opt", "causal_lm", False),
    ],
)
def test_a_forward_of_a_few_tokens_shows_it(architecture, task, leaves_out):
    model = tiny_architectures.build(CONFIG_MAPPING[architecture], task).train().requires_grad_(True)
    before = torch.get_rng_state()
    assert may_leave_out(model) == leaves_out
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dropped_layers_and_models_that_take_no_such_row_are_looked_at():
    opt = tiny_architectures.build(CONFIG_MAPPING["opt"], "causal_lm")
    opt.config.layerdrop = 0.1
    assert may_leave_out(opt)
    gpt2 = tiny_architectures.build(CONFIG_MAPPING["gpt2"], "causal_lm")
    gpt2.transformer.wpe = torch.nn.Embedding(2, 32)  # positions for two tokens
    assert may_leave_out(gpt2)


def test_what_a_backward_reaches():
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    assert reached((used * 2).sum() + unused.detach().sum()) == {used}


def test_what_no_loss_reaches_does_not_decay_where_its_gradient_is_taken_for_zeros():
    model = tiny_architectures.build(CONFIG_MAPPING["xlnet"], "causal_lm")
    unused = never_reached(model)
    assert unused and all(parameter.any() for parameter in unused)
    for is_left, moves in ((False, True), (True, False)):
        optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=0.1)
        if is_left:
            leave_undecayed(optimizer, unused)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = {parameter: parameter.detach().clone() for parameter in unused}
        optimizer.step()
        assert any(not torch.equal(parameter, value) for parameter, value in before.items()) == moves
