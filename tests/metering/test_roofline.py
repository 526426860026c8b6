"""The operator counter's FLOPs, bytes and places, each beside its formula; and which roof an operator is under."""

import functools
import json
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from course_lib.errors import CourseError
from course_lib.metering.roofline import (
    Bound,
    Operator,
    OperatorCounter,
    Peaks,
    bound,
    floor_seconds,
    measure_link,
    measure_peaks,
    merged,
)
from tests.ranks import on_ranks

B, S, HEADS, KEYS, D, FFN = 2, 6, 4, 2, 4, 24
H, TOKENS = HEADS * D, B * S
PEAKS = Peaks({"float32": 1e9, "bfloat16": 1e10}, memory=1e8, launch=1e-5, device="cpu", threads=1, link=1e7)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(H, H, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(H, KEYS * D, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, D)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """As Llama has it, with a LayerNorm and grouped queries."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(H), Attention()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((H, FFN), (H, FFN), (FFN, H)))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


MATMULS = 2 * TOKENS * (2 * H * H + 2 * H * KEYS * D + 3 * H * FFN)
ATTENTION = 4 * B * HEADS * S * S * D


def counted(call, *modules, timed=False):
    with OperatorCounter(*modules, timed=timed) as counter:
        call()
    return counter.operators


def one(operators, name):
    (row,) = [row for row in operators if row.name == name]
    return row.calls, row.flops, row.bytes


X, W, BIAS, IDS = torch.ones(5, 8), torch.ones(16, 8), torch.ones(16), torch.zeros(3, dtype=torch.int64)
COSTS = {  # calls, FLOPs and bytes
    "addmm": (lambda: F.linear(X, W, BIAS), (1, 2 * 5 * 8 * 16, 4 * (40 + 128 + 16 + 80))),
    "_softmax": (lambda: X.softmax(1), (1, 40, 4 * 80)),
    # weight and bias lie in x; mean and 1/sigma are written too
    "native_layer_norm": (lambda: F.layer_norm(X, [8], X[0], X[1]), (1, 40, 4 * (40 + 40 + 2 * 5))),
    "add": (lambda: X + 1, (1, 40, 4 * 80)),
    "add_": (lambda: X.clone().add_(1), (1, 40, 4 * 80)),
    "zero_": (lambda: X.clone().zero_(), (1, 0, 4 * 40)),  # reads nothing
    "_to_copy": (lambda: X.bfloat16(), (1, 0, 40 * 6)),
    "sum": (lambda: X.sum(1), (1, 40, 4 * 45)),
    "embedding": (lambda: F.embedding(IDS, W), (1, 0, 3 * 8 + 2 * 3 * 8 * 4)),  # not the table
    "convolution": (
        lambda: F.conv2d(torch.ones(1, 2, 6, 6), torch.ones(3, 2, 3, 3)),
        (1, 2 * 2 * 9 * 3 * 16, 4 * (72 + 54 + 48)),
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_what_one_operator_costs_is_its_formula(name):
    call, costs = COSTS[name]
    assert one(counted(call), name) == costs


def test_an_input_that_is_given_twice_is_read_once_and_views_are_free():
    x = torch.ones(4, 4)
    assert one(counted(lambda: x * x), "mul") == (1, 16, 4 * 32)
    assert one(counted(lambda: x @ x.T), "mm") == (1, 128, 4 * 32)
    assert one(counted(lambda: x[:2] * x[2:]), "mul") == (1, 8, 4 * 24)  # two halves of a storage are not one
    assert one(counted(lambda: x[0].expand(4, 4) * 1), "mul") == (1, 16, 4 * (4 + 16))
    views = counted(lambda: (x.T.reshape(2, 8), x.view(16)[3:], x.unsqueeze(0).expand(5, 4, 4), torch.empty(7)))
    assert sum(row.calls for row in views if row.kind == "view") >= 5
    assert {(row.flops, row.bytes) for row in views if row.kind == "view"} == {(0, 0)}


def test_adamw_moves_eighty_bytes_a_parameter_in_foreach_and_twenty_eight_fused():
    moved = {}
    for way in ("foreach", "fused"):
        parameters = [nn.Parameter(torch.ones(40, 3)), nn.Parameter(torch.ones(80))]
        optimizer = torch.optim.AdamW(parameters, **{way: True})
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # makes the moments
        rows = counted(optimizer.step, None, optimizer)
        assert {row.phase for row in rows} == {"optimizer"}
        large = [row for row in rows if row.flops >= 200]
        moved[way] = len(large), sum(row.flops for row in large), sum(row.bytes for row in large)
    assert moved == {
        "foreach": (7, 8 * 200 + 2, 80 * 200 + 20),  # the two counts of steps are added to as well
        "fused": (1, 8 * 200, 28 * 200 + 8),
    }


@pytest.mark.parametrize("way", ["plain", "checkpointed"])
def test_a_block_costs_what_the_formula_says_and_each_module_its_part(way):
    block, x = Block(), torch.ones(B, S, H, requires_grad=True)
    run = block if way == "plain" else functools.partial(checkpoint, block, use_reentrant=False)
    rows = counted(lambda: run(x).sum().backward(), block)
    total = {(row.phase, row.kind): row.flops for row in merged(rows, "phase", "kind")}
    again = 1 if way == "checkpointed" else 0  # time that the backward computes the forward
    product = 2 * TOKENS * H
    assert total["forward", "matmul"] == MATMULS and total["forward", "attention"] == ATTENTION
    last = again * product * FFN  # whose output no backward needs: PyTorch stops before it
    assert total["backward", "matmul"] == (2 + again) * MATMULS - last
    assert total["backward", "attention"] == 2.5 * ATTENTION + again * ATTENTION
    modules = {
        (row.module, row.phase): row.flops for row in merged(rows, "module", "phase", "kind") if row.kind == "matmul"
    }
    outputs = {"attention.q_proj": H, "attention.k_proj": KEYS * D, "attention.o_proj": H, "gate": FFN, "up": FFN}
    for name, width in outputs.items():
        assert modules[name, "forward"] == product * width
        assert modules[name, "backward"] == (2 + again) * product * width
    (attention,) = [
        row for row in rows if row.kind == "attention" and row.phase == "backward" and row.name.endswith("backward")
    ]
    assert attention.module == "attention" and attention.calls == 1
    assert modules["down", "backward"] == 2 * product * FFN
    (silu,) = [row for row in rows if row.name == "silu_backward"]
    assert silu.module == "" and silu.bytes == 4 * 3 * TOKENS * FFN  # the block's own, which is the root
    (everything,) = merged(rows)
    for field in ("calls", "flops", "bytes"):
        assert sum(getattr(row, field) for row in rows) == getattr(everything, field)


def test_in_inference_mode_the_operators_are_the_same():
    block, x = Block(), torch.ones(B, S, H)
    with torch.inference_mode():
        rows = merged(counted(lambda: block(x), block), "kind")
    assert {row.kind: row.flops for row in rows}["matmul"] == MATMULS
    assert {row.kind: row.flops for row in rows}["attention"] == ATTENTION


def test_gradients_that_add_up_belong_to_the_module_of_their_parameter():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight  # tied

    def twice():
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()

    rows = [row for row in counted(twice, model) if row.phase == "backward"]
    assert [row.calls for row in rows if row.name == "mm" and row.module == "1"] == [4]
    assert [row.calls for row in rows if row.name == "mm" and row.module == "0"] == [2]
    assert sum(row.calls for row in rows if row.name in ("add", "add_")) == 3  # two uses twice, and two backwards


def test_the_lowest_roof_is_the_bound():
    row = Operator("mm", "", "forward", "matmul", "float32", calls=2, flops=1000_000, bytes=1000)
    assert bound(row, PEAKS) == Bound("compute", 1e-3) and row.intensity == 1000 > PEAKS.ridge == 100
    assert bound(replace(row, dtype="bfloat16"), PEAKS) == Bound("compute", 1e-4)
    assert bound(replace(row, flops=10_000, bytes=10_000), PEAKS) == Bound("memory", 1e-4)
    assert bound(replace(row, flops=10, bytes=10), PEAKS) == Bound("launch", 2e-5)
    send = replace(row, name="all_reduce", kind="collective", flops=0, bytes=10_000)
    assert bound(send, PEAKS) == Bound("link", 1e-3)
    assert floor_seconds([row, send], PEAKS) == 2e-3
    with pytest.raises(CourseError, match="measure_link"):
        bound(send, replace(PEAKS, link=None))
    assert math.isnan(row.rate) and replace(row, seconds=0.5).rate == 2e6 and replace(row, seconds=0.5).bandwidth == 2e3


def test_peaks_are_measured_and_written_as_json():
    before = torch.get_rng_state()
    peaks = measure_peaks(seconds=0.05)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(peaks.flops) == ["float32"] and peaks.device == "cpu" and peaks.threads == torch.get_num_threads()
    assert min(*peaks.flops.values(), peaks.memory, peaks.launch, peaks.ridge) > 0 and peaks.link is None
    assert Peaks(**json.loads(json.dumps(asdict(peaks)))) == peaks
    with pytest.raises(CourseError, match="init_process_group"):
        measure_link()


def test_timed_changes_no_count():
    block, x = Block(), torch.ones(B, S, H)

    def passes():
        block.zero_grad()
        block(x).sum().backward()

    rows, timed = (counted(passes, block, timed=timed) for timed in (False, True))
    assert all(math.isnan(row.seconds) for row in rows) and all(row.seconds > 0 for row in timed)
    assert [replace(row, seconds=0.0) for row in rows] == [replace(row, seconds=0.0) for row in timed]


@on_ranks(2)
def test_collectives_of_ddp_and_dtensor_send_what_the_ring_model_says():
    links = [0.0, 0.0]
    dist.all_gather_object(links, measure_link(size=1 << 16))
    assert links[0] == links[1] > 0
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    with OperatorCounter(model, timed=True) as counter:
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))
        model(torch.ones(4, 8)).sum().backward()
    ddp = [(row.name, row.phase, row.calls, row.bytes) for row in counter.operators if row.kind == "collective"]
    assert ddp == [("all_gather", "forward", 1, 16), ("all_reduce", "backward", 1, 72 * 4)]  # whole, halves twice
    mesh = DeviceMesh("cpu", range(2))
    left = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    right = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
    with OperatorCounter() as counter:
        (left @ right).full_tensor()
    # this rank's, and not the shapes' derivation
    assert one(counter.operators, "mm") == (1, 2 * 4 * 3 * 2, 4 * (12 + 6 + 8))
    assert one(counter.operators, "all_reduce") == (1, 0, 8 * 4)
