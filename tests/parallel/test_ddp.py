"""Data parallelism from scratch on real ranks, against one process that sees the whole batch, and against torch's.

In float64, so that the order of a sum shows in the 16th digit only; tolerances say where it is otherwise.
"""

import contextlib
import datetime
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from course_lib.errors import CourseError, ModelError
from course_lib.launching.launch import RankError, launch
from course_lib.parallel import collectives
from course_lib.parallel.ddp import DataParallel, bf16_compression, sum_gradients

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


def model_of(seed=0):
    return Blocks(seed).double()


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(ROWS, 6, generator=generator, dtype=dtype) for _ in range(2)]


def share(tensors, rank, ranks):
    """This rank's rows of a batch; as many as the others', or one fewer."""
    return [tensor.tensor_split(ranks)[rank] for tensor in tensors]


def loss_of(model, rows, ranks, **options):
    """The part of the whole batch's mean that these rows bring, times N, as DDP divides by N."""
    x, y = rows
    return (model(x, **options) - y).square().sum() * ranks / (ROWS * y.shape[1])


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def steps(model, rank, ranks, accumulate=1, clip=None, set_to_none=True, optimizer=None, **options):
    """Three steps on this rank's rows; gradients of the last one, norms, and weights."""
    optimizer, norms = optimizer or optimizer_of(model), []
    for step in range(3):
        for part in range(accumulate):
            quiet = isinstance(model, DataParallel) and part < accumulate - 1
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss_of(model, share(batch(step + 10 * part), rank, ranks), ranks, **options).backward()
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return grads, [p.detach().clone() for p in model.parameters()], norms


def near(mine, theirs, atol=1e-12):
    return len(mine) == len(theirs) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.allclose(a, b, rtol=0, atol=atol))
        for a, b in zip(mine, theirs, strict=True)
    )


def alike(tensors, group):
    """Whether all ranks hold the same bits."""
    flat = torch.cat([t.detach().reshape(-1).double() for t in tensors])
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(copies, flat, group=group)
    return all(torch.equal(copy, flat) for copy in copies)


def single(**options):
    return steps(model_of(), 0, 1, **options)


def training(group, rank, ranks):
    """The engine's ways to the same weights, each compared with one process."""
    found = {}
    alone = model_of()
    _, weights, _ = steps(alone, rank, ranks)
    found["unsynchronised ranks agree"] = alike(weights, group)

    for name, given, both in (
        ("steps", {}, {}),
        ("small buckets", SMALL, {}),
        ("accumulation", SMALL, {"accumulate": 3}),
        ("gradients zeroed in place", SMALL, {"set_to_none": False}),
        ("accumulation, zeroed in place", SMALL, {"accumulate": 2, "set_to_none": False}),
        ("clipping", SMALL, {"clip": 0.1}),
        ("branch used", SMALL, {"branch": True}),
        ("used by none", SMALL | {"find_unused_parameters": True}, {}),
        ("used by none, accumulation", SMALL | {"find_unused_parameters": True}, {"accumulate": 2}),
    ):
        # Ranks begin with other weights: they take the first rank's.
        engine = DataParallel(model_of(seed=0 if rank == 0 else rank), group=group, **given)
        grads, weights, norms = steps(engine, rank, ranks, **both)
        expected = single(**both)
        if "branch" not in both and "find_unused_parameters" not in given:
            # Used by none: a gradient of zeros, which weight decay takes for one.
            where = [name.startswith("module.branch") for name, _ in engine.named_parameters()]
            assert sum(where) == 2 and all(not g.any() for g, w in zip(grads, where, strict=True) if w)
            grads, weights = ([t for t, w in zip(each, where, strict=True) if not w] for each in (grads, weights))
            expected = [[t for t, w in zip(each, where, strict=True) if not w] for each in expected[:2]] + [norms]
        found[name] = (
            near(grads, expected[0])
            and near(weights, expected[1])
            and alike(weights, group)
            and norms == pytest.approx(expected[2])
        )

    for name, reentrant in (("checkpointing", False), ("reentrant checkpointing", True)):
        model = model_of()
        model.checkpointing = reentrant
        model.first.weight.requires_grad_(True)
        if reentrant:  # `scale` is used in each of the segments: its gradient comes thrice
            model.scale.requires_grad_(False)
        engine = DataParallel(model, group=group, **SMALL, find_unused_parameters=True)
        oracle = model_of()
        oracle.scale.requires_grad_(not reentrant)
        found[name] = near(steps(engine, rank, ranks)[1], steps(oracle, 0, 1)[1])
    return found


