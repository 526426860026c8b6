"""What lesson 19 claims, measured anew: gradients of A and B, bytes, 4 bits, own rows, activations, merging."""

import pytest

from tests.notebooks.conftest import says


@pytest.fixture(scope="module")
def lesson(run_lesson):
    return run_lesson("19_too_large_to_fine_tune", device="auto", world_size=2, steps=12)


def test_b_alone_moves_first_and_peft_trains_the_same(lesson):
    first, second = lesson["first_gradients"]
    assert first["A"] == 0 < first["B"] and second["A"] > 0 and lesson["peft_off"] < 1e-4
    assert says(lesson, "B begins at zero, so training begins at the base model")


def test_frozen_weights_are_gathered_and_only_adapters_are_reduced(lesson):
    sent = lesson["sent_by"]
    assert lesson["sent_of_full"]["DDP"]["LoRA"] < 0.1 < 0.65 < lesson["sent_of_full"]["FSDP2"]["LoRA"]
    assert sent["FSDP2"]["LoRA"]["reduce_scatter"] == sent["FSDP2"]["QLoRA"]["reduce_scatter"]
    assert sent["ZeRO-3"] == sent["FSDP2"]


def test_what_a_rank_holds_is_what_is_planned(lesson):
    assert len(lesson["bytes"]) == 3
    for way, methods in lesson["bytes"].items():
        for method, held in methods.items():
            planned = lesson["planned"][way][method]
            for kind in ("parameters", "gradients", "optimizer states"):
                assert held[kind] == pytest.approx(planned[kind], rel=0.01), (way, method, kind)


def test_four_bits(lesson):
    errors = lesson["four_bit_errors"]
    assert errors["NF4"] < 0.95 * errors["evenly spaced"] and lesson["levels_off"] < 1e-4
    assert lesson["bits_per_weight"] == pytest.approx(lesson["formula_bits"], rel=0.002)
    assert lesson["nf4_gradient_off"] < 1e-5


def test_each_rank_reads_its_own_rows(lesson):
    assert lesson["parts_are_whole"] and lesson["read_shares"] == [0.5, 0.5]
    assert lesson["loads"]["own rows"]["peak"] < 0.65 < 1.2 < lesson["loads"]["whole, then sharded"]["peak"]


def test_activations_are_what_is_left(lesson):
    kept = lesson["kept_bytes"]
    assert kept["offloaded"] < kept["a block's input is kept"] < 0.24 * kept["everything is kept"]
    assert kept["products are kept"] > kept["everything is kept"] and lesson["kept_gradients_apart"] < 1e-6
    assert lesson["moved_share"] > 110


def test_the_adapter_is_pefts_and_merges(lesson):
    off = lesson["off_pefts"]
    assert max(off["by hand"], off["course merge"]) < 1e-4 < 0.05 < off["base alone"]
    assert any("answers alone" in note for note in lesson["notes"])
