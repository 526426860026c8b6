"""`--context_parallel_size`: rows whose tokens several ranks share, equal to one process under every engine."""

import json

import pytest

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.lessons import parity
from course_lib.training.checkpoints import checkpoint, formats, sharded
from course_lib.training.optimization import parameter_groups
from course_lib.training.ranks import Ranks
from tests.forked_process import import_deepspeed
from tests.fresh_accelerator import forget_accelerator

STEPS, SAVED = 3, 2
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
}


SOME = ("zero3", "fsdp, tensor, torch")
"""In `make test`; all are in `make long`."""
MORE = {
    "zero2": shared(2, "allgather", engine="scratch", strategy="zero2"),
    "zero1, torch": shared(2, "ring", engine="torch", strategy="zero1"),
    "zero2, torch": shared(2, "zigzag", engine="torch", strategy="zero2"),
    "zero1, tensor, torch": shared(2, "ulysses", strategy="zero1", engine="torch", tensor_parallel_size=2),
    "fsdp, tensor": shared(2, "allgather", strategy="fsdp", engine="scratch", tensor_parallel_size=2),
}
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


def runs(folder, cases, ranks, **common):
    """Several runs, one after the other on the same ranks; what each left."""
    found = {}
    for name, options in cases.items():
        forget_accelerator()
        copies = (
            ranks
            // options.get("context_parallel_size", 1)
            // options.get("tensor_parallel_size", 1)
            // (options.get("pipeline_parallel_size", 1))
        )
        found[name] = parity.trace(
            parity.task(
                where(folder, name),
                1,
                **(
                    {
                        "max_steps": STEPS,
                        "eval_steps": 3,
                        "batch_size": parity.GLOBAL_ROWS // 2 // copies,
                        "save_steps": 1,
                        "save_total_limit": None,
                    }
                    | common
                    | options
                ),
            )
        )
    return found


def where(folder, name):
    return folder / name.replace(" ", "-").replace(",", "")


def first_gradients(folder):
    """The gradients of the first step, as clipped, by parameter: ten times AdamW's first moment."""
    saved = folder / checkpoint.name(1)
    if formats.is_sharded(saved):
        state = sharded.whole(saved, "optimizer/")
    else:
        config = parity.task(folder, 1)
        model = parity.prepared(config.data, config.model, config.run.seed)[0].model
        names = {parameter: name for name, parameter in model.named_parameters()}
        trained = [names[p] for group in parameter_groups(model, 0.0) for p in group["params"]]
        state = formats.whole_optimizer_state(saved, trained)
    return {
        key.removesuffix("/exp_avg"): 10 * value.flatten() for key, value in state.items() if key.endswith("/exp_avg")
    }


def evaluations(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["eval.loss"] for line in lines if "eval.loss" in line]


def differences(folder, found, one, ranks):
    """What differs from one process by more than the tolerances, by case."""
    wrong, wanted = {}, first_gradients(where(folder, "one"))
    for name, trace in found.items():
        cell = parity.compare(trace, one, name, "", ranks)
        gradients = first_gradients(where(folder, name))
        assert gradients.keys() == wanted.keys() and len(gradients) > 40
        gradient = max((gradients[key] - wanted[key]).abs().max().item() for key in wanted)
        scores = zip(evaluations(where(folder, name)), evaluations(where(folder, "one")), strict=True)
        evaluated = max(abs(a - b) for a, b in scores)
        if not (
            cell.agrees
            and gradient <= GRADIENT_TOLERANCE
            and evaluated <= parity.LOSS_TOLERANCE
            and cell.norm <= 1e-4 * max(one.norms)
        ):
            wrong[name] = {
                "loss": cell.loss,
                "weight": cell.weight,
                "gradient": gradient,
                "evaluation": evaluated,
                "norm": cell.norm,
            }
    return wrong


@pytest.fixture(scope="module")
def one(folder):
    return parity.trace(
        parity.task(
            where(folder, "one"),
            1,
            training_type="basic",
            max_steps=STEPS,
            save_steps=1,
            eval_steps=3,
            save_total_limit=None,
        )
    )


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.long)])
def found(request, folder, one):
    cases = {name: CASES[name] for name in (CASES if request.param == "all" else SOME)}
    return launch(runs, folder, cases, 4, num_processes=4, timeout=1400)[0]


