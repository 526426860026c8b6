"""Data parallelism from scratch on real ranks, against one process that sees the whole batch, and against torch's.

In float64, so that the order of a sum shows in the 16th digit only; tolerances say where it is otherwise.
"""

import contextlib
import datetime
import functools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from course_lib.errors import CourseError, ModelError
from course_lib.launching.launch import RankError
from course_lib.parallel import collectives
from course_lib.parallel.ddp import DataParallel, bf16_compression
from tests.parallel.between_ranks import here, spread
from tests.ranks import on_ranks

SMALL = {"bucket_bytes": 2000, "first_bucket_bytes": 300}  # several buckets in a tiny model
ROWS = 10  # 3, 3, 2, 2 on four ranks


class Blocks(nn.Module):
    """Three layers, a branch that is used on demand, a frozen one, and a head that is tied to the first layer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.branch = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 6, bias=False)
        self.head.weight = nn.Parameter(torch.empty(6, 16))
        self.scale = nn.Parameter(torch.ones(16))
        nn.init.normal_(self.head.weight, std=0.3)
        self.tied = self.first.weight
        self.checkpointing = None

    def forward(self, x, branch=False):
        hidden = self.first(x)
        for block in self.blocks:
            if self.checkpointing is None:
                hidden = hidden + torch.tanh(block(hidden) * self.scale)
            else:
                hidden = checkpoint(
                    lambda h, block=block: h + torch.tanh(block(h) * self.scale),
                    hidden,
                    use_reentrant=self.checkpointing,
                )
        if branch:
            hidden = self.branch(hidden)
        hidden = self.frozen(hidden)
        return self.head(hidden) + F.linear(hidden, self.tied.t())


def model_of(seed=0, checkpointing=None):
    """In float64; recomputed in reentrant segments, `scale` would have a gradient of each of them, and is frozen."""
    model = Blocks(seed).double()
    model.checkpointing = checkpointing
    model.scale.requires_grad_(not checkpointing)
    return model


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(ROWS, 6, generator=generator, dtype=dtype) for _ in range(2)]


def loss_of(model, step, rank=0, ranks=1, dtype=torch.float64, **options):
    """The part of the whole batch's mean that this rank's rows bring, times N, as DDP divides by N.

    A rank has as many rows as the others, or one fewer.
    """
    x, y = (tensor.tensor_split(ranks)[rank] for tensor in batch(step, dtype))
    return (model(x, **options) - y).square().sum() * ranks / (ROWS * y.shape[1])


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, **options)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def steps(model, rank=0, ranks=1, accumulate=1, clip=None, set_to_none=True, optimizer=adamw, **options):
    """Three steps on this rank's rows; gradients of the last one, norms, and weights."""
    optimizer, norms = optimizer([p for p in model.parameters() if p.requires_grad]), []
    for step in range(3):
        for part in range(accumulate):
            quiet = isinstance(model, DataParallel) and part < accumulate - 1
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss_of(model, step + 10 * part, rank, ranks, **options).backward()
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return grads, [p.detach().clone() for p in model.parameters()], norms


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def by_our_ring(bucket):
    """The all-reduce of the collectives from scratch, as the hook."""
    collectives.all_reduce(bucket.flat, group=bucket.group)
    done = torch.futures.Future()
    done.set_result(None)
    return done


@on_ranks(2, 4)
def test_ranks_that_are_not_synchronised_go_apart():
    assert spread(steps(model_of(), *here())[1]) > 1e-3


USED = {"branch": True}  # by all ranks
FIND = SMALL | {"find_unused_parameters": True}


