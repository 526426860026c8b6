"""Planted wrong answers of lesson 02: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("ddp.average", "sum for mean", "mean gradient", "parameter.grad /= dist.get_world_size()", "pass"),
    Planted("ddp.average", "divides by two, whatever the ranks", "mean gradient", "dist.get_world_size()", "2"),
    Planted(
        "ddp.average",
        "averages the weights instead",
        "weights untouched",
        "dist.all_reduce(parameter.grad)\n            parameter.grad /= dist.get_world_size()",
        "dist.all_reduce(parameter.data)\n            parameter.data += 1",
    ),
    Planted(
        "ddp.average",
        "sends everything twice",
        "bytes",
        "dist.all_reduce(parameter.grad)",
        "dist.all_reduce(parameter.grad.clone())\n            dist.all_reduce(parameter.grad)",
    ),
    Planted(
        "ddp.ring",
        "fake ring: torch's all-reduce",
        "messages only",
        "    for step in range(ranks - 1):\n        mine = parts[(rank - step - 1)",
        "    dist.all_reduce(tensor)\n    return\n    for step in range(ranks - 1):\n"
        "        mine = parts[(rank - step - 1)",
    ),
    Planted(
        "ddp.ring",
        "half a ring: the sums never go round",
        "sum",
        "mine.copy_(shift(parts[(rank - step + 1) % ranks], mine))",
        "pass",
    ),
    Planted(
        "ddp.ring",
        "sends the whole tensor at each step",
        "bytes",
        "        return landing",
        "        if ranks > 1:\n"
        "            extra = [dist.isend(tensor, (rank + 1) % ranks), dist.irecv(torch.empty_like(tensor),"
        " (rank - 1) % ranks)]\n"
        "            for work in extra:\n                work.wait()\n        return landing",
    ),
    Planted(
        "ddp.ring",
        "everyone sends to everyone",
        "to one neighbour",
        "    for step in range(ranks - 1):\n        mine = parts[(rank - step - 1)",
        "    total = tensor.clone()\n    for far in range(1, ranks):\n        other = torch.empty_like(tensor)\n"
        "        works = [dist.isend(tensor, (rank + far) % ranks), dist.irecv(other, (rank - far) % ranks)]\n"
        "        for work in works:\n            work.wait()\n        total += other\n    tensor.copy_(total)\n"
        "    return\n    for step in range(ranks - 1):\n        mine = parts[(rank - step - 1)",
    ),
    Planted(
        "ddp.bucketing",
        "a message for each gradient",
        "buckets",
        "if sum(g.nbytes for g in bucket) >= bucket_bytes:",
        "if bucket:",
    ),
    Planted(
        "ddp.bucketing",
        "one bucket for all",
        "buckets",
        "if sum(g.nbytes for g in bucket) >= bucket_bytes:",
        "if False:",
    ),
    Planted("ddp.bucketing", "forgets the last bucket", "mean", "    if bucket:\n        send(bucket)", "    pass"),
    Planted("ddp.bucketing", "counts elements for bytes", "buckets", "g.nbytes", "g.numel()"),
    Planted("ddp.bucketing", "sum for mean", "mean", "flat /= dist.get_world_size()", "pass"),
    Planted(
        "ddp.overlap",
        "a blocking all-reduce in the hook",
        "does not block backward",
        "works.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
        "dist.all_reduce(parameter.grad)\n        parameter.grad /= dist.get_world_size()",
    ),
    Planted(
        "ddp.overlap",
        "begins when backward is over",
        "leaves early",
        "    for parameter in model.parameters():\n        if parameter.requires_grad:\n"
        "            parameter.register_post_accumulate_grad_hook(send)\n\n    def finish():",
        "    def finish():\n        for parameter in model.parameters():\n"
        "            if parameter.grad is not None:\n                send(parameter)",
    ),
    Planted("ddp.overlap", "sum for mean", "mean gradient", "parameter.grad /= dist.get_world_size()", "pass"),
    Planted(
        "ddp.overlap",
        "waits for the first only",
        "waits for all",
        "            work.wait()",
        "            if work is works[0][1]:\n                work.wait()",
    ),
    Planted(
        "ddp.no_sync", "sends every micro-batch", "sent once", "if last else engine.no_sync()", "if True else None"
    ),
    Planted(
        "ddp.no_sync",
        "never sends",
        "gradient",
        "contextlib.nullcontext() if last else engine.no_sync()",
        "engine.no_sync()",
    ),
    Planted("ddp.no_sync", "wrong scale under accumulation", "gradient", " / len(micro_batches)", ""),
    Planted(
        "ddp.no_sync",
        "drops the last micro-batch",
        "gradient",
        "enumerate(micro_batches)",
        "enumerate(micro_batches[:-1])",
    ),
    Planted(
        "ddp.average",
        "stumbles over a parameter without a gradient",
        "mean gradient",
        "if parameter.grad is not None:",
        "if True:",
    ),
    Planted(
        "ddp.average",
        "layer after layer, the shared weight twice",
        "bytes",
        "for parameter in model.parameters():",
        'for parameter in [layer.weight for layer in model if hasattr(layer, "weight")]:',
    ),
    Planted(
        "ddp.average",
        "everybody has rank 0's",
        "mean gradient",
        "dist.all_reduce(parameter.grad)\n            parameter.grad /= dist.get_world_size()",
        "dist.broadcast(parameter.grad, 0)",
    ),
    Planted(
        "ddp.average",
        "the sum on rank 0 alone",
        "mean gradient",
        "dist.all_reduce(parameter.grad)",
        "dist.reduce(parameter.grad, 0)",
    ),
    Planted(
        "ddp.average",
        "a mean that nobody keeps",
        "mean gradient",
        "parameter.grad /= dist.get_world_size()",
        "parameter.grad / dist.get_world_size()",
    ),
    Planted(
        "ddp.average",
        "rank 0 alone asks",
        "mean gradient",
        "if parameter.grad is not None:",
        "if parameter.grad is not None and dist.get_rank() == 0:",
    ),
    Planted("ddp.ring", "chunk for tensor_split", "sum", "tensor.tensor_split(ranks)", "tensor.chunk(ranks)"),
    Planted(
        "ddp.ring",
        "copies where it should add",
        "sum",
        "mine += shift(parts[(rank - step) % ranks], mine)",
        "mine.copy_(shift(parts[(rank - step) % ranks], mine))",
    ),
    Planted(
        "ddp.ring",
        "a step too many",
        "sum",
        "for step in range(ranks - 1):\n        mine = parts[(rank - step - 1)",
        "for step in range(ranks):\n        mine = parts[(rank - step - 1)",
    ),
    Planted(
        "ddp.ring",
        "a mean",
        "sum",
        "    for step in range(ranks - 1):\n        mine = parts[(rank - step - 1)",
        "    tensor /= ranks\n    for step in range(ranks - 1):\n        mine = parts[(rank - step - 1)",
    ),
    Planted(
        "ddp.ring", "sums a copy", "sum", "    parts = tensor.tensor_split", "    parts = tensor.clone().tensor_split"
    ),
    Planted(
        "ddp.bucketing",
        "closes a bucket before it would overflow",
        "buckets",
        "        bucket.append(gradient)\n        if sum(g.nbytes for g in bucket) >= bucket_bytes:\n"
        "            send(bucket)\n            bucket = []\n",
        "        if bucket and sum(g.nbytes for g in [*bucket, gradient]) > bucket_bytes:\n"
        "            send(bucket)\n            bucket = []\n        bucket.append(gradient)\n",
    ),
    Planted("ddp.bucketing", "only a bucket that holds more is full", "buckets", ">= bucket_bytes", "> bucket_bytes"),
    Planted("ddp.bucketing", "a mean that the gradients never see", "mean", "gradient.copy_(mean)", "gradient = mean"),
    Planted(
        "ddp.bucketing",
        "from the last gradient to the first",
        "buckets",
        "for gradient in gradients:",
        "for gradient in reversed(gradients):",
    ),
    Planted(
        "ddp.bucketing", "never empties its bucket", "buckets", "send(bucket)\n            bucket = []", "send(bucket)"
    ),
    Planted("ddp.overlap", "the pending list is never cleared", "mean gradient", "        works.clear()\n", ""),
    Planted("ddp.overlap", "a hook on a frozen parameter", "mean gradient", "if parameter.requires_grad:", "if True:"),
    Planted(
        "ddp.overlap",
        "layer after layer, the shared weight twice",
        "mean gradient",
        "for parameter in model.parameters():",
        'for parameter in [layer.weight for layer in model if hasattr(layer, "weight")]:',
    ),
    Planted(
        "ddp.overlap",
        "waits in a thread of its own while backward runs",
        "does not block backward",
        "        works.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
        "        work = dist.all_reduce(parameter.grad, async_op=True)\n        work.wait()\n"
        "        works.append((parameter, work))",
    ),
    Planted(
        "ddp.overlap",
        "one message when all gradients are there",
        "leaves early",
        "",
        """import torch
