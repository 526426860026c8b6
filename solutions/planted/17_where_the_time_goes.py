"""Planted wrong answers of lesson 17: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("roofline.bounds", "a multiply and an add are one FLOP", "FLOPs", "(2 * m * k * n,", "(m * k * n,"),
    Planted(
        "roofline.bounds",
        "attention as if all had one head",
        "FLOPs",
        'scores = about["batch"] * about["heads"] * about["tokens"] ** 2',
        'scores = about["batch"] * about["tokens"] ** 2',
    ),
    Planted(
        "roofline.bounds",
        "a softmax does not compute",
        "FLOPs",
        "(scores, 2 * scores, False)",
        "(0, 2 * scores, False)",
    ),
    Planted(
        "roofline.bounds", "a fused chain computes once per element", "FLOPs", "(len(steps) * elements,", "(elements,"
    ),
    Planted("roofline.bounds", "what is written does not count", "bytes", "read + m * n, True", "read, True"),
    Planted(
        "roofline.bounds",
        "the same memory read twice",
        "bytes",
        'm * k if about["same"] else m * k + k * n',
        "m * k + k * n",
    ),
    Planted(
        "roofline.bounds",
        "4 bytes whatever the data type",
        "bytes",
        '{"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}',
        'dict.fromkeys(("float32", "bfloat16", "float8_e4m3fn"), 4)',
    ),
    Planted("roofline.bounds", "one operand read twice in a step", "bytes", "len(set(inputs)) + 1", "len(inputs) + 1"),
    Planted(
        "roofline.bounds",
        "an output in place is not written",
        "bytes",
        "(len(set(inputs)) + 1) * elements, False) for _, *inputs in steps]",
        "len({output, *inputs}) * elements, False) for output, *inputs in steps]",
    ),
    Planted(
        "roofline.bounds",
        "fused, each step still reads and writes",
        "bytes",
        '(len(read) + len(about["keep"])) * elements',
        "sum(len(set(step[1:])) + 1 for step in steps) * elements",
    ),
    Planted(
        "roofline.bounds", "fused, what is made inside is read again", "bytes", "set(inputs) - written", "set(inputs)"
    ),
    Planted("roofline.bounds", "fused, all that is made is written", "bytes", 'len(about["keep"])', "len(written)"),
    Planted(
        "roofline.bounds",
        "what is overwritten in the end is not read",
        "bytes",
        "    return [(len(steps) * elements, (len(read)",
        "    read -= written\n    return [(len(steps) * elements, (len(read)",
    ),
    Planted(
        "roofline.bounds", "keys for each head of queries", "bytes", 'about["kv_heads"] * rows', 'about["heads"] * rows'
    ),
    Planted(
        "roofline.bounds",
        "fused attention writes its scores",
        "bytes",
        "2 * queries + 2 * keys, True",
        "2 * queries + 2 * keys + 2 * scores, True",
    ),
    Planted(
        "roofline.bounds",
        "the textbook's softmax in place of its product",
        "bytes",
        "(scores, 2 * scores, False)",
        "(scores, scores, False)",
    ),
    Planted(
        "roofline.bounds",
        "attention not fused is one kernel",
        "roofs",
        "    return [(product, queries + keys + scores, True), (scores, 2 * scores, False),\n"
        "            (product, scores + keys + queries, True)]",
        "    return [(2 * product + scores, 2 * queries + 2 * keys + 4 * scores, True)]",
    ),
    Planted(
        "roofline.bounds",
        "computes, then moves",
        "roofs",
        "            kernels.append(",
        '            bound = flops / rate + size / peaks["memory"]\n            kernels.append(',
    ),
    Planted("roofline.bounds", "the roof that is highest", "roofs", "bound, roof = max(", "bound, roof = min("),
    Planted(
        "roofline.bounds",
        "the ridge the other way round",
        "roofs",
        "            kernels.append(",
        '            if roof != "launch":\n'
        '                roof = "compute" if flops / size < rate / peaks["memory"] else "memory"\n'
        "            kernels.append(",
    ),
    Planted(
        "roofline.bounds",
        "one peak for all data types",
        "roofs",
        'peaks["flops"][operator["dtype"]]',
        'max(peaks["flops"].values())',
    ),
    Planted(
        "roofline.bounds",
        "launching costs nothing",
        "roofs",
        ',\n                              (peaks["launch"], "launch"))',
        ")",
    ),
    Planted(
        "roofline.bounds",
        "the step's bound of its sums",
        "roofs",
        "sum(bound for _, _, bound, _ in kernels), model",
        'max(sum(k[0] for k in kernels) / max(peaks["flops"].values()), '
        'sum(k[1] for k in kernels) / peaks["memory"]), model',
    ),
    Planted(
        "roofline.bounds",
        "what is computed again counts",
        "MFU",
        'if is_product and not operator["again"]:',
        "if is_product:",
    ),
    Planted(
        "roofline.bounds",
        "what is computed again takes no time",
        "roofs",
        "    for operator in operators:\n",
        '    for operator in operators:\n        if operator["again"]:\n            continue\n',
    ),
    Planted("roofline.bounds", "all FLOPs in the MFU", "MFU", "if is_product and not", "if not"),
    Planted(
        "roofline.bounds",
        "the bound in place of the time",
        "MFU",
        "model_flops / seconds",
        "model_flops / sum(bound for _, _, bound, _ in kernels)",
    ),
    Planted(
        "roofline.bounds",
        "over the peak of fp32",
        "MFU",
        '/ max(peaks["flops"].values())\n\n',
        '/ peaks["flops"]["float32"]\n\n',
    ),
    Planted(
        "flash.attention",
        "no running maximum",
        "large scores",
        "torch.maximum(most, scores.amax(-1, keepdim=True))",
        "torch.zeros_like(most)",
    ),
    Planted("flash.attention", "the sum is not corrected", "output", "total = old * total + p", "total = total + p"),
    Planted("flash.attention", "the output is not corrected", "output", "mixed = old * mixed + p", "mixed = mixed + p"),
    Planted(
        "flash.attention", "corrected the wrong way round", "output", "(most - finite).exp()", "(finite - most).exp()"
    ),
    Planted(
        "flash.attention",
        "the maximum of the last block alone",
        "large scores",
        "torch.maximum(most, scores.amax(-1, keepdim=True))",
        "scores.amax(-1, keepdim=True)",
    ),
    Planted(
        "flash.attention",
        "the running maximum begins at 0",
        "large scores",
        "torch.full_like(queries[..., :1], -torch.inf)",
        "torch.zeros_like(queries[..., :1])",
    ),
    Planted(
        "flash.attention",
        "a mask of -10000",
        "large scores",
        "masked_fill(~seen, -torch.inf)",
        "masked_fill(~seen, -10000.0)",
    ),
    Planted(
        "flash.attention",
        "minus infinity less minus infinity",
        "queries that see nothing",
        "new.masked_fill(new == -torch.inf, 0.0)",
        "new",
    ),
    Planted(
        "flash.attention",
        "divides by a sum of 0",
        "queries that see nothing",
        "mixed / total.masked_fill(total == 0, 1.0)",
        "mixed / total",
    ),
    Planted(
        "flash.attention",
        "who sees nothing sees all alike",
        "queries that see nothing",
        "masked_fill(~seen, -torch.inf)",
        "masked_fill(~seen, -1e30)",
    ),
    Planted(
        "flash.attention",
        "a huge finite number for the logarithm of 0",
        "log of the sum",
        "(most + total.log()).squeeze(-1)",
        "(most.clamp(min=-1e30) + total.clamp(min=1e-30).log()).squeeze(-1)",
    ),
    Planted(
        "flash.attention",
        "the sum's logarithm without its maximum",
        "log of the sum",
        "(most + total.log())",
        "total.log()",
    ),
    Planted(
        "flash.attention",
        "the logarithm less the maximum",
        "log of the sum",
        "(most + total.log())",
        "(total.log() - most)",
    ),
    Planted(
        "flash.attention",
        "scales the caller's q",
        "output",
        "queries = q[:, :, rows] / width**0.5",
        "queries = q[:, :, rows].div_(width**0.5)",
    ),
    Planted("flash.attention", "no scale", "output", " / width**0.5", ""),
    Planted(
        "flash.attention",
        "the scale in the maximum alone",
        "large scores",
        "scores.amax(-1, keepdim=True))\n",
        "scores.amax(-1, keepdim=True) / width**0.5)\n",
    ),
    Planted(
        "flash.attention",
        "the last keys are left out where they fill no block",
        "output",
        "range(0, rows.stop if causal else tokens, block)",
        "range(0, (rows.stop if causal else tokens) // block * block, block)",
    ),
    Planted(
        "flash.attention",
        "the last queries are zeros",
        "output",
        "output, log_sum = torch.empty_like(q), q.new_empty(batch, heads, tokens)\n"
        "    for start in range(0, tokens, block):",
        "output, log_sum = torch.zeros_like(q), q.new_zeros(batch, heads, tokens)\n"
        "    for start in range(0, tokens // block * block, block):",
    ),
    Planted("flash.attention", "the diagonal is masked", "output", ">= torch.arange(cols", "> torch.arange(cols"),
    Planted(
        "flash.attention",
        "positions within the block",
        "output",
        "torch.arange(rows.start, rows.stop)[:, None] >= torch.arange(cols.start, cols.stop)",
        "torch.arange(rows.stop - start)[:, None] >= torch.arange(cols.stop - first)",
    ),
    Planted(
        "flash.attention",
        "padding is seen",
        "output",
        "keep[:, None, None, cols]",
        "torch.ones_like(keep)[:, None, None, cols]",
    ),
    Planted(
        "flash.attention",
        "padding hides queries, not keys",
        "output",
        "keep[:, None, None, cols]",
        "keep[:, None, rows, None]",
    ),
    Planted(
        "flash.attention",
        "heads share keys in turn, not in a row",
        "output",
        "k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)",
        "k.repeat(1, shared, 1, 1), v.repeat(1, shared, 1, 1)",
    ),
    Planted(
        "flash.attention",
        "all blocks, masked",
        "no block beyond the diagonal",
        "rows.stop if causal else tokens",
        "tokens",
    ),
    Planted(
        "flash.attention",
        "a strip of all keys",
        "no matrix",
        "rows.stop if causal else tokens, block):\n            cols = slice(first, min(first + block, tokens))",
        "1):\n            cols = slice(0, rows.stop if causal else tokens)",
    ),
    Planted(
        "flash.attention",
        "a mask of the whole matrix",
        "no matrix",
        "    for start in range(0, tokens, block):\n",
        "    past = torch.ones(tokens, tokens, dtype=torch.bool).tril()\n    for start in range(0, tokens, block):\n",
    ),
    Planted(
        "flash.attention",
        "the textbook's",
        "no matrix",
        "",
        """import torch


