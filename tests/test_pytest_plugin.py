"""What pytest finds where the course is installed: `audit` and `ranks` pass what is right and fail what is wrong."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_lib import pytest_plugin
from course_lib.launching.launch import RankError
from course_lib.pytest_plugin import assert_moved, assert_order
from tests.audit import subjects
from tests.torch_versions import FSDP2_ON_CPUS, needs

ranks = pytest_plugin.ranks  # not that of tests/ranks.py

WIDTH = 8
BYTES = (WIDTH * WIDTH + WIDTH) * 4


def test_a_right_loop_passes_and_a_wrong_one_fails_with_its_sentence(audit):
    assert [str(verdict.layout) for verdict in audit(subjects.right, ranks=3).verdicts] == ["dp2", "dp3"]
    with pytest.raises(pytest.fail.Exception, match=r"and 6 more: 2 times the reference, the size\s+of dp: summed"):
        audit(subjects.summed, ranks=2)


def sharded():
    """A layer under FSDP2: its set-up, which a test of a step is not about."""
    layer = torch.nn.Linear(WIDTH, WIDTH)
    dist.broadcast(layer.weight.data, 0)
    return fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True)


@pytest.fixture
def seen(ranks):
    """What a step of it does on two ranks."""

    def step(layer):
        layer(torch.ones(2, WIDTH)).sum().backward()
        return dist.get_rank(), layer.weight.grad.to_local().numel()

    return ranks(2)(step, sharded)


@needs(FSDP2_ON_CPUS)
def test_what_an_engine_moves_and_in_what_order(seen):
    assert [rank.value for rank in seen] == [(0, WIDTH * WIDTH // 2), (1, WIDTH * WIDTH // 2)]
    assert_moved(seen, "all_gather", calls=2, bytes=2 * BYTES, sent=BYTES, axis="world")
    assert_moved(seen, "reduce_scatter", calls=1, bytes=BYTES, dtype=torch.float32)
    assert_moved(seen, "all_gather")
    assert_moved(seen, "broadcast", calls=0)  # of the set-up
    assert_moved(seen, "reduce_scatter", calls=0, axis="dp")
    assert_order(seen, "all_gather", "reduce_scatter")
    assert_order(seen, "all_gather", "all_gather", "reduce_scatter", exactly=True)


@needs(FSDP2_ON_CPUS)
@pytest.mark.parametrize(
    ("check", "calls", "options", "said"),
    [
        (
            assert_moved,
            ["all_gather"],
            {"bytes": BYTES},
            f"all_gather: bytes {2 * BYTES:,}, not {BYTES:,}. It issued:",
        ),
        (assert_moved, ["all_reduce"], {}, "all_reduce: none. It issued: 2 x all_gather over world of float32, "),
        (assert_moved, ["reduce_scatter"], {"dtype": torch.bfloat16}, "reduce_scatter of bfloat16: none"),
        (
            assert_order,
            ["reduce_scatter", "all_gather"],
            {},
            "no all_gather at its place in the order reduce_scatter",
        ),
        (assert_order, ["all_gather", "reduce_scatter"], {"exactly": True}, "3 calls, not 2"),
    ],
)
def test_what_differs_is_told(seen, check, calls, options, said):
    with pytest.raises(AssertionError, match="^rank 0: " + re.escape(said)):
        check(seen, *calls, **options)


def test_ranks_are_metered_without_an_engine(ranks):
    seen = ranks(2)(lambda: dist.all_reduce(torch.ones(4)))
    assert_moved(seen, "all_reduce", calls=1, bytes=16, axis="world")
    with pytest.raises(RankError, match="division by zero"):
        ranks(1)(lambda: 1 / 0)
