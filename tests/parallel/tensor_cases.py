"""What each rank does in the tests of tensor parallelism, and what it finds; the tests look at what was found.

Where float64 serves (transformers takes Llama's norms and a causal model's loss in fp32), sums in another order
differ in the 16th digit only.
"""

import contextlib
import functools
import gc
import weakref
from copy import deepcopy
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

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

VOCABULARY, WIDTH, LAYERS, HEADS, ROWS, TOKENS = 64, 32, 2, 4, 4, 8
SIZES = (1, 2, 4)
CASES = [  # model, dtype, options; the loss of a case in float64 is the test's own
    ("gpt2", torch.float64, {}),
    ("gpt2", torch.float64, {"sequence": True}),
    ("bert", torch.float64, {}),
    ("bert", torch.float64, {"sequence": True}),
    ("gpt2", torch.float32, {"split_vocabulary": False}),
    ("bert classifier", torch.float32, {"sequence": True}),
    ("llama", torch.float32, {}),
    ("llama", torch.float32, {"sequence": True, "split_vocabulary": False}),
    ("llama", torch.float32, {"sequence": True, "checkpointing": True}),
]
DTENSOR_CASES = [
    (2, "gpt2", {}),
    (4, "gpt2", {"sequence": True}),
    (4, "bert", {}),
    (2, "bert", {"sequence": True}),
    (2, "llama", {}),
    (4, "llama", {"sequence": True, "split_vocabulary": False}),
]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}
no_exchange = functools.partial(mock.patch.object, new=lambda hidden, *_: hidden)


def build(kind, seed=0, dropout=0.0, **sizes):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 16,
        "initializer_range": 0.2,
    } | sizes
    if kind == "gpt2":
        config = GPT2Config(
            **sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0
        )
        model = GPT2LMHeadModel(config)
    elif kind == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(**sizes | {"num_attention_heads": 2 * HEADS}, num_key_value_heads=HEADS, intermediate_size=48)
        )
    else:
        config = BertConfig(
            **sizes,
            intermediate_size=64,
            hidden_dropout_prob=dropout,
            num_labels=3,
            attention_probs_dropout_prob=dropout,
        )
        model = (BertForMaskedLM if kind == "bert" else BertForSequenceClassification)(config)
    for name, parameter in model.named_parameters():  # biases of 0 and norms of 1 would hide much
        if "bias" in name or "norm" in name.lower() or "ln_" in name:
            nn.init.normal_(parameter, 1.0 if "weight" in name else 0.0, 0.2)
    return model


def batch(kind="gpt2", step=0):
    """Rows of uneven lengths, a padding token among them, and labels of which some don't count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 5:], tokens[1, 5:] = 0, 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 2] = -100
    if kind == "bert classifier":
        labels = torch.arange(ROWS) % 3
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def loss_of(model, inputs, dtype=torch.float32):
    if dtype == torch.float32:
        return model(**inputs).loss
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def differences(loss, gradients, weights, whole, whole_loss):
    """Largest distance from the whole model's, of its loss, its gradients and its weights; and its largest gradient."""
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    state = whole.state_dict()
    assert set(gradients) == set(wanted) and set(weights) == set(state)
    return {
        "loss": abs(loss.item() - whole_loss.item()),
        "gradients": max((gradients[name] - each).abs().max().item() for name, each in wanted.items()),
        "weights": max((weights[name] - each).abs().max().item() for name, each in state.items()),
        "scale": max(each.abs().max().item() for each in wanted.values()),
    }


@functools.cache
def oracle(kind, dtype=torch.float32):
    whole = build(kind).to(dtype)
    loss = loss_of(whole, batch(kind), dtype)
    loss.backward()
    return whole, loss


def compared(kind, dtype, options, group):
    options = dict(options)
    checkpointing = options.pop("checkpointing", False)
    model = TensorParallel(build(kind, seed=dist.get_rank(group)).to(dtype), group, **options)  # the first one's count
    if checkpointing:
        model.module.gradient_checkpointing_enable()
    loss = loss_of(model, batch(kind), dtype)
    loss.backward()
    return differences(loss, model.whole_gradients(), model.whole_weights(), *oracle(kind, dtype))


