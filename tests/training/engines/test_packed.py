"""Texts that share rows, trained by ranks that share layers, stages and tokens: equal to one process."""

import json
from unittest import mock

import pytest

from course_lib.data.conversations import Answered, Chat
from course_lib.lessons import parity
from course_lib.modeling.inputs import WholeSequences
from tests.long_cases import some
from tests.training.engines.layouts import agree, alone, apart, on

pytestmark = pytest.mark.usefixtures("two_blocks")

COMMON = {"packing": "best_fit", "max_length": 48, "max_steps": 3, "eval_batch_size": 3}
PIPELINE = {"training_type": "pipeline", "pipeline_parallel_size": 2, "pipeline_chunks": 2}
CASES = {
    "ddp": {"cpu_kernels": "fast", "attention_dropout": 0.0},
    "fsdp, recomputed": {"strategy": "fsdp", "activation_checkpointing": True},
    "pipeline": PIPELINE,
    "pipeline, torch": PIPELINE | {"engine": "torch"},
    "tensor": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "ring": {"context_parallel_size": 2, "context_parallel": "ring"},
    "zigzag": {"context_parallel_size": 2, "context_parallel": "zigzag"},
    "ulysses": {"context_parallel_size": 2, "context_parallel": "ulysses"},
    "allgather": {"context_parallel_size": 2, "context_parallel": "allgather", "strategy": "zero1"},
}


@pytest.fixture(scope="module")
def one(folder):
    return alone(folder / "one", **COMMON)


def test_without_positions_it_trains_another_model(tmp_path, one):
    def glued(self, batch):
        return {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["labels"]

    with mock.patch.object(WholeSequences, "cut", glued):
        assert apart(alone(tmp_path, **COMMON), one).weight > 100 * parity.WEIGHT_TOLERANCE


@pytest.mark.parametrize("name", some(CASES, "fsdp, recomputed", "pipeline", "tensor", "zigzag", "ulysses"))
def test_two_ranks_train_what_one_process_trains(folder, one, name):
    agree(on(2, folder, {name: CASES[name]}, **COMMON)[name], one)


def talks(folder):
    """A file of conversations, whose answers are of many lengths."""
    path = folder / "talks.jsonl"
    rows = [
        [{"role": "user", "content": f"{row} times?"}, {"role": "assistant", "content": f"{row} " * (row % 9)}]
        for row in range(70)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return {"dataset": str(path), "chat_template": "chatml", "max_length": 80, "max_steps": 3}


def test_answers_alone_are_learnt_by_any_number_of_ranks(tmp_path):
    """A global batch's loss is the mean over its answers' tokens, of which every rank has others."""
    options = talks(tmp_path)
    two = on(2, tmp_path, {packing: {"packing": packing} for packing in ("wrapped", "best_fit")}, **options)
    for packing, found in two.items():
        one = alone(tmp_path / "one", packing=packing, **options)
        agree(found, one)

    def all_tokens(self, conversation, where):
        ids, _ = learnt(self, conversation, where)
        return Answered(ids, [True] * len(ids))

    learnt = Chat.__call__
    other_length = options | {"max_length": 79}  # or the rows come from the cache
    with mock.patch.object(Chat, "__call__", all_tokens):
        other = alone(tmp_path / "all", packing="best_fit", **other_length)
    assert apart(other, one).loss > 100 * parity.LOSS_TOLERANCE


@pytest.mark.parametrize("model", some(["tiny-llama", "tiny-olmoe", "tiny-mixtral"], "tiny-llama"))
def test_other_families_share_tokens_too(tmp_path, model):
    options = COMMON | {"model": model}
    agree(on(2, tmp_path, {"ring": CASES["ring"]}, **options)["ring"], alone(tmp_path / "one", **options))