import torch.distributed as dist


def attach(model):
    arrived, wanted = [], sum(p.requires_grad for name, p in model.named_parameters() if name != "unused")
    pending = []

    def send(parameter):
        arrived.append(parameter)
        if len(arrived) == wanted:
            flat = torch.cat([p.grad.reshape(-1) for p in arrived])
            pending.append((flat, dist.all_reduce(flat, async_op=True)))

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(send)

    def finish():
        flat, work = pending.pop()
        work.wait()
        for p, mean in zip(arrived, flat.split([p.numel() for p in arrived])):
            p.grad.copy_(mean.view_as(p) / dist.get_world_size())
        arrived.clear()

    return finish
""",
    ),
    Planted(
        "ddp.overlap",
        "a buffer per parameter that adds up from step to step",
        "mean gradient",
        "",
        """import torch
import torch.distributed as dist


def attach(model):
    buffers = {p: torch.zeros_like(p) for p in model.parameters()}
    works = {}

    def send(parameter):
        buffers[parameter] += parameter.grad
        works[parameter] = dist.all_reduce(buffers[parameter], async_op=True)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(send)

    def finish():
        for parameter, work in works.items():
            work.wait()
            parameter.grad.copy_(buffers[parameter] / dist.get_world_size())

    return finish
""",
    ),
    Planted(
        "ddp.overlap",
        "takes its hooks away after the first step",
        "mean gradient",
        "",
        """
