"""Tensor and sequence parallelism on real ranks, against one process that has the whole model, and against DTensor."""

import functools
import gc
import weakref
from copy import deepcopy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from course_lib.errors import CourseError
from course_lib.metering.meter import Meter
from course_lib.parallel import tensor_parallel, tp_collectives
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    sequence_parallel_norm,
    vocab_parallel_cross_entropy,
)
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.parallel.topology import RankGrid
from course_lib.parallel.torch_engines.tensor_parallel import TorchTensorParallel
from tests.parallel.between_ranks import here
from tests.parallel.tensor_cases import (
    HEADS,
    LAYERS,
    ROWS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    batch,
    build,
    differences,
    loss_of,
    oracle,
)
from tests.ranks import on_ranks

HIDDEN = ROWS * TOKENS * WIDTH * 4  # bytes
assert_near = functools.partial(assert_close, rtol=0, atol=1e-13)


def split(model, **options):
    return TensorParallel(model, dist.group.WORLD, **options)


def torchs_mesh():
    grid = RankGrid(tp=dist.get_world_size())
    return grid.mesh(grid.groups())["tp"]


@pytest.mark.parametrize(
    ("name", "whole_in", "alike_in", "whole_out", "alike_out"),
    [
        ("copy", False, True, False, False),
        ("reduce", False, False, False, True),
        ("scatter", True, True, False, False),
        ("gather", False, False, True, True),
        ("all_gather", False, False, True, False),
        ("reduce_scatter", True, False, False, False),
    ],
)
@on_ranks(1, 2, 4)
def test_the_backward_of_each_exchange_is_its_adjoint(name, whole_in, alike_in, whole_out, alike_out):
    """The dot product of F(x) with y is that of x with B(y).

    A tensor that all ranks hold alike is one tensor, and counts once; slices and parts count on each rank.
    """
    rank, ranks = here()

    def random(alike, whole, seed):
        generator = torch.Generator().manual_seed(seed + (0 if alike else 10 * rank))
        return torch.randn(3, 2 * ranks if whole else 2, 2, dtype=torch.float64, generator=generator)

    def dot(left, right, alike):
        product = (left * right).sum() / (ranks if alike else 1)
        dist.all_reduce(product)
        return product.item()

    x, y = random(alike_in, whole_in, 1).requires_grad_(), random(alike_out, whole_out, 2)
    along = (1,) if name in ("scatter", "gather") else ()
    result = getattr(tp_collectives, name)(x, dist.group.WORLD, *along)
    result.backward(y)
    forward = dot(result.detach(), y, alike_out)
    assert forward == pytest.approx(dot(x.detach(), x.grad, alike_in), rel=1e-12) and abs(forward) > 0.01


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(1, 2, 4)
def test_layers_equal_the_whole_ones(sequence):
    """Norm, column, row in fp64, from a whole input or from slices."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    first, norm, second = nn.Linear(6, 8).double(), nn.LayerNorm(6).double(), nn.Linear(8, 6).double()
    x = torch.randn(3, 8, 6, dtype=torch.float64)
    split_norm = nn.LayerNorm(6).double()
    column = ColumnParallelLinear(first, group, sequence=sequence)
    row = RowParallelLinear(deepcopy(second), group, sequence=sequence)  # takes the bias itself
    whole_in, split_in = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted = second(torch.tanh(first(norm(whole_in))))
    if sequence:
        sequence_parallel_norm(split_norm, group)
    hidden = tp_collectives.scatter(split_in, group, 1) if sequence else split_in
    hidden = row(torch.tanh(column(split_norm(hidden))))
    result = tp_collectives.gather(hidden, group, 1) if sequence else hidden
    for output in (wanted, result):
        (output * x.cos()).sum().backward()

    def whole_gradient(layer, name):
        return layer.splits[name].whole(layer.get_parameter(name).grad, group)

    mine = [result, split_in.grad, row.bias.grad, *(p.grad for p in split_norm.parameters())]
    mine += [whole_gradient(column, "weight"), whole_gradient(column, "bias"), whole_gradient(row, "weight")]
    theirs = [wanted, whole_in.grad, second.bias.grad, *(p.grad for p in norm.parameters())]
    theirs += [first.weight.grad, first.bias.grad, second.weight.grad]
    assert_near(mine, theirs)


@on_ranks(1, 2, 4)
def test_a_split_vocabulary_equals_the_whole_one():
    """Embedding and cross-entropy in fp64, their gradients too."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    whole = nn.Embedding(16, 6, padding_idx=9).double()
    embedding = VocabParallelEmbedding(whole, group)
    tokens = torch.tensor([[0, 9, 15, 4], [8, 9, 3, 0]])
    weight = torch.randn(2, 4, 6, dtype=torch.float64)
    for each in (whole, embedding):
        (each(tokens) * weight).sum().backward()
    assert_near(embedding(tokens), whole(tokens))
    assert_near(embedding.splits["weight"].whole(embedding.weight.grad, group), whole.weight.grad)

    logits = torch.randn(2, 4, 16, dtype=torch.float64) * 1000  # exp() of which overflows
    targets = torch.tensor([[0, 15, -100, 4], [8, 7, 12, -100]])
    mine = tp_collectives.scatter(logits, group).requires_grad_()
    logits.requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, targets, group)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 4)
    for each in (losses, wanted):
        (each * weight[..., 0]).sum().backward()
    largest = wanted.detach().max()
    assert_near(losses / largest, wanted / largest)
    assert_near(tp_collectives.gathered(mine.grad, group, -1), logits.grad)


