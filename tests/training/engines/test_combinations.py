"""Every pair of axes that no row of the table refuses, on real ranks, beside one process: by each engine."""

import functools
import itertools

import pytest
import torch

from course_lib.config import combinations, option
from course_lib.config.axes import AXES, ENGINES
from course_lib.config.combinations import PLAIN
from course_lib.lessons import parity
from tests.forked_process import import_deepspeed
from tests.training.engines.layouts import alone, on, runs

pytestmark = pytest.mark.usefixtures("two_blocks")

ALONE = ("compile", "checkpointing", "lora", "4bit", "sgd", "adafactor", "muon", "watch", "async_save")
"""Beside an axis of ranks; two of them are no matter of ranks."""
OF_THE_UPDATE = ("model", "lora_r", "load_in_4bit", "optimizer", "adam_epsilon")
"""Options that one process needs too, to be compared with."""
LOSSY = 1e-2
"""Difference of a loss where gradients travel in eight bits."""
OF_MUON = 3e-5
"""Difference of a weight where muon multiplies its updates, of 1e-3, in bf16."""
SOME = (("pipeline", "fsdp"), ("fsdp", "experts"), ("tensor", "compile"), ("pipeline", "compile"), ("zero3", "4bit"))
"""In `make test`."""


def cases():
    """By pair and engine, the options of a run; 4 ranks for two axes of ranks, where each needs its own."""
    found = {}
    for pair in [*itertools.combinations(combinations.RANKS, 2), *itertools.product(combinations.RANKS, ALONE)]:
        for engine, row in (combinations.together(*pair) or {}).items():
            if row is None and engine != "accelerate":
                found[pair, engine] = layout(pair, engine)
    return found


def layout(pair, engine):
    given = {name: value for axis in pair for name, value in AXES[axis].options.items()} | {"engine": engine}
    if "strategy" not in given:
        runs = (
            strategy
            for strategy in ENGINES
            if engine in ENGINES[strategy] and combinations.refusal({**PLAIN, **given, "strategy": strategy}) is None
        )
        given["strategy"] = next(runs)
    if "pipeline" in pair:
        given |= {"pipeline_parallel_size": 2, "pipeline_chunks": 2}
    if "experts" in pair:
        given["model"] = "tiny-olmoe"
    if given.get("optimizer") in ("sgd", "adafactor"):
        given["adam_epsilon"] = option("adam_epsilon").default  # the task's is for Adam
    return given


def compiled_without_inductor(folder, cases, **common):
    """The traces of some cases; compiled blocks are traced and differentiated, without Inductor's code."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()
    return runs(folder, cases, **common)


@pytest.mark.parametrize(
    "pairs", [SOME, pytest.param(None, marks=[pytest.mark.long, pytest.mark.timeout(3600)])], ids=["some", "all"]
)
def test_every_pair_that_is_not_refused_trains_as_one_process_does(tmp_path, pairs):
    import_deepspeed()
    chosen = {case: given for case, given in cases().items() if pairs is None or case[0] in pairs}

    @functools.cache
    def one_process(**given):
        return alone(tmp_path / f"one-{len(list(tmp_path.iterdir()))}", max_steps=2, **given)

    wrong = []
    for deepspeed, world_size in itertools.product((False, True), (2, 4)):
        here = {
            f"{' × '.join(pair)}, {engine}": given
            for (pair, engine), given in chosen.items()
            if (engine == "deepspeed") == deepspeed and (4 if set(pair) <= set(combinations.RANKS) else 2) == world_size
        }
        if not here:
            continue
        place = tmp_path / f"{world_size}-{deepspeed}"
        for name, found in on(world_size, place, here, runs=compiled_without_inductor, max_steps=2).items():
            options = {option: here[name][option] for option in OF_THE_UPDATE if option in here[name]}
            cell = parity.compare(found, one_process(**options), name, "", world_size)
            if "communication" in name:
                agrees = cell.loss < LOSSY
            elif "muon" in name:
                agrees = cell.loss < parity.LOSS_TOLERANCE and cell.weight < OF_MUON
            else:
                agrees = cell.agrees
            if not agrees:
                wrong.append(cell)
    assert wrong == []
