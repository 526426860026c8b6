"""Context parallelism against one process: ring, all-gather and Ulysses; layouts, documents, bytes and order."""

import itertools

import pytest
import torch

from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.parallel.context import METHODS, bytes_sent, context_attention
from course_lib.parallel.sequence_layout import IGNORED, SequenceLayout, next_tokens
from tests.parallel import context_cases
from tests.parallel.context_cases import HEADS, LENGTH, ROWS, TEXTS, WIDTH

CASES = list(itertools.product(METHODS, (False, True), (False, True), HEADS, TEXTS))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_one_process(ranks):
    for found in launch(context_cases.differences, CASES, num_processes=ranks, timeout=400):
        assert len(found) == 108
        assert {case: off for case, off in found.items() if not off < 1e-12} == {}


def test_without_the_others_keys_it_would_differ():
    found = launch(context_cases.without_the_ring, num_processes=2, timeout=400)
    assert max(off for one in found for off in one.values()) > 0.1


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_sent_is_the_formula(ranks):
    shape = {"rows": ROWS, "heads": 4, "key_heads": 2, "tokens": LENGTH // ranks, "width": WIDTH, "itemsize": 4}
    for found in launch(context_cases.metered, num_processes=ranks, timeout=400):
        assert {method: of_method[:2] for method, of_method in found.items()} == {
            method: (bytes_sent(method, ranks, **shape), bytes_sent(method, ranks, **shape, backward=True))
            for method in METHODS
        }
        assert found["ring"][0] == found["allgather"][0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ring_holds_two_blocks_whatever_the_ranks(ranks):
    """The one at work and the one that arrives, in its forward; with those of gradients six in its backward."""
    block = 2 * ROWS * 2 * (LENGTH // ranks) * WIDTH * 4
    for found in launch(context_cases.metered, num_processes=ranks, timeout=400):
        assert found["ring"][2] == 2 * block and found["ring"][3] <= 6 * block


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_next_block_is_on_its_way_before_a_block_is_computed_with(ranks):
    """And no message holds more than one rank's keys and values."""
    block = f"send {(2, ROWS, 2, LENGTH // ranks, WIDTH)} float32"
    for forward, backward in launch(context_cases.events, num_processes=ranks, timeout=400):
        assert forward == [block, "compute", "arrived"] * (ranks - 1) + ["compute"]
        first = [block, "compute", block, "arrived"]  # the gradient sets out after the block is computed with
        middle = [block, "compute", "arrived", block, "arrived"]
        assert backward == first + middle * (ranks - 2) + ["compute", "arrived", block, "arrived"]


def test_sums_are_in_float32_whatever_the_inputs():
    """bfloat16 has 8 bits: the error is that of its rounding, and no larger than that of torch's attention twice."""
    for found in launch(context_cases.precision, num_processes=2, timeout=400):
        for ours, torchs, dtype in found:
            assert dtype == torch.bfloat16 and ours < 2 * torchs


def test_a_model_on_parts_of_sequences_trains_as_on_whole_ones():
    wanted, weights = launch(context_cases.trained, False, False, num_processes=1, timeout=400)[0]
    for zigzag in (False, True):
        found = launch(context_cases.trained, False, False, zigzag, num_processes=2, timeout=400)
        for losses, mine in found:
            assert losses == pytest.approx(wanted, abs=1e-5) and torch.allclose(mine, weights, atol=1e-5)


@pytest.mark.parametrize("mistake", [(True, False), (False, True)], ids=["shifted after the cut", "mean of means"])
def test_labels_shifted_after_the_cut_and_a_mean_of_means_are_seen(mistake):
    wanted, weights = launch(context_cases.trained, False, False, num_processes=1, timeout=400)[0]
    losses, mine = launch(context_cases.trained, *mistake, num_processes=2, timeout=400)[0]
    assert abs(losses[0] - wanted[0]) > 1e-3 and (mine - weights).abs().max() > 1e-2  # 100 times what is let pass


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("zigzag", [False, True])
def test_every_token_is_on_one_rank_and_comes_back(ranks, zigzag):
    layout = SequenceLayout(24, ranks, zigzag)
    whole = torch.arange(24).view(1, 24, 1)
    parts = [layout.shard(whole, rank, 1) for rank in range(ranks)]
    assert [part.flatten().tolist() for part in parts] == [layout.positions(rank).tolist() for rank in range(ranks)]
    assert torch.equal(layout.join(parts, 1), whole)
    assert torch.equal(torch.cat(parts, 1)[:, layout.order()], whole)
    work = [layout.pairs(rank) for rank in range(ranks)]
    assert sum(work) == 24 * 25 // 2 and layout.pairs(0, causal=False) == 24 * 24 // ranks
    assert (len(set(work)) == 1) is (zigzag or ranks == 1)


def test_labels_end_with_their_document():
    labels, documents = torch.tensor([[4, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1]])
    assert next_tokens(labels).tolist() == [[5, 6, 7, IGNORED]]
    assert next_tokens(labels, documents).tolist() == [[5, IGNORED, 7, IGNORED]]


def refusals():
    torch.distributed.init_process_group("gloo")
    said = []
    for heads, key_heads, method in ((3, 3, "ulysses"), (4, 3, "ring"), (4, 4, "rings")):
        with pytest.raises(ConfigError) as error:
            context_attention(torch.ones(1, heads, 4, 2), *torch.ones(2, 1, key_heads, 4, 2), method=method)
        said.append(str(error.value))
    return said


def test_what_cannot_be_shared_is_refused():
    said = launch(refusals, num_processes=2, timeout=400)[0]
    assert "3 heads cannot be shared evenly by 2 ranks" in said[0] and "use the ring" in said[0]
    assert "4 heads cannot share 3 key heads" in said[1] and "unknown method 'rings'" in said[2]
    with pytest.raises(ConfigError, match="10 tokens cannot be cut into 4 equal chunks: pad it to a multiple of 4"):
        SequenceLayout(10, 2, True)