def without_an_exchange(group):
    """What the models' numbers are when one of the exchanges is left out."""
    found = {}
    for name, options in (("reduce", {}), ("copy", {}), ("sequence", {"sequence": True})):
        with contextlib.ExitStack() as stack:
            if name == "sequence":  # the norms' gradients stay parts
                stack.enter_context(mock.patch("course_lib.parallel.tensor_parallel.sum_gradients", lambda *_: None))
            else:
                stack.enter_context(no_exchange(tensor_parallel, name))
            found[name] = compared("gpt2", torch.float64, options, group)
    return found


def adjoint(group):
    """For each exchange F and its backward B: the dot products of F(x) with y, and of x with B(y).

    A tensor that all ranks hold alike is one tensor, and counts once; slices and parts count on each rank.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def random(alike, tokens, seed):
        generator = torch.Generator().manual_seed(seed + (0 if alike else 10 * rank))
        return torch.randn(3, tokens, 2, dtype=torch.float64, generator=generator)

    def dot(left, right, alike):
        product = (left * right).sum() / (ranks if alike else 1)
        dist.all_reduce(product, group=group)
        return product.item()

    found, whole = {}, 2 * ranks
    for name, tokens_in, alike_in, tokens_out, alike_out in (
        ("copy", 2, True, 2, False),
        ("reduce", 2, False, 2, True),
        ("scatter", whole, True, 2, False),
        ("gather", 2, False, whole, True),
        ("all_gather", 2, False, whole, False),
        ("reduce_scatter", whole, False, 2, False),
    ):
        exchange = getattr(tp_collectives, name)
        x, y = random(alike_in, tokens_in, 1).requires_grad_(), random(alike_out, tokens_out, 2)
        result = exchange(x, group, 1) if name in ("scatter", "gather") else exchange(x, group)
        result.backward(y)
        found[name] = dot(result.detach(), y, alike_out), dot(x.detach(), x.grad, alike_in)
    return found


def layers(group, sequence):
    """Norm, column, row in fp64, from a whole input or from slices; distances from the whole layers."""
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
    for each in (wanted, result):
        (each * x.cos()).sum().backward()
    pairs = [
        (result, wanted),
        (split_in.grad, whole_in.grad),
        (row.bias.grad, second.bias.grad),
        (split_norm.weight.grad, norm.weight.grad),
        (split_norm.bias.grad, norm.bias.grad),
        *[
            (layer.splits[name].whole(layer.get_parameter(name).grad, group), whole.get_parameter(name).grad)
            for layer, whole, names in ((column, first, ("weight", "bias")), (row, second, ("weight",)))
            for name in names
        ],
    ]
    return [(mine - theirs).abs().max().item() for mine, theirs in pairs]


def vocabulary(group):
    """Embedding and cross-entropy in fp64, their gradients too; distances from the whole ones."""
    torch.manual_seed(0)
    whole = nn.Embedding(16, 6, padding_idx=9).double()
    split = VocabParallelEmbedding(whole, group)
    tokens = torch.tensor([[0, 9, 15, 4], [8, 9, 3, 0]])
    weight = torch.randn(2, 4, 6, dtype=torch.float64)
    for each in (whole, split):
        (each(tokens) * weight).sum().backward()
    gradient = split.splits["weight"].whole(split.weight.grad, group)
    embedded = [split(tokens) - whole(tokens), gradient - whole.weight.grad]
    logits = torch.randn(2, 4, 16, dtype=torch.float64) * 1000  # exp() of which overflows
    targets = torch.tensor([[0, 15, -100, 4], [8, 7, 12, -100]])
    mine = tp_collectives.scatter(logits, group).requires_grad_()
    logits.requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, targets, group)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 4)
    for each in (losses, wanted):
        (each * weight[..., 0]).sum().backward()
    crossed = [(losses - wanted) / wanted.detach().max(), tp_collectives.gathered(mine.grad, group, -1) - logits.grad]
    return [each.abs().max().item() for each in (*embedded, *crossed)]


def measured(kind, options, group):
    """Collectives of a forward and of a backward, as (name, bytes), and bytes that this rank sent."""
    model = TensorParallel(build(kind), group, **options)
    with Meter() as forward:
        loss = model(**batch(kind)).loss
    with Meter() as backward:
        loss.backward()
    return {
        "forward": [(each.name, each.bytes) for each in forward.collectives],
        "backward": [(each.name, each.bytes) for each in backward.collectives],
        "sent": forward.bytes_sent + backward.bytes_sent,
    }


def dropped(group, seed_by_rank):
    """Whether the ranks' gradients of a replicated norm are alike after a step with dropout."""
    model = TensorParallel(build("gpt2", dropout=0.3), group)
    torch.manual_seed(5 + seed_by_rank * dist.get_rank())
    model(**batch()).loss.backward()
    mine = model.module.transformer.ln_f.weight.grad
    everyones = tp_collectives.gathered(mine, group, 0).chunk(dist.get_world_size(group))
    return [torch.equal(mine, each) for each in everyones]