def compared(kind, dtype, checkpointing=False, **options):
    model = split(build(kind, seed=dist.get_rank()).to(dtype), **options)  # the first one's count
    if checkpointing:
        model.module.gradient_checkpointing_enable()
    loss = loss_of(model, batch(kind), dtype)
    loss.backward()
    return differences(loss, model.whole_gradients(), model.whole_weights(), *oracle(kind, dtype))


@pytest.mark.parametrize(
    ("left_out", "options", "right"),
    [
        ("reduce", {}, {"weights"}),
        ("copy", {}, {"weights", "loss"}),  # in the forward it does nothing
        ("sum_gradients", {"sequence": True}, {"weights", "loss"}),  # the norms' gradients stay parts
    ],
)
@on_ranks(2)
def test_without_an_exchange_the_model_differs(left_out, options, right):
    with mock.patch.object(tensor_parallel, left_out, lambda hidden, *_: hidden):
        found = compared("gpt2", torch.float64, **options)
    assert {name for name in ("loss", "gradients", "weights") if found[name] < 1e-13} == right
    assert found["gradients"] > 1e-3 and (found["loss"] > 1e-3 or "loss" in right)


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("gpt2", torch.float64, {}),
        ("gpt2", torch.float64, {"sequence": True}),
        ("bert", torch.float64, {}),
        ("bert", torch.float64, {"sequence": True}),
        ("gpt2", torch.float32, {"split_vocabulary": False}),
        ("bert classifier", torch.float32, {"sequence": True}),
        ("llama", torch.float32, {}),
        ("llama", torch.float32, {"sequence": True, "split_vocabulary": False}),
        ("llama", torch.float32, {"sequence": True, "checkpointing": True}),
    ],
)
@on_ranks(1, 2, 4)
def test_models_equal_one_process(kind, dtype, options):
    found = compared(kind, dtype, **options)
    assert found.pop("scale") > 0.01 and found.pop("weights") == 0
    assert max(found.values()) < {torch.float64: 1e-13, torch.float32: 1e-6}[dtype], found


