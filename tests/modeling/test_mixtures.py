"""Blocks of experts of transformers' models, replaced by the textbook's: equal to them, on one rank and on two."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, OlmoeConfig

from course_lib.errors import ModelError
from course_lib.modeling.mixtures import ExpertCounts, spread_experts
from course_lib.parallel.experts import average_gradients, expert_groups
from tests.ranks import on_ranks

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "eos_token_id": 1}
CONFIGS = {
    "olmoe": lambda: OlmoeConfig(**SIZES, num_experts=4),
    "olmoe, normalized": lambda: OlmoeConfig(**SIZES, num_experts=4, norm_topk_prob=True),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
}


def model(name):
    torch.manual_seed(2)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), experts_implementation="eager").double()


def stepped(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def furthest(name, scoring="before"):
    """The largest difference of loss and gradients from transformers' on one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = expert_groups(ranks)
    ids = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(1))
    loss, gradients = stepped(model(name), ids)
    ours = model(name)
    layers = spread_experts(ours, groups.sharing)
    assert len(layers) == 2
    for layer in layers:
        layer.gate.scoring = scoring
    counts = ExpertCounts(ours)
    my_loss, mine = stepped(ours, ids.chunk(ranks)[rank])
    average_gradients(ours, groups)
    chosen, dropped = counts.take()
    assert chosen.sum(1).tolist() == [4 * 8 * 2 // ranks] * 2 and dropped == 0
    dist.all_reduce(my_loss)
    assert set(mine) == set(gradients)
    rights = {key: g.chunk(ranks)[rank] if ".experts." in key else g for key, g in gradients.items()}
    of_gradients = [(mine[key] - right).abs().max().item() for key, right in rights.items()]
    return max(abs(my_loss / ranks - loss).item(), *of_gradients)


@pytest.mark.parametrize("name", CONFIGS)
@on_ranks(1, 2)
def test_our_layer_is_transformers_block(name):
    assert furthest(name) < 1e-6  # their loss and softmax are float32: a unit of 4 is 2.4e-7


@pytest.mark.parametrize("name", CONFIGS)
@on_ranks(1)
def test_another_scoring_is_another_model(name):
    assert furthest(name, "sigmoid") > 2e-5


def dense_model():
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 1, "pad_token_id": 0}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes))


def test_a_model_without_experts_or_with_their_loss_is_refused():
    dense = dense_model()
    with pytest.raises(ModelError, match="model type llama has no block of experts"):
        spread_experts(dense)
    dense.config.output_router_logits = True
    with pytest.raises(ModelError, match="add course_lib.parallel.expert_router.balance_loss"):
        spread_experts(dense)
