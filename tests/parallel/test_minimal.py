"""The shortest form of each parallelism: it trains what one process trains, and what the full form beside it trains.

Four steps of AdamW in float32 on 2 and 4 ranks. Without the mechanism a weight is ten thousand times as far off as is
allowed here.
"""

import ast
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from course_lib.parallel import tensor_parallel as full_tensor_parallel
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.minimal import data_parallel, fsdp, gpipe, one_f_one_b, tensor_parallel, zero1, zero2, zero3
from course_lib.parallel.pipeline.executor import PipelineExecutor
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.sharding import gather_whole
from course_lib.parallel.zero import Zero1, Zero2
from course_lib.parallel.zero3 import Zero3
from tests.parallel.between_ranks import here
from tests.ranks import on_ranks

STEPS, ROWS, LAYERS, WIDTH, HIDDEN = 4, 12, 4, 13, 20
MICROBATCHES = 6
SAME, ELSE = 1e-6, 1e-2
"""Furthest that a weight may lie from one process's, and least that it does without the mechanism."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd sizes, so that flat tensors need padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(11, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


loss_function = nn.functional.cross_entropy
make_optimizer = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, weight_decay=0.1)


def net(rank=0):
    """The same for all; with a rank, one that has to take over the first one's weights."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    return model


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, 11, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def rows_of(step):
    """This rank's share of a batch's rows; all shares are equal."""
    return [part[dist.get_rank() :: dist.get_world_size()] for part in batch(step)]