def flash_attention(q, k, v, keep, causal, block):
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    seen = keep[:, None, None, :]
    if causal:
        seen = seen & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)
""",
    ),
    Planted(
        "flash.attention",
        "PyTorch's own, and a logarithm from whole rows",
        "no block beyond the diagonal",
        "",
        """import torch
from torch.nn import functional as F


def flash_attention(q, k, v, keep, causal, block):
    seen = keep[:, None, None, :].expand(-1, 1, q.shape[2], -1)
    if causal:
        seen = seen & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    output = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).nan_to_num()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return output, (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).logsumexp(-1)
""",
    ),
    Planted(
        "flash.attention",
        "products in bf16",
        "output",
        "queries @ k[:, :, cols].mT)",
        "(queries.bfloat16() @ k[:, :, cols].mT.bfloat16()).float())",
    ),
    Planted(
        "loss.chunked",
        "a mean of the chunks' means",
        "loss",
        "",
        """import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class ChunkedCrossEntropy(nn.Module):
    def __init__(self, vocabulary, width, chunk):
        super().__init__()
        self.weight, self.chunk = nn.Parameter(torch.zeros(vocabulary, width)), chunk

    def forward(self, states, targets):
        losses = [F.cross_entropy(rows @ self.weight.T, wanted).nan_to_num()
                  for rows, wanted in zip(states.split(self.chunk), targets.split(self.chunk))]
        return torch.stack(losses).mean() / dist.get_world_size()