def measured(model, kind):
    """Collectives of a forward and of a backward, as (name, bytes), and bytes that this rank sent."""
    with Meter() as forward:
        loss = model(**batch(kind)).loss
    with Meter() as backward:
        loss.backward()
    said = [[(each.name, each.bytes) for each in meter.collectives] for meter in (forward, backward)]
    return *said, forward.bytes_sent + backward.bytes_sent


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
@on_ranks(2, 4)
def test_two_all_reduces_a_layer_each_way_and_sequence_parallelism_sends_the_same_bytes_in_halves(kind):
    size = dist.get_world_size()
    forward, backward, plain = measured(split(build(kind), split_vocabulary=False), kind)
    assert forward == backward == [("all_reduce", HIDDEN)] * 2 * LAYERS
    assert plain == 4 * LAYERS * 2 * (size - 1) * HIDDEN // size

    forward, backward, sent = measured(split(build(kind), sequence=True, split_vocabulary=False), kind)
    halves = [("all_gather", HIDDEN), ("reduce_scatter", HIDDEN)] * 2 * LAYERS + [("all_gather", HIDDEN)]
    assert forward == halves  # the last is after the final norm
    small = [each for each in backward if each[0] == "all_reduce"]
    assert [each for each in backward if each not in small] == halves
    vectors = {"gpt2": 6 * LAYERS + 2, "bert": 6 * LAYERS, "llama": 2 * LAYERS + 1}[kind]  # of norms and row biases
    assert small == [("all_reduce", WIDTH * 4)] * vectors
    both_ends = 2 * (size - 1) * HIDDEN // size
    assert sent - both_ends - vectors * 2 * (size - 1) * WIDTH * 4 // size == plain


@on_ranks(4)
def test_a_rank_keeps_its_share_and_nothing_else():
    model = build("llama")
    before = sum(parameter.nbytes for parameter in model.parameters())
    matrix = weakref.ref(model.model.layers[0].mlp.gate_proj.weight)
    engine = split(model)
    gc.collect()
    assert matrix() is None
    replicated = sum(p.nbytes for name, p in engine.module.named_parameters() if name not in engine.splits)
    assert 0 < replicated < 0.05 * before
    assert sum(p.nbytes for p in engine.parameters()) == (before - replicated) / 4 + replicated
    reloaded = build("llama", seed=1)
    reloaded.load_state_dict(engine.whole_weights())
    assert_close(engine(**batch()).logits, reloaded(**batch()).logits, rtol=0, atol=1e-5)


