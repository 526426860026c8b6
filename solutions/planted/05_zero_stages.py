"""Planted wrong answers of lesson 05: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("zero.bytes", "fp32 Adam without the copy", "stage 0", "states = 12", "states = 8"),
    Planted("zero.bytes", "splits the gradients in stage 1", "stage 1", "stage >= 2", "stage >= 1"),
    Planted("zero.bytes", "never splits the weights", "stage 3", "stage >= 3", "stage > 3"),
    Planted("zero.bytes", "stage 2 keeps the gradients", "stage 2", "stage >= 2", "stage >= 3"),
    Planted("zero.partition", "whole parameters on a rank", "even", "    length = -",
            "    return [(index, 0, size) for index, size in enumerate(sizes) if index % ranks == rank]\n"
            "    length = -"),
    Planted("zero.partition", "drops the remainder", "every element once", "-(-sum(sizes) // ranks)",
            "sum(sizes) // ranks"),
    Planted("zero.partition", "counts from the buffer's beginning", "in order", "(index, low - start, high - low)",
            "(index, low, high - low)"),
    Planted("zero.partition", "an element too many", "every element once", "min(start + size, (rank + 1) * length)",
            "min(start + size, (rank + 1) * length + 1)"),
    Planted("zero.stage1", "sum for mean", "weights", "    mean /= ranks\n", ""),
    Planted("zero.stage1", "all-reduces the whole gradient", "collectives",
            "    dist.reduce_scatter_single(mean, gradient)",
            "    dist.all_reduce(gradient)\n    mean.copy_(gradient.chunk(ranks)[rank])"),
    Planted("zero.stage1", "the others never hear of it", "collectives",
            "    dist.all_gather_single(weights, mine.clone())", "    pass"),
    Planted("zero.stage1", "updates the next rank's slice", "weights", "weights.chunk(ranks)[rank]",
            "weights.chunk(ranks)[(rank + 1) % ranks]"),
    Planted("zero.stage1", "forgets its momentum", "own state", "momentum.mul_(beta).add_(mean)",
            "momentum = momentum * beta + mean"),
    Planted("zero.stage2", "keeps the whole gradients", "freed", "        parameter.grad = None\n", ""),
    Planted("zero.stage2", "waits until backward is over", "freed",
            "    for parameter in parameters:\n        parameter.register_post_accumulate_grad_hook(arrived)\n\n"
            "    def finish():",
            "    def finish():\n        for parameter in parameters:\n            arrived(parameter)"),
    Planted("zero.stage2", "all-reduces, and takes its slice", "while backward runs",
            "slices[parameter] = whole.new_empty(whole.numel() // ranks)\n"
            "        works.append(dist.reduce_scatter_single(slices[parameter], whole, async_op=True))",
            "works.append(dist.all_reduce(whole, async_op=True))\n"
            "        slices[parameter] = whole.chunk(ranks)[dist.get_rank()]"),
    Planted("zero.stage2", "sum for mean", "shards", "slices[parameter] / ranks", "slices[parameter]"),
)