""",
    ),
    Planted(
        "loss.chunked",
        "autograd over chunks, which keeps them all",
        "a chunk alone",
        "",
        """import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class ChunkedCrossEntropy(nn.Module):
    def __init__(self, vocabulary, width, chunk):
        super().__init__()
        self.weight, self.chunk = nn.Parameter(torch.zeros(vocabulary, width)), chunk

    def forward(self, states, targets):
        count = (targets != -100).sum()
        dist.all_reduce(count)
        return sum(F.cross_entropy(rows @ self.weight.T, wanted, reduction="sum") for rows, wanted in zip(
            states.split(self.chunk), targets.split(self.chunk))) / count.clamp(min=1)
""",
    ),
    Planted(
        "loss.chunked",
        "checkpointed chunks, whose products are made again",
        "three products",
        "",
        """import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class ChunkedCrossEntropy(nn.Module):
    def __init__(self, vocabulary, width, chunk):
        super().__init__()
        self.weight, self.chunk = nn.Parameter(torch.zeros(vocabulary, width)), chunk

    def forward(self, states, targets):
        count = (targets != -100).sum()
        dist.all_reduce(count)

        def part(rows, wanted):
            return F.cross_entropy(rows @ self.weight.T, wanted, reduction="sum")

        return sum(checkpoint(part, rows, wanted, use_reentrant=False) for rows, wanted in zip(
            states.split(self.chunk), targets.split(self.chunk))) / count.clamp(min=1)
