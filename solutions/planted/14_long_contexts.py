"""Planted wrong answers of lesson 14: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted(
        "context.merge",
        "a mean of the outputs",
        "output",
        "(shares.unsqueeze(-1) * outputs).sum(dim=0)",
        "outputs.mean(dim=0)",
    ),
    Planted(
        "context.merge",
        "exponentials by themselves",
        "large scores",
        "shares = (log_sums - finite).exp()",
        "shares = log_sums.exp() / log_sums.exp().sum(dim=0)",
    ),
    Planted(
        "context.merge",
        "nothing less nothing",
        "queries that see nothing",
        "(log_sums - finite).exp()",
        "(log_sums - log_sum).exp()",
    ),
    Planted(
        "context.merge",
        "the largest logarithm for the sum",
        "log of the sum",
        "sum(dim=0), log_sum",
        "sum(dim=0), log_sums.max(dim=0).values",
    ),
    Planted("context.merge", "the last two blocks alone", "output", "zip(*blocks)", "zip(*blocks[-2:])"),
    Planted(
        "context.merge",
        "0 for a query that sees nothing",
        "log of the sum",
        "sum(dim=0), log_sum",
        "sum(dim=0), finite",
    ),
    Planted(
        "context.zigzag",
        "contiguous parts",
        "positions",
        "starts = rank * size, (2 * ranks - 1 - rank) * size",
        "starts = 2 * rank * size, (2 * rank + 1) * size",
    ),
    Planted(
        "context.zigzag", "every N-th chunk", "positions", "(2 * ranks - 1 - rank) * size", "(ranks + rank) * size"
    ),
    Planted(
        "context.zigzag",
        "the late chunk first",
        "positions",
        "rank * size, (2 * ranks - 1 - rank) * size",
        "(2 * ranks - 1 - rank) * size, rank * size",
    ),
    Planted(
        "context.zigzag",
        "the positions for their inverse",
        "order",
        "sorted(range(tokens), key=held.__getitem__)",
        "held",
    ),
    Planted("context.zigzag", "a query does not see itself", "pairs", "sum(place + 1 for place", "sum(place for place"),
    Planted(
        "context.loss",
        "shifts its own part alone",
        "the mean",
        "firsts[rank + 1] if rank + 1 < ranks else torch.full_like(labels[:1], -100)",
        "torch.full_like(labels[:1], -100)",
    ),
    Planted(
        "context.loss",
        "round to the first label",
        "the mean",
        "firsts[rank + 1] if rank + 1 < ranks else torch.full_like(labels[:1], -100)",
        "firsts[(rank + 1) % ranks]",
    ),
    Planted("context.loss", "not shifted", "gradient", "torch.cat([labels[1:], behind])", "labels"),
    Planted(
        "context.loss",
        "a mean of means",
        "the mean",
        "    dist.all_reduce(count)\n    return",
        "    dist.all_reduce(count)\n    count = (targets >= 0).sum() * ranks\n    return",
    ),
    Planted("context.loss", "each rank its own mean", "each share", "    dist.all_reduce(count)\n", ""),
    Planted(
        "context.loss",
        "the whole loss on every rank",
        "each share",
        '    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / count',
        '    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / count\n'
        "    whole = loss.detach().clone()\n    dist.all_reduce(whole)\n    return loss - loss.detach() + whole",
    ),
    Planted(
        "context.loss",
        "gathers the logits",
        "bytes",
        "    count = (targets",
        "    dist.all_gather([torch.empty_like(logits) for _ in range(ranks)], logits.detach())\n    count = (targets",
    ),
    Planted(
        "context.ring",
        "own keys alone",
        "output",
        "if owner <= rank:\n                    scores =",
        "if owner == rank:\n                    scores =",
    ),
    Planted(
        "context.ring",
        "sees the keys of later ranks",
        "output",
        "if owner <= rank:\n                    scores =",
        "if True:\n                    scores =",
    ),
    Planted("context.ring", "no mask in its own block", "output", "if own else scores", "if False else scores"),
    Planted("context.ring", "sees one key too many", "output", ".triu(1)", ".triu(2)"),
    Planted(
        "context.ring",
        "shares of gradients stay",
        "gradients of keys and values",
        "                if ranks > 1:\n                    of_block = hand_on(of_block)\n",
        "",
    ),
    Planted(
        "context.ring",
        "the gradient is a step short of home",
        "gradients of keys and values",
        "                if ranks > 1:\n",
        "                if step < ranks - 1:\n",
    ),
    Planted(
        "context.ring",
        "only its own share of gradients",
        "gradients of keys and values",
        "of_block = of_block + torch.stack",
        "of_block = torch.stack",
    ),
    Planted(
        "context.ring", "forgets what the softmax takes", "gradient of queries", "block[1].mT - taken)", "block[1].mT)"
    ),
    Planted("context.ring", "gradient not scaled", "gradient of queries", "- taken) * q.shape[-1] ** -0.5", "- taken)"),
    Planted(
        "context.ring", "blocks are added without their worth", "output", "(log_sum - total).exp() * output", "output"
    ),
    Planted(
        "context.ring",
        "sends the other way",
        "a ring",
        "(rank + 1) % ranks),\n                dist.P2POp(dist.irecv, arrives, (rank - 1) % ranks)",
        "(rank - 1) % ranks),\n                dist.P2POp(dist.irecv, arrives, (rank + 1) % ranks)",
    ),
    Planted(
        "context.ring",
        "gathers all keys besides",
        "a ring",
        "            block = torch.stack((k, v))\n",
        "            block = torch.stack((k, v))\n"
        "            dist.all_gather([torch.empty_like(block) for _ in range(ranks)], block)\n",
    ),
    Planted(
        "context.merge",
        "exponentials in float64",
        "large scores",
        "shares = (log_sums - finite).exp()",
        "shares = (log_sums.double().exp() / log_sums.double().exp().sum(dim=0).clamp(min=1e-300)).float()",
    ),
)
