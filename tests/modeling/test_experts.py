"""Experts of transformers' models over 2 and 4 ranks, in data parallelism: loss and every gradient of one process."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from course_lib.errors import ConfigError, ModelError
from course_lib.launching.launch import launch
from course_lib.modeling.experts import ExpertParallel
from course_lib.parallel.ddp import DataParallel, average_gradients
from course_lib.parallel.experts import expert_groups
from course_lib.parallel.sharding import Shard
from tests.modeling.test_mixtures import CONFIGS, model, stepped

TOLERANCE = 1e-6
"""Transformers' loss and softmax are float32 also for a model in float64: a unit of a loss of 4 is 2.4e-7."""
SHARED_BY = {2: (1, 2), 4: (2, 4)}
"""By number of ranks: how many of them share the experts."""


def experts_mean_over_their_own(ours, spread, ids):
    """The mistake: experts' gradients as the mean over the ranks that hold the same ones."""
    loss, _ = stepped(ours, ids)
    of_experts = list(spread.summed_over())
    inside = set(of_experts)
    average_gradients(of_experts, spread.groups.same)
    average_gradients(parameter for parameter in ours.parameters() if parameter not in inside)
    return loss


def by_data_parallel(ours, spread, ids):
    wrapped = DataParallel(ours, groups=spread.summed_over(), bucket_bytes=2000, first_bucket_bytes=500)
    assert {len(bucket.views) for bucket in wrapped.buckets} > {1}  # some in company, experts and others apart
    loss = wrapped(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def differences(way, sizes):
    """By model, ranks that share, and parameter (or "loss"): the largest difference from one process."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(1))
    found = {}
    for size in sizes:
        groups = expert_groups(size)
        for name in CONFIGS:
            loss, gradients = stepped(model(name), ids)
            ours = model(name)
            if way is by_data_parallel:  # which hands out the first rank's weights; an expert's, those of its own first
                with torch.no_grad():
                    for parameter in ours.parameters():
                        parameter += rank // size
            spread = ExpertParallel(ours, groups)
            assert len(spread.layers) == 2 and len(spread.shapes) == 4
            my_loss = way(ours, spread, ids.chunk(ranks)[rank])
            dist.all_reduce(my_loss)
            off = {"loss": float(abs(my_loss / ranks - loss))}
            for each, parameter in ours.named_parameters():
                run = spread.in_whole(each, Shard(parameter.shape, 0, parameter.grad.flatten()))
                assert run.shape == gradients[each].shape
                off[each] = float((run.data - run.of(gradients[each])).abs().max())
            assert set(off) == {"loss", *gradients}
            found[name, size] = off
    return found


@pytest.mark.parametrize("ranks", SHARED_BY)
def test_loss_and_every_gradient_are_those_of_one_process(ranks):
    for found in launch(differences, by_data_parallel, SHARED_BY[ranks], num_processes=ranks, timeout=400):
        assert len(found) == len(CONFIGS) * 2
        wrong = {(case, name): far for case, off in found.items() for name, far in off.items() if not far < TOLERANCE}
        assert wrong == {}


def test_experts_averaged_over_their_own_ranks_alone_are_wrong_where_no_loss_shows_it():
    for found in launch(differences, experts_mean_over_their_own, (2,), num_processes=2, timeout=400):
        for off in found.values():
            assert {name for name, far in off.items() if far > 100 * TOLERANCE} == {
                name for name in off if ".experts." in name
            }


def refusals():
    dist.init_process_group("gloo")
    said = []
    groups = expert_groups(3)
    dense = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, pad_token_id=0
        )
    )
    for wrong, error in ((model("mixtral"), ConfigError), (dense, ModelError)):
        with pytest.raises(error) as raised:
            ExpertParallel(wrong, groups)
        said.append(str(raised.value))
    return said


def test_what_cannot_be_shared_is_refused():
    uneven, dense = launch(refusals, num_processes=3, timeout=400)[0]
    assert "4 experts in each layer cannot be shared by 3 ranks" in uneven and "divides 4" in uneven
    assert "model type llama has no block of experts" in dense
