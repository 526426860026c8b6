"""Planted wrong answers of lesson 04: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("evaluation.gather", "keeps the padding", "rows", ".flatten(0, 1)[:total]", ".flatten(0, 1)"),
    Planted("evaluation.gather", "rank after rank", "rows", "torch.stack(gathered, dim=1).flatten(0, 1)",
            "torch.cat(gathered)"),
    Planted("evaluation.gather", "drops the uneven rows", "rows", "-(-total // ranks)", "total // ranks"),
    Planted("evaluation.gather", "sends everything twice", "bytes", "    dist.all_gather(gathered, padded)",
            "    dist.all_gather(gathered, padded)\n    dist.all_gather(gathered, padded)"),
    Planted("evaluation.macro_f1", "mean of the ranks' scores", "score", "    dist.all_reduce(counts)\n    hits",
            "    hits"),
    Planted("evaluation.macro_f1", "accuracy", "score", "    scores = 2 * hits / (predicted + labelled).clamp(min=1)\n",
            "    scores = hits.sum() / labelled.sum()\n"),
    Planted("evaluation.macro_f1", "gathers the rows", "few bytes", "    dist.all_reduce(counts)",
            "    rows = torch.zeros(4 * 64)\n    dist.all_reduce(rows)\n    dist.all_reduce(counts)"),
    Planted("evaluation.macro_f1", "precision for F1", "score", "2 * hits / (predicted + labelled)",
            "hits / predicted"),
    Planted("evaluation.perplexity", "mean of the perplexities", "perplexity", "    both = torch.tensor",
            "    own = torch.tensor(math.exp(loss_sum / tokens))\n    dist.all_reduce(own)\n"
            "    return own / dist.get_world_size()\n    both = torch.tensor"),
    Planted("evaluation.perplexity", "exponential of the mean of means", "perplexity", "    both = torch.tensor",
            "    own = torch.tensor(loss_sum / tokens)\n    dist.all_reduce(own)\n"
            "    return math.exp(own / dist.get_world_size())\n    both = torch.tensor"),
    Planted("evaluation.perplexity", "this rank's own", "perplexity", "    dist.all_reduce(both)\n", ""),
    Planted("evaluation.perplexity", "in bits", "perplexity", "math.exp(both[0] / both[1])",
            "2 ** (both[0] / both[1]).item()"),
    Planted("evaluation.gather", "rounds down and loses the only row", "rows", "[:total]", "[:total // ranks * ranks]"),
    Planted("evaluation.gather", "this rank's rows twice where they are short", "rows", "padded[: len(rows)] = rows",
            "padded[: len(rows)] = rows\n    padded[len(rows):] = rows[-1] if len(rows) else 0\n"
            "    total = longest * ranks"),
    Planted("evaluation.macro_f1", "divides by zero where a class is absent", "score", ".clamp(min=1)", ""),
    Planted("evaluation.macro_f1", "leaves out the class that is absent", "score", "scores.mean().item()",
            "scores[predicted + labelled > 0].mean().item()"),
    Planted("evaluation.macro_f1", "1 for the class that is absent", "score", "    return scores.mean()",
            "    scores = torch.where(predicted + labelled > 0, scores, torch.ones_like(scores))\n"
            "    return scores.mean()"),
    Planted("evaluation.macro_f1", "micro for macro", "score", "2 * hits / (predicted + labelled).clamp(min=1)",
            "2 * hits.sum() / (predicted + labelled).sum()"),
    Planted("evaluation.perplexity", "the loss, not its exponential", "perplexity", "math.exp(both[0] / both[1])",
            "float(both[0] / both[1])"),
    Planted("evaluation.perplexity", "rank 0 alone knows", "perplexity", "dist.all_reduce(both)",
            "dist.reduce(both, 0)"),
)