def optimizers(group, rank, ranks):
    """foreach, fused, and momentum."""
    found = {}
    for name, make in (
        ("fused", lambda p: torch.optim.AdamW(p, fused=True)),
        ("foreach", lambda p: torch.optim.AdamW(p, foreach=True)),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    ):
        engine, oracle = DataParallel(model_of(), group=group, **SMALL), model_of()
        mine = steps(engine, rank, ranks, branch=True, optimizer=make(engine.parameters()))
        theirs = steps(oracle, 0, 1, branch=True, optimizer=make(oracle.parameters()))
        found[name] = near(mine[1], theirs[1])
    return found


def views(group, rank, ranks):
    """Gradients lie in the buckets after every backward, whatever zero_grad did; with the parameters' strides."""
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)).to(memory_format=torch.channels_last)
    engine = DataParallel(model, group=group, **SMALL)
    found = []
    for set_to_none in (True, True, False, False, True):
        for quiet in (True, False):
            with engine.no_sync() if quiet else contextlib.nullcontext():
                engine(torch.randn(2, 2, 3, 3)).sum().backward()
            inside = {b.flat.untyped_storage().data_ptr() for b in engine.buckets}
            found += [
                p.grad.untyped_storage().data_ptr() in inside and p.grad.stride() == p.stride()
                for p in model.parameters()
            ]
        engine.zero_grad(set_to_none=set_to_none)
    assert sum(b.flat.numel() for b in engine.buckets) == sum(p.numel() for p in model.parameters())
    return found


def partly_used(group, rank, ranks):
    """A branch used by the first rank alone is averaged over all, at the end of backward."""
    found = {}
    for find in (True, False):
        engine = DataParallel(model_of(), group=group, find_unused_parameters=find, **SMALL)
        loss_of(engine, share(batch(0), rank, ranks), ranks, branch=True).backward()
        engine.zero_grad()  # the buckets still hold the gradients of a step in which all used the branch
        loss_of(engine, share(batch(0), rank, ranks), ranks, branch=rank == 0).backward()
        alone = model_of()
        loss_of(alone, share(batch(0), 0, ranks), ranks, branch=True).backward()
        branch = engine.module.branch
        found[find] = near(
            [p.grad for p in branch.parameters()], [p.grad / ranks for p in alone.branch.parameters()]
        ) and alike([p.grad for p in engine.parameters() if p.grad is not None], group)
        # Without zero_grad, under no_sync, and then not used any more: what it has is kept and averaged.
        with engine.no_sync():
            loss_of(engine, share(batch(1), rank, ranks), ranks, branch=rank == 0).backward()
        loss_of(engine, share(batch(2), rank, ranks), ranks).backward()
        loss_of(alone, share(batch(1), 0, ranks), ranks, branch=True).backward()
        found[find] &= near([p.grad for p in branch.parameters()], [p.grad / ranks for p in alone.branch.parameters()])
    return found


def frozen_and_tied(group, rank, ranks):
    """Frozen parameters are in no bucket and keep no gradient; a tied one is in one bucket, reduced once a step."""
    engine = DataParallel(model_of(), group=group, **SMALL)
    names = [name for bucket in engine.buckets for name in bucket.views]
    arrivals = []
    engine.module.tied.register_post_accumulate_grad_hook(lambda p: arrivals.append(p.grad.clone()))
    loss_of(engine, share(batch(0), rank, ranks), ranks).backward()
    return {
        "reversed": names == [n for n, p in reversed(list(engine.module.named_parameters())) if p.requires_grad],
        "no frozen": not any(n.startswith("frozen") for n in names) and engine.module.frozen.weight.grad is None,
        "tied once": names.count("tied") == 1 and "first.weight" not in names and len(arrivals) == 1,
        "several buckets": len(engine.buckets) > 2,
    }


