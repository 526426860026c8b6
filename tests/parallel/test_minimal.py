"""The shortest form of each parallelism: it trains what one process trains, and what the full form beside it trains.

Four steps of AdamW in float32 on 2 and 4 ranks. Without the mechanism a weight is ten thousand times as far off as is
allowed here.
"""

import ast
import functools
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.launching.launch import launch
from course_lib.parallel import tensor_parallel as full_tensor_parallel
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.minimal import data_parallel, fsdp, gpipe, one_f_one_b, tensor_parallel, zero1, zero2, zero3
from course_lib.parallel.pipeline.executor import PipelineExecutor
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.sharding import gather_whole
from course_lib.parallel.zero import Zero1, Zero2
from course_lib.parallel.zero3 import Zero3

SIZES = (2, 4)
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
    assert weights.keys() == others.keys() and len(weights) == 4 + 6 * LAYERS
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


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


# --- on the ranks: each trains, and returns weights and losses ---


def with_data_parallel():
    module = net(dist.get_rank())
    data_parallel.broadcast_model(module)
    optimizer = make_optimizer(module.parameters())
    losses = train(module, optimizer, after_backward=lambda: data_parallel.average_gradients(module))
    return weights_of(module), losses


def with_buckets():
    """Also how many buckets there are, and how many had left when the first layer's gradient was there."""
    module, left = net(dist.get_rank()), []
    engine = data_parallel.TinyDDP(module, 2000, reversed)
    module.embed.weight.register_hook(lambda gradient: left.append(len(engine.sent)))
    losses = train(module, make_optimizer(module.parameters()), after_backward=engine.finish)
    return weights_of(module), losses, len(engine.buckets), left


def with_full_data_parallel():
    engine = DataParallel(net(dist.get_rank()), bucket_bytes=2000, first_bucket_bytes=2000)
    losses = train(engine, make_optimizer(engine.parameters()))
    return weights_of(engine.module), losses


