"""Models and loops that break engines: each trained by all of them, in the loop that everyone writes.

What is compared are whole weights after some steps with those of the plain loop on the whole batch, in one process. The
loop calls ``optimizer.zero_grad()``, ``loss.backward()`` and ``optimizer.step()``, and no method of an engine.
"""

import contextlib
import functools
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from course_lib.errors import CourseError
from course_lib.parallel.blocks import blocks
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.sharding import gather_whole
from course_lib.parallel.torch_engines.fsdp import shard_with_torch
from course_lib.parallel.zero import OverlappedZero1, Zero1, Zero2
from course_lib.parallel.zero3 import Zero3
from tests.parallel.between_ranks import here
from tests.ranks import on_ranks

RANKS, ROWS, WIDTH = 2, 8, 6
FLAT = {"zero1": Zero1, "zero1 overlapped": OverlappedZero1, "zero2": Zero2}
BY_BLOCKS = {"zero3": Zero3, "fsdp": FullyShardedDataParallel}
SHARDED = FLAT | BY_BLOCKS
OURS = ("ddp", *SHARDED)
ALL = (*OURS, "torch fsdp")


def rows(step, rank, world, dtype=torch.float32):
    """This rank's inputs, targets, and which rows use the parameter that only rank 0's use."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)
    flags = torch.arange(ROWS) % RANKS == 0
    return x[rank::world].to(dtype), y[rank::world].to(dtype), flags[rank::world], step


class Residual(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9, dtype=dtype), nn.Linear(9, WIDTH, dtype=dtype)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Residual() for _ in range(depth))

    def forward(self, x, flags, step):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class PartlyUsed(Net):
    """One parameter that nothing uses, one that rank 0's rows alone use, and a block that odd steps leave out."""

    def __init__(self):
        super().__init__()
        self.unused, self.some = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, flags, step):
        if flags.any():
            x = x + flags[:, None] * self.some
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x) if number != 1 or step % 2 == 0 else x
        return x


class Unused(PartlyUsed):
    """All ranks use the same parameters, which FSDP2 wants."""

    def forward(self, x, flags, step):
        return super().forward(x, torch.ones_like(flags), step)


class OneBlockThrice(Net):
    def __init__(self):
        super().__init__(depth=1)
        self.layers = nn.ModuleList([self.layers[0]] * 3)


class CallsForward(Net):
    """As transformers' SqueezeBERT calls its layers: past their hooks."""

    def forward(self, x, flags, step):
        x = self.first(x)
        for layer in self.layers:
            x = layer.forward(x)
        return x


class NoDimension(Net):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        for layer in self.layers:
            layer.scale = nn.Parameter(torch.tensor(1.5))
            layer.register_forward_hook(lambda module, args, output: output * module.scale)

    def forward(self, x, flags, step):
        return super().forward(x, flags, step) * self.temperature


@dataclass(frozen=True)
class State:
    """What blocks hand each other; not a type that torch's pytree knows."""

    hidden: torch.Tensor
    also: dict[str, torch.Tensor]


class OfStates(Residual):
    def forward(self, state):
        hidden = state.also["double"] / 2 + state.hidden - super().forward(state.hidden) / 3
        return State(hidden, {"double": 2 * hidden})


