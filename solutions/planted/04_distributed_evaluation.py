"""Planted wrong answers of lesson 04: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("evaluation.gather", "keeps the padding", "rows", ".flatten(0, 1)[:total]", ".flatten(0, 1)"),
    Planted(
        "evaluation.gather",
        "rank after rank",
        "rows",
        "torch.stack(gathered, dim=1).flatten(0, 1)",
        "torch.cat(gathered)",
    ),
    Planted("evaluation.gather", "drops the uneven rows", "rows", "-(-total // ranks)", "total // ranks"),
    Planted(
        "evaluation.gather",
        "sends everything twice",
        "bytes",
        "    dist.all_gather(gathered, padded)",
        "    dist.all_gather(gathered, padded)\n    dist.all_gather(gathered, padded)",
    ),
    Planted(
        "evaluation.macro_f1", "mean of the ranks' scores", "score", "    dist.all_reduce(counts)\n    hits", "    hits"
    ),
    Planted(
        "evaluation.macro_f1",
        "accuracy",
        "score",
        "    scores = 2 * hits / (predicted + labelled).clamp(min=1)\n",
        "    scores = hits.sum() / labelled.sum()\n",
    ),
    Planted(
        "evaluation.macro_f1",
        "gathers the rows",
        "few bytes",
        "    dist.all_reduce(counts)",
        "    rows = torch.zeros(4 * 64)\n    dist.all_reduce(rows)\n    dist.all_reduce(counts)",
    ),
    Planted(
        "evaluation.macro_f1", "precision for F1", "score", "2 * hits / (predicted + labelled)", "hits / predicted"
    ),
    Planted(
        "evaluation.perplexity",
        "mean of the perplexities",
        "perplexity",
        "    both = torch.tensor",
        "    own = torch.tensor(math.exp(loss_sum / tokens))\n    dist.all_reduce(own)\n"
        "    return own / dist.get_world_size()\n    both = torch.tensor",
    ),
    Planted(
        "evaluation.perplexity",
        "exponential of the mean of means",
        "perplexity",
        "    both = torch.tensor",
        "    own = torch.tensor(loss_sum / tokens)\n    dist.all_reduce(own)\n"
        "    return math.exp(own / dist.get_world_size())\n    both = torch.tensor",
    ),
    Planted("evaluation.perplexity", "this rank's own", "perplexity", "    dist.all_reduce(both)\n", ""),
    Planted(
        "evaluation.perplexity",
        "in bits",
        "perplexity",
        "math.exp(both[0] / both[1])",
        "2 ** (both[0] / both[1]).item()",
    ),
    Planted("evaluation.gather", "rounds down and loses the only row", "rows", "[:total]", "[:total // ranks * ranks]"),
    Planted(
        "evaluation.gather",
        "this rank's rows twice where they are short",
        "rows",
        "padded[: len(rows)] = rows",
        "padded[: len(rows)] = rows\n    padded[len(rows):] = rows[-1] if len(rows) else 0\n"
        "    total = longest * ranks",
    ),
    Planted("evaluation.macro_f1", "divides by zero where a class is absent", "score", ".clamp(min=1)", ""),
    Planted(
        "evaluation.macro_f1",
        "leaves out the class that is absent",
        "score",
        "scores.mean().item()",
        "scores[predicted + labelled > 0].mean().item()",
    ),
    Planted(
        "evaluation.macro_f1",
        "1 for the class that is absent",
        "score",
        "    return scores.mean()",
        "    scores = torch.where(predicted + labelled > 0, scores, torch.ones_like(scores))\n    return scores.mean()",
    ),
    Planted(
        "evaluation.macro_f1",
        "micro for macro",
        "score",
        "2 * hits / (predicted + labelled).clamp(min=1)",
        "2 * hits.sum() / (predicted + labelled).sum()",
    ),
    Planted(
        "evaluation.perplexity",
        "the loss, not its exponential",
        "perplexity",
        "math.exp(both[0] / both[1])",
        "float(both[0] / both[1])",
    ),
    Planted(
        "evaluation.perplexity", "rank 0 alone knows", "perplexity", "dist.all_reduce(both)", "dist.reduce(both, 0)"
    ),
    Planted("evaluation.metric", "counts what fills the last round", "counts", "(rows < self.total) & ", ""),
    Planted(
        "evaluation.metric",
        "a rank's rows are a run",
        "counts",
        "(self.seen + torch.arange(len(labels))) * dist.get_world_size() + dist.get_rank()",
        "dist.get_rank() * -(-self.total // dist.get_world_size()) + self.seen + torch.arange(len(labels))",
    ),
    Planted(
        "evaluation.metric",
        "drops the last row of each rank that has one too many",
        "counts",
        "counts = (rows < self.total) &",
        "counts = (rows < self.total // dist.get_world_size() * dist.get_world_size()) &",
    ),
    Planted(
        "evaluation.metric", "each batch begins with the first row", "counts", "        self.seen += len(labels)\n", ""
    ),
    Planted(
        "evaluation.metric",
        "rows without a label count",
        "scores",
        " & (labels != -100)\n",
        "\n        labels = labels.clamp(min=0)\n",
    ),
    Planted(
        "evaluation.metric",
        "predictions by labels",
        "counts",
        "labels[counts] * self.classes + predictions[counts]",
        "predictions[counts] * self.classes + labels[counts]",
    ),
    Planted(
        "evaluation.metric",
        "no reset of the place",
        "next epoch",
        "        self.reset()\n\n    def reset(self):\n        self.seen = 0\n",
        "        self.seen = 0\n        self.reset()\n\n    def reset(self):\n",
    ),
    Planted("evaluation.metric", "adds up in its own counts", "goes on", "self.sums.clone()", "self.sums"),
    Planted(
        "evaluation.metric",
        "begins anew when asked",
        "goes on",
        "        sums = self.sums.clone()\n",
        "        sums = self.sums.clone()\n        self.sums.zero_()\n",
    ),
    Planted("evaluation.metric", "rank 0 alone knows", "counts", "dist.all_reduce(sums)", "dist.reduce(sums, 0)"),
    Planted(
        "evaluation.metric",
        "the mean of the ranks' counts",
        "counts",
        "dist.all_reduce(sums)\n",
        "dist.all_reduce(sums)\n        sums /= dist.get_world_size()\n",
    ),
    Planted(
        "evaluation.metric",
        "the mean of the ranks' losses",
        "scores",
        "        dist.all_reduce(sums)\n",
        "        sums[-1] /= max(sums[:-1].sum(), 1) * dist.get_world_size()\n        dist.all_reduce(sums)\n"
        "        sums[-1] *= sums[:-1].sum()\n",
    ),
    Planted(
        "evaluation.metric",
        "adds up with each batch",
        "one collective",
        "        pairs =",
        "        dist.all_reduce(torch.tensor(len(labels)))\n        pairs =",
    ),
    Planted(
        "evaluation.metric",
        "gathers the losses",
        "one collective",
        "        dist.all_reduce(sums)\n",
        "        dist.all_reduce(sums)\n        dist.all_reduce(torch.zeros(self.total))\n",
    ),
    Planted(
        "evaluation.metric",
        "leaves out classes that never occur",
        "scores",
        "(2 * hits / (predicted + labelled).clamp(min=1)).mean()",
        "(2 * hits / (predicted + labelled)).nanmean()",
    ),
    Planted(
        "evaluation.metric", "divides by the whole data set", "scores", "max(confusion.sum().item(), 1)", "self.total"
    ),
    Planted("evaluation.metric", "tensors for numbers", "types", "hits.sum().item() / rows", "hits.sum() / rows"),
    Planted("evaluation.metric", "counts as float64", "types", "sums[:-1].long()", "sums[:-1]"),
    Planted(
        "evaluation.gather",
        "pads with float32",
        "rows",
        "rows.new_zeros(longest, *rows.shape[1:])",
        "torch.zeros(longest, *rows.shape[1:])",
    ),
    Planted(
        "evaluation.gather",
        "pads with float64, in which they fit",
        "rows",
        "rows.new_zeros(longest, *rows.shape[1:])",
        "torch.zeros(longest, *rows.shape[1:], dtype=torch.float64)",
    ),
    Planted(
        "evaluation.macro_f1",
        "divides by the number of rows",
        "score",
        "scores.mean().item()",
        "(scores * predicted.sum() / labelled.sum()).mean().item()",
    ),
    Planted(
        "evaluation.perplexity",
        "the ranks' means, weighted, of no tokens",
        "perplexity",
        "[loss_sum, tokens]",
        "[loss_sum / tokens * tokens, tokens]",
    ),
    Planted(
        "evaluation.metric", "divides by no rows", "scores", "max(confusion.sum().item(), 1)", "confusion.sum().item()"
    ),
)