""",
    ),
    Planted(
        "loss.chunked",
        "F.cross_entropy of all logits",
        "a chunk alone",
        "",
        """import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class ChunkedCrossEntropy(nn.Module):
    def __init__(self, vocabulary, width, chunk):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocabulary, width))

    def forward(self, states, targets):
        count = (targets != -100).sum()
        dist.all_reduce(count)
        return F.cross_entropy(states @ self.weight.T, targets, reduction="sum") / count.clamp(min=1)
""",
    ),
    Planted(
        "loss.chunked",
        "targets that do not count are the first word",
        "loss",
        "counted = (wanted != -100)[:, None]",
        "counted = torch.ones_like(wanted)[:, None]",
    ),
    Planted(
        "loss.chunked",
        "tokens that do not count have a gradient",
        "gradient of states",
        "p *= counted / count",
        "p /= count",
    ),
    Planted("loss.chunked", "divides by all tokens", "loss", "(targets != -100).sum()", "torch.tensor(len(targets))"),
    Planted("loss.chunked", "a mean over its own targets", "one count", "        dist.all_reduce(count)\n", ""),
    Planted(
        "loss.chunked",
        "its own mean, over the number of ranks",
        "loss",
        "        dist.all_reduce(count)\n",
        "        dist.all_reduce(count.clone())\n        count = count * dist.get_world_size()\n",
    ),
    Planted(
        "loss.chunked",
        "each rank the mean of all",
        "loss",
        "        return total / count\n",
        "        total = total / count\n        dist.all_reduce(total)\n        return total\n",
    ),
    Planted(
        "loss.chunked",
        "gradients for DDP, which takes a mean",
        "gradient of the weight",
        "gradient * d_weight",
        "gradient * d_weight * dist.get_world_size()",
    ),
    Planted(
        "loss.chunked",
        "a count for each chunk",
        "one count",
        "            counted = (wanted",
        "            dist.all_reduce((wanted != -100).sum())\n            counted = (wanted",
    ),
    Planted(
        "loss.chunked",
        "the gradient is reduced too",
        "one count",
        "        d_states, d_weight = ctx.saved_tensors\n",
        "        d_states, d_weight = ctx.saved_tensors\n        dist.all_reduce(d_weight.clone())\n",
    ),
    Planted(
        "loss.chunked",
        "the count in the backward",
        "one count",
        "        d_states, d_weight = ctx.saved_tensors\n",
        "        d_states, d_weight = ctx.saved_tensors\n        dist.all_reduce(torch.tensor(1))\n",
    ),
    Planted(
        "loss.chunked",
        "what arrives in backward is taken for 1",
        "gradient of the weight",
        "return gradient * d_states, gradient * d_weight,",
        "return d_states, d_weight,",
    ),
    Planted(
        "loss.chunked",
        "the weight's gradient of the last chunk",
        "gradient of the weight",
        "d_weight += p.T",
        "d_weight = p.T",
    ),
    Planted(
        "loss.chunked",
        "the weight's gradient into .grad",
        "gradient of the weight",
        "return gradient * d_states, gradient * d_weight,",
        "return gradient * d_states, None,",
    ),
    Planted(
        "loss.chunked",
        "softmax without its 1 at the target",
        "gradient of states",
        "            p.scatter_add_(1, labels, -torch.ones_like(lse))\n",
        "",
    ),
    Planted(
        "loss.chunked",
        "exponentials that overflow",
        "loss",
        "logits.logsumexp(1, keepdim=True)",
        "logits.exp().sum(1, keepdim=True).log()",
    ),
    Planted(
        "loss.chunked",
        "the last chunk is left out where it is short",
        "loss",
        "zip(states.split(chunk), targets.split(chunk), d_states.split(chunk)):",
        "[parts for parts in zip(states.split(chunk), targets.split(chunk), d_states.zero_().split(chunk))\n"
        "                                       if len(parts[0]) == chunk]:",
    ),
    Planted("loss.chunked", "nothing over nothing", "no targets", "count.clamp(min=1)", "count"),
    Planted(
        "loss.chunked",
        "a rank without targets leaves",
        "no targets",
        "        dist.all_reduce(count)\n",
        "        if count == 0:\n            return (states * 0).sum()\n        dist.all_reduce(count)\n",
    ),
    Planted(
        "loss.chunked",
        "a rank without targets has no gradient",
        "no targets",
        "        dist.all_reduce(count)\n",
        "        own = int(count)\n        dist.all_reduce(count)\n        if own == 0:\n"
        "            return (states * 0).sum()\n",
    ),
    Planted(
        "loss.chunked",
        "keeps the probabilities for its backward",
        "a chunk alone",
        "",
        """import torch