def buffers(group, rank, ranks):
    """BatchNorm's means are the first rank's at the start and before each training forward, and not otherwise."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[0].running_mean.fill_(rank)
    found = {"before": alike(model.buffers(), group)}
    engine = DataParallel(model, group=group)
    found["at the start"] = alike(model.buffers(), group) and model[0].running_mean.sum().item() == 0
    x = torch.randn(8, 4) + rank
    engine(x)
    found["after a forward"] = alike(model.buffers(), group)
    with mock.patch.object(nn.BatchNorm1d, "forward", lambda self, x: x):
        with torch.no_grad():
            engine(x)
        engine.eval()(x)
        found["in evaluation"] = alike(model.buffers(), group)
        engine.train()
        with engine.no_sync():
            engine(x)
        found["under no_sync"] = alike(model.buffers(), group)
        engine(x)
        found["in the next training forward"] = alike(model.buffers(), group)
    return found


def mixed_precision(group, rank, ranks):
    """bf16 parameters have bf16 buckets beside fp32 ones; autocast leaves fp32 gradients; the hook halves the bytes."""
    found, sent = {}, []
    model = Blocks()
    model.blocks.bfloat16()

    def forward(x, branch=False):
        hidden = model.first(x)
        for block in model.blocks:
            hidden = hidden + torch.tanh(block(hidden.bfloat16()).float() * model.scale)
        return model.head(hidden)

    model.forward = forward
    engine = DataParallel(model, group=group, **SMALL)
    loss_of(engine, share(batch(0, torch.float32), rank, ranks), ranks).backward()
    found["dtypes"] = (
        all(p.grad.dtype == p.dtype for p in model.parameters() if p.grad is not None)
        and {b.flat.dtype for b in engine.buckets} == {torch.float32, torch.bfloat16}
        and alike([p.grad for p in model.parameters() if p.grad is not None], group)
    )

    engine, oracle = (Blocks() for _ in range(2))
    engine = DataParallel(engine, group=group, **SMALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(engine, share(batch(0, torch.float32), rank, ranks), ranks).backward()
        loss_of(oracle, batch(0, torch.float32), 1).backward()
    found["autocast"] = all(
        mine.grad.dtype == torch.float32 and torch.allclose(mine.grad, theirs.grad, atol=0.02 * theirs.grad.abs().max())
        for mine, theirs in zip(engine.parameters(), oracle.parameters(), strict=True)
        if theirs.grad is not None
    )

    all_reduce = dist.all_reduce

    def counted(tensor, *args, **options):
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *args, **options)

    plain, compressed = (
        DataParallel(Blocks(), group=group, communication_hook=hook, **SMALL)
        for hook in (sum_gradients, bf16_compression)
    )
    with mock.patch.object(dist, "all_reduce", counted):
        for engine in (plain, compressed):
            loss_of(engine, share(batch(0, torch.float32), rank, ranks), ranks, branch=True).backward()
            sent.append(None)
    first, second = sent[: sent.index(None)], sent[sent.index(None) + 1 : -1]
    found["half the bytes"] = len(first) > 2 and [2 * each for each in second] == first
    pairs = [
        (a.grad, b.grad) for a, b in zip(plain.parameters(), compressed.parameters(), strict=True) if a.grad is not None
    ]
    # Rounded to 8 bits once by each rank and once a sum: an error of 2^-8 of the largest partial sum each time.
    found["bf16 hook"] = (
        any(not torch.equal(a, b) for a, b in pairs)
        and len(pairs) == 12
        and all(torch.allclose(a, b, rtol=0, atol=(ranks + 1) * 2**-8 * a.abs().max()) for a, b in pairs)
        and alike([b for _, b in pairs], group)
    )
    return found


def by_our_ring(group, rank, ranks):
    """The all-reduce of the collectives from scratch, as the hook."""

    def ring(bucket):
        collectives.all_reduce(bucket.flat, group=bucket.group)
        done = torch.futures.Future()
        done.set_result(None)
        return done

    engine = DataParallel(model_of(), group=group, communication_hook=ring, **SMALL)
    return near(steps(engine, rank, ranks, branch=True)[1], single(branch=True)[1])


def beside_torch(group, rank, ranks):
    """The same bits as DistributedDataParallel's: at 4 ranks except for the order of the sums."""
    mine, theirs = Blocks(), Blocks()
    engine = DataParallel(mine, group=group)
    torchs = DistributedDataParallel(theirs, process_group=group, gradient_as_bucket_view=True)
    found = []
    optimizers = [optimizer_of(mine), optimizer_of(theirs)]
    for step in range(3):
        for each, optimizer in zip((engine, torchs), optimizers, strict=True):
            loss_of(each, share(batch(step, torch.float32), rank, ranks), ranks, branch=True).backward()
            optimizer.step()
        pairs = list(zip(mine.parameters(), theirs.parameters(), strict=True))
        grads = [(a.grad, b.grad) for a, b in pairs if a.requires_grad]
        found.append(
            all(torch.equal(a, b) for a, b in grads + pairs)
            if ranks < 4
            else all(torch.allclose(a, b, atol=1e-5) for a, b in grads + pairs)
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
    return found


def overlap(group, rank, ranks):
    """What happens in one backward, in order: gradients as they arrive, all-reduces as they start, waits."""
    engine = DataParallel(model_of(), group=group, **SMALL)
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
        loss = loss_of(engine, share(batch(0), rank, ranks), ranks, branch=True)
        assert not happened
        loss.backward()
        assert len(happened) == 12 + 2 * len(engine.buckets), happened
        quiet = len(happened)
        with engine.no_sync():
            loss_of(engine, share(batch(0), rank, ranks), ranks, branch=True).backward()
    return happened[:quiet], happened[quiet:]


def disagreements(group, rank, ranks):
    """What each rank is told when the last rank's model is another one."""
    said, odd = {}, rank == ranks - 1

    def shape(model):
        model.branch = nn.Linear(16, 17 if odd else 16)

    def dtype(model):
        model.blocks[1].to(torch.float64 if odd else torch.float32)

    def frozen(model):
        model.scale.requires_grad_(not odd)

    def extra(model):
        if odd:
            model.extra = nn.Parameter(torch.zeros(1))

    def lacks(model):
        if odd:
            del model.scale

    def buffer(model):
        model.register_buffer("mask", torch.zeros(3 if odd else 2))

    for change in (shape, dtype, frozen, extra, lacks, buffer):
        model = Blocks()
        change(model)
        try:
            DataParallel(model, group=group)
        except ModelError as error:
            said[change.__name__] = str(error)
    return said


def changes(group, rank, ranks):
    """What the next forward says of a model that was changed after it was wrapped."""
    said = []
    for change in (
        lambda m: setattr(m, "extra", nn.Parameter(torch.zeros(1))),
        lambda m: setattr(m, "head", nn.Linear(16, 6, bias=False)),
        lambda m: m.scale.requires_grad_(False),
        lambda m: m.frozen.requires_grad_(True),
        lambda m: m.blocks.double(),
        lambda m: delattr(m, "branch"),
    ):
        engine = DataParallel(Blocks(), group=group)
        engine(torch.zeros(1, 6))
        change(engine.module)
        with pytest.raises(ModelError) as caught:
            engine(torch.zeros(1, 6))
        said.append(str(caught.value))
    return said


def twice(group, rank, ranks):
    """A gradient that comes in parts, as `scale`'s does from reentrant segments, is refused by its name."""
    model = model_of()
    model.checkpointing = True
    engine = DataParallel(model, group=group)
    with pytest.raises(CourseError) as caught:
        loss_of(engine, share(batch(0), rank, ranks), ranks).backward()
    return str(caught.value)


CASES = (
    training,
    optimizers,
    views,
    partly_used,
    frozen_and_tied,
    buffers,
    mixed_precision,
    by_our_ring,
    beside_torch,
    overlap,
    disagreements,
    changes,
    twice,
)


def on_every_size():
    dist.init_process_group("gloo")
    me, results = dist.get_rank(), {}
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (1, 2, 4)}
    for ranks, group in groups.items():
        if me < ranks:
            results[ranks] = {case.__name__: case(group, me, ranks) for case in CASES}
    return results