import torch.distributed as dist


def attach(model):
    works, hooks = [], []

    def send(parameter):
        works.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    for parameter in model.parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(send))

    def finish():
        while works:
            parameter, work = works.pop()
            work.wait()
            parameter.grad /= dist.get_world_size()
        for hook in hooks:
            hook.remove()

    return finish
""",
    ),
    Planted(
        "ddp.no_sync",
        "the first micro-batch sends, not the last",
        "gradient",
        "last = number == len(micro_batches) - 1",
        "last = number == 0",
    ),
    Planted(
        "ddp.no_sync",
        "a single micro-batch stays at home",
        "gradient",
        "last = number == len(micro_batches) - 1",
        "last = 0 < number == len(micro_batches) - 1",
    ),
    Planted(
        "ddp.no_sync",
        "zeroes the gradient before each micro-batch",
        "gradient",
        "        last = number",
        "        engine.zero_grad()\n        last = number",
    ),
    Planted(
        "ddp.module",
        "every rank goes on from its own weights",
        "same start",
        "            dist.broadcast(parameter.data, 0)",
        "            pass",
    ),
    Planted(
        "ddp.module",
        "sends when backward is over",
        "leaves early",
        "        self.arrived.add(parameter)",
        "        return",
    ),
    Planted(
        "ddp.module",
        "remembers what arrived in the last step",
        "mean gradient",
        "parameter.grad = mean.view_as(parameter)\n        self.arrived, self.sent = set(), []",
        "parameter.grad = mean.view_as(parameter)\n        self.sent = []",
    ),
    Planted(
        "ddp.module",
        "remembers what it sent in the last step",
        "mean gradient",
        "parameter.grad = mean.view_as(parameter)\n        self.arrived, self.sent = set(), []",
        "parameter.grad = mean.view_as(parameter)\n        self.arrived = set()",
    ),
    Planted("ddp.module", "sum for mean", "mean gradient", "            flat /= dist.get_world_size()\n", ""),
    Planted(
        "ddp.module",
        "waits in the hook",
        "waits in finish",
        "self.sent.append((flat, dist.all_reduce(flat, async_op=True)))",
        "self.sent.append((flat, dist.all_reduce(flat, async_op=True)))\n        self.sent[-1][1].wait()",
    ),
    Planted("ddp.module", "buckets from the first parameter on", "buckets", "reversed(learning)", "learning"),
    Planted(
        "ddp.module",
        "frozen weights have a hook too",
        "mean gradient",
        "for parameter in module.parameters() if parameter.requires_grad]",
        "for parameter in module.parameters()]",
    ),
    Planted(
        "ddp.module",
        "no gradient here, none of the others' either",
        "mean gradient",
        "                parameter.grad = mean",
        "                if parameter.grad is not None:\n                    parameter.grad = mean",
    ),
    Planted(
        "ddp.module",
        "a bucket that is not complete stays at home",
        "mean gradient",
        "        while len(self.sent) < len(self.buckets):\n            self.send()\n",
        "",
    ),
    Planted(
        "ddp.module",
        "closes a bucket before it would overflow",
        "buckets",
        ">= bucket_bytes:",
        "+ parameter.nbytes > bucket_bytes and self.buckets[-1]:",
    ),
    Planted(
        "ddp.module",
        "whatever is complete leaves, in the order of this rank",
        "mean gradient",
        "",
        """
import torch
import torch.distributed as dist
from torch import nn


class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
        learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets = [[]]
        for parameter in reversed(learning):
            if sum(p.nbytes for p in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
        self.arrived, self.sent = set(), {}
        for parameter in learning:
            parameter.register_post_accumulate_grad_hook(self.note)

    def forward(self, *inputs):
        return self.module(*inputs)

    def note(self, parameter):
        self.arrived.add(parameter)
        for number, bucket in enumerate(self.buckets):
            if number not in self.sent and self.arrived.issuperset(bucket):
                self.send(number)

    def send(self, number):
        bucket = self.buckets[number]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        self.sent[number] = flat, dist.all_reduce(flat, async_op=True)

    def finish(self):
        for number in range(len(self.buckets)):
            if number not in self.sent:
                self.send(number)
        for number, (flat, work) in self.sent.items():
            work.wait()
            flat /= dist.get_world_size()
            bucket = self.buckets[number]
            for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                parameter.grad = mean.view_as(parameter)
        self.arrived, self.sent = set(), {}
""",
    ),
    Planted("ddp.ring", "lands in float32", "sum", "torch.empty_like(received)", "torch.empty(received.numel())"),
    Planted(
        "ddp.ring",
        "does not wait for what it sends",
        "messages only",
        "            works.append(dist.isend(sent.contiguous(), (rank + 1) % ranks))",
        "            dist.isend(sent.contiguous(), (rank + 1) % ranks)",
    ),
)
