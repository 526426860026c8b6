"""Planted wrong answers of lesson 05: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("zero.bytes", "fp32 Adam without the copy", "stage 0", "states = 12", "states = 8"),
    Planted("zero.bytes", "splits the gradients in stage 1", "stage 1", "stage >= 2", "stage >= 1"),
    Planted("zero.bytes", "never splits the weights", "stage 3", "stage >= 3", "stage > 3"),
    Planted("zero.bytes", "stage 2 keeps the gradients", "stage 2", "stage >= 2", "stage >= 3"),
    Planted(
        "zero.partition",
        "whole parameters on a rank",
        "even",
        "    length = -",
        "    return [(index, 0, size) for index, size in enumerate(sizes) if index % ranks == rank]\n    length = -",
    ),
    Planted(
        "zero.partition", "drops the remainder", "every element once", "-(-sum(sizes) // ranks)", "sum(sizes) // ranks"
    ),
    Planted(
        "zero.partition",
        "counts from the buffer's beginning",
        "in order",
        "(index, low - start, high - low)",
        "(index, low, high - low)",
    ),
    Planted(
        "zero.partition",
        "an element too many",
        "every element once",
        "min(start + size, (rank + 1) * length)",
        "min(start + size, (rank + 1) * length + 1)",
    ),
    Planted("zero.stage1", "sum for mean", "weights", "    mean /= ranks\n", ""),
    Planted(
        "zero.stage1",
        "all-reduces the whole gradient",
        "collectives",
        "    dist.reduce_scatter_single(mean, gradient)",
        "    dist.all_reduce(gradient)\n    mean.copy_(gradient.chunk(ranks)[rank])",
    ),
    Planted(
        "zero.stage1",
        "the others never hear of it",
        "collectives",
        "    dist.all_gather_single(weights, mine.clone())",
        "    pass",
    ),
    Planted(
        "zero.stage1",
        "updates the next rank's slice",
        "weights",
        "weights.chunk(ranks)[rank]",
        "weights.chunk(ranks)[(rank + 1) % ranks]",
    ),
    Planted(
        "zero.stage1",
        "forgets its momentum",
        "own state",
        "momentum.mul_(beta).add_(mean)",
        "momentum = momentum * beta + mean",
    ),
    Planted("zero.stage2", "keeps the whole gradients", "freed", "        parameter.grad = None\n", ""),
    Planted(
        "zero.stage2",
        "waits until backward is over",
        "freed",
        "    for parameter in parameters:\n        parameter.register_post_accumulate_grad_hook(arrived)\n\n"
        "    def finish():",
        "    def finish():\n        for parameter in parameters:\n            arrived(parameter)",
    ),
    Planted(
        "zero.stage2",
        "all-reduces, and takes its slice",
        "while backward runs",
        "slices[parameter] = whole.new_empty(whole.numel() // ranks)\n"
        "        works.append(dist.reduce_scatter_single(slices[parameter], whole, async_op=True))",
        "works.append(dist.all_reduce(whole, async_op=True))\n"
        "        slices[parameter] = whole.chunk(ranks)[dist.get_rank()]",
    ),
    Planted("zero.stage2", "sum for mean", "shards", "slices.pop(parameter) / ranks", "slices.pop(parameter)"),
    Planted("zero.bytes", "gradients in fp32", "stage 0", "gradients = 2", "gradients = 4"),
    Planted("zero.partition", "keeps empty runs", "every element once", "if high > low:", "if high >= low:"),
    Planted(
        "zero.partition",
        "shares that differ by one, as tensor_split cuts",
        "in order",
        "    length = -(-sum(sizes) // ranks)\n",
        "    base, more = divmod(sum(sizes), ranks)\n    length = base + (rank < more)\n"
        "    begin = rank * base + min(rank, more)\n    rank, ranks = begin / max(length, 1), ranks\n",
    ),
    Planted(
        "zero.stage1",
        "gathers the slice as it was",
        "weights",
        "mine -= lr * momentum\n    dist.all_gather_single(weights, mine.clone())",
        "old = mine.clone()\n    mine -= lr * momentum\n    dist.all_gather_single(weights, old)",
    ),
    Planted("zero.stage1", "damps the gradient, as Adam does", "weights", ".add_(mean)", ".add_((1 - beta) * mean)"),
    Planted("zero.stage1", "Nesterov's momentum", "weights", "lr * momentum", "lr * (mean + beta * momentum)"),
    Planted(
        "zero.stage1",
        "momentum of the sum",
        "own state",
        "mean /= ranks\n    momentum.mul_(beta).add_(mean)",
        "momentum.mul_(beta).add_(mean)\n    mean /= ranks\n    lr /= ranks",
    ),
    Planted(
        "zero.stage2",
        "the slices in the order in which they came",
        "shards",
        "for parameter in parameters]",
        "for parameter in list(slices)]",
    ),
    Planted(
        "zero.stage2",
        "adds to the slice of the last step",
        "shards",
        "",
        """import torch