def steps(model, inner, rows):
    """Norms of three steps of AdamW with clipping, on some of the rows of each batch."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), []
    plain_clip = functools.partial(nn.utils.clip_grad_norm_, list(inner.parameters()))
    for step in range(3):
        inputs = {name: each[rows] for name, each in batch(step=step).items()}
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        F.cross_entropy(logits.flatten(0, 1), inputs["input_ids"].flatten()).backward()
        norms.append(getattr(inner, "clip_grad_norm_", plain_clip)(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@on_ranks(4)
def test_data_and_tensor_parallelism_equal_one_process():
    grid = RankGrid(dp=2, tp=2)
    groups, place = grid.groups(), grid.coordinates(dist.get_rank())
    rows = slice(place.dp * ROWS // 2, (place.dp + 1) * ROWS // 2)
    whole = build("gpt2").double()
    expected = steps(whole, whole, slice(None))
    assert min(expected) > 0.5
    inner = TensorParallel(build("gpt2").double(), groups.tp, sequence=True)
    assert steps(DataParallel(inner, group=groups.dp), inner, rows) == pytest.approx(expected, rel=1e-12)
    assert_close(inner.whole_weights(), whole.state_dict(), rtol=0, atol=1e-11)
    inner = TensorParallel(build("gpt2").double(), groups.tp, sequence=True)
    steps(inner, inner, rows)
    weights = inner.whole_weights()
    assert max((weights[key] - each).abs().max() for key, each in whole.state_dict().items()) > 1e-3


@on_ranks(4)
def test_the_groups_are_the_grids_lines():
    rank, grid = dist.get_rank(), RankGrid(dp=2, tp=2)
    groups = grid.groups()
    mesh, tensor_line = grid.mesh(groups), [rank // 2 * 2, rank // 2 * 2 + 1]
    lines = [dist.get_process_group_ranks(group) for group in groups if group is not None]
    assert lines == [[rank % 2, rank % 2 + 2], [rank], tensor_line]
    assert mesh.mesh.tolist() == [[[0, 1]], [[2, 3]]] and mesh.mesh_dim_names == ("dp", "pp", "tp")
    assert mesh.get_group("tp") is groups.tp
    assert dist.get_process_group_ranks(grid.new_group("pp", "tp")) == tensor_line
    assert [*mesh.get_coordinate(), 0] == [*grid.coordinates(rank)] == [rank // 2, 0, rank % 2, 0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {}),
        ("gpt2", {"sequence": True}),
        ("bert", {"sequence": True}),
        ("llama", {"sequence": True, "split_vocabulary": False}),
    ],
)
@on_ranks(2, 4)
def test_dtensor_agrees_and_sends_what_ours_sends(kind, options):
    model = TorchTensorParallel(build(kind, seed=dist.get_rank()), torchs_mesh(), **options)
    with Meter() as meter:
        loss = model(**batch(kind)).loss
        loss.backward()
    found = differences(loss, model.whole_gradients(), model.whole_weights(), *oracle(kind))
    assert found["loss"] < 1e-6 and found["gradients"] < 1e-6 and found["weights"] == 0
    forward, backward, _ = measured(split(build(kind), **options), kind)
    # Ours adds up the gradients of norms and biases in the backward; DTensor leaves that until they are used.
    ours = [each for each in forward + backward if each != ("all_reduce", WIDTH * 4)]
    assert sorted((each.name, each.bytes) for each in meter.collectives) == sorted(ours)


LLAMA = LlamaConfig(hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
OPT = OPTConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, vocab_size=32, word_embed_proj_dim=16
)
CROSSING = GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=1, vocab_size=VOCABULARY, add_cross_attention=True)


@pytest.mark.parametrize(
    ("number", "wrong", "rule"),
    [
        (
            3,
            lambda: split(build("gpt2")),
            "num_attention_heads is 4, which 3 tensor-parallel ranks cannot share evenly",
        ),
        (4, lambda: split(LlamaForCausalLM(LLAMA)), "num_key_value_heads is 2, which 4 tensor-parallel ranks"),
        (
            2,
            lambda: split(build("gpt2", vocab_size=65)),
            r"vocabulary is 65, .* model.resize_token_embeddings\(pad_to_multiple_of=2\), or don't split it",
        ),
        (
            2,
            lambda: TorchTensorParallel(build("gpt2", vocab_size=65), torchs_mesh()),
            "vocabulary is 65, .*pad_to_multiple_of=2",
        ),
        (
            4,
            lambda: ColumnParallelLinear(nn.Linear(4, 6), dist.group.WORLD),
            r"dimension 0 of a \(6, 4\) parameter is 6, which 4",
        ),
        (
            4,
            lambda: RowParallelLinear(nn.Linear(6, 4), dist.group.WORLD),
            r"dimension 1 of a \(4, 6\) parameter is 6, which 4",
        ),
        (
            2,
            lambda: split(build("gpt2"), sequence=True)(input_ids=torch.ones(1, 7, dtype=torch.long)),
            r"dimension 1 of a \(1, 7, 32\) tensor is 7, which 2 .* pad the sequences to a multiple",
        ),
        (
            2,
            lambda: split(OPTForCausalLM(OPT)),
            "no tensor-parallel plan for opt: hand in a Plan .* gpt2, bert, .*llama",
        ),
        (2, lambda: split(nn.Linear(2, 2)), "no tensor-parallel plan for Linear"),
        (2, lambda: split(GPT2Model(CROSSING), sequence=True), "the plan does not name `crossattention"),
        (
            2,
            lambda: split(build("gpt2", num_hidden_layers=1 + dist.get_rank())),
            "rank 1's model is not rank 0's",
        ),
        (4, lambda: RankGrid(dp=3, tp=2).groups(), "a grid of 3 x 1 x 2 is 6 ranks, and there are 4"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_rule(ranks, number, wrong, rule):
    def refused():
        with pytest.raises(CourseError, match=rule):
            wrong()

    ranks(number, join=True)(refused)


@pytest.mark.parametrize(("token", "refusing"), [(-1, 0), (16, 3)])
@on_ranks(4)
def test_a_token_beyond_the_vocabulary_is_an_error_on_the_rank_at_that_end(token, refusing):
    embedding = VocabParallelEmbedding(nn.Embedding(16, 2), dist.group.WORLD)
    with mock.patch.object(tensor_parallel, "reduce", lambda partial, _: partial):  # one rank alone refuses
        if dist.get_rank() != refusing:
            embedding(torch.tensor([token]))
        else:
            with pytest.raises(IndexError):
                embedding(torch.tensor([token]))
