"""`--context_parallel_size`: rows whose tokens several ranks share, equal to one process under every engine."""

from unittest import mock

import pytest
from torch.testing import assert_close

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.lessons import parity
from course_lib.training.checkpoints import checkpoint, formats, sharded
from course_lib.training.optimization import parameter_groups
from course_lib.training.ranks import Ranks
from tests.forked_process import import_deepspeed
from tests.training.engines.layouts import agree, alone, apart, evaluations, goes_on, on, place, saved

STEPS, SAVED = 3, 2
COMMON = {"max_steps": STEPS, "eval_steps": 3, "save_steps": 1, "save_total_limit": None}
GRADIENT_TOLERANCE = 1e-7
"""Of gradients that are clipped to a norm of 0.5."""


def shared(ranks, way, **options):
    return {"context_parallel_size": ranks, "context_parallel": way} | options


CASES = {
    "ddp": shared(2, "zigzag", engine="scratch"),
    "zero1": shared(2, "ulysses", engine="scratch", strategy="zero1"),
    "zero3": shared(4, "zigzag", engine="scratch", strategy="zero3", activation_checkpointing=True),
    "fsdp": shared(4, "ring", engine="scratch", strategy="fsdp"),
    "ddp, torch": shared(4, "ulysses", engine="torch"),
    "fsdp, torch": shared(4, "allgather", engine="torch", strategy="fsdp"),
    "hybrid fsdp, torch": shared(2, "zigzag", engine="torch", strategy="fsdp", shard_group_size=2),
    "ddp, tensor": shared(2, "zigzag", tensor_parallel_size=2, sequence_parallel=True),
    "fsdp, tensor, torch": shared(2, "ring", strategy="fsdp", engine="torch", tensor_parallel_size=2),
    "zero2": shared(2, "allgather", engine="scratch", strategy="zero2"),
    "zero1, torch": shared(2, "ring", engine="torch", strategy="zero1"),
    "zero2, torch": shared(2, "zigzag", engine="torch", strategy="zero2"),
    "zero1, tensor, torch": shared(2, "ulysses", strategy="zero1", engine="torch", tensor_parallel_size=2),
    "fsdp, tensor": shared(2, "allgather", strategy="fsdp", engine="scratch", tensor_parallel_size=2),
}
SOME = ("zero3", "fsdp, tensor, torch")
"""In `make test`; all are in `make long`."""
DEEPSPEED = {
    "zero1, deepspeed": shared(2, "zigzag", strategy="zero1"),
    "zero2, deepspeed": shared(2, "ulysses", strategy="zero2"),
    "zero3, deepspeed": shared(2, "ring", strategy="zero3"),
}
ONWARDS = {  # what goes on from whose checkpoint, on four ranks
    "one process to ddp": ("one", shared(4, "ring", engine="scratch")),
    "ddp to plain zero3": ("ddp", {"strategy": "zero3", "engine": "scratch"}),
    "zero3 to plain pipeline": (
        "zero3",
        {"training_type": "pipeline", "pipeline_parallel_size": 4, "pipeline_chunks": 2},
    ),
    "fsdp to tensor": ("fsdp", shared(2, "zigzag", strategy="zero1", tensor_parallel_size=2)),
    "fsdp, tensor, torch to fsdp": ("fsdp, tensor, torch", shared(2, "ulysses", strategy="fsdp", engine="scratch")),
    "hybrid fsdp, torch to plain zero3": ("hybrid fsdp, torch", {"strategy": "zero3", "engine": "scratch"}),
}


def first_gradients(folder, name):
    """The gradients of the first step, as clipped, by parameter: ten times AdamW's first moment."""
    run = place(folder, name) / checkpoint.name(1)
    if formats.is_sharded(run):
        state = sharded.whole(run, "optimizer/")
    else:
        config = parity.task(folder, 1)
        model = parity.prepared(config.data, config.model, config.run.seed)[0].model
        names = {parameter: name for name, parameter in model.named_parameters()}
        trained = [names[p] for group in parameter_groups(model, 0.0) for p in group["params"]]
        state = formats.whole_optimizer_state(run, trained)
    return {
        key.removesuffix("/exp_avg"): 10 * value.flatten() for key, value in state.items() if key.endswith("/exp_avg")
    }


