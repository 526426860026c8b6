"""Planted wrong answers of lesson 01: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("loop.warmup", "begins at zero", "warm-up", "peak * (step + 1) / warmup", "peak * step / warmup"),
    Planted("loop.warmup", "never warms up", "warm-up", "if step < warmup:", "if False:"),
    Planted(
        "loop.warmup", "decays from step 0 on", "decay", "(total - step) / (total - warmup)", "(total - step) / total"
    ),
    Planted("loop.warmup", "stays at its peak", "decay", " * (total - step) / (total - warmup)", ""),
    Planted(
        "loop.length_groups",
        "rows in their given order",
        "padding",
        "sorted(range(len(lengths)), key=lambda row: lengths[row])",
        "list(range(len(lengths)))",
    ),
    Planted(
        "loop.length_groups",
        "drops the last batch",
        "every row once",
        "range(0, len(order), batch_size)]",
        "range(0, len(order) - batch_size + 1, batch_size)]",
    ),
    Planted(
        "loop.length_groups",
        "one row per batch",
        "batch size",
        "    return [order",
        "    batch_size = 1\n    return [order",
    ),
    Planted(
        "loop.length_groups",
        "lengths for row numbers",
        "every row once",
        "sorted(range(len(lengths)), key=lambda row: lengths[row])",
        "sorted(lengths)",
    ),
    Planted(
        "loop.token_weighted",
        "mean of the micro-batches' means",
        "gradient",
        "(losses * mask).sum() / tokens",
        "(losses * mask).sum() / mask.sum() / len(micro_batches)",
    ),
    Planted("loop.token_weighted", "counts the padding", "gradient", "sum(mask.sum() for", "sum(mask.numel() for"),
    Planted("loop.token_weighted", "trains on the padding", "gradient", "(losses * mask).sum()", "losses.sum()"),
    Planted(
        "loop.token_weighted",
        "one backward for all",
        "one graph at a time",
        "loss.backward()\n        total += loss.item()\n    return total",
        "total = total + loss\n    total.backward()\n    return total.item()",
    ),
    Planted(
        "loop.token_weighted", "only the last micro-batch's loss", "loss", "total += loss.item()", "total = loss.item()"
    ),
    Planted("loop.adamw", "no bias correction", "weights", "/ (1 - betas[0] ** step)", "/ 1"),
    Planted(
        "loop.adamw",
        "decay in the gradient, as in Adam",
        "weights",
        "    m = state",
        "    gradient = gradient + weight_decay * weight\n    weight_decay = 0\n    m = state",
    ),
    Planted(
        "loop.adamw",
        "epsilon under the root",
        "weights",
        "(v / (1 - betas[1] ** step)).sqrt() + eps",
        "(v / (1 - betas[1] ** step) + eps).sqrt()",
    ),
    Planted(
        "loop.adamw",
        "remembers the gradient too",
        "two states per weight",
        "    m.mul_",
        '    state["gradient"] = gradient\n    m.mul_',
    ),
    Planted("loop.warmup", "warms up for a step too many", "decay", "if step < warmup:", "if step <= warmup:"),
    Planted(
        "loop.warmup",
        "is at zero in the last step",
        "decay",
        "(total - step) / (total - warmup)",
        "(total - 1 - step) / (total - 1 - warmup)",
    ),
    Planted(
        "loop.length_groups",
        "sorts within windows",
        "padding",
        "key=lambda row: lengths[row])",
        "key=lambda row: (row // (2 * batch_size), lengths[row]))",
    ),
    Planted(
        "loop.length_groups",
        "fills the last batch up with row 0",
        "every row once",
        "    return [order",
        "    order += [0] * (-len(order) % batch_size or batch_size)\n    return [order",
    ),
    Planted(
        "loop.token_weighted", "returns the loss with its graph", "loss", "total += loss.item()", "total = total + loss"
    ),
    Planted("loop.token_weighted", "returns a tensor", "loss", "return total", "return torch.tensor(total)"),
    Planted(
        "loop.token_weighted",
        "scales what it returns, not what it differentiates",
        "gradient",
        "loss = (losses * mask).sum() / tokens\n        loss.backward()",
        "loss = (losses * mask).sum()\n        loss.backward()\n        loss = loss / tokens",
    ),
    Planted(
        "loop.token_weighted",
        "zeroes the gradient before each micro-batch",
        "gradient",
        "        losses = F.cross",
        "        model.zero_grad()\n        losses = F.cross",
    ),
    Planted(
        "loop.adamw",
        "counts steps from 2",
        "weights",
        "(m / (1 - betas[0] ** step))",
        "(m / (1 - betas[0] ** (step + 1)))",
    ),
    Planted(
        "loop.adamw",
        "a new momentum that the state never sees",
        "weights",
        "m.mul_(betas[0]).add_((1 - betas[0]) * gradient)",
        "m = betas[0] * m + (1 - betas[0]) * gradient",
    ),
    Planted("loop.adamw", "updates a copy of the weight", "weights", "weight.sub_(lr", "weight = weight - (lr"),
    Planted(
        "loop.adamw", "the two betas exchanged", "weights", "    m = state", "    betas = betas[::-1]\n    m = state"
    ),
    Planted(
        "loop.warmup",
        "divides by a warm-up of no steps",
        "decay",
        "    if step < warmup:\n",
        "    rising = (step + 1) / warmup\n    if step < warmup:\n",
    ),
    Planted(
        "loop.length_groups",
        "asks for the longest of no rows",
        "every row once",
        "    order = sorted(",
        "    longest = max(lengths)\n    order = sorted(",
    ),
    Planted(
        "loop.token_weighted",
        "each micro-batch's mean times its share",
        "gradient",
        "(losses * mask).sum() / tokens",
        "(losses * mask).sum() / mask.sum() * (mask.sum() / tokens)",
    ),
    Planted(
        "loop.token_weighted",
        "the mean of what counts, of which there may be none",
        "loss",
        "(losses * mask).sum() / tokens",
        "losses[mask.bool()].mean() * mask.sum() / tokens",
    ),
    Planted(
        "loop.token_weighted",
        "clamps the mean of an empty micro-batch alone",
        "loss",
        "(losses * mask).sum() / tokens",
        "losses.mean() * 0 + (losses * mask).sum() / mask.sum().clamp(min=1) * mask.sum() / tokens",
    ),
)