def steps(model, inner, rows):
    """Three steps of AdamW with clipping, on some of the rows of each batch."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), []
    for step in range(3):
        inputs = {name: each[rows] for name, each in batch(step=step).items()}
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        losses = F.cross_entropy(logits.flatten(0, 1), inputs["input_ids"].flatten(), reduction="none")
        losses.mean().backward()
        clip = (
            inner.clip_grad_norm_
            if isinstance(inner, TensorParallel)
            else functools.partial(nn.utils.clip_grad_norm_, inner.parameters())
        )
        norms.append(clip(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def two_dimensions():
    """DP x TP at 2 x 2: weights and norms after three steps, with and without the averages over dp; and one process."""
    grid = RankGrid(dp=2, tp=2)
    groups, place = grid.groups(), grid.coordinates(dist.get_rank())
    mesh = grid.mesh(groups)
    lines = [dist.get_process_group_ranks(group) for group in groups if group is not None]
    found = {
        "lines": lines,
        "mesh": mesh.mesh.tolist(),
        "mesh place": list(mesh.get_coordinate()),
        "place": list(place),
        "names": mesh.mesh_dim_names,
        "same group": mesh.get_group("tp") is groups.tp,
        "model parallel": dist.get_process_group_ranks(grid.new_group("pp", "tp")),
    }
    rows = slice(place.dp * ROWS // 2, (place.dp + 1) * ROWS // 2)
    whole = build("gpt2").double()
    found["norms"] = steps(whole, whole, slice(None))
    for name, wrap in (("alone", lambda inner: inner), ("with dp", functools.partial(DataParallel, group=groups.dp))):
        inner = TensorParallel(build("gpt2").double(), groups.tp, sequence=True)
        norms = steps(wrap(inner), inner, rows)
        weights = inner.whole_weights()
        found[name] = norms, max((weights[key] - each).abs().max().item() for key, each in whole.state_dict().items())
    return found


def kept(group):
    """Bytes of parameters on this rank, of the whole model, and whether a whole matrix is still alive somewhere."""
    model = build("llama")
    before = sum(parameter.nbytes for parameter in model.parameters())
    matrix = weakref.ref(model.model.layers[0].mlp.gate_proj.weight)
    split = TensorParallel(model, group)
    gc.collect()
    reloaded = build("llama", seed=1)
    reloaded.load_state_dict(split.whole_weights())
    logits = [each(**batch()).logits for each in (split, reloaded)]
    replicated = sum(p.nbytes for name, p in split.module.named_parameters() if name not in split.splits)
    return {
        "before": before,
        "after": sum(p.nbytes for p in split.parameters()),
        "replicated": replicated,
        "alive": matrix() is not None,
        "reloaded": (logits[0] - logits[1]).abs().max().item(),
    }


def refusals(groups):
    """What is said to each thing that cannot be."""
    two, three, four = groups[2], groups[3], groups[4]
    crossing = GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=1, vocab_size=VOCABULARY, add_cross_attention=True)
    odd = {"input_ids": torch.ones(1, 7, dtype=torch.long)}
    wrong = {
        "key-value heads": lambda: TensorParallel(
            LlamaForCausalLM(
                LlamaConfig(hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
            ),
            four,
        ),
        "vocabulary": lambda: TensorParallel(build("gpt2", vocab_size=65), two),
        "vocabulary of torch's": lambda: TorchTensorParallel(
            build("gpt2", vocab_size=65), RankGrid(2, 1, 2).mesh(RankGrid(2, 1, 2).groups())["tp"]
        ),
        "columns": lambda: ColumnParallelLinear(nn.Linear(4, 6), four),
        "rows": lambda: RowParallelLinear(nn.Linear(6, 4), four),
        "tokens": lambda: TensorParallel(build("gpt2"), two, sequence=True)(**odd),
        "no plan": lambda: TensorParallel(
            OPTForCausalLM(
                OPTConfig(
                    hidden_size=16,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    ffn_dim=16,
                    vocab_size=32,
                    word_embed_proj_dim=16,
                )
            ),
            two,
        ),
        "no config": lambda: TensorParallel(nn.Linear(2, 2), two),
        "cross-attention": lambda: TensorParallel(GPT2Model(crossing), two, sequence=True),
        "other models": lambda: TensorParallel(build("gpt2", num_hidden_layers=1 + dist.get_rank(two)), two),
        "grid": lambda: RankGrid(dp=3, tp=2).groups(),
    }
    if dist.get_rank() < 3:
        wrong["heads"] = lambda: TensorParallel(build("gpt2"), three)
    said = {}
    for name, call in wrong.items():
        try:
            call()
        except CourseError as error:
            said[name] = str(error)
    return said


def beyond_the_vocabulary(group):
    """The errors of tokens that no rank has."""
    said = []
    for token in (-1, 16):
        embedding = VocabParallelEmbedding(nn.Embedding(16, 2), group)
        # one rank alone refuses
        with mock.patch("course_lib.parallel.tensor_parallel.reduce", lambda partial, _: partial):
            try:
                embedding(torch.tensor([token]))
            except IndexError as error:
                said.append(str(error))
    return said


def with_dtensor(meshes):
    """The engine beside ours on the same models: distances from one process, and both engines' collectives."""
    found = {}
    for size, kind, options in DTENSOR_CASES:
        mesh = meshes[size]
        model = TorchTensorParallel(build(kind, seed=mesh.get_local_rank()), mesh, **options)
        with Meter() as meter:
            loss = model(**batch(kind)).loss
            loss.backward()
        ours = measured(kind, options, mesh.get_group())
        found[size, kind, tuple(options)] = (
            differences(loss, model.whole_gradients(), model.whole_weights(), *oracle(kind)),
            sorted((each.name, each.bytes) for each in meter.collectives),
            sorted(ours["forward"] + ours["backward"]),
        )
    return found