class Dataclasses(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(OfStates() for _ in range(3))

    def forward(self, x, flags, step):
        x = self.first(x)
        state = State(x, {"double": 2 * x})
        for layer in self.layers:
            state = layer(state)
        return state.hidden


class TwoPrecisions(Net):
    """The second block is bf16, and the model casts for it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Residual(), Residual(torch.bfloat16), Residual()])

    def forward(self, x, flags, step):
        x = self.layers[0](self.first(x))
        return self.layers[2](self.layers[1](x.bfloat16()).float())


def adamw(parameters, lr=1e-2, eps=1e-3):
    return torch.optim.AdamW(parameters, lr=lr, eps=eps, weight_decay=0.1)


sgd = functools.partial(torch.optim.SGD, lr=0.1)
adagrad = functools.partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.3)
CASES = {
    "plain": (Net, adamw, ALL),
    "partly used": (PartlyUsed, adamw, OURS),
    "unused": (Unused, adamw, ALL),
    "adagrad": (Net, adagrad, ALL),
    "float64": (lambda: Net().double(), adamw, ALL),
    "one block thrice": (OneBlockThrice, adamw, OURS),
    "calls forward": (CallsForward, adamw, ALL),
    "no dimension": (NoDimension, adamw, OURS),
    "dataclasses": (Dataclasses, adamw, ALL),
    "two precisions": (TwoPrecisions, functools.partial(adamw, eps=0.1), ("ddp", *BY_BLOCKS, "torch fsdp")),
}
"""By name: the model, its optimizer, and the engines that train it. FSDP2 is left out where it refuses (one block at
several places, parameters without a dimension), and where ranks use other parameters, which aborts in gloo."""


def fresh(build):
    torch.manual_seed(0)
    return build()


def weights_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def wrapped(name, model, make):
    """The engine around a model, its optimizer, and a function that gives the whole weights on rank 0."""
    optimizer = make(model.parameters())
    if name == "ddp":
        return DataParallel(model, find_unused_parameters=True), optimizer, lambda: weights_of(model)
    if name == "torch fsdp":
        engine = shard_with_torch(model, optimizer)
        return engine, optimizer, engine.whole_weights
    engine = SHARDED[name](model, optimizer)
    return engine, optimizer, lambda: gather_whole(engine.shards())


def squares(module, number, rank=0, world=1, dtype=torch.float32):
    x, y, flags, step = rows(number, rank, world, dtype)
    return (module(x, flags, step) - y).square().mean()


def furthest(weights, others):
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


def assert_same(name, weights, wanted, bound=2e-6):
    """On the ranks that were given them."""
    assert_close(
        weights or wanted, wanted, rtol=0, atol=bound, check_dtype=False, msg=lambda said: f"by {name}: {said}"
    )


def loop(module, optimizer, rank=0, world=1):
    """The loop that everyone writes."""
    dtype = next(p.dtype for p in module.parameters())
    for step in range(4):
        optimizer.zero_grad()
        squares(module, step, rank, world, torch.float64 if dtype == torch.float64 else torch.float32).backward()
        optimizer.step()


@pytest.mark.parametrize("case", CASES)
@on_ranks(RANKS)
def test_every_engine_equals_the_plain_loop(case):
    build, make, engines = CASES[case]
    plain = fresh(build)
    loop(plain, make(plain.parameters()))
    wanted = weights_of(plain)
    assert furthest(wanted, weights_of(fresh(build))) > 1e-2
    for name in engines:
        engine, optimizer, whole_weights = wrapped(name, fresh(build), make)
        loop(engine, optimizer, *here())
        bound = 1e-13 if case == "float64" else 2e-6
        if case == "two precisions":
            # of bf16 weights, a step of 2 ** -9 apart; ZeRO-3's masters in fp32 move where bf16 would stand still
            bound = 1e-2 if name == "zero3" else 2e-3
        assert_same(name, whole_weights(), wanted, bound)


@pytest.mark.parametrize("name", SHARDED)
@on_ranks(RANKS)
def test_norms_of_float64_gradients_are_of_float64(name):
    plain, model = fresh(Net).double(), fresh(Net).double()
    squares(plain, 0, dtype=torch.float64).backward()
    engine = SHARDED[name](model, adamw(model.parameters()))
    squares(engine, 0, *here(), torch.float64).backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    assert engine.clip_grad_norm_(0.5).item() == pytest.approx(wanted.item(), rel=1e-13)


CLIPS = {
    "none": lambda parameters: None,
    "2": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.3),
    "3": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.2, norm_type=3.0),
    "inf": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=float("inf")),
    "not needed": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e3),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.02),
    "2, foreach": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.3, foreach=True),
    "value, foreach": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.02, foreach=True),
    "by hand": lambda parameters: clip_by_hand([p for p in parameters if p.grad is not None]),
}
"""By name: one of torch's own ways to clip, with bounds that all but one of these gradients exceed."""


def clip_by_hand(parameters):
    """As old code does it: norms of ``.data``, and a factor for each."""
    norm = torch.stack([p.grad.data.norm(2) for p in parameters]).norm(2)
    for p in parameters:
        p.grad.data.mul_(0.3 / (norm + 1e-6))
    return norm


def clipping_loop(module, optimizer, clip, rank=0, world=1):
    """Two micro-batches per step; the norms that torch returned, also one between two backwards."""
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        for micro_batch in range(2):
            squares(module, 2 * step + micro_batch, rank, world).backward()
            if step == 1 or micro_batch == 1:
                norms.append(clip(module.parameters()))
        optimizer.step()
    return [float(getattr(norm, "full_tensor", lambda norm=norm: norm)()) for norm in norms if norm is not None]


@pytest.mark.parametrize("way", CLIPS)
@on_ranks(RANKS)
def test_torch_clips_the_gradients_of_all_ranks(way):
    for build, engines in ((PartlyUsed, SHARDED), (Unused, ["torch fsdp"])):
        plain, unclipped = fresh(build), fresh(build)
        norms = clipping_loop(plain, sgd(plain.parameters()), CLIPS[way])
        clipping_loop(unclipped, sgd(unclipped.parameters()), CLIPS["none"])
        moved = furthest(weights_of(plain), weights_of(unclipped))
        assert (moved > 1e-3) == (way not in ("none", "not needed")), moved
        assert len(norms) == (0 if way == "none" or "value" in way else 4)  # torch returns none of these
        for name in engines:
            engine, optimizer, whole_weights = wrapped(name, fresh(build), sgd)
            assert clipping_loop(engine, optimizer, CLIPS[way], *here()) == pytest.approx(norms, rel=1e-5), name
            assert_same(name, whole_weights(), weights_of(plain))


def dropping_loop(module, model, optimizer, rank=0, world=1, forgets=True):
    """Some gradients are thrown away by setting ``.grad`` to None; one is, after clipping and before a step."""
    for step in range(4):
        for micro_batch in range(2):
            squares(module, 2 * step + micro_batch, rank, world).backward()
            if step == 2 and micro_batch == 0:
                model.first.bias.grad = None
        if step % 2:
            nn.utils.clip_grad_norm_(module.parameters(), 0.3)
            model.layers[2].up.weight.grad = None
        optimizer.step()
        if forgets:
            model.zero_grad()  # the model's, which is not the engine's
    return weights_of(model)


@pytest.mark.parametrize("name", SHARDED)
@on_ranks(RANKS)
def test_a_gradient_set_to_none_is_thrown_away(name):
    plain, keeps, model = fresh(PartlyUsed), fresh(PartlyUsed), fresh(PartlyUsed)
    wanted = dropping_loop(plain, plain, sgd(plain.parameters()))
    assert furthest(dropping_loop(keeps, keeps, sgd(keeps.parameters()), forgets=False), wanted) > 1e-2
    engine, optimizer, whole_weights = wrapped(name, model, sgd)
    dropping_loop(engine, model, optimizer, *here())
    assert_same(name, whole_weights(), wanted)


@pytest.mark.parametrize("put", [True, False], ids=["a tensor put there", "a scaler"])
@pytest.mark.parametrize("name", SHARDED)
@on_ranks(RANKS)
def test_a_gradient_put_there_and_a_scaler_are_refused_in_a_line(name, put):
    model, scaler = fresh(Net), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = sgd(model.parameters())
    engine = SHARDED[name](model, optimizer)
    scaler.scale(squares(engine, 0, *here())).backward()
    if put:
        model.first.bias.grad = torch.zeros(WIDTH)
    with pytest.raises(CourseError, match="`.grad` of `first.bias` was set to a tensor" if put else "GradScaler"):
        optimizer.step() if put else scaler.step(optimizer)


@pytest.mark.parametrize("name", SHARDED)
@on_ranks(RANKS)
def test_a_gradient_in_pieces_says_so_where_it_cannot_be_read(name):
    model = fresh(Net)
    engine = SHARDED[name](model, adamw(model.parameters()))
    squares(engine, 0, *here()).backward()
    with pytest.raises(CourseError, match="^the gradient of `first.weight` lies in shards on all ranks"):
        model.first.weight.grad.sum()
    with engine.no_sync():
        squares(engine, 0, *here()).backward()
    # Stages 1 and 2 reduce what has come so far, whoever says no_sync; the others keep it, and must not clip less.
    keeps = name not in ("zero1", "zero2")
    with pytest.raises(CourseError, match="backward within no_sync") if keeps else contextlib.nullcontext():
        nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
    assert model.first.weight.grad.untyped_storage().nbytes() == 0
    engine.zero_grad()
    assert {p.grad for p in model.parameters()} == {None}


@pytest.mark.parametrize("name", FLAT)
@on_ranks(RANKS)
def test_what_is_written_into_bf16_weights_between_steps_is_kept(name):
    """Weights of 7 are loaded, then clamped in place; each time a step at learning rate 0 follows."""
    model = fresh(Net).bfloat16()
    engine = FLAT[name](model, adamw(model.parameters(), lr=0.0))

    def step():
        squares(engine, 0, *here(), torch.bfloat16).backward()
        engine.step()
        engine.zero_grad()

    step()
    model.load_state_dict({key: torch.full_like(value, 7.0) for key, value in model.state_dict().items()})
    step()
    assert {value for p in model.parameters() for value in p.unique().tolist()} == {7.0}
    with torch.no_grad():
        model.first.weight.clamp_(max=3.0)
    step()
    assert (model.first.weight.unique().tolist(), model.first.bias.unique().tolist()) == ([3.0], [7.0])


@pytest.mark.parametrize("name", SHARDED)
@on_ranks(RANKS)
def test_closures_zeros_in_place_of_none_and_gradients_thrown_away(name):
    plain, model = fresh(PartlyUsed), fresh(PartlyUsed)
    reference, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    engine = SHARDED[name](model, optimizer)
    for step in range(4):
        reference.zero_grad(set_to_none=False)
        squares(plain, step).backward()
        reference.step()
        (3 * squares(engine, step, *here())).backward()  # thrown away
        optimizer.zero_grad(set_to_none=step == 0)

        @torch.enable_grad()
        def closure(step=step):
            loss = squares(engine, step, *here())
            loss.backward()
            return loss

        assert engine.step(closure) > 0
        optimizer.zero_grad(set_to_none=False)
    assert_same(name, gather_whole(engine.shards()), weights_of(plain))


class Sparse(Net):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, sparse=True)


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.phases = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Empty(nn.Module):
    pass