import torch.distributed as dist
from torch import nn


class ChunkedCrossEntropy(nn.Module):
    def __init__(self, vocabulary, width, chunk):
        super().__init__()
        self.weight, self.chunk = nn.Parameter(torch.zeros(vocabulary, width)), chunk

    def forward(self, states, targets):
        count = (targets != -100).sum()
        dist.all_reduce(count)
        return InChunks.apply(states, self.weight, targets, count.clamp(min=1), self.chunk)


class InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, targets, count, chunk):
        total, ctx.parts = 0.0, []
        ctx.save_for_backward(states, weight)
        for rows, wanted in zip(states.split(chunk), targets.split(chunk)):
            counted, labels = (wanted != -100).unsqueeze(-1), wanted.clamp(min=0).unsqueeze(-1)
            logits = rows @ weight.T
            lse = logits.logsumexp(-1, keepdim=True)
            total += ((lse - logits.gather(1, labels)) * counted).sum()
            p = (logits - lse).exp().scatter_add(1, labels, -torch.ones_like(lse))
            ctx.parts.append(p * counted / count)
        return total / count

    @staticmethod
    def backward(ctx, gradient):
        states, weight = ctx.saved_tensors
        d_states = torch.cat([p @ weight for p in ctx.parts])
        d_weight = sum(p.T @ rows for p, rows in zip(ctx.parts, states.split(len(ctx.parts[0]))))
        return gradient * d_states, gradient * d_weight, None, None, None
