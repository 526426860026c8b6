"""Planted wrong answers of lesson 03: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("accelerate.rows", "neighbouring blocks", "as Accelerate",
            "range(rank * batch_size, taken, batch_size * ranks)",
            "range(rank * (taken // ranks), (rank + 1) * (taken // ranks), batch_size)"),
    Planted("accelerate.rows", "drops the remainder", "every row", "-(-total // (batch_size * ranks))",
            "(total // (batch_size * ranks))"),
    Planted("accelerate.rows", "a short last batch", "full batches", "for row in range(first, first + batch_size)]",
            "for row in range(first, min(first + batch_size, total))]"),
    Planted("accelerate.rows", "every rank sees everything", "as Accelerate",
            "range(rank * batch_size, taken, batch_size * ranks)", "range(0, taken, batch_size)"),
    Planted("accelerate.loss", "mean of the ranks' means", "mean", "    both = torch.stack",
            "    mean = (losses * mask).sum() / mask.sum().clamp(min=1)\n    dist.all_reduce(mean)\n"
            "    return mean / dist.get_world_size()\n    both = torch.stack"),
    Planted("accelerate.loss", "counts the padding", "mean", "mask.sum().to(losses.dtype)",
            "torch.tensor(float(mask.numel()))"),
    Planted("accelerate.loss", "this rank's own mean", "mean", "    dist.all_reduce(both)\n", ""),
    Planted("accelerate.loss", "sends every loss", "few bytes", "    dist.all_reduce(both)",
            "    everything = torch.zeros(dist.get_world_size() * 64)\n    dist.all_reduce(everything)\n"
            "    dist.all_reduce(both)"),
    Planted("accelerate.main_first", "every rank prepares", "once", "if dist.get_rank() == 0:", "if True:"),
    Planted("accelerate.main_first", "nobody waits", "afterwards", "    dist.barrier()\n", ""),
    Planted("accelerate.main_first", "rank 0 alone reads", "value", "return read()",
            "return read() if dist.get_rank() == 0 else None"),
    Planted("accelerate.main_first", "reads before it waits", "afterwards", "    dist.barrier()\n    return read()",
            "    value = read()\n    dist.barrier()\n    return value"),
    Planted("accelerate.rows", "repeats the last row", "as Accelerate", "row % total", "min(row, total - 1)"),
    Planted("accelerate.rows", "goes on with row 1", "as Accelerate", "row % total",
            "row if row < total else row - total + 1"),
    Planted("accelerate.loss", "rank 0 alone knows", "mean", "dist.all_reduce(both)", "dist.reduce(both, 0)"),
    Planted("accelerate.loss", "forgets the mask of the sum", "mean",
            "(losses * mask).sum(), mask", "losses.sum(), mask"),
    Planted("accelerate.main_first", "the last rank prepares", "once", "if dist.get_rank() == 0:",
            "if dist.get_rank() == dist.get_world_size() - 1:"),
    Planted("accelerate.main_first", "a barrier for rank 0 alone", "value", "    dist.barrier()\n",
            "        dist.barrier()\n"),
)