@pytest.mark.parametrize(
    ("built", "given", "both"),
    [
        pytest.param({}, {}, USED, id="one bucket"),
        pytest.param({}, SMALL, USED, id="small buckets"),
        pytest.param({}, SMALL, USED | {"accumulate": 3}, id="accumulation"),
        pytest.param({}, SMALL, USED | {"accumulate": 2, "set_to_none": False}, id="accumulation, zeroed in place"),
        pytest.param({}, SMALL, USED | {"set_to_none": False, "clip": 0.1}, id="clipping, zeroed in place"),
        pytest.param({}, FIND, {}, id="used by none"),
        pytest.param({}, FIND, {"accumulate": 2}, id="used by none, accumulation"),
        pytest.param({"checkpointing": False}, FIND, {}, id="checkpointing"),
        pytest.param({"checkpointing": True}, FIND, {}, id="reentrant checkpointing"),
        pytest.param({}, SMALL, USED | {"optimizer": functools.partial(adamw, fused=True)}, id="fused"),
        pytest.param({}, SMALL, USED | {"optimizer": functools.partial(adamw, foreach=True)}, id="foreach"),
        pytest.param({}, SMALL, USED | {"optimizer": momentum}, id="momentum"),
        pytest.param({}, SMALL | {"communication_hook": by_our_ring}, USED, id="our own ring"),
    ],
)
@on_ranks(1, 2, 4)
def test_training_equals_one_process_on_the_whole_batch(built, given, both):
    # Ranks begin with other weights: they take the first rank's.
    engine = DataParallel(model_of(seed=dist.get_rank(), **built), **given)
    found = steps(engine, *here(), **both)
    assert_close(found, steps(model_of(**built), **both), rtol=0, atol=1e-12)
    assert spread(found[1]) == 0


@on_ranks(4)
def test_a_group_of_some_of_the_ranks():
    group, rank = dist.new_group([1, 3]), dist.get_rank()
    if rank in (1, 3):
        engine = DataParallel(model_of(seed=rank), group=group, **FIND)
        expected = steps(model_of(seed=1))
        assert_close(steps(engine, rank // 2, 2), expected, rtol=0, atol=1e-12)


@on_ranks(1, 2)
def test_gradients_are_views_of_the_buckets():
    """After every backward, whatever zero_grad did; with the parameters' strides."""
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)).to(memory_format=torch.channels_last)
    engine = DataParallel(model, **SMALL)
    assert sum(b.flat.numel() for b in engine.buckets) == sum(p.numel() for p in model.parameters())
    for set_to_none in (True, True, False, False, True):
        for quiet in (True, False):
            with engine.no_sync() if quiet else contextlib.nullcontext():
                engine(torch.randn(2, 2, 3, 3)).sum().backward()
            inside = {b.flat.untyped_storage().data_ptr() for b in engine.buckets}
            for parameter in model.parameters():
                assert parameter.grad.untyped_storage().data_ptr() in inside
                assert parameter.grad.stride() == parameter.stride()
        engine.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("find", [True, False])
@on_ranks(1, 2, 4)
def test_a_branch_that_one_rank_uses_is_averaged_over_all(find):
    rank, ranks = here()
    engine, alone = DataParallel(model_of(), find_unused_parameters=find, **SMALL), model_of()

    def assert_averaged():
        expected = [gradient / ranks for gradient in gradients(alone.branch)]
        assert_close(gradients(engine.module.branch), expected, rtol=0, atol=1e-12)

    loss_of(engine, 0, rank, ranks, branch=True).backward()
    engine.zero_grad()  # the buckets still hold the gradients of a step in which all used the branch
    loss_of(engine, 0, rank, ranks, branch=rank == 0).backward()
    loss_of(alone, 0, 0, ranks, branch=True).backward()
    assert_averaged()
    assert spread(gradients(engine)) == 0
    # Without zero_grad, under no_sync, and then not used any more: what it has is kept and averaged.
    with engine.no_sync():
        loss_of(engine, 1, rank, ranks, branch=rank == 0).backward()
    loss_of(engine, 2, rank, ranks).backward()
    loss_of(alone, 1, 0, ranks, branch=True).backward()
    assert_averaged()


@on_ranks(1, 2)
def test_what_nobody_uses_gets_zeros_and_the_frozen_nothing_and_a_tied_weight_one_gradient():
    engine, arrivals = DataParallel(model_of(), **SMALL), []
    names = [name for bucket in engine.buckets for name in bucket.views]
    assert names == [n for n, p in reversed(list(engine.module.named_parameters())) if p.requires_grad]
    assert names.count("tied") == 1 and "first.weight" not in names and "frozen.weight" not in names
    assert len(engine.buckets) > 2
    engine.module.tied.register_post_accumulate_grad_hook(lambda p: arrivals.append(p.grad.clone()))
    loss_of(engine, 0, *here()).backward()
    assert len(arrivals) == 1 and engine.module.frozen.weight.grad is None
    assert [gradient.count_nonzero() for gradient in gradients(engine.module.branch)] == [0, 0]


