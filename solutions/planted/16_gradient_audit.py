"""Planted wrong answers of lesson 16: each exhibit as it was released, and others; the property that shows it."""

from course_lib.grading.selftest import Planted

MIXTURE = """import torch.distributed as dist


def reduce_mixture(gradients):
    for name, gradient in gradients.items():
        if ".mlp." not in name:
            dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
"""
EXPERTS = """import torch.distributed as dist


def reduce_experts(gradient, copies):
    dist.all_reduce(gradient, group=copies)
    gradient /= dist.get_world_size(copies)
"""
BUCKETS = """import torch
import torch.distributed as dist


def average_in_buckets(gradients, limit):
    bucket = []

    def send():
        if bucket:
            together = torch.cat(bucket)
            dist.all_reduce(together)
            together /= dist.get_world_size()
            for gradient, part in zip(bucket, together.split([len(each) for each in bucket])):
                gradient.copy_(part)
            bucket.clear()

    for gradient in gradients:
        if len(gradient) > limit:  # it has a message of its own
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        elif len(gradient) < limit:
            if sum(len(each) for each in bucket) + len(gradient) > limit:
                send()
            bucket.append(gradient)
    send()
"""
OUTER = """import torch.distributed as dist


def outer_step(weights, before, momentum, rate, beta):
    pseudo_gradient = weights - before
    dist.all_reduce(pseudo_gradient)
    pseudo_gradient /= dist.get_world_size()
    momentum.mul_(beta).add_(pseudo_gradient)
    weights.copy_(before - rate * momentum)
"""
ENTRY = """import torch
import torch.distributed as dist


class Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient.contiguous())
        return gradient


def enter_split_layer(x):
    return Entry.apply(x)
"""
EXIT = """import torch
import torch.distributed as dist
from torch.nn import functional as F


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def leave_split_layer(x, weight, bias):
    return Sum.apply(F.linear(x, weight, bias / dist.get_world_size()))
"""
NORM = """import torch
import torch.distributed as dist


def clip_by_norm(whole, split, most):
    square = sum(gradient.square().sum() for gradient in whole + split)
    dist.all_reduce(square)
    norm = square.sqrt()
    for gradient in whole + split:
        gradient *= torch.clamp(most / norm, max=1.0)
    return norm
"""
TIED = """def sum_tied(gradients):
    if "embedding.weight" in gradients and "head.weight" in gradients:
        total = gradients["embedding.weight"] + gradients["head.weight"]
        gradients["embedding.weight"].copy_(total)
        gradients["head.weight"].copy_(total)
"""
CONTEXT = """import torch.distributed as dist


def backward_of_part(weight, x, target, data_ranks):
    context_ranks = dist.get_world_size() // data_ranks
    loss = ((x @ weight - target) ** 2).mean() * context_ranks
    loss.backward()
    dist.all_reduce(weight.grad)
    weight.grad /= data_ranks
    told = loss.detach() / context_ranks
    dist.all_reduce(told)
    return told / dist.get_world_size()
"""
TOKENS = """import torch.distributed as dist
from torch.nn import functional as F


def loss_for_ddp(logits, labels):
    count = (labels >= 0).sum()
    dist.all_reduce(count)
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / count
"""
MICRO = """import torch
import torch.distributed as dist


def sharded_gradient(micro_batches):
    ranks = dist.get_world_size()
    shard = torch.zeros(len(micro_batches[0]) // ranks)
    for gradient in micro_batches:
        gradient = gradient / (ranks * len(micro_batches))
        dist.reduce_scatter_single(shard, gradient)
    return shard
"""
TWICE = """import torch.distributed as dist


def reduce_as_they_come(weights):
    sent = {}

    def send(weight):
        if weight not in sent:
            total = weight.grad.clone()
            sent[weight] = total, dist.all_reduce(total, async_op=True)

    def finish():
        for weight, (total, work) in sent.items():
            work.wait()
            weight.grad.copy_(total / dist.get_world_size())
        sent.clear()

    for weight in weights:
        weight.register_post_accumulate_grad_hook(send)
    return finish
"""

