"""A tiny mixture of experts trains with DDP, and says which experts its tokens went to."""

import json

import pytest
import torch

from course_lib.modeling import load_trained
from course_lib.training.callbacks.expert_load import imbalance_of_ranks
from tests.training import quick


@pytest.fixture(scope="module", autouse=True)
def narrow_presets():
    """The usual ones: the choices of two trainings are compared."""


MIXTURE = {"model": "tiny-olmoe", "task": "causal_lm", "max_length": 16, "max_steps": 4, "logging_steps": 2}
LAYERS, EXPERTS, K = 4, 8, 2


def train(folder, options):
    torch.set_num_threads(1)
    quick.train(folder, **MIXTURE | options)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def trained(tmp_path, ranks):
    """A function (name, number of ranks, options) that trains; gives the logged lines, and the file of counts."""

    def trained_on(name, number, **options):
        ranks(number)(train, tmp_path / name, options)
        logged = [line for line in quick.logged(tmp_path / name) if "loss" in line]
        return logged, tmp_path / name / "monitor" / "experts.jsonl"

    return trained_on


def test_ddp_trains_a_mixture_as_one_process_and_counts_every_choice(trained):
    alone, by_one = trained("1", 1, batch_size=8)
    both, by_two = trained("2", 2, training_type="accelerated", strategy="ddp", engine="scratch")
    assert [line["loss"] for line in both] == pytest.approx([line["loss"] for line in alone], abs=2e-4)
    for one, two, line in zip(lines(by_one), lines(by_two), both, strict=True):
        assert len(two["chosen"]) == LAYERS and one["step"] == two["step"] == line["step"]
        totals = []
        for name, (first, second) in two["chosen"].items():
            total = [sum(pair) for pair in zip(first, second, strict=True)]
            assert len(total) == EXPERTS and sum(total) == 2 * 8 * 16 * K  # steps, rows, tokens, experts of a token
            assert sum(first) == sum(second) and first != second
            # Weights that differ by rounding may choose otherwise for a token between two experts.
            assert sum(abs(a - b) for a, b in zip(total, one["chosen"][name][0], strict=True)) <= 8
            totals.append(total)
        assert line["expert_imbalance"] == round(max(max(t) * EXPERTS / sum(t) for t in totals), 4) > 1
        assert line["experts_unused"] == sum(t.count(0) for t in totals) and line["tokens_dropped"] == 0


def test_spread_experts_and_the_work_of_each_rank_are_counted_and_the_model_is_whole_at_the_end(tmp_path, trained):
    alone, _ = trained("1", 1, batch_size=8, router_aux_loss_coef=0.01)
    logged, path = trained("2", 2, expert_parallel_size=2, router_aux_loss_coef=0.01)
    for line, one, counted in zip(logged, alone, lines(path), strict=True):
        # In float32 a token between two experts may choose otherwise; a thousandth is what few of them change.
        assert line["loss"] == pytest.approx(one["loss"], abs=2e-3)
        assert line["router_aux_loss"] == pytest.approx(one["router_aux_loss"], abs=1e-3)
        assert line["router_aux_loss"] > K  # which is that of an even load
        each = [of_rank for ranks in counted["chosen"].values() for of_rank in ranks]
        work = [sum(sum(chosen[:4]) for chosen in each), sum(sum(chosen[4:]) for chosen in each)]
        assert sum(work) == LAYERS * 2 * 8 * 16 * K
        assert line["expert_rank_imbalance"] == round(max(work) * 2 / sum(work), 4) >= 1
        assert "expert_rank_imbalance" not in one
    whole = [load_trained(tmp_path / ranks / "model", "causal_lm").model.state_dict() for ranks in "12"]
    # Four steps of Adam move a weight by 2e-4 at most; an expert in another's place would be 0.02 away.
    torch.testing.assert_close(dict(whole[1]), dict(whole[0]), rtol=0, atol=4e-4)


def test_imbalance_of_ranks_is_of_their_experts_and_not_of_their_tokens():
    assert imbalance_of_ranks([[[3, 1, 0, 0], [3, 1, 0, 0]], [[0, 0, 2, 2], [2, 2, 0, 0]]]) == 12 * 2 / 16


def test_stages_of_a_pipeline_count_their_own_layers_and_a_dense_one_has_none(trained):
    logged, path = trained("experts", 2, training_type="pipeline", batch_size=8)
    assert [len(line["chosen"]) for line in lines(path)] == [LAYERS] * 2  # each layer is on one rank
    assert {sum(*counts) for line in lines(path) for counts in line["chosen"].values()} == {2 * 8 * 16 * K}
    assert logged[0]["expert_imbalance"] > 1
    logged, path = trained("dense", 2, training_type="pipeline", model="tiny-llama")
    assert not path.exists() and "expert_imbalance" not in logged[0]


def test_recomputed_activations_are_counted_once_and_a_dense_model_not_at_all(trained):
    _, path = trained("again", 1, model="tiny-mixtral", activation_checkpointing=True)
    assert {sum(*counts) for line in lines(path) for counts in line["chosen"].values()} == {2 * 4 * 16 * K}
    metrics, path = trained("dense", 1, model="tiny-llama")
    assert not path.exists() and "expert_imbalance" not in metrics[0]
