"""Planted wrong answers of lesson 06: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted(
        "fsdp.gather",
        "gathers everything first",
        "one layer at a time",
        "    for shard, shape in zip(shards, shapes):\n        whole = shard.new_empty(ranks * shard.numel())\n"
        "        dist.all_gather_single(whole, shard)\n",
        "    wholes = []\n    for shard in shards:\n        wholes.append(torch.empty(ranks * shard.numel()))\n"
        "        dist.all_gather_single(wholes[-1], shard)\n    for whole, shape in zip(wholes, shapes):\n",
    ),
    Planted(
        "fsdp.gather",
        "never frees",
        "freed",
        "        del whole",
        '        sharded_forward.kept = [*getattr(sharded_forward, "kept", []), whole]',
    ),
    Planted(
        "fsdp.gather",
        "gathers twice",
        "each gathered once",
        "        dist.all_gather_single(whole, shard)\n",
        "        dist.all_gather_single(whole, shard)\n        dist.all_gather_single(whole, shard)\n",
    ),
    Planted(
        "fsdp.gather",
        "takes the padding for the weight",
        "output",
        "whole[: math.prod(shape)]",
        "whole.roll(1)[: math.prod(shape)]",
    ),
    Planted("fsdp.gather", "drops the last layer", "output", "zip(shards, shapes):", "zip(shards[:-1], shapes):"),
    Planted(
        "fsdp.prefetch",
        "no prefetch",
        "one layer ahead",
        "        work.wait()\n        coming = begin(layer + 1) if layer + 1 < len(shapes) else None\n"
        "        x = compute(x, whole[: math.prod(shape)].view(shape))\n",
        "        work.wait()\n        x = compute(x, whole[: math.prod(shape)].view(shape))\n"
        "        coming = begin(layer + 1) if layer + 1 < len(shapes) else None\n",
    ),
    Planted(
        "fsdp.prefetch",
        "everything at once",
        "one layer ahead",
        "    coming = begin(0)\n    for layer, shape in enumerate(shapes):\n        whole, work = coming\n"
        "        work.wait()\n        coming = begin(layer + 1) if layer + 1 < len(shapes) else None\n",
        "    coming = [begin(layer) for layer in range(len(shapes))]\n"
        "    for layer, shape in enumerate(shapes):\n        whole, work = coming[layer]\n"
        "        coming[layer] = None\n        work.wait()\n",
    ),
    Planted(
        "fsdp.prefetch",
        "blocks on the next layer",
        "does not block",
        "        coming = begin(layer + 1) if layer + 1 < len(shapes) else None\n",
        "        coming = begin(layer + 1) if layer + 1 < len(shapes) else None\n        if coming:\n"
        "            coming[1].wait()\n",
    ),
    Planted(
        "fsdp.prefetch",
        "gathers the last layer once more",
        "each gathered once",
        "begin(layer + 1) if layer + 1 < len(shapes) else None",
        "begin(min(layer + 1, len(shapes) - 1))",
    ),
    Planted("fsdp.prefetch", "drops the last layer", "output", "enumerate(shapes)", "enumerate(shapes[:-1])"),
    Planted(
        "fsdp.prefetch",
        "keeps what was used",
        "freed",
        "        del whole, work",
        '        begin.kept = getattr(begin, "kept", []) + [whole]',
    ),
    Planted("fsdp.clip", "this rank's own norm", "norm", "    dist.all_reduce(square)\n", ""),
    Planted(
        "fsdp.clip",
        "sum of the ranks' norms",
        "norm",
        "    dist.all_reduce(square)\n    norm = square.sqrt()",
        "    norm = square.sqrt()\n    dist.all_reduce(norm)",
    ),
    Planted("fsdp.clip", "scales small gradients up", "scaled", "if norm > max_norm:", "if True:"),
    Planted("fsdp.clip", "returns the norm, clips nothing", "scaled", "if norm > max_norm:", "if False:"),
    Planted(
        "fsdp.clip",
        "brings the gradients together",
        "few bytes",
        "    dist.all_reduce(square)\n",
        "    dist.all_reduce(square)\n    dist.all_reduce(torch.zeros(100))\n",
    ),
    Planted(
        "fsdp.gather",
        "keeps the padding",
        "output",
        "whole[: math.prod(shape)].view(shape)",
        "whole.view(-1, shape[-1])[: shape[0]] if whole.numel() % shape[-1] == 0 else whole.view(shape)",
    ),
    Planted(
        "fsdp.gather",
        "backwards through the layers",
        "output",
        "zip(shards, shapes):",
        "reversed(list(zip(shards, shapes))):",
    ),
    Planted(
        "fsdp.prefetch",
        "gathers the first layer anew after the last",
        "each gathered once",
        "begin(layer + 1) if layer + 1 < len(shapes) else None",
        "begin((layer + 1) % len(shapes))",
    ),
    Planted(
        "fsdp.prefetch",
        "wants a next layer",
        "output",
        "begin(layer + 1) if layer + 1 < len(shapes) else None",
        "begin(layer + 1)",
    ),
    Planted("fsdp.clip", "the norm of this rank's shards", "norm", "    dist.all_reduce(square)\n", ""),
    Planted(
        "fsdp.module",
        "keeps the weight it was given",
        "freed",
        "        self.shape, ranks =",
        "        self.given = weight\n        self.shape, ranks =",
    ),
    Planted(
        "fsdp.module",
        "keeps the gathered weight for backward",
        "freed",
        "        return x @ gather(shard, shape).T",
        "        ctx.whole = gather(shard, shape)\n        return x @ ctx.whole.T",
    ),
    Planted(
        "fsdp.module",
        "autograd saves the gathered weight",
        "freed",
        "        return Sharded.apply(x, self.shard, self.shape)",
        "        return x @ gather(self.shard, self.shape).T + 0 * self.shard.sum()",
    ),
    Planted("fsdp.module", "sum for mean", "gradients", "            of_shard /= dist.get_world_size()\n", ""),
    Planted(
        "fsdp.module",
        "all-reduces, and takes its run",
        "collectives",
        "            dist.reduce_scatter_single(of_shard, padded(gradient.T @ x))\n",
        "            whole = padded(gradient.T @ x)\n            dist.all_reduce(whole)\n"
        "            of_shard.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])\n",
    ),
    Planted("fsdp.module", "the gradient transposed", "gradients", "gradient.T @ x", "x.T @ gradient"),
    Planted("fsdp.module", "a frozen layer sends as well", "collectives", "if ctx.needs_input_grad[1]:", "if True:"),
    Planted(
        "fsdp.module",
        "a frozen layer lets nothing through",
        "gradient of x",
        "of_x = gradient @ gather(shard, ctx.shape)",
        "of_x = gradient @ gather(shard, ctx.shape) * ctx.needs_input_grad[1]",
    ),
    Planted(
        "fsdp.module",
        "writes the gradient itself, the second use over the first",
        "gradients",
        "        return of_x, of_shard, None",
        "        shard.grad = of_shard\n        return of_x, None, None",
    ),
    Planted("fsdp.module", "no padding", "output", "(0, -weight.numel() % ranks)", "(0, 0)"),
    Planted("fsdp.gather", "gathers into float32", "output", "shard.new_empty(ranks", "torch.empty(ranks"),
    Planted(
        "fsdp.prefetch",
        "sends in float32",
        "each gathered once",
        "        whole = shards[layer].new_empty(dist.get_world_size() * shards[layer].numel())\n"
        "        return whole, dist.all_gather_single(whole, shards[layer], async_op=True)",
        "        whole = torch.empty(dist.get_world_size() * shards[layer].numel())\n"
        "        return whole, dist.all_gather_single(whole, shards[layer].float(), async_op=True)",
    ),
    Planted(
        "fsdp.clip",
        "a rank with nothing stays away",
        "norm",
        "    dist.all_reduce(square)\n",
        "    if sum(gradient.numel() for gradient in gradients):\n        dist.all_reduce(square)\n",
    ),
    Planted(
        "fsdp.clip",
        "the largest of nothing",
        "norm",
        "    square = sum(",
        "    largest = torch.cat(gradients).abs().max()\n    square = sum(",
    ),
)
