"""Experts of transformers' models over 2 and 4 ranks, in data parallelism: loss and every gradient of one process."""

import pytest
import torch
import torch.distributed as dist

from course_lib.errors import ConfigError, ModelError
from course_lib.modeling.experts import ExpertParallel
from course_lib.parallel.ddp import DataParallel, average_gradients
from course_lib.parallel.experts import expert_groups
from course_lib.parallel.sharding import Shard
from tests.modeling.test_mixtures import CONFIGS, dense_model, model, stepped
from tests.ranks import on_ranks

TOLERANCE = 1e-6
"""Transformers' loss and softmax are float32 also for a model in float64: a unit of a loss of 4 is 2.4e-7."""


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


def differences(name, way, size):
    """By parameter (or "loss"): the largest difference from one process, where so many ranks share the experts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(1))
    loss, gradients = stepped(model(name), ids)
    ours = model(name)
    if way is by_data_parallel:  # which hands out the first rank's weights; an expert's, those of its own first
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter += rank // size
    spread = ExpertParallel(ours, expert_groups(size))
    assert len(spread.layers) == 2 and len(spread.shapes) == 4
    my_loss = way(ours, spread, ids.chunk(ranks)[rank])
    dist.all_reduce(my_loss)
    off = {"loss": float(abs(my_loss / ranks - loss))}
    for each, parameter in ours.named_parameters():
        run = spread.in_whole(each, Shard(parameter.shape, 0, parameter.grad.flatten()))
        assert run.shape == gradients[each].shape
        off[each] = float((run.data - run.of(gradients[each])).abs().max())
    assert set(off) == {"loss", *gradients}
    return off


@pytest.mark.parametrize("name", CONFIGS)
@on_ranks(2, 4)
def test_loss_and_every_gradient_are_those_of_one_process(name):
    for size in (2, 1) if dist.get_world_size() == 2 else (2, 4):
        off = differences(name, by_data_parallel, size)
        assert {parameter: far for parameter, far in off.items() if not far < TOLERANCE} == {}


@pytest.mark.parametrize("name", CONFIGS)
@on_ranks(2)
def test_experts_averaged_over_their_own_ranks_alone_are_wrong_where_no_loss_shows_it(name):
    off = differences(name, experts_mean_over_their_own, 2)
    wrong = {parameter for parameter, far in off.items() if far > 100 * TOLERANCE}
    assert wrong == {parameter for parameter in off if ".experts." in parameter}


@on_ranks(3)
def test_what_cannot_be_shared_is_refused():
    groups = expert_groups(3)
    with pytest.raises(ConfigError, match="4 experts in each layer cannot be shared by 3 ranks.*divides 4"):
        ExpertParallel(model("mixtral"), groups)
    with pytest.raises(ModelError, match="model type llama has no block of experts"):
        ExpertParallel(dense_model(), groups)