def on_rank():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    grid, three = RankGrid(dp=2, tp=2), dist.new_group([0, 1, 2])
    groups = {1: grid.new_group(), 2: grid.new_group("tp"), 3: three, 4: grid.new_group("dp", "tp")}
    found = {
        "adjoint": {size: adjoint(groups[size]) for size in SIZES},
        "layers": {(size, sequence): layers(groups[size], sequence) for size in SIZES for sequence in (False, True)},
        "vocabulary": {size: vocabulary(groups[size]) for size in SIZES},
        "models": {(size, i): compared(*case, groups[size]) for size in (2, 4) for i, case in enumerate(CASES)}
        | {(1, i): compared(*CASES[i], groups[1]) for i in (1, 8)},
        "without": without_an_exchange(groups[2]),
        "kept": kept(groups[4]),
        "two": two_dimensions(),
        "refusals": refusals(groups),
        "beyond": beyond_the_vocabulary(groups[4]),
        "dropout": {seed_by_rank: dropped(groups[4], seed_by_rank) for seed_by_rank in (0, 1)},
        "measured": {
            (size, kind, sequence): measured(kind, {"sequence": sequence, "split_vocabulary": False}, groups[size])
            for size in (2, 4)
            for kind in ("gpt2", "bert", "llama")
            for sequence in (False, True)
        },
    }
    whole_mesh = RankGrid(tp=4)
    meshes = {2: grid.mesh(grid.groups())["tp"], 4: whole_mesh.mesh(whole_mesh.groups())["tp"]}
    return found | {"dtensor": with_dtensor(meshes), "rank": rank}
