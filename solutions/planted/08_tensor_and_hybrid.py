"""Planted wrong answers of lesson 08: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("tensor.mlp", "no f: the gradient of x is a part", "gradient of x", "Copy.apply(x)", "x"),
    Planted("tensor.mlp", "no g: the output is a part", "output",
            "return Reduce.apply(torch.tanh(Copy.apply(x) @ up.T) @ down.T)",
            "return torch.tanh(Copy.apply(x) @ up.T) @ down.T"),
    Planted("tensor.mlp", "sums in the backward of g as well", "one all-reduce each way",
            "def backward(ctx, gradient):\n            return gradient",
            "def backward(ctx, gradient):\n            return summed(gradient)"),
    Planted("tensor.mlp", "mean for sum", "output", "return total", "return total / dist.get_world_size()"),
    Planted("tensor.mlp", "brings the weights together", "one all-reduce each way", "    return Reduce.apply",
            "    summed(up.detach())\n    return Reduce.apply"),
    Planted("tensor.embedding", "no mask", "vectors", " * mine.unsqueeze(-1)", ""),
    Planted("tensor.embedding", "ids not shifted", "vectors", "ids - dist.get_rank() * len(rows)", "ids"),
    Planted("tensor.embedding", "no sum", "one all-reduce", "    dist.all_reduce(vectors)\n", ""),
    Planted("tensor.embedding", "sends the table", "one all-reduce", "    dist.all_reduce(vectors)",
            "    dist.all_reduce(rows.clone())\n    dist.all_reduce(vectors)"),
    Planted("tensor.cross_entropy", "no maximum taken out", "large logits",
            "largest = logits.max(dim=1).values\n    dist.all_reduce(largest, op=dist.ReduceOp.MAX)",
            "largest = torch.zeros(len(logits))"),
    Planted("tensor.cross_entropy", "each rank its own maximum", "loss",
            "    dist.all_reduce(largest, op=dist.ReduceOp.MAX)\n", ""),
    Planted("tensor.cross_entropy", "targets not shifted", "loss", "targets - dist.get_rank() * columns", "targets"),
    Planted("tensor.cross_entropy", "gathers the logits", "bytes", "    columns = logits.shape[1]\n",
            "    columns = logits.shape[1]\n"
            "    dist.all_gather([torch.empty_like(logits) for _ in range(dist.get_world_size())], logits)\n"),
    Planted("tensor.cross_entropy", "sum for mean", "loss", ".mean()", ".sum()"),
    Planted("tensor.grid", "the first axis moves fastest", "data",
            "    rest, t = divmod(rank, tensor)\n    d, p = divmod(rest, pipeline)\n",
            "    rest, d = divmod(rank, data)\n    t, p = divmod(rest, pipeline)\n"),
    Planted("tensor.grid", "pipeline neighbours are next to each other", "pipeline",
            "[(d * pipeline + i) * tensor + t for i in range(pipeline)]",
            "[rank - p + i for i in range(pipeline)]"),
    Planted("tensor.grid", "the whole world as tensor group", "tensor",
            "[(d * pipeline + p) * tensor + i for i in range(tensor)]", "list(range(data * pipeline * tensor))"),
)