@pytest.fixture(scope="module")
def results():
    """By number of ranks and rank: what every case found."""
    of_ranks = launch(on_every_size, num_processes=4, timeout=560)
    return [(ranks, rank, of_ranks[rank][ranks]) for ranks in (1, 2, 4) for rank in range(ranks)]


def test_every_case_ran_on_every_size(results):
    assert [(ranks, rank) for ranks, rank, _ in results] == [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)]
    assert all(list(found) == [case.__name__ for case in CASES] for _, _, found in results)


def test_training_equals_one_process_on_the_whole_batch(results):
    for ranks, rank, found in results:
        outcomes = dict(found["training"])
        assert outcomes.pop("unsynchronised ranks agree") == (ranks == 1)
        assert len(outcomes) == 11
        assert all(outcomes.values()), (ranks, rank, outcomes)


def all_of(results, case, count):
    for ranks, rank, found in results:
        outcomes = found[case]
        assert len(outcomes) == count
        assert all(outcomes.values() if isinstance(outcomes, dict) else outcomes), (ranks, rank, outcomes)


def test_fused_foreach_and_momentum(results):
    all_of(results, "optimizers", 3)


def test_gradients_are_views_of_the_buckets(results):
    all_of(results, "views", 5 * 2 * 4)


def test_parameters_that_some_ranks_do_not_use(results):
    all_of(results, "partly_used", 2)