@on_ranks(2, 4)
def test_buffers_are_the_first_ranks_at_the_start_and_in_each_training_forward():
    """And not otherwise: BatchNorm's means are those of a rank's own rows after the forward."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[0].running_mean.fill_(rank)
    assert spread(model.buffers()) > 0.9
    engine = DataParallel(model)
    assert spread(model.buffers()) == 0 and model[0].running_mean.sum() == 0
    x = torch.randn(8, 4) + rank
    engine(x)
    apart = spread(model.buffers())
    assert apart > 0
    with mock.patch.object(nn.BatchNorm1d, "forward", lambda self, x: x):
        with torch.no_grad():
            engine(x)
        engine.eval()(x)
        engine.train()
        with engine.no_sync():
            engine(x)
        assert spread(model.buffers()) == apart
        engine(x)
        assert spread(model.buffers()) == 0


@on_ranks(1, 2, 4)
def test_buckets_have_one_dtype_and_gradients_their_parameters():
    model = Blocks()
    model.blocks.bfloat16()

    def forward(x):
        hidden = model.first(x)
        for block in model.blocks:
            hidden = hidden + torch.tanh(block(hidden.bfloat16()).float() * model.scale)
        return model.head(hidden)

    model.forward = forward
    engine = DataParallel(model, **SMALL)
    loss_of(engine, 0, *here(), torch.float32).backward()
    assert {b.flat.dtype for b in engine.buckets} == {torch.float32, torch.bfloat16}
    assert all(p.grad.dtype == p.dtype for p in model.parameters() if p.requires_grad)
    assert spread(gradients(model)) == 0


@on_ranks(1, 2, 4)
def test_the_bf16_hook_sends_half_the_bytes_and_rounds():
    all_reduce, sent = dist.all_reduce, {}

    def backward(**hook):
        def counted(tensor, *args, **options):
            sent[engine].append(tensor.nbytes)
            return all_reduce(tensor, *args, **options)

        engine = DataParallel(Blocks(), **hook, **SMALL)
        sent[engine] = []
        with mock.patch.object(dist, "all_reduce", counted):
            loss_of(engine, 0, *here(), torch.float32, branch=True).backward()
        return engine

    plain, compressed = backward(), backward(communication_hook=bf16_compression)
    assert len(sent[plain]) > 2 and [2 * nbytes for nbytes in sent[compressed]] == sent[plain]
    assert spread(gradients(compressed)) == 0
    pairs = list(zip(gradients(plain), gradients(compressed), strict=True))
    assert max((a - b).abs().max() for a, b in pairs) > 0
    for exact, rounded in pairs:
        # Rounded to 8 bits once by each rank and once a sum: an error of 2^-8 of the largest partial sum each time.
        assert_close(rounded, exact, rtol=0, atol=(here()[1] + 1) * 2**-8 * exact.abs().max().item())


@on_ranks(1, 2, 4)
def test_the_bits_of_torchs_ddp():
    """At 4 ranks except for the order of the sums."""
    engine = DataParallel(Blocks())
    torchs = DistributedDataParallel(Blocks(), gradient_as_bucket_view=True)
    mine, theirs = (steps(each, *here(), dtype=torch.float32, branch=True) for each in (engine, torchs))
    bounds = {"rtol": 1e-5, "atol": 1e-5} if dist.get_world_size() == 4 else {"rtol": 0, "atol": 0}
    assert_close(mine, theirs, **bounds)


@on_ranks(1, 2, 4)
def test_communication_starts_while_gradients_are_still_to_come():
    engine = DataParallel(model_of(), **SMALL)
    happened, all_reduce = [], dist.all_reduce
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: happened.append(name))

    class Watched:
        def __init__(self, work):
            self.work = work

        def wait(self):
            happened.append("wait")
            self.work.wait()

    def watched(tensor, *args, async_op, **options):
        assert async_op
        happened.append("all_reduce")
        return Watched(all_reduce(tensor, *args, async_op=async_op, **options))

    with mock.patch.object(dist, "all_reduce", watched):
        loss_of(engine, 0, *here(), branch=True).backward()
        assert len(happened) == 12 + 2 * len(engine.buckets)
        last_gradient = max(i for i, what in enumerate(happened) if what not in ("all_reduce", "wait"))
        assert happened.index("all_reduce") < last_gradient // 2
        assert happened.index("wait") > last_gradient
        happened.clear()
        with engine.no_sync():
            loss_of(engine, 0, *here(), branch=True).backward()
    assert len(happened) == 12 and not {"all_reduce", "wait"} & set(happened)


def of_square(name, dtype="torch.float32", size=16):
    return f"`{name}` is parameter ({size}, 16) {dtype}, and was to be parameter (16, 16) torch.float32"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m, odd: setattr(m, "branch", nn.Linear(16, 16 + odd)), of_square("branch.weight", size=17)),
        (lambda m, odd: m.blocks[1].to(torch.float64 if odd else None), of_square("blocks.1.weight", "torch.float64")),
        (lambda m, odd: m.scale.requires_grad_(not odd), "`scale` is parameter (16,) torch.float32 frozen, and was to"),
        (
            lambda m, odd: odd and setattr(m, "extra", nn.Parameter(torch.zeros(1))),
            "`extra` is parameter (1,) torch.float32, and was to be absent",
        ),
        (
            lambda m, odd: odd and delattr(m, "scale"),
            "`scale` is missing, and was to be parameter (16,) torch.float32",
        ),
        (
            lambda m, odd: m.register_buffer("mask", torch.zeros(2 + odd)),
            "`mask` is buffer (3,) torch.float32, and was to be buffer (2,) torch.float32",
        ),
    ],
    ids=["shape", "dtype", "frozen", "extra", "lacks", "buffer"],
)
@on_ranks(2, 4)
def test_models_that_differ_between_ranks_are_told_on_every_rank(change, says):
    model, last = Blocks(), dist.get_world_size() - 1
    change(model, dist.get_rank() == last)
    with pytest.raises(ModelError, match=re.escape(f"rank {last}'s model is not rank 0's: {says}")):
        DataParallel(model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: setattr(m, "extra", nn.Parameter(torch.zeros(1))), "`extra` was added"),
        (lambda m: setattr(m, "head", nn.Linear(16, 6, bias=False)), "`head.weight` was replaced"),
        (lambda m: m.scale.requires_grad_(False), "`scale` was frozen"),
        (lambda m: m.frozen.requires_grad_(True), "`frozen.weight` was unfrozen"),
        (lambda m: m.blocks.double(), "`blocks.0.weight` got another shape, dtype or device"),
        (lambda m: delattr(m, "branch"), "`branch.weight` was removed"),
    ],
)
@on_ranks(1)
def test_a_model_changed_after_wrapping_is_told_at_the_next_forward(change, says):
    engine = DataParallel(Blocks())
    engine(torch.zeros(1, 6))
    change(engine.module)
    with pytest.raises(ModelError, match=f"parameter {says} after"):
        engine(torch.zeros(1, 6))


@on_ranks(1, 2)
def test_a_gradient_that_comes_in_parts_is_refused_by_its_name():
    """As `scale`'s does from reentrant segments."""
    model = model_of(checkpointing=True)
    model.scale.requires_grad_(True)
    engine = DataParallel(model)
    with pytest.raises(CourseError, match="gradient of `scale` came twice .*use_reentrant=False"):
        loss_of(engine, 0, *here()).backward()


def skip_a_collective():
    """Rank 1 runs under no_sync, and is done."""
    dist.init_process_group("gloo")
    engine = DataParallel(Blocks())
    _set_pg_timeout(datetime.timedelta(seconds=3), dist.group.WORLD)  # only now: ranks may be late for their set-up
    with engine.no_sync() if dist.get_rank() == 1 else contextlib.nullcontext():
        engine(torch.ones(2, 6)).sum().backward()


def test_a_rank_that_skips_a_collective_is_ended_by_the_timeout(ranks):
    with pytest.raises(RankError) as caught:
        ranks(2, timeout=240)(skip_a_collective)
    said = str(caught.value)
    assert caught.value.rank == 0 and "engine(torch.ones(2, 6)).sum().backward()" in said
    assert "rank 0 waited for the gradients of `head.weight` to `scale`" in said and "ran it under no_sync" in said