def with_zero(engine_class):
    """Also the elements of the optimizer's moments."""
    module = net()
    engine = engine_class(module, module.layers, make_optimizer)
    losses = train(module, engine)
    for bucket in engine.buckets:
        bucket.flat.untyped_storage().resize_(bucket.flat.nbytes)  # stage 3 has freed it
        bucket.gather()
    moments = [state[name].numel() for state in engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return weights_of(module), losses, sum(moments)


def with_fsdp():
    """Also the elements of whole weights while each block computes and between steps, by a rank's own account."""
    module = net(dist.get_rank())
    engine = fsdp.TinyFSDP(module, module.layers, fsdp.Unit)

    def whole():
        return sum(unit.flat.untyped_storage().nbytes() // 4 for unit in engine.units)

    during, between = [], []
    for layer in module.layers:
        layer.up.register_forward_hook(lambda *_: during.append(whole()))
        layer.up.register_full_backward_pre_hook(lambda *_: during.append(whole()))
    optimizer = make_optimizer([unit.shard for unit in engine.units])
    losses = train(module, optimizer, after_backward=lambda: between.append(whole()))
    assert module.head.weight.isnan().all()
    for unit in engine.units:
        unit.gather()
    return weights_of(module), losses, during, between, [unit.shard.numel() for unit in engine.units]


def with_full_sharding(engine_class):
    module = net(dist.get_rank())
    engine = engine_class(module, make_optimizer(module.parameters()))
    losses = train(engine, engine)
    return gather_whole(engine.shards(), dist.group.WORLD), losses


def with_tensor_parallel(split_layers):
    """Weights are put together again by the layers' names: columns of `up`, rows of `down`."""
    module = net()
    split_layers(module)
    losses = train(module, make_optimizer(module.parameters()), batch)
    weights = weights_of(module)
    shapes = {name: tuple(weights[f"layers.0.{name}"].shape) for name in ("up.weight", "up.bias", "down.weight")}
    for name in weights:
        dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(".".join(name.split(".")[-2:]))
        if dim is not None:
            parts = [torch.empty_like(weights[name]) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, weights[name].contiguous())
            weights[name] = torch.cat(parts, dim)
    return weights, losses, shapes


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


def stage_of(module):
    """The modules of this rank, and its stage."""
    parts = [module.embed, *module.layers, module.head]
    sizes = [len(part) for part in torch.arange(len(parts)).tensor_split(dist.get_world_size())]
    first = sum(sizes[: dist.get_rank()])
    return nn.Sequential(*parts[first : first + sizes[dist.get_rank()]])


def in_stages(engine_of):
    """Train a pipeline; the weights of the stages that are elsewhere are sent here."""
    module = net()
    stage = stage_of(module)
    optimizer = make_optimizer(stage.parameters())
    step_of, peak_of = engine_of(stage)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(step_of(*batch(step)))
        optimizer.step()
    trained = [None] * dist.get_world_size()
    own = set(stage.parameters())
    dist.all_gather_object(trained, {n: p.detach() for n, p in module.named_parameters() if p in own})
    return {n: weights for part in trained for n, weights in part.items()}, losses, peak_of()


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


CASES = {
    "data parallel": with_data_parallel,
    "buckets": with_buckets,
    "full data parallel": with_full_data_parallel,
    "zero1": functools.partial(with_zero, zero1.TinyZeRO1),
    "zero2": functools.partial(with_zero, zero2.TinyZeRO2),
    "zero3": functools.partial(with_zero, zero3.TinyZeRO3),
    "full zero1": functools.partial(with_full_sharding, Zero1),
    "full zero2": functools.partial(with_full_sharding, Zero2),
    "full zero3": functools.partial(with_full_sharding, Zero3),
    "fsdp": with_fsdp,
    "full fsdp": functools.partial(with_full_sharding, FullyShardedDataParallel),
    "tensor parallel": functools.partial(with_tensor_parallel, split_minimal),
    "full tensor parallel": functools.partial(with_tensor_parallel, split_full),
    "tensor parallel, silent": functools.partial(with_tensor_parallel, split_silent),
    "gpipe": functools.partial(in_stages, functools.partial(minimal_pipeline, gpipe.TinyGPipe)),
    "1f1b": functools.partial(in_stages, functools.partial(minimal_pipeline, one_f_one_b.TinyOneFOneB)),
    "full gpipe": functools.partial(in_stages, functools.partial(full_pipeline, "gpipe")),
    "full 1f1b": functools.partial(in_stages, functools.partial(full_pipeline, "1f1b")),
}
OF_DATA = ("data parallel", "buckets", "zero1", "zero2", "zero3", "fsdp")
FULL = {
    "data parallel": "full data parallel",
    "buckets": "full data parallel",
    "zero1": "full zero1",
    "zero2": "full zero2",
    "zero3": "full zero3",
    "fsdp": "full fsdp",
    "tensor parallel": "full tensor parallel",
    "gpipe": "full gpipe",
    "1f1b": "full 1f1b",
}


def run_cases():
    dist.init_process_group("gloo")
    return {name: case() for name, case in CASES.items()}


@pytest.fixture(scope="module")
def trained():
    """By case and number of ranks: what each rank returned."""
    by_size = {size: launch(run_cases, num_processes=size, timeout=800) for size in SIZES}
    return {(name, size): [said[name] for said in by_size[size]] for name in CASES for size in SIZES}


@pytest.fixture(scope="module")
def expected():
    return one_process()


def test_without_the_mechanism_it_is_another_model(trained, expected):
    weights, _ = expected
    for size in SIZES:
        alone, _ = one_process(slice(0, None, size))  # what data parallelism and sharding make good
        assert furthest(alone, weights) > ELSE
        silent, _, _ = trained["tensor parallel, silent", size][0]
        assert furthest(silent, weights) > ELSE
    one_microbatch, _ = one_process(slice(ROWS // MICROBATCHES))
    assert furthest(one_microbatch, weights) > ELSE
    assert furthest(weights_of(net()), weights) > ELSE  # a stage whose gradient never came


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FULL)
def test_it_trains_what_one_process_trains(name, size, trained, expected):
    weights, losses = expected
    for ranks_weights, _, *_ in trained[name, size]:
        assert furthest(ranks_weights, weights) < SAME
    by_rank = torch.tensor([ranks_losses for _, ranks_losses, *_ in trained[name, size]])
    whole = by_rank.mean(0) if name in OF_DATA else by_rank[-1]
    assert torch.allclose(whole, torch.tensor(losses), rtol=0, atol=SAME)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FULL)
def test_it_trains_what_the_full_one_trains(name, size, trained):
    assert furthest(trained[name, size][0][0], trained[FULL[name], size][0][0]) < SAME
    ours, theirs = ([said[1] for said in trained[case, size]] for case in (name, FULL[name]))
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=SAME)


@pytest.mark.parametrize("size", SIZES)
def test_buckets_leave_within_backward(size, trained):
    for _, _, buckets, left in trained["buckets", size]:
        assert buckets > 4
        assert left == [buckets - 1] * STEPS  # all but the one that the first layer's own gradient is in


@pytest.mark.parametrize("size", SIZES)
def test_zero_holds_its_share_of_the_optimizer(size, trained):
    model = net()
    block = sum(parameter.numel() for parameter in model.layers[0].parameters())
    elements = sum(parameter.numel() for parameter in model.parameters())
    padded = -(-elements // size)
    in_blocks = LAYERS * -(-block // size) + -(-(elements - LAYERS * block) // size)
    for name, share in (("zero1", padded), ("zero2", in_blocks), ("zero3", in_blocks)):
        assert [moments for _, _, moments in trained[name, size]] == [2 * share] * size, name


@pytest.mark.parametrize("size", SIZES)
def test_fsdp_has_one_block_whole_at_a_time(size, trained):
    model = net()
    block = sum(parameter.numel() for parameter in model.layers[0].parameters())
    root = sum(parameter.numel() for parameter in (*model.embed.parameters(), *model.head.parameters()))
    block, root = (-(-elements // size) * size for elements in (block, root))
    for _, _, during, between, shards in trained["fsdp", size]:
        assert during == [root + block] * 2 * LAYERS * STEPS
        assert between == [0] * STEPS
        assert shards == [root // size] + [block // size] * LAYERS


@pytest.mark.parametrize("size", SIZES)
def test_tensor_parallel_ranks_hold_their_columns_and_rows(size, trained):
    share = HIDDEN // size
    for _, _, shapes in trained["tensor parallel", size]:
        assert shapes == {"up.weight": (share, WIDTH), "up.bias": (share,), "down.weight": (WIDTH, share)}


@pytest.mark.parametrize("size", SIZES)
def test_1f1b_holds_fewer_microbatches(size, trained):
    assert [peak for _, _, peak in trained["gpipe", size]] == [MICROBATCHES] * size
    assert [peak for _, _, peak in trained["1f1b", size]] == [size - rank for rank in range(size)]
    for name in ("gpipe", "1f1b"):
        assert [peak for _, _, peak in trained[name, size]] == [peak for _, _, peak in trained[f"full {name}", size]]


def test_each_is_short_and_has_no_options():
    """Under 100 lines, and no argument with a default but the group, which is that of all ranks."""
    files = [data_parallel, fsdp, gpipe, one_f_one_b, tensor_parallel, zero1, zero2, zero3]
    for module in files:
        text = inspect.getsource(module)
        assert text.count("\n") < 100, module.__name__
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        optional = {
            argument.arg
            for function in functions
            for argument in function.args.args[len(function.args.args) - len(function.args.defaults) :]
        }
        assert functions and optional <= {"group"}, module.__name__
        assert not any(function.args.kw_defaults for function in functions)
    assert len(list(Path(data_parallel.__file__).parent.glob("[!_]*.py"))) == len(files)
