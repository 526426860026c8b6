"""The auxiliary loss of routers beside transformers' own, padding and filler left out."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from course_lib.errors import ConfigError
from course_lib.modeling.inputs import WholeSequences
from course_lib.training.router_loss import RouterLoss
from tests.modeling.test_mixtures import CONFIGS, model

WHOLE, ALONE = WholeSequences("causal_lm"), SimpleNamespace(sum=lambda numbers: numbers, own_part=lambda own: own)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_transformers_of_the_mean_layer_and_padding_and_filler_do_not_count(name):
    trained = model(name).train()
    ids = torch.randint(2, 50, (3, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels = ids.clone()
    labels[2] = -100
    counted = mask * torch.tensor([1, 1, 0])[:, None]  # the last row is filler
    loss = RouterLoss(trained, 0.1)
    logits = trained(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).router_logits
    theirs = torch.stack([load_balancing_loss_func((layer,), 4, 2, counted) for layer in logits]).mean()
    ours = loss.share({"input_ids": ids, "attention_mask": mask, "labels": labels}, WHOLE, ALONE)
    assert ours.item() == pytest.approx(0.1 * theirs.item(), rel=1e-5) and len(logits) == 2
    for wrong in (mask, None):
        of_all = torch.stack([load_balancing_loss_func((layer,), 4, 2, wrong) for layer in logits]).mean()
        assert ours.item() != pytest.approx(0.1 * of_all.item(), rel=1e-5)
    gradients = [
        torch.autograd.grad(of, trained.model.layers[0].mlp.gate.weight, retain_graph=True)[0]
        for of in (ours, 0.1 * theirs)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)
    assert loss.take() == pytest.approx(theirs.item(), rel=1e-5) and loss.take() == 0.0


def test_a_micro_batch_of_filler_alone_has_none():
    trained = model("mixtral").train()
    loss = RouterLoss(trained, 0.1)
    ids = torch.ones(1, 4, dtype=torch.long)
    trained(input_ids=ids)
    assert (
        loss.share({"input_ids": ids, "attention_mask": ids, "labels": torch.full((1, 4), -100)}, WHOLE, ALONE).item()
        == 0
    )


def test_a_dense_model_has_none():
    dense = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, pad_token_id=0
        )
    )
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no router"):
        RouterLoss(dense, 0.1)