def weights_of(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def furthest(weights, others):
    return max((weights[name] - others[name]).abs().max().item() for name in others)


def elements_of(*modules):
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def train(module, optimizer, rows=rows_of, after_backward=lambda: None):
    """The losses of all steps."""
    losses = []
    for step in range(STEPS):
        x, y = rows(step)
        optimizer.zero_grad()
        loss = loss_function(module(x), y)
        loss.backward()
        after_backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def one_process(rows=slice(None)):
    """Weights and losses of one process that has all rows, or only some."""
    module = net()
    losses = train(module, make_optimizer(module.parameters()), lambda step: [part[rows] for part in batch(step)])
    return weights_of(module), losses


# --- on the ranks: each trains, and returns weights and losses; what it holds meanwhile is asserted on the way ---


def with_data_parallel():
    module = net(dist.get_rank())
    data_parallel.broadcast_model(module)
    optimizer = make_optimizer(module.parameters())
    losses = train(module, optimizer, after_backward=lambda: data_parallel.average_gradients(module))
    return weights_of(module), losses


def with_buckets():
    module, left = net(dist.get_rank()), []
    engine = data_parallel.TinyDDP(module, 2000, reversed)
    module.embed.weight.register_hook(lambda gradient: left.append(len(engine.sent)))
    losses = train(module, make_optimizer(module.parameters()), after_backward=engine.finish)
    buckets = len(engine.buckets)
    assert buckets > 4
    assert left == [buckets - 1] * STEPS  # within backward, all but the one that the first layer's own gradient is in
    return weights_of(module), losses


def with_full_data_parallel():
    engine = DataParallel(net(dist.get_rank()), bucket_bytes=2000, first_bucket_bytes=2000)
    losses = train(engine, make_optimizer(engine.parameters()))
    return weights_of(engine.module), losses


def with_zero(engine_class):
    module, size = net(), dist.get_world_size()
    engine = engine_class(module, module.layers, make_optimizer)
    losses = train(module, engine)
    for bucket in engine.buckets:
        bucket.flat.untyped_storage().resize_(bucket.flat.nbytes)  # stage 3 has freed it
        bucket.gather()
    moments = [state[name].numel() for state in engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    elements, block = elements_of(module), elements_of(module.layers[0])
    in_blocks = LAYERS * -(-block // size) + -(-(elements - LAYERS * block) // size)
    assert sum(moments) == 2 * (-(-elements // size) if engine_class is zero1.TinyZeRO1 else in_blocks)
    return weights_of(module), losses


def with_fsdp():
    """One block is whole at a time, while it computes, and none between steps, by a rank's own account."""
    module, size = net(dist.get_rank()), dist.get_world_size()
    block = -(-elements_of(module.layers[0]) // size) * size
    root = -(-elements_of(module.embed, module.head) // size) * size
    engine = fsdp.TinyFSDP(module, module.layers, fsdp.Unit)

    def whole():
        return sum(unit.flat.untyped_storage().nbytes() // 4 for unit in engine.units)

    during, between = [], []
    for layer in module.layers:
        layer.up.register_forward_hook(lambda *_: during.append(whole()))
        layer.up.register_full_backward_pre_hook(lambda *_: during.append(whole()))
    optimizer = make_optimizer([unit.shard for unit in engine.units])
    losses = train(module, optimizer, after_backward=lambda: between.append(whole()))
    assert during == [root + block] * 2 * LAYERS * STEPS and between == [0] * STEPS
    assert [unit.shard.numel() for unit in engine.units] == [root // size] + [block // size] * LAYERS
    assert module.head.weight.isnan().all()
    for unit in engine.units:
        unit.gather()
    return weights_of(module), losses


def with_full_sharding(engine_class):
    module = net(dist.get_rank())
    engine = engine_class(module, make_optimizer(module.parameters()))
    losses = train(engine, engine)
    return gather_whole(engine.shards(), dist.group.WORLD), losses


def with_tensor_parallel(split_layers):
    """Weights are put together again by the layers' names: columns of `up`, rows of `down`."""
    module, size = net(), dist.get_world_size()
    split_layers(module)
    losses = train(module, make_optimizer(module.parameters()), batch)
    weights, share = weights_of(module), HIDDEN // size
    shapes = {"up.weight": (share, WIDTH), "up.bias": (share,), "down.weight": (WIDTH, share)}
    for name in weights:
        kind = ".".join(name.split(".")[-2:])
        if kind in shapes:
            assert weights[name].shape == shapes[kind]
            parts = [torch.empty_like(weights[name]) for _ in range(size)]
            dist.all_gather(parts, weights[name].contiguous())
            weights[name] = torch.cat(parts, 1 if kind == "down.weight" else 0)
    return weights, losses


def split_minimal(module):
    for layer in module.layers:
        layer.up, layer.down = tensor_parallel.TinyColumns(layer.up), tensor_parallel.TinyRows(layer.down)


def split_full(module):
    for layer in module.layers:
        layer.up = full_tensor_parallel.ColumnParallelLinear(layer.up, dist.group.WORLD)
        layer.down = full_tensor_parallel.RowParallelLinear(layer.down, dist.group.WORLD)


def split_silent(module):
    """Shards as they have to be, and nobody says a word."""
    with torch.no_grad():
        for layer in module.layers:
            for parameter, dim in ((layer.up.weight, 0), (layer.up.bias, 0), (layer.down.weight, 1)):
                parameter.data = tensor_parallel.part(parameter, dim)


def in_stages(engine_of, holds):
    """Train a pipeline; the weights of the stages that are elsewhere are sent here."""
    module, (rank, ranks) = net(), here()
    parts = [module.embed, *module.layers, module.head]
    own = torch.arange(len(parts)).tensor_split(ranks)[rank].tolist()
    stage = nn.Sequential(*parts[own[0] : own[-1] + 1])
    optimizer = make_optimizer(stage.parameters())
    step_of, peak_of = engine_of(stage)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(step_of(*batch(step)))
        optimizer.step()
    assert peak_of() == holds(rank, ranks)
    trained = [None] * ranks
    held = set(stage.parameters())
    dist.all_gather_object(trained, {n: p.detach() for n, p in module.named_parameters() if p in held})
    return {n: weights for part in trained for n, weights in part.items()}, losses


def minimal_pipeline(engine_class, stage):
    engine = engine_class(stage, loss_function, torch.empty(ROWS // MICROBATCHES, WIDTH))

    def step(x, y):
        engine.step(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES))
        return engine.loss

    return step, lambda: engine.peak


def full_pipeline(name, stage):
    results, rank, ranks = [], dist.get_rank(), dist.get_world_size()
    engine = PipelineExecutor(make(name, ranks, MICROBATCHES), {rank: stage}, loss_function, dist.group.WORLD)

    def step(x, y):
        results.append(engine.step(x, targets=y))
        return sum(loss.item() for loss in results[-1].losses) / MICROBATCHES

    return step, lambda: max(result.peak for result in results)


def all_microbatches(rank, ranks):
    return MICROBATCHES


def fewer_microbatches(rank, ranks):
    return ranks - rank


CASES = {
    "data parallel": (with_data_parallel, with_full_data_parallel),
    "buckets": (with_buckets, with_full_data_parallel),
    "zero1": (functools.partial(with_zero, zero1.TinyZeRO1), functools.partial(with_full_sharding, Zero1)),
    "zero2": (functools.partial(with_zero, zero2.TinyZeRO2), functools.partial(with_full_sharding, Zero2)),
    "zero3": (functools.partial(with_zero, zero3.TinyZeRO3), functools.partial(with_full_sharding, Zero3)),
    "fsdp": (with_fsdp, functools.partial(with_full_sharding, FullyShardedDataParallel)),
    "tensor parallel": (
        functools.partial(with_tensor_parallel, split_minimal),
        functools.partial(with_tensor_parallel, split_full),
    ),
    "gpipe": (
        functools.partial(in_stages, functools.partial(minimal_pipeline, gpipe.TinyGPipe), all_microbatches),
        functools.partial(in_stages, functools.partial(full_pipeline, "gpipe"), all_microbatches),
    ),
    "1f1b": (
        functools.partial(in_stages, functools.partial(minimal_pipeline, one_f_one_b.TinyOneFOneB), fewer_microbatches),
        functools.partial(in_stages, functools.partial(full_pipeline, "1f1b"), fewer_microbatches),
    ),
}
"""The shortest form, and the full one."""


@pytest.mark.parametrize("size", [2, 4])
def test_without_the_mechanism_it_is_another_model(size, ranks):
    weights, _ = one_process()
    alone, _ = one_process(slice(0, None, size))  # what data parallelism and sharding make good
    one_microbatch, _ = one_process(slice(ROWS // MICROBATCHES))
    silent, _ = ranks(size, join=True)(with_tensor_parallel, split_silent)[0]
    untouched = weights_of(net())  # a stage whose gradient never came
    assert min(furthest(other, weights) for other in (alone, one_microbatch, silent, untouched)) > ELSE


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, 4)
def test_it_trains_what_one_process_and_the_full_one_train(name):
    minimal, full = CASES[name]
    weights, losses = minimal()
    expected_weights, expected_losses = one_process()
    assert_close(weights, expected_weights, rtol=0, atol=SAME)
    whole = torch.tensor(losses)
    if name in ("gpipe", "1f1b"):  # the last stage has the loss
        dist.broadcast(whole, dist.get_world_size() - 1)
    elif name != "tensor parallel":  # each rank has that of its rows
        dist.all_reduce(whole)
        whole /= dist.get_world_size()
    assert_close(whole.tolist(), expected_losses, rtol=0, atol=SAME)

    full_weights, full_losses = full()
    assert_close(full_weights or weights, weights, rtol=0, atol=SAME)
    assert_close(losses, full_losses, rtol=0, atol=SAME)


def test_each_is_short_and_has_no_options():
    """Under 100 lines, and no argument with a default but the group, which is that of all ranks."""
    for path in Path(data_parallel.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert text.count("\n") < 100, path
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        for arguments in (function.args for function in functions):
            optional = arguments.args[len(arguments.args) - len(arguments.defaults) :]
            assert {argument.arg for argument in optional} <= {"group"} and not arguments.kw_defaults, path