def test_losses_first_gradients_evaluations_and_final_weights_are_those_of_one_process(folder, found, one):
    assert differences(folder, found, one, 4) == {}
    assert len(found) in (len(SOME), len(CASES)) and (len(SOME), len(CASES)) == (2, 9)


@pytest.mark.long
def test_those_of_further_layouts_are_too(folder, one):
    more = launch(runs, folder, MORE, 4, num_processes=4, timeout=1400)[0]
    assert differences(folder, more, one, 4) == {} and len(more) == len(MORE) == 5


@pytest.mark.long
def test_deepspeed_s_are_too(folder, one):
    import_deepspeed()
    found = launch(runs, folder, DEEPSPEED, 2, num_processes=2, timeout=800)[0]
    assert differences(folder, found, one, 2) == {} and len(found) == len(DEEPSPEED) == 3


def test_checkpoints_go_on_with_other_ranks_sharing_tokens_or_none(folder, found, one):
    cases = {
        name: options | {"resume_from_checkpoint": str(where(folder, source) / checkpoint.name(SAVED))}
        for name, (source, options) in ONWARDS.items()
        if source in {*found, "one"}
    }
    again = launch(runs, folder / "again", cases, 4, num_processes=4, timeout=800)[0]
    assert len(ONWARDS) == 6 and len(again) == (6 if len(found) == len(CASES) else 3)
    for name, trace in again.items():
        assert trace.losses == pytest.approx(one.losses[SAVED:], abs=parity.LOSS_TOLERANCE), name
        largest = max((trace.weights[key] - one.weights[key]).abs().max().item() for key in one.weights)
        assert largest <= parity.WEIGHT_TOLERANCE, name


def test_experts_and_their_routers_see_the_tokens_of_all_ranks(tmp_path):
    routed = {"model": "tiny-olmoe", "router_aux_loss_coef": 0.1}
    one = parity.trace(
        parity.task(
            where(tmp_path, "one"),
            1,
            training_type="basic",
            max_steps=STEPS,
            save_steps=1,
            save_total_limit=None,
            **routed,
        )
    )
    case = {"olmoe": shared(2, "zigzag", engine="scratch", **routed)}
    found = launch(runs, tmp_path, case, 2, num_processes=2, timeout=400)[0]
    cell = parity.compare(found["olmoe"], one, "olmoe", "", 2)
    assert cell.agrees and cell.norm <= 1e-4 * max(one.norms), cell


def without_the_sum(folder, cases):
    """Gradients are added up over the ranks that have other rows alone, as where each rank has whole rows."""
    Ranks.gradient_group = property(lambda self: self.groups.dp, lambda self, group: None)
    Ranks.gradient_ranks = property(lambda self: self.grid.dp)
    return runs(folder, cases, 4)


def test_without_the_sum_over_the_ranks_that_share_tokens_the_comparison_would_notice(folder, one):
    cases = {"apart": CASES["ddp"]}
    wrong = differences(folder, launch(without_the_sum, folder, cases, num_processes=4, timeout=400)[0], one, 4)
    assert wrong["apart"]["gradient"] > 1e4 * GRADIENT_TOLERANCE
    assert wrong["apart"]["weight"] > 100 * parity.WEIGHT_TOLERANCE


TWO = {"task": "causal_lm", "model": "tiny-llama", "max_length": 32, "context_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_processes": 3}, "num_processes 3 is no multiple of context_parallel_size 2"),
        (
            {"num_processes": 6, "tensor_parallel_size": 2},
            "num_processes 6 is no multiple of context_parallel_size 2 × tensor_parallel_size 2",
        ),
        (
            {"max_length": 30},
            "max_length 30 cannot be cut into 4 equal chunks, as context_parallel zigzag on 2 ranks does",
        ),
        ({"max_length": 31, "context_parallel": "ring"}, "max_length 31 cannot be cut into 2 equal chunks"),
        ({"context_parallel_size": 1, "context_parallel": "ring"}, "context_parallel ring has no effect"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, told):
    with pytest.raises(ConfigError) as error:
        build(TWO | options)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_rows_of_any_length_are_padded_so_that_they_can_be_cut():
    masked = TWO | {"task": "masked_lm", "model": "tiny-bert", "max_length": 31}
    assert build(masked).data.pad_to_multiple_of == 4
    assert build(masked | {"pad_to_multiple_of": 6, "context_parallel": "ulysses"}).data.pad_to_multiple_of == 6
    assert build(masked | {"context_parallel_size": 3, "pad_to_multiple_of": 8}).data.pad_to_multiple_of == 24
