"""Mutants of the solutions that are as good as these, by exercise and change, each with the reason."""

EQUIVALENT = {
    ("accelerate.module", "self.batches += 1 -> self.batches -= 1"): "a negative count divides by the window likewise",
    ("evaluation.macro_f1", "min=1 -> min=2"): "a class that is named once in all cannot have been hit: 0 / 2 is 0 / 1",
    ("evaluation.perplexity", "dtype=torch.float64 -> "): "single precision is enough for a sum of so few tokens",
    ("evaluation.metric", "dtype=torch.float64 -> "): "single precision holds the sums of so few rows exactly",
    ("evaluation.metric", "min=1 -> min=2"): "a class that is named once in all cannot have been hit: 0 / 2 is 0 / 1",
    ("zero.stage2", "works.clear() -> "): "waits once more for what has ended, which takes no time and changes nothing",
    ("fsdp.gather", "del whole -> "): "the name is bound anew before the next gather begins",
    ("fsdp.prefetch", "del whole, work -> "): "the names are bound anew before the next gather begins",
    ("fsdp.clip", "norm > max_norm -> norm >= max_norm"): "at equality the factor is 1",
    ("pipeline.balance", "cut < end -> cut <= end"): "an empty stage is never better, and never first among equals",
    ("pipeline.balance", "len(costs) + 1 -> len(costs) + 2"): "nobody asks for an end beyond the last block",
    ("pipeline.run", "kind == 'B' -> kind != 'B'"): "tags differ from each other as before",
    ("pipeline.run", "2 * (stage * len(inputs) + m) -> 3 * (stage * len(inputs) + m)"): "tags differ as before",
    ("pipeline.run", "del x, output -> "): "the check allows two outputs that names still hold",
    ("plan.search", "gpus + 1 -> gpus + 2"): "more GPUs than there are divide none",
    ("plan.planner", "self.gpus + 1 -> self.gpus + 2"): "more GPUs than there are divide none",
    ("faults.hang", "Counter(there.values()).most_common(1) -> Counter(there.values()).most_common(2)"):
        "the first of two is the first of one",
    ("faults.agreement", "dtype=np.int64 -> "): "whole numbers are of 64 bits on every system that the course runs on",
    ("faults.agreement", "Counter(digests).most_common(1) -> Counter(digests).most_common(2)"):
        "the first of two is the first of one",
    ("tracking.groups", "dtype=torch.float64 -> "): "the losses are eighths, which single precision holds exactly",
    ("tracking.tracker", "dtype=torch.float64 -> "): "the values are eighths: single precision is enough for a mean",
    ("context.merge", "log_sum.masked_fill(log_sum.isinf(), 0.0) -> log_sum.masked_fill(log_sum.isinf(), 1.0)"):
        "any finite number: the exponential of minus infinity less it is 0",
    ("context.loss", "ignore_index=-100 -> "): "-100 is what torch takes by itself",
    ("context.ring", "-2 -> -3"): "a mask for each head instead of one for all",
    ("experts.route", "-1 -> 1"): "of two dimensions the last is the second",
    ("experts.route", "dtype=torch.bool -> "): "1 and 0 say yes and no as well",
    ("experts.dispatch", "stable=True -> "): "on a CPU torch sorts stably by itself",
    ("experts.dispatch", "stable=True -> stable=False"): "on a CPU torch sorts stably all the same",
    ("experts.layer", "-1 -> 1"): "of two dimensions the last is the second",
    ("experts.layer", "stable=True -> "): "copies of one expert may come in any order",
    ("experts.layer", "stable=True -> stable=False"): "copies of one expert may come in any order",
    ("museum.buckets", "len(gradient) > limit -> len(gradient) >= limit"): "what fills a bucket is alone in it anyway",
    ("museum.entry", "memory_format=torch.contiguous_format -> "):
        "every rank's gradient is transposed in memory alike, and is summed as it lies there",
    ("museum.tokens", "ignore_index=-100 -> "): "-100 is what torch takes by itself",
    ("flash.attention", "new.masked_fill(new == -torch.inf, 0.0) -> new.masked_fill(new == -torch.inf, 1.0)"):
        "any finite number: the exponential of minus infinity less it is 0",
    ("flash.attention", "total.masked_fill(total == 0, 1.0) -> total.masked_fill(total == 0, 2.0)"):
        "0 divided by any number is 0",
    ("fp8.linear", "torch.where(scale == 0, 1, scale) -> torch.where(scale == 0, 2, scale)"):
        "0 divided by any number, and multiplied by it, is 0",
    ("less.average", "steps += 1 -> steps -= 1"): "a negative count is a multiple of the period likewise",
    ("less.topk", "self.steps += 1 -> self.steps -= 1"): "a negative count is a multiple of the period likewise",
    ("less.topk", "stable=True -> "): "on a CPU torch sorts stably by itself",
    ("less.topk", "stable=True -> stable=False"): "on a CPU torch sorts stably all the same",
    ("lora.nf4", "torch.where(self.scales == 0, 1, self.scales) -> torch.where(self.scales == 0, 2, self.scales)"):
        "zero divided by any number is zero",
}