""",
    ),
    Planted(
        "loss.chunked",
        "the logits' products again in the backward",
        "three products",
        "        d_states, d_weight = ctx.saved_tensors\n",
        "        d_states, d_weight = ctx.saved_tensors\n"
        "        for rows in d_states.split(4):\n            rows @ d_weight.T\n",
    ),
    Planted(
        "loss.chunked",
        "chunks of 64 whatever is asked for",
        "a chunk alone",
        "        self.chunk = chunk\n",
        "        self.chunk = 64\n",
    ),
    Planted(
        "loss.chunked",
        "a bias beside the weight",
        "a chunk alone",
        "        self.chunk = chunk\n",
        "        self.chunk = chunk\n        self.bias = nn.Parameter(torch.zeros(vocabulary))\n",
    ),
    Planted(
        "loss.chunked",
        "the weight is no parameter",
        "gradient of the weight",
        "self.weight = nn.Parameter(torch.zeros(vocabulary, width))",
        'self.register_buffer("weight", torch.zeros(vocabulary, width))',
    ),
    Planted(
        "fp8.linear", "the scale the other way round", "output", "(side / scale).to(form)", "(side * scale).to(form)"
    ),
    Planted(
        "fp8.linear",
        "the scales left out of the product",
        "output",
        "return product(a, b, scale_a, scale_b)",
        "return product(a, b, torch.ones(1), torch.ones(1))",
    ),
    Planted(
        "fp8.linear",
        "the scales inverted for the product",
        "output",
        "return (side / scale).to(form), scale",
        "return (side / scale).to(form), 1 / scale",
    ),
    Planted(
        "fp8.linear",
        "one scale for both sides",
        "output",
        "return product(a, b, scale_a, scale_b)",
        "return product(a, b, scale_a, scale_a[: len(b)] if by_row else scale_a)",
    ),
    Planted(
        "fp8.linear",
        "no scale at all",
        "gradient of x",
        "    scale = torch.where(scale == 0, 1, scale)\n",
        "    scale = torch.ones_like(scale)\n",
    ),
    Planted(
        "fp8.linear",
        "the largest, but not of those below 0",
        "output",
        "side.abs().amax(1, keepdim=True) if by_row else side.abs().amax()",
        "side.amax(1, keepdim=True) if by_row else side.amax()",
    ),
    Planted("fp8.linear", "one scale for all rows", "output", "if by_row else", "if by_row and len(side) == 0 else"),
    Planted("fp8.linear", "a scale per row though one is asked for", "output", " if by_row else side.abs().amax()", ""),
    Planted(
        "fp8.linear",
        "a scale for each column",
        "output",
        "side.abs().amax(1, keepdim=True) if by_row",
        "side.abs().amax(0, keepdim=True) if by_row",
    ),
    Planted(
        "fp8.linear",
        "the same scales per token in the third product",
        "gradient of the weight",
        "        ctx.save_for_backward(*rounded(x.T, e4m3, by_row), weight)\n",
        "        eight, scale = rounded(x, e4m3, by_row)\n"
        "        scale = scale.amax().expand(x.shape[1], 1) if by_row else scale\n"
        "        ctx.save_for_backward(eight.T, scale, weight)\n",
    ),
    Planted(
        "fp8.linear",
        "x is rounded twice",
        "gradient of the weight",
        "        ctx.save_for_backward(*rounded(x.T, e4m3, by_row), weight)\n",
        "        eight, scale = rounded(x, e4m3, by_row)\n"
        "        ctx.save_for_backward(*rounded((eight.float() * scale).T, e4m3, by_row), weight)\n",
    ),
    Planted(
        "fp8.linear",
        "the scales of the weight's rows for its columns",
        "gradient of x",
        "rounded(weight.T, torch.float8_e4m3fn, ctx.by_row)",
        "(lambda eight, scale: (eight.T, scale.amax().expand(weight.shape[1], 1) if ctx.by_row else scale))("
        "*rounded(weight, torch.float8_e4m3fn, ctx.by_row))",
    ),
    Planted(
        "fp8.linear",
        "the gradient's rows keep their scales when it is transposed",
        "gradient of the weight",
        "        g, scale_g = rounded(gradient.T, torch.float8_e5m2, ctx.by_row)\n",
        "        g, scale_g = g.T, scale_g.amax().expand(g.shape[1], 1) if ctx.by_row else scale_g\n",
    ),
    Planted(
        "fp8.linear",
        "e4m3 for gradients",
        "formats",
        "rounded(gradient, torch.float8_e5m2, ctx.by_row)",
        "rounded(gradient, torch.float8_e4m3fn, ctx.by_row)",
    ),
    Planted("fp8.linear", "e5m2 for all", "formats", "e4m3 = torch.float8_e4m3fn", "e4m3 = torch.float8_e5m2"),
    Planted("fp8.linear", "448 for both formats", "formats", "torch.finfo(form).max", "448"),
    Planted("fp8.linear", "57344 for both formats", "output", "torch.finfo(form).max", "57344"),
    Planted("fp8.linear", "127, as for int8", "formats", "torch.finfo(form).max", "127"),
    Planted(
        "fp8.linear", "zeros divided by their scale", "zeros", "    scale = torch.where(scale == 0, 1, scale)\n", ""
    ),
    Planted(
        "fp8.linear", "an epsilon", "tiny gradients", "torch.where(scale == 0, 1, scale)", "scale.clamp(min=1e-12)"
    ),
    Planted(
        "fp8.linear",
        "an epsilon on the largest",
        "tiny gradients",
        "largest / torch.finfo(form).max",
        "largest.clamp(min=1e-12) / torch.finfo(form).max",
    ),
    Planted(
        "fp8.linear",
        "x is kept in fp32",
        "kept in 8 bits",
        "        ctx.save_for_backward(*rounded(x.T, e4m3, by_row), weight)\n",
        "        ctx.save_for_backward(*rounded(x.T, e4m3, by_row), weight)\n        ctx.x = x\n",
    ),
    Planted(
        "fp8.linear",
        "x is kept in bf16",
        "kept in 8 bits",
        "        ctx.save_for_backward(*rounded(x.T, e4m3, by_row), weight)\n",
        "        ctx.save_for_backward(*rounded(x.T, e4m3, by_row), weight)\n        ctx.x = x.bfloat16()\n",
    ),
    Planted(
        "fp8.linear",
        "what was rounded is kept in fp32",
        "kept in 8 bits",
        "        ctx.save_for_backward(*rounded(x.T, e4m3, by_row), weight)\n",
        "        ctx.save_for_backward(*rounded(x.T, e4m3, by_row), weight)\n"
        "        ctx.x = rounded(x, e4m3, by_row)[0].float()\n",
    ),
    Planted(
        "fp8.linear",
        "gradients in fp32",
        "formats",
        "return d_x, ctx.product(g, x, scale_g, scale_x)",
        "return d_x, gradient.T @ (x.float() * scale_x).T",
    ),
    Planted(
        "fp8.linear",
        "a product of numbers that were not rounded",
        "formats",
        "",
        """import torch


