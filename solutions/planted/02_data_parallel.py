"""Planted wrong answers of lesson 02: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("ddp.average", "sum for mean", "mean gradient", "parameter.grad /= dist.get_world_size()", "pass"),
    Planted("ddp.average", "divides by two, whatever the ranks", "mean gradient", "dist.get_world_size()", "2"),
    Planted("ddp.average", "averages the weights instead", "weights untouched",
            "dist.all_reduce(parameter.grad)\n            parameter.grad /= dist.get_world_size()",
            "dist.all_reduce(parameter.data)\n            parameter.data += 1"),
    Planted("ddp.average", "sends everything twice", "bytes", "dist.all_reduce(parameter.grad)",
            "dist.all_reduce(parameter.grad.clone())\n            dist.all_reduce(parameter.grad)"),
    Planted("ddp.ring", "fake ring: torch's all-reduce", "messages only",
            "    for step in range(ranks - 1):\n        mine = parts[(rank - step - 1)",
            "    dist.all_reduce(tensor)\n    return\n    for step in range(ranks - 1):\n"
            "        mine = parts[(rank - step - 1)"),
    Planted("ddp.ring", "half a ring: the sums never go round", "sum",
            "mine.copy_(shift(parts[(rank - step + 1) % ranks], mine))", "pass"),
    Planted("ddp.ring", "sends the whole tensor at each step", "bytes", "        return landing",
            "        if ranks > 1:\n"
            "            extra = [dist.isend(tensor, (rank + 1) % ranks), dist.irecv(torch.empty_like(tensor),"
            " (rank - 1) % ranks)]\n"
            "            for work in extra:\n                work.wait()\n        return landing"),
    Planted("ddp.ring", "everyone sends to everyone", "to one neighbour",
            "    for step in range(ranks - 1):\n        mine = parts[(rank - step - 1)",
            "    total = tensor.clone()\n    for far in range(1, ranks):\n        other = torch.empty_like(tensor)\n"
            "        works = [dist.isend(tensor, (rank + far) % ranks), dist.irecv(other, (rank - far) % ranks)]\n"
            "        for work in works:\n            work.wait()\n        total += other\n    tensor.copy_(total)\n"
            "    return\n    for step in range(ranks - 1):\n        mine = parts[(rank - step - 1)"),
    Planted("ddp.bucketing", "a message for each gradient", "buckets",
            "if sum(g.nbytes for g in bucket) >= bucket_bytes:", "if bucket:"),
    Planted("ddp.bucketing", "one bucket for all", "buckets", "if sum(g.nbytes for g in bucket) >= bucket_bytes:",
            "if False:"),
    Planted("ddp.bucketing", "forgets the last bucket", "mean", "    if bucket:\n        send(bucket)", "    pass"),
    Planted("ddp.bucketing", "counts elements for bytes", "buckets", "g.nbytes", "g.numel()"),
    Planted("ddp.bucketing", "sum for mean", "mean", "flat /= dist.get_world_size()", "pass"),
    Planted("ddp.overlap", "a blocking all-reduce in the hook", "does not block backward",
            "works.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))",
            "dist.all_reduce(parameter.grad)\n        parameter.grad /= dist.get_world_size()"),
    Planted("ddp.overlap", "begins when backward is over", "leaves early",
            "    for parameter in model.parameters():\n        parameter.register_post_accumulate_grad_hook(send)\n\n"
            "    def finish():",
            "    def finish():\n        for parameter in model.parameters():\n            send(parameter)"),
    Planted("ddp.overlap", "sum for mean", "mean gradient", "parameter.grad /= dist.get_world_size()", "pass"),
    Planted("ddp.overlap", "waits for the first only", "waits for all", "            work.wait()",
            "            if work is works[0][1]:\n                work.wait()"),
    Planted("ddp.no_sync", "sends every micro-batch", "sent once", "if last else engine.no_sync()",
            "if True else None"),
    Planted("ddp.no_sync", "never sends", "gradient", "contextlib.nullcontext() if last else engine.no_sync()",
            "engine.no_sync()"),
    Planted("ddp.no_sync", "wrong scale under accumulation", "gradient", " / len(micro_batches)", ""),
    Planted("ddp.no_sync", "drops the last micro-batch", "gradient", "enumerate(micro_batches)",
            "enumerate(micro_batches[:-1])"),
)