import torch.distributed as dist


def attach_zero2(parameters):
    ranks = dist.get_world_size()
    slices = {p: torch.zeros(p.numel() // ranks) for p in parameters}

    def arrived(parameter):
        whole, parameter.grad = parameter.grad.flatten(), None
        mine = whole.new_empty(whole.numel() // ranks)
        dist.reduce_scatter_single(mine, whole)
        slices[parameter] += mine / ranks

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(arrived)
    return lambda: [slices[p] for p in parameters]
""",
    ),
    Planted("zero.optimizer", "sum for mean", "weights", "        self.shard.grad /= self.ranks\n", ""),
    Planted(
        "zero.optimizer",
        "frozen weights in the buffer",
        "collectives",
        "for parameter in parameters if parameter.requires_grad]",
        "for parameter in parameters]",
    ),
    Planted(
        "zero.optimizer",
        "states that begin anew in each step",
        "weights",
        "        self.optimizer.step()",
        "        self.optimizer.state.clear()\n        self.optimizer.step()",
    ),
    Planted(
        "zero.optimizer",
        "gathers before it steps",
        "weights",
        "        self.optimizer.step()\n        whole = torch.empty(self.ranks * self.length)\n"
        "        dist.all_gather_single(whole, self.shard.detach())\n",
        "        whole = torch.empty(self.ranks * self.length)\n"
        "        dist.all_gather_single(whole, self.shard.detach())\n        self.optimizer.step()\n",
    ),
    Planted(
        "zero.optimizer", "new tensors that the model never sees", "weights", "parameter.data.copy_(", "print and ("
    ),
    Planted(
        "zero.optimizer",
        "stumbles over a missing gradient",
        "weights",
        "torch.zeros_like(p) if p.grad is None else p.grad for",
        "p.grad for",
    ),
    Planted(
        "zero.optimizer", "zero_grad does nothing", "zero_grad", "            parameter.grad = None", "            pass"
    ),
    Planted(
        "zero.optimizer",
        "the next rank's shard",
        "weights",
        "chunk(self.ranks)[dist.get_rank()]",
        "chunk(self.ranks)[(dist.get_rank() + 1) % self.ranks]",
    ),
    Planted(
        "zero.optimizer",
        "reads every weight from the beginning",
        "weights",
        "            start += parameter.numel()\n",
        "",
    ),
    Planted(
        "zero.optimizer",
        "all-reduces, and every rank has all states",
        "states in shards",
        "",
        """
import torch.distributed as dist


class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.optimizer = make_optimizer(self.parameters)

    def step(self):
        for parameter in self.parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.optimizer.step()

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None
""",
    ),
    Planted(
        "zero.partition",
        "a run of nothing for a rank beyond the end",
        "every element once",
        "    return runs\n",
        "    return runs or [(len(sizes) - 1, sizes[-1], 0)]\n",
    ),
    Planted(
        "zero.stage2",
        "waits for nothing",
        "while backward runs",
        "        for work in works:\n            work.wait()\n",
        "",
    ),
)