def linear_in_8_bits(x, weight, product, by_row):
    return x @ weight.T
""",
    ),
    Planted(
        "fp8.linear",
        "rounded, and then a product in fp32",
        "formats",
        "return product(a, b, scale_a, scale_b)",
        "return (a.float() * scale_a) @ (b.float() * scale_b).T",
    ),
    Planted(
        "fp8.linear",
        "autograd's backward, of the rounded sides",
        "formats",
        "",
        """import torch


def linear_in_8_bits(x, weight, product, by_row):
    def rounded(side):
        largest = side.detach().abs().amax(-1, keepdim=True) if by_row else side.detach().abs().amax()
        scale = torch.where(largest == 0, 1, largest / 448)
        return side + ((side / scale).to(torch.float8_e4m3fn).float() * scale - side).detach()

    return rounded(x) @ rounded(weight).T
""",
    ),
    Planted(
        "fp8.all_gather",
        "each rank its own scale",
        "weight",
        "    dist.all_reduce(largest, dist.ReduceOp.MAX)\n",
        "    dist.all_reduce(largest.clone(), dist.ReduceOp.MAX)\n",
    ),
    Planted(
        "fp8.all_gather", "no agreement on the scale", "bytes", "    dist.all_reduce(largest, dist.ReduceOp.MAX)\n", ""
    ),
    Planted(
        "fp8.all_gather",
        "a sum of the largest",
        "scale",
        "dist.all_reduce(largest, dist.ReduceOp.MAX)",
        "dist.all_reduce(largest)",
    ),
    Planted(
        "fp8.all_gather",
        "a mean of the largest",
        "scale",
        "dist.all_reduce(largest, dist.ReduceOp.MAX)",
        "dist.all_reduce(largest)\n    largest /= ranks",
    ),
    Planted("fp8.all_gather", "the largest, but not of those below 0", "scale", "part.abs().amax()", "part.amax()"),
    Planted("fp8.all_gather", "numbers converted to bytes", "weight", "mine.view(torch.uint8)", "mine.to(torch.uint8)"),
    Planted(
        "fp8.all_gather",
        "bytes converted to numbers",
        "weight",
        "whole[: shape.numel()].view(torch.float8_e4m3fn)",
        "whole[: shape.numel()].to(torch.float8_e4m3fn)",
    ),
    Planted(
        "fp8.all_gather",
        "fp8 is handed to gloo",
        "weight",
        "dtype=torch.uint8)\n    dist.all_gather_single(whole, mine.view(torch.uint8))",
        "dtype=torch.float8_e4m3fn)\n    dist.all_gather_single(whole, mine)",
    ),
    Planted(
        "fp8.all_gather",
        "gathers fp32, and rounds the whole",
        "bytes",
        "",
        """import torch
import torch.distributed as dist


