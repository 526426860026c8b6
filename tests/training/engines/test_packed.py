"""Texts that share rows, trained by ranks that share layers, stages and tokens: equal to one process."""

import json
import shutil
from unittest import mock

import pytest
import torch

from course_lib.data.conversations import Answered, Chat
from course_lib.launching.launch import launch
from course_lib.lessons import parity
from course_lib.modeling.inputs import WholeSequences
from tests.fresh_accelerator import forget_accelerator
from tests.long_cases import some

pytestmark = pytest.mark.usefixtures("two_blocks")

COMMON = {"packing": "best_fit", "max_length": 48, "max_steps": 3, "eval_batch_size": 3}
CASES = {
    "ddp": {"cpu_kernels": "fast", "attention_dropout": 0.0},
    "fsdp, recomputed": {"strategy": "fsdp", "activation_checkpointing": True},
    "pipeline": {"training_type": "pipeline", "batch_size": 4, "pipeline_chunks": 2},
    "pipeline, torch": {"training_type": "pipeline", "batch_size": 4, "pipeline_chunks": 2, "engine": "torch"},
    "tensor": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "ring": {"context_parallel_size": 2, "context_parallel": "ring"},
    "zigzag": {"context_parallel_size": 2, "context_parallel": "zigzag"},
    "ulysses": {"context_parallel_size": 2, "context_parallel": "ulysses"},
    "allgather": {"context_parallel_size": 2, "context_parallel": "allgather", "strategy": "zero1"},
}
SOME = ("fsdp, recomputed", "pipeline", "tensor", "zigzag", "ulysses")


def options_of(name):
    shares_rows = any("parallel_size" in option or option == "training_type" for option in CASES[name])
    return COMMON | ({"batch_size": 4} if shares_rows else {}) | CASES[name]


def on_ranks(folder, names):
    found = {}
    for name in names:
        forget_accelerator()
        found[name] = parity.trace(parity.task(folder / name, 2, **options_of(name)))
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return parity.trace(parity.task(tmp_path_factory.mktemp("one"), 1, training_type="basic", **COMMON))


def test_without_positions_it_trains_another_model(tmp_path, one):
    def glued(self, batch):
        return {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["labels"]

    with mock.patch.object(WholeSequences, "cut", glued):
        found = parity.trace(parity.task(tmp_path, 1, training_type="basic", **COMMON))
    assert parity.compare(found, one, "ddp", "none", 1).weight > 100 * parity.WEIGHT_TOLERANCE


@pytest.mark.parametrize(
    "names", some([SOME, tuple(name for name in CASES if name not in SOME)], SOME), ids=lambda names: " "
)
def test_two_ranks_train_what_one_process_trains(tmp_path, one, names):
    for name, found in launch(on_ranks, tmp_path, names, num_processes=2, timeout=280)[0].items():
        cell = parity.compare(found, one, name, "", 2)
        assert cell.agrees, cell


def talks(folder):
    """A file of conversations, whose answers are of many lengths."""
    path = folder / "talks.jsonl"
    rows = [
        [{"role": "user", "content": f"{row} times?"}, {"role": "assistant", "content": f"{row} " * (row % 9)}]
        for row in range(70)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return {"dataset": str(path), "chat_template": "chatml", "max_length": 80, "max_steps": 3}


def of_talks(folder, options):
    return {
        packing: parity.trace(parity.task(folder / packing, 2, packing=packing, **options))
        for packing in ("wrapped", "best_fit")
    }


def test_answers_alone_are_learnt_by_any_number_of_ranks(tmp_path):
    """A global batch's loss is the mean over its answers' tokens, of which every rank has others."""
    options = talks(tmp_path)
    two = launch(of_talks, tmp_path, options, num_processes=2, timeout=280)[0]
    for packing, found in two.items():
        one = parity.trace(parity.task(tmp_path / "one", 1, training_type="basic", packing=packing, **options))
        assert parity.compare(found, one, "ddp", packing, 2).agrees

    def all_tokens(self, conversation, where):
        ids, _ = learnt(self, conversation, where)
        return Answered(ids, [True] * len(ids))

    learnt = Chat.__call__
    with mock.patch.object(Chat, "__call__", all_tokens):
        (tmp_path / "other").mkdir()
        other = parity.trace(
            parity.task(
                tmp_path / "all",
                1,
                training_type="basic",
                **options | {"dataset": shutil.copy(options["dataset"], tmp_path / "other"), "max_length": 79},
            )
        )
    assert parity.compare(other, one, "ddp", "all tokens", 1).loss > 100 * parity.LOSS_TOLERANCE


@pytest.mark.parametrize("model", some(["tiny-llama", "tiny-olmoe", "tiny-mixtral"], "tiny-llama"))
def test_other_families_share_tokens_too(tmp_path, model):
    options = COMMON | {"model": model, "batch_size": 4}
    alone = parity.trace(parity.task(tmp_path / "one", 1, training_type="basic", **options))
    found = launch(of_model, tmp_path, options, num_processes=2, timeout=280)[0]
    assert parity.compare(found, alone, "ring", model, 2).agrees


def of_model(folder, options):
    torch.set_num_threads(1)
    return parity.trace(parity.task(folder / "ring", 2, **options, context_parallel_size=2, context_parallel="ring"))