def test_frozen_and_tied_parameters(results):
    all_of(results, "frozen_and_tied", 4)


def test_buffers(results):
    for ranks, rank, found in results:
        outcomes = found["buffers"]
        together = ["at the start", "in the next training forward"]
        apart = ["before", "after a forward", "in evaluation", "under no_sync"]
        assert sorted(outcomes) == sorted(together + apart)
        assert all(outcomes[name] for name in together), (ranks, rank, outcomes)
        assert all(outcomes[name] == (ranks == 1) for name in apart), (ranks, rank, outcomes)


def test_mixed_precision_and_compression(results):
    all_of(results, "mixed_precision", 4)


def test_our_own_ring_as_communication_hook(results):
    assert all(found["by_our_ring"] for _, _, found in results)


def test_the_bits_of_torchs_ddp(results):
    all_of(results, "beside_torch", 3)


def test_communication_starts_while_gradients_are_still_to_come(results):
    for _, _, found in results:
        happened, quiet = found["overlap"]
        last_gradient = max(i for i, what in enumerate(happened) if what not in ("all_reduce", "wait"))
        assert happened.index("all_reduce") < last_gradient // 2
        assert happened.index("wait") > last_gradient
        assert len(quiet) == 12 and not {"all_reduce", "wait"} & set(quiet)


def test_models_that_differ_between_ranks_are_told_on_every_rank(results):
    for ranks, _, found in results:
        said = found["disagreements"]
        if ranks == 1:
            assert said == {}
            continue
        begin, usual = f"rank {ranks - 1}'s model is not rank 0's: ", "torch.float32, and was to be parameter"
        assert said == {
            name: begin + what + ": build the same model on every rank"
            for name, what in {
                "shape": f"`branch.weight` is parameter (17, 16) {usual} (16, 16) torch.float32",
                "dtype": f"`blocks.1.weight` is parameter (16, 16) {usual} (16, 16) torch.float32".replace(
                    "32", "64", 1
                ),
                "frozen": "`scale` is parameter (16,) torch.float32 frozen, and was to be parameter (16,) "
                "torch.float32",
                "extra": "`extra` is parameter (1,) torch.float32, and was to be absent",
                "lacks": "`scale` is missing, and was to be parameter (16,) torch.float32",
                "buffer": "`mask` is buffer (3,) torch.float32, and was to be buffer (2,) torch.float32",
            }.items()
        }


def test_a_model_changed_after_wrapping_is_told_at_the_next_forward(results):
    for _, _, found in results:
        assert [said.split(" after ")[0] for said in found["changes"]] == [
            "parameter `extra` was added",
            "parameter `head.weight` was replaced",
            "parameter `scale` was frozen",
            "parameter `frozen.weight` was unfrozen",
            "parameter `blocks.0.weight` got another shape, dtype or device",
            "parameter `branch.weight` was removed",
        ]


def test_a_gradient_that_comes_in_parts_is_refused(results):
    assert all(
        "gradient of `scale` came twice" in found["twice"] and "use_reentrant=False" in found["twice"]
        for _, _, found in results
    )


def skip_a_collective():
    """Rank 1 runs under no_sync, and is done."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    engine = DataParallel(Blocks())
    _set_pg_timeout(datetime.timedelta(seconds=3), dist.group.WORLD)  # only now: ranks may be late for their set-up
    with engine.no_sync() if rank == 1 else contextlib.nullcontext():
        engine(torch.ones(2, 6)).sum().backward()


def test_a_rank_that_skips_a_collective_is_ended_by_the_timeout():
    with pytest.raises(RankError) as caught:
        launch(skip_a_collective, num_processes=2, timeout=240)
    said = str(caught.value)
    assert caught.value.rank == 0 and "engine(torch.ones(2, 6)).sum().backward()" in said
    assert "rank 0 waited for the gradients of `head.weight` to `scale`" in said and "ran it under no_sync" in said