def gather_in_8_bits(shard, shape):
    ranks = dist.get_world_size()
    part = torch.zeros(-(-shape.numel() // ranks))
    part[: len(shard)] = shard
    whole = torch.empty(ranks * len(part))
    dist.all_gather_single(whole, part)
    whole = whole[: shape.numel()].view(shape)
    scale = whole.abs().amax() / 448
    scale = torch.where(scale == 0, 1, scale)
    return (whole / scale).to(torch.float8_e4m3fn), scale
""",
    ),
    Planted(
        "fp8.all_gather",
        "gathers each rank's scale, and rounds again",
        "bytes",
        "",
        """import torch
import torch.distributed as dist


def gather_in_8_bits(shard, shape):
    ranks = dist.get_world_size()
    part = torch.zeros(-(-shape.numel() // ranks))
    part[: len(shard)] = shard
    own = part.abs().amax() / 448
    own = torch.where(own == 0, 1, own).reshape(1)
    scales, whole = torch.empty(ranks), torch.empty(ranks * len(part), dtype=torch.uint8)
    dist.all_gather_single(scales, own)
    dist.all_gather_single(whole, (part / own).to(torch.float8_e4m3fn).view(torch.uint8))
    values = (whole.view(torch.float8_e4m3fn).float().view(ranks, -1) * scales[:, None]).flatten()[: shape.numel()]
    scale = scales.max()
    return (values / scale).to(torch.float8_e4m3fn).view(shape), scale
""",
    ),
    Planted(
        "fp8.all_gather",
        "rounds before the scale is agreed on",
        "weight",
        "    dist.all_reduce(largest, dist.ReduceOp.MAX)\n    scale = largest / 448\n"
        "    scale = torch.where(scale == 0, 1, scale)\n    mine = (part / scale).to(torch.float8_e4m3fn)\n",
        "    own = torch.where(largest == 0, 1, largest / 448)\n"
        "    mine = (part / own).to(torch.float8_e4m3fn)\n"
        "    dist.all_reduce(largest, dist.ReduceOp.MAX)\n    scale = largest / 448\n"
        "    scale = torch.where(scale == 0, 1, scale)\n",
    ),
    Planted(
        "fp8.all_gather",
        "bf16 on the wire",
        "bytes",
        "    whole = torch.empty(ranks * len(part), dtype=torch.uint8)\n"
        "    dist.all_gather_single(whole, mine.view(torch.uint8))\n"
        "    return whole[: shape.numel()].view(torch.float8_e4m3fn).view(shape), scale",
        "    whole = torch.empty(ranks * len(part), dtype=torch.bfloat16)\n"
        "    dist.all_gather_single(whole, mine.bfloat16())\n"
        "    return whole[: shape.numel()].to(torch.float8_e4m3fn).view(shape), scale",
    ),
    Planted(
        "fp8.all_gather",
        "a sum of zeros and parts",
        "bytes",
        "    whole = torch.empty(ranks * len(part), dtype=torch.uint8)\n"
        "    dist.all_gather_single(whole, mine.view(torch.uint8))\n",
        "    whole = torch.zeros(ranks, len(part), dtype=torch.uint8)\n"
        "    whole[dist.get_rank()] = mine.view(torch.uint8)\n    dist.all_reduce(whole)\n"
        "    whole = whole.flatten()\n",
    ),
    Planted(
        "fp8.all_gather",
        "its own part first",
        "weight",
        "    return whole[: shape.numel()]",
        "    whole = whole.roll(-dist.get_rank() * len(part))\n    return whole[: shape.numel()]",
    ),
    Planted(
        "fp8.all_gather",
        "the padding stays within",
        "weight",
        "    part = torch.zeros(-(-shape.numel() // ranks))\n    part[: len(shard)] = shard\n",
        "    part = torch.zeros(-(-shape.numel() // ranks))\n    part[len(part) - len(shard):] = shard\n",
    ),
    Planted(
        "fp8.all_gather",
        "parts as they come, without padding",
        "weight",
        "    part = torch.zeros(-(-shape.numel() // ranks))\n    part[: len(shard)] = shard\n",
        "    part = shard\n",
    ),
    Planted("fp8.all_gather", "parts rounded down", "weight", "-(-shape.numel() // ranks)", "shape.numel() // ranks"),
    Planted("fp8.all_gather", "the largest of an empty part", "weight", "part.abs().amax()", "shard.abs().amax()"),
    Planted(
        "fp8.all_gather",
        "padded to parts of 16",
        "bytes",
        "-(-shape.numel() // ranks)",
        "-(-shape.numel() // (16 * ranks)) * 16",
    ),
    Planted(
        "fp8.all_gather",
        "zeros divided by their scale",
        "weight",
        "    scale = torch.where(scale == 0, 1, scale)\n",
        "",
    ),
    Planted("fp8.all_gather", "an epsilon", "scale", "torch.where(scale == 0, 1, scale)", "scale.clamp(min=1e-3)"),
    Planted(
        "fp8.all_gather",
        "e5m2",
        "weight",
        "mine = (part / scale).to(torch.float8_e4m3fn)",
        "mine = (part / scale).to(torch.float8_e5m2)",
    ),
    Planted("fp8.all_gather", "the largest number of e5m2", "scale", "largest / 448", "largest / 57344"),
    Planted(
        "fp8.all_gather",
        "returns numbers in fp32",
        "weight",
        ".view(torch.float8_e4m3fn).view(shape), scale",
        ".view(torch.float8_e4m3fn).view(shape).float(), scale",
    ),
    Planted("fp8.all_gather", "the scale inverted", "scale", ".view(shape), scale", ".view(shape), 1 / scale"),
)