def are_those_of_one_process(folder, found, one):
    for name, trace in found.items():
        agree(trace, one, relative_norm=1e-4)
        assert_close(first_gradients(folder, name), first_gradients(folder, "one"), rtol=0, atol=GRADIENT_TOLERANCE)
        wanted = evaluations(folder, "one")
        assert evaluations(folder, name) == pytest.approx(wanted, abs=parity.LOSS_TOLERANCE), name


@pytest.fixture(scope="module")
def one(folder):
    return alone(folder / "one", **COMMON)


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.long)])
def found(request, folder, one):
    return on(4, folder, {name: CASES[name] for name in (CASES if request.param == "all" else SOME)}, **COMMON)


def test_losses_first_gradients_evaluations_and_final_weights_are_those_of_one_process(folder, found, one):
    are_those_of_one_process(folder, found, one)


@pytest.mark.long
def test_deepspeed_s_are_too(folder, one):
    import_deepspeed()
    are_those_of_one_process(folder, on(2, folder, DEEPSPEED, **COMMON), one)


def test_checkpoints_go_on_with_other_ranks_sharing_tokens_or_none(folder, found, one):
    cases = {
        name: options | {"resume_from_checkpoint": saved(folder, source, SAVED)}
        for name, (source, options) in ONWARDS.items()
        if source in {*found, "one"}
    }
    for trace in on(4, folder / "again", cases, **COMMON).values():
        goes_on(trace, one, SAVED)


def test_experts_and_their_routers_see_the_tokens_of_all_ranks(tmp_path):
    routed = {"model": "tiny-olmoe", "router_aux_loss_coef": 0.1, "max_steps": STEPS}
    one = alone(tmp_path / "one", **routed)
    found = on(2, tmp_path, {"olmoe": shared(2, "zigzag", engine="scratch", **routed)})
    agree(found["olmoe"], one, relative_norm=1e-4)


def test_without_the_sum_over_the_ranks_that_share_tokens_the_comparison_would_notice(folder, one):
    """Gradients are added up over the ranks that have other rows alone, as where each rank has whole rows."""
    group = property(lambda self: self.groups.dp, lambda self, group: None)
    ranks = property(lambda self: self.grid.dp)
    with mock.patch.multiple(Ranks, create=True, gradient_group=group, gradient_ranks=ranks):
        wrong = on(4, folder, {"apart": CASES["ddp"]}, **COMMON)["apart"]
    assert apart(wrong, one).weight > 100 * parity.WEIGHT_TOLERANCE
    gradients, wanted = first_gradients(folder, "apart"), first_gradients(folder, "one")
    assert max((gradients[key] - wanted[key]).abs().max() for key in wanted) > 1e4 * GRADIENT_TOLERANCE


TWO = {"task": "causal_lm", "model": "tiny-llama", "max_length": 32, "context_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_processes": 3}, "num_processes 3 is no multiple of context_parallel_size 2"),
        (
            {"num_processes": 6, "tensor_parallel_size": 2},
            "num_processes 6 is no multiple of context_parallel_size 2 × tensor_parallel_size 2",
        ),
        ({"max_length": 30}, "max_length 30 cannot be cut into 4 equal chunks, as context_parallel zigzag on 2 ranks"),
        ({"max_length": 31, "context_parallel": "ring"}, "max_length 31 cannot be cut into 2 equal chunks"),
        ({"context_parallel_size": 1, "context_parallel": "ring"}, "context_parallel ring has no effect"),
    ],
)
def test_what_cannot_be_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        build(TWO | options)


def test_rows_of_any_length_are_padded_so_that_they_can_be_cut():
    masked = TWO | {"task": "masked_lm", "model": "tiny-bert", "max_length": 31}
    assert build(masked).data.pad_to_multiple_of == 4
    assert build(masked | {"pad_to_multiple_of": 6, "context_parallel": "ulysses"}).data.pad_to_multiple_of == 6
    assert build(masked | {"context_parallel_size": 3, "pad_to_multiple_of": 8}).data.pad_to_multiple_of == 24
