"""Tensor and sequence parallelism on real ranks, against one process that has the whole model, and against DTensor."""

import re

import pytest

from course_lib.launching.launch import launch
from tests.parallel.tensor_cases import CASES, DTENSOR_CASES, LAYERS, ROWS, SIZES, TOKENS, TOLERANCE, WIDTH, on_rank


@pytest.fixture(scope="module")
def ranks():
    return launch(on_rank, num_processes=4, timeout=560, stream=False)


@pytest.mark.parametrize("size", SIZES)
def test_the_backward_of_each_exchange_is_its_adjoint(ranks, size):
    found = ranks[0]["adjoint"][size]
    assert len(found) == 6
    for forward, backward in found.values():
        assert forward == pytest.approx(backward, rel=1e-12) and abs(forward) > 0.01


@pytest.mark.parametrize("size", SIZES)
def test_layers_equal_the_whole_ones(ranks, size):
    for found in ranks:
        for sequence in (False, True):
            assert len(found["layers"][size, sequence]) == 8 and max(found["layers"][size, sequence]) < 1e-13
        assert len(found["vocabulary"][size]) == 4 and max(found["vocabulary"][size]) < 1e-13


def test_without_an_exchange_the_model_differs(ranks):
    for found in ranks:
        assert found["without"]["reduce"]["loss"] > 1e-3
        assert found["without"]["copy"]["loss"] < 1e-13  # in the forward it does nothing
        assert found["without"]["copy"]["gradients"] > 1e-3
        assert found["without"]["sequence"]["loss"] < 1e-13
        assert found["without"]["sequence"]["gradients"] > 1e-3


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{'-'.join(CASES[i][2])}")
def test_models_equal_one_process(ranks, size, index):
    tolerance = TOLERANCE[CASES[index][1]]
    for found in ranks:
        case = found["models"][size, index]
        assert case["loss"] < tolerance and case["gradients"] < tolerance and case["weights"] == 0
        assert case["scale"] > 0.01


def test_one_rank_is_the_same_code(ranks):
    assert len(ranks[0]["models"]) == 2 * len(CASES) + 2
    for index in (1, 8):
        assert max(ranks[0]["models"][1, index][each] for each in ("loss", "gradients")) < TOLERANCE[CASES[index][1]]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_two_all_reduces_a_layer_each_way(ranks, kind, size):
    hidden = ROWS * TOKENS * WIDTH * 4
    for found in ranks:
        case = found["measured"][size, kind, False]
        assert case["forward"] == case["backward"] == [("all_reduce", hidden)] * 2 * LAYERS
        assert case["sent"] == 4 * LAYERS * 2 * (size - 1) * hidden // size


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_sequence_parallelism_sends_the_same_bytes_in_halves(ranks, kind, size):
    hidden = ROWS * TOKENS * WIDTH * 4
    for found in ranks:
        case, plain = found["measured"][size, kind, True], found["measured"][size, kind, False]
        into, out_of = ("all_gather", hidden), ("reduce_scatter", hidden)
        assert case["forward"] == [into, out_of] * 2 * LAYERS + [into]  # and the last is after the final norm
        small = [each for each in case["backward"] if each[0] == "all_reduce"]
        assert [each for each in case["backward"] if each not in small] == [into, out_of] * 2 * LAYERS + [into]
        vectors = {"gpt2": 6 * LAYERS + 2, "bert": 6 * LAYERS, "llama": 2 * LAYERS + 1}[kind]  # of norms and row biases
        assert small == [("all_reduce", WIDTH * 4)] * vectors
        both_ends = 2 * (size - 1) * hidden // size
        assert case["sent"] - both_ends - vectors * 2 * (size - 1) * WIDTH * 4 // size == plain["sent"]


def test_a_rank_keeps_its_share_and_nothing_else(ranks):
    for found in ranks:
        case = found["kept"]
        assert 0 < case["replicated"] < 0.05 * case["before"]
        assert case["after"] == (case["before"] - case["replicated"]) / 4 + case["replicated"]
        assert not case["alive"] and case["reloaded"] < 1e-5


def test_replicated_tensors_have_one_dropout_mask_where_the_ranks_seed_alike(ranks):
    assert [found["dropout"][0] for found in ranks] == [[True] * 4] * 4
    assert not all(all(found["dropout"][1]) for found in ranks)


def test_data_and_tensor_parallelism_equal_one_process(ranks):
    for found in ranks:
        two = found["two"]
        norms, distance = two["with dp"]
        assert norms == pytest.approx(two["norms"], rel=1e-12) and len(norms) == 3 and min(norms) > 0.5
        assert distance < 1e-11
        assert two["alone"][1] > 1e-3


def test_the_groups_are_the_grids_lines(ranks):
    for rank, found in enumerate(ranks):
        two = found["two"]
        assert two["lines"] == [[rank % 2, rank % 2 + 2], [rank], [rank // 2 * 2, rank // 2 * 2 + 1]]
        assert two["mesh"] == [[[0, 1]], [[2, 3]]] and two["names"] == ("dp", "pp", "tp")
        assert two["mesh place"] == [rank // 2, 0, rank % 2] and two["place"] == [*two["mesh place"], 0]
        assert two["same group"] and two["model parallel"] == two["lines"][2]


def test_dtensor_agrees_and_sends_what_ours_sends(ranks):
    for found in ranks:
        assert len(found["dtensor"]) == len(DTENSOR_CASES) == 6
        for difference, theirs, ours in found["dtensor"].values():
            assert difference["loss"] < 1e-6 and difference["gradients"] < 1e-6 and difference["weights"] == 0
            # Ours adds up the gradients of norms and biases in the backward; DTensor leaves that until they are used.
            assert theirs == [each for each in ours if each != ("all_reduce", WIDTH * 4)]


def test_what_cannot_be_split_is_refused_with_the_rule(ranks):
    rules = {
        "heads": "num_attention_heads is 4, which 3 tensor-parallel ranks cannot share evenly: choose a tensor",
        "key-value heads": "num_key_value_heads is 2, which 4 tensor-parallel ranks",
        "vocabulary": r"vocabulary is 65, .* model.resize_token_embeddings\(pad_to_multiple_of=2\), or don't split it",
        "vocabulary of torch's": r"vocabulary is 65, .*pad_to_multiple_of=2",
        "columns": r"dimension 0 of a \(6, 4\) parameter is 6, which 4",
        "rows": r"dimension 1 of a \(4, 6\) parameter is 6, which 4",
        "tokens": r"dimension 1 of a \(1, 7, 32\) tensor is 7, which 2 .* pad the sequences to a multiple",
        "no plan": "no tensor-parallel plan for opt: hand in a Plan .* gpt2, bert, .*llama",
        "no config": "no tensor-parallel plan for Linear",
        "cross-attention": "the plan does not name `crossattention",
        "other models": "rank [13]'s model is not rank [02]'s",
        "grid": "a grid of 3 x 1 x 2 is 6 ranks, and there are 4",
    }
    for rank, found in enumerate(ranks):
        wanted = rules if rank < 3 else {name: rule for name, rule in rules.items() if name != "heads"}
        assert set(found["refusals"]) == set(wanted)
        for name, rule in wanted.items():
            assert re.search(rule, found["refusals"][name]), found["refusals"][name]


def test_a_token_beyond_the_vocabulary_is_an_error_on_the_rank_at_that_end(ranks):
    assert [len(found["beyond"]) for found in ranks] == [1, 0, 0, 1]
