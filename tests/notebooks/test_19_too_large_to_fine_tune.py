"""What lesson 19 claims, measured anew: gradients of A and B, bytes, 4 bits, own rows, activations, merging."""

from tests.notebooks.conftest import says

PARAMETERS = {"device": "auto", "world_size": 2, "steps": 12}


def test_b_alone_moves_first_and_peft_trains_the_same(lesson):
    assert says(lesson, "B begins at zero, so training begins at the base model")


def test_frozen_weights_are_gathered_and_only_adapters_are_reduced(lesson):
    sent = lesson["sent_by"]
    assert sent["FSDP2"]["LoRA"]["reduce_scatter"] == sent["FSDP2"]["QLoRA"]["reduce_scatter"]
    assert sent["ZeRO-3"] == sent["FSDP2"]


def test_each_rank_reads_its_own_rows(lesson):
    assert lesson["parts_are_whole"] and lesson["read_shares"] == [0.5, 0.5]


def test_levels_of_four_bits_and_what_offloading_moves(lesson):
    assert lesson["levels_off"] < 1e-4 and lesson["moved_share"] > 110