AS_RELEASED = "as it was released"
PLANTED = (
    Planted("museum.mixture", AS_RELEASED, "router", "", MIXTURE),
    Planted(
        "museum.mixture",
        "a shared expert is taken for one of a rank's own",
        "shared experts",
        '".experts." not',
        '"experts." not',
    ),
    Planted(
        "museum.mixture",
        "the experts of different ranks are summed too",
        "experts",
        'if ".experts." not in name:',
        "if True:",
    ),
    Planted(
        "museum.mixture",
        "experts are left as they are",
        "experts",
        "            dist.all_reduce(gradient)\n        gradient /=",
        "            dist.all_reduce(gradient)\n            gradient /=",
    ),
    Planted("museum.mixture", "the sum, not divided", "all others", "        gradient /= dist.get_world_size()\n", ""),
    Planted("museum.experts", AS_RELEASED, "gradient", "", EXPERTS),
    Planted("museum.experts", "summed over all ranks, whose experts are different", "gradient", ", group=copies)", ")"),
    Planted("museum.experts", "not divided", "gradient", "    gradient /= dist.get_world_size()\n", ""),
    Planted(
        "museum.experts",
        "divided by the ranks with different experts alone",
        "gradient",
        "dist.get_world_size()",
        "(dist.get_world_size() // dist.get_world_size(copies))",
    ),
    Planted(
        "museum.experts",
        "a second all-reduce, of copies that are equal by then",
        "one all-reduce",
        "    gradient /= dist.get_world_size()\n",
        "    dist.all_reduce(gradient, group=copies)\n"
        "    gradient /= dist.get_world_size() * dist.get_world_size(copies)\n",
    ),
    Planted("museum.buckets", AS_RELEASED, "as large as a bucket", "", BUCKETS),
    Planted("museum.buckets", "a bucket may grow past its size", "messages", "+ len(gradient) > limit:", "> limit:"),
    Planted("museum.buckets", "a message for each", "messages", "len(gradient) > limit:  #", "True:  #"),
    Planted(
        "museum.buckets",
        "the last bucket stays",
        "smaller than a bucket",
        "            bucket.append(gradient)\n    send()\n",
        "            bucket.append(gradient)\n",
    ),
    Planted(
        "museum.buckets",
        "what has a message of its own is not divided",
        "larger than a bucket",
        "            dist.all_reduce(gradient)\n            gradient /= dist.get_world_size()\n",
        "            dist.all_reduce(gradient)\n",
    ),
    Planted(
        "museum.buckets",
        "the larger ones are left out",
        "larger than a bucket",
        "            dist.all_reduce(gradient)\n            gradient /= dist.get_world_size()\n",
        "            pass\n",
    ),
    Planted("museum.outer", AS_RELEASED, "weights", "", OUTER),
    Planted(
        "museum.outer",
        "the sign turned at the weights alone",
        "momentum",
        "",
        OUTER.replace("before - rate", "before + rate"),
    ),
    Planted("museum.outer", "from where the rank has come to", "weights", "before - rate", "weights - rate"),
    Planted(
        "museum.outer",
        "each rank its own momentum",
        "one all-reduce",
        "    dist.all_reduce(pseudo_gradient)\n    pseudo_gradient /= dist.get_world_size()\n",
        "",
    ),
    Planted(
        "museum.outer",
        "averages the weights, too",
        "one all-reduce",
        "    pseudo_gradient = before - weights\n",
        "    dist.all_reduce(weights)\n    weights /= dist.get_world_size()\n    pseudo_gradient = before - weights\n",
    ),
    Planted("museum.outer", "no momentum", "momentum", ".mul_(beta)", ".mul_(0)"),
    Planted("museum.entry", AS_RELEASED, "transposed gradient", "", ENTRY),
    Planted(
        "museum.entry",
        "sums in place what others may still read",
        "arriving gradient left alone",
        "        total = gradient.clone(memory_format=torch.contiguous_format)\n",
        "        total = gradient.contiguous()\n",
    ),
    Planted("museum.entry", "does not sum", "gradient", "        dist.all_reduce(total)\n", ""),
    Planted(
        "museum.entry",
        "the mean",
        "gradient",
        "        return total\n",
        "        return total / dist.get_world_size()\n",
    ),
    Planted(
        "museum.entry",
        "sums forward too",
        "output",
        "        return x.view_as(x)\n",
        "        total = x.clone()\n        dist.all_reduce(total)\n        return total\n",
    ),
    Planted("museum.exit", AS_RELEASED, "gradient of the bias", "", EXIT),
    Planted(
        "museum.exit", "each rank adds the bias", "output", "F.linear(x, weight)) + bias", "F.linear(x, weight, bias))"
    ),
    Planted(
        "museum.exit",
        "one rank adds the bias, and it alone has its gradient",
        "gradient of the bias",
        "F.linear(x, weight)) + bias",
        "F.linear(x, weight, bias if dist.get_rank() == 0 else 0 * bias))",
    ),
    Planted(
        "museum.exit",
        "backward sums over the ranks, too",
        "gradients of input and weight",
        "        return gradient\n",
        "        total = gradient.clone()\n        dist.all_reduce(total)\n        return total\n",
    ),
    Planted("museum.exit", "no bias", "gradient of the bias", " + bias", " + 0 * bias"),
    Planted("museum.norm", AS_RELEASED, "norm", "", NORM),
    Planted("museum.norm", "each rank its own norm", "norm", "    dist.all_reduce(square)\n", ""),
    Planted(
        "museum.norm",
        "each kind by a norm of its own",
        "what is clipped",
        "    for gradient in whole + split:\n        gradient *= torch.clamp(most / norm, max=1.0)\n",
        "    own = sum(gradient.square().sum() for gradient in whole).sqrt()\n"
        "    for gradient in whole:\n        gradient *= torch.clamp(most / own, max=1.0)\n"
        "    for gradient in split:\n        gradient *= torch.clamp(most / norm, max=1.0)\n",
    ),
    Planted("museum.norm", "small gradients are made larger", "what is small enough", ", max=1.0", ""),
    Planted(
        "museum.norm",
        "the sum of norms",
        "norm",
        "norm = (square + of_whole).sqrt()",
        "norm = square.sqrt() + of_whole.sqrt()",
    ),
    Planted(
        "museum.norm",
        "the split ones are not scaled",
        "what is clipped",
        "    for gradient in whole + split:\n",
        "    for gradient in whole:\n",
    ),
    Planted("museum.tied", AS_RELEASED, "tied gradients", "", TIED),
    Planted(
        "museum.tied",
        "all stages take part",
        "who talks to whom",
        "",
        """import torch
import torch.distributed as dist


def sum_tied(gradients):
    names = [name for name in ("embedding.weight", "head.weight") if name in gradients]
    block = next(gradient for name, gradient in gradients.items() if name.startswith("blocks"))
    total = sum((gradients[name] for name in names), torch.zeros_like(block))
    dist.all_reduce(total)
    for name in names:
        gradients[name].copy_(total)
""",
    ),
    Planted(
        "museum.tied",
        "the mean of the two",
        "tied gradients",
        "        mine += other\n",
        "        mine += other\n        mine /= 2\n",
    ),
    Planted(
        "museum.tied",
        "each has the other's",
        "tied gradients",
        "        mine += other\n",
        "        mine.copy_(other)\n",
    ),
    Planted("museum.tied", "two stages alone", "tied gradients", "elif rank in (0, last):", "elif last == 1:"),
    Planted(
        "museum.tied",
        "one process is forgotten",
        "tied gradients",
        "    if last == 0:\n",
        "    if last == 0:\n        return\n    if last == 0:\n",
    ),
    Planted(
        "museum.tied",
        "the blocks are divided, too",
        "who talks to whom",
        "        mine += other\n",
        "        mine += other\n    for name, gradient in gradients.items():\n"
        '        gradient /= 1 + name.startswith("blocks")\n',
    ),
    Planted("museum.context", AS_RELEASED, "gradient", "", CONTEXT),
    Planted(
        "museum.context",
        "the sum over the data ranks is not divided",
        "gradient",
        "    weight.grad /= dist.get_world_size()\n",
        "    weight.grad /= dist.get_world_size() // data_ranks\n",
    ),
    Planted(
        "museum.context",
        "divided by the data ranks alone",
        "gradient",
        "    weight.grad /= dist.get_world_size()\n",
        "    weight.grad /= data_ranks\n",
    ),
    Planted(
        "museum.context",
        "each rank tells its own loss",
        "loss",
        "    dist.all_reduce(told)\n    return told / dist.get_world_size()\n",
        "    return told\n",
    ),
    Planted(
        "museum.context",
        "the loss is that of the context ranks once more",
        "loss",
        "return told /",
        "return told * (dist.get_world_size() // data_ranks) /",
    ),
    Planted("museum.tokens", AS_RELEASED, "gradient", "", TOKENS),
    Planted(
        "museum.tokens",
        "each rank its own mean",
        "gradient",
        "    dist.all_reduce(count)\n",
        "    dist.all_reduce(count)\n    count = (labels >= 0).sum() * dist.get_world_size()\n",
    ),
    Planted("museum.tokens", "padding counts", "gradient", "(labels >= 0).sum()", "(labels >= -100).sum()"),
    Planted(
        "museum.tokens",
        "the right gradient under a loss of its own",
        "mean of the losses",
        "    return loss * dist.get_world_size() / count\n",
        "    right = loss * dist.get_world_size() / count\n    return right - right.detach() + loss.detach()\n",
    ),
    Planted(
        "museum.tokens",
        "all labels travel",
        "what travels",
        "    count = (labels >= 0).sum()\n",
        "    everybody = [labels.clone() for _ in range(dist.get_world_size())]\n"
        "    dist.all_gather(everybody, labels)\n    count = (labels >= 0).sum()\n",
    ),
    Planted("museum.micro", AS_RELEASED, "shard", "", MICRO),
    Planted("museum.micro", "the sum of the micro-batches", "shard", "ranks * len(micro_batches)", "ranks"),
    Planted("museum.micro", "the sum over the ranks", "shard", "ranks * len(micro_batches)", "len(micro_batches)"),
    Planted(
        "museum.micro",
        "the first micro-batch alone",
        "shard",
        "for gradient in micro_batches:",
        "for gradient in micro_batches[:1]:",
    ),
    Planted(
        "museum.micro",
        "whole gradients on every rank",
        "reduce-scatter",
        "        dist.reduce_scatter_single(part, gradient)\n",
        "        dist.all_reduce(gradient)\n        part = gradient.chunk(ranks)[dist.get_rank()]\n",
    ),
    Planted("museum.twice", AS_RELEASED, "used twice", "", TWICE),
    Planted(
        "museum.twice",
        "each time all that is there, so that the first use is summed twice",
        "used twice",
        "",
        """import torch.distributed as dist


def reduce_as_they_come(weights):
    works = []

    def send(weight):
        works.append(dist.all_reduce(weight.grad, async_op=True))

    def finish():
        for work in works:
            work.wait()
        works.clear()
        for weight in weights:
            weight.grad /= dist.get_world_size()

    for weight in weights:
        weight.register_post_accumulate_grad_hook(send)
    return finish
""",
    ),
    Planted(
        "museum.twice",
        "all of it after the backward",
        "during backward",
        "",
        """import torch.distributed as dist


def reduce_as_they_come(weights):
    def finish():
        for weight in weights:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()

    return finish
""",
    ),
    Planted(
        "museum.twice",
        "blocks the backward",
        "during backward",
        "        sent.append((weight, part, dist.all_reduce(part, async_op=True)))\n",
        "        work = dist.all_reduce(part, async_op=True)\n        work.wait()\n"
        "        sent.append((weight, part, work))\n",
    ),
    Planted("museum.twice", "the last use alone", "used twice", "weight.grad += part", "weight.grad = part"),
    Planted("museum.twice", "what was sent in the last step is added again", "used once", "        sent.clear()\n", ""),
    Planted("museum.twice", "the sum", "used once", " / dist.get_world_size()", ""),
    Planted("museum.twice", "waits for nothing", "during backward", "            work.wait()\n", ""),
)