def with_adamw(model, *others):
    return model, adamw([*model.parameters(), *others])


def that_has_stepped():
    model, optimizer = with_adamw(Net())
    squares(model, 0).backward()
    optimizer.step()
    return model, optimizer


REFUSED = {
    "embedding.weight` is sparse": lambda: with_adamw(Sparse()),
    "`phases` is complex": lambda: with_adamw(Complex()),
    "has no parameters": lambda: with_adamw(Empty(), nn.Parameter(torch.ones(3))),
    "of shape (3,) that the module has not": lambda: with_adamw(Net(), nn.Parameter(torch.ones(3))),
    "before the first step": that_has_stepped,
}


@pytest.mark.parametrize("says", REFUSED)
@pytest.mark.parametrize("name", SHARDED)
@on_ranks(1)
def test_what_an_engine_cannot_do_it_refuses_in_a_line(name, says):
    with pytest.raises(CourseError, match=re.escape(says)):
        SHARDED[name](*REFUSED[says]())


@on_ranks(1)
def test_data_parallelism_refuses_sparse_gradients_alone_and_stage_one_a_closure_of_the_optimizers():
    with pytest.raises(CourseError, match="the gradient of `embedding.weight` is sparse"):
        DataParallel(Sparse())
    DataParallel(Complex())
    DataParallel(Empty())
    with pytest.raises(CourseError, match="use engine.step"):
        Zero1(*with_adamw(Net())).optimizer.step(lambda: 0.0)


def test_blocks_of_lists_of_lists_are_the_members():
    net = nn.Module()
    net.blocks = nn.ModuleList(nn.ModuleList(Residual() for _ in range(2)) for _ in range(3))
    assert list(blocks(net)) == [f"blocks.{i}.{j}" for i in range(3) for j in range(2)]
