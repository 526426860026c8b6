"""How blocks are dealt to stages."""

import pytest

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.partition import blocks_per_stage


def test_all_blocks_are_dealt_once_and_the_middle_has_what_is_left():
    for blocks in range(1, 130):
        for stages in range(1, blocks + 3):
            dealt = blocks_per_stage(blocks, stages)
            assert sum(dealt) == blocks and len(dealt) == stages and max(dealt) - min(dealt) <= 1
            assert dealt[0] == min(dealt) or blocks % stages == 0 or blocks % stages == stages - 1
            assert dealt[-1] == min(dealt)
            assert list(dealt) == sorted(dealt[: stages // 2]) + sorted(dealt[stages // 2 :], reverse=True)


def test_it_is_how_llama_3_was_cut():
    assert blocks_per_stage(126, 16) == (7, *[8] * 14, 7) and blocks_per_stage(126, 128) == (0, *[1] * 126, 0)
    assert blocks_per_stage(80, 24) == (*[3] * 8, *[4] * 8, *[3] * 8)


@pytest.mark.parametrize("stages", [0, 7])
def test_other_numbers_of_stages_are_refused(stages):
    with pytest.raises(ConfigError, match=f"{stages} pipeline stages of 4 blocks: take from 1 to 6 stages"):
        blocks_per_stage(4, stages)
