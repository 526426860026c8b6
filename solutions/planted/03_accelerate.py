"""Planted wrong answers of lesson 03: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted(
        "accelerate.rows",
        "neighbouring blocks",
        "as Accelerate",
        "range(rank * batch_size, taken, batch_size * ranks)",
        "range(rank * (taken // ranks), (rank + 1) * (taken // ranks), batch_size)",
    ),
    Planted(
        "accelerate.rows",
        "drops the remainder",
        "every row",
        "-(-total // (batch_size * ranks))",
        "(total // (batch_size * ranks))",
    ),
    Planted(
        "accelerate.rows",
        "a short last batch",
        "full batches",
        "for row in range(first, first + batch_size)]",
        "for row in range(first, min(first + batch_size, total))]",
    ),
    Planted(
        "accelerate.rows",
        "every rank sees everything",
        "as Accelerate",
        "range(rank * batch_size, taken, batch_size * ranks)",
        "range(0, taken, batch_size)",
    ),
    Planted(
        "accelerate.loss",
        "mean of the ranks' means",
        "mean",
        "    both = torch.stack",
        "    mean = (losses * mask).sum() / mask.sum().clamp(min=1)\n    dist.all_reduce(mean)\n"
        "    return mean / dist.get_world_size()\n    both = torch.stack",
    ),
    Planted(
        "accelerate.loss",
        "counts the padding",
        "mean",
        "mask.sum().to(losses.dtype)",
        "torch.tensor(float(mask.numel()))",
    ),
    Planted("accelerate.loss", "this rank's own mean", "mean", "    dist.all_reduce(both)\n", ""),
    Planted(
        "accelerate.loss",
        "sends every loss",
        "few bytes",
        "    dist.all_reduce(both)",
        "    everything = torch.zeros(dist.get_world_size() * 64)\n    dist.all_reduce(everything)\n"
        "    dist.all_reduce(both)",
    ),
    Planted("accelerate.main_first", "every rank prepares", "once", "if dist.get_rank() == 0:", "if True:"),
    Planted("accelerate.main_first", "nobody waits", "afterwards", "    dist.barrier()\n", ""),
    Planted(
        "accelerate.main_first",
        "rank 0 alone reads",
        "value",
        "return read()",
        "return read() if dist.get_rank() == 0 else None",
    ),
    Planted(
        "accelerate.main_first",
        "reads before it waits",
        "afterwards",
        "    dist.barrier()\n    return read()",
        "    value = read()\n    dist.barrier()\n    return value",
    ),
    Planted("accelerate.rows", "repeats the last row", "as Accelerate", "row % total", "min(row, total - 1)"),
    Planted(
        "accelerate.rows",
        "goes on with row 1",
        "as Accelerate",
        "row % total",
        "row if row < total else row - total + 1",
    ),
    Planted("accelerate.loss", "rank 0 alone knows", "mean", "dist.all_reduce(both)", "dist.reduce(both, 0)"),
    Planted(
        "accelerate.loss", "forgets the mask of the sum", "mean", "(losses * mask).sum(), mask", "losses.sum(), mask"
    ),
    Planted(
        "accelerate.main_first",
        "the last rank prepares",
        "once",
        "if dist.get_rank() == 0:",
        "if dist.get_rank() == dist.get_world_size() - 1:",
    ),
    Planted(
        "accelerate.main_first",
        "a barrier for rank 0 alone",
        "value",
        "    dist.barrier()\n",
        "        dist.barrier()\n",
    ),
    Planted(
        "accelerate.module",
        "each rank keeps its own weights",
        "same start",
        "            dist.broadcast(parameter.data, src=0)\n",
        "            pass\n",
    ),
    Planted(
        "accelerate.module",
        "frozen weights stay each rank's own",
        "same start",
        "            dist.broadcast(parameter.data, src=0)\n",
        "            if parameter.requires_grad:\n                dist.broadcast(parameter.data, src=0)\n",
    ),
    Planted(
        "accelerate.module",
        "the mean of the ranks' weights",
        "same start",
        "            dist.broadcast(parameter.data, src=0)\n",
        "            dist.all_reduce(parameter.data)\n            parameter.data /= dist.get_world_size()\n",
    ),
    Planted(
        "accelerate.module",
        "a run of the batches for each rank",
        "batches",
        "(i * ranks + dist.get_rank()) % len(self.batches)",
        "(dist.get_rank() * rounds + i) % len(self.batches)",
    ),
    Planted(
        "accelerate.module",
        "drops the last round",
        "batches",
        "-(-len(self.batches) // ranks)",
        "max(1, len(self.batches) // ranks)",
    ),
    Planted(
        "accelerate.module",
        "the last batch again fills the round",
        "batches",
        "(i * ranks + dist.get_rank()) % len(self.batches)",
        "min(i * ranks + dist.get_rank(), len(self.batches) - 1)",
    ),
    Planted(
        "accelerate.module",
        "the last window is left to the next epoch",
        "weights",
        "self.is_last or self.batches % self.window == 0",
        "self.batches % self.window == 0",
    ),
    Planted(
        "accelerate.module",
        "the count goes on in the next epoch",
        "weights",
        "        if self.is_last:\n            self.batches = 0\n",
        "",
    ),
    Planted(
        "accelerate.module",
        "a step with each batch",
        "weights",
        "self.is_last or self.batches % self.window == 0",
        "True",
    ),
    Planted("accelerate.module", "does not divide by the window", "weights", "(loss / self.window)", "loss"),
    Planted(
        "accelerate.module",
        "forgets each batch's gradient",
        "weights",
        "        if self.accelerator.sync_gradients:\n            self.optimizer.zero_grad()",
        "        self.optimizer.zero_grad()",
    ),
    Planted(
        "accelerate.module",
        "the optimizer steps in each batch",
        "weights",
        "        if self.accelerator.sync_gradients:\n            self.optimizer.step()",
        "        self.optimizer.step()",
    ),
    Planted(
        "accelerate.module",
        "averages with each batch",
        "collectives",
        "        if self.sync_gradients:\n            for",
        "        if True:\n            for",
    ),
    Planted(
        "accelerate.module",
        "a sum for a mean",
        "weights",
        "                    parameter.grad /= dist.get_world_size()\n",
        "",
    ),
    Planted(
        "accelerate.module",
        "wants a gradient of every parameter",
        "weights",
        "                if parameter.grad is not None:\n",
        "                if True:\n",
    ),
    Planted(
        "accelerate.module",
        "returns the norm after clipping",
        "norms",
        "return torch.nn.utils.clip_grad_norm_(parameters, max_norm)",
        "return min(torch.nn.utils.clip_grad_norm_(parameters, max_norm), torch.tensor(max_norm))",
    ),
    Planted(
        "accelerate.module",
        "the parameters' iterator is used up by the norm",
        "weights",
        "return torch.nn.utils.clip_grad_norm_(parameters, max_norm)",
        "norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])\n"
        "        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)\n        return norm",
    ),
    Planted(
        "accelerate.module", "the weights alone", "resumed", "        self.optimizer.load_state_dict(optimizer)\n", ""
    ),
    Planted(
        "accelerate.module",
        "rank 0's random numbers on every rank",
        "resumed",
        '        torch.set_rng_state(torch.load(f"{folder}/random{dist.get_rank()}.pt"))',
        '        torch.set_rng_state(torch.load(f"{folder}/random0.pt"))',
    ),
    Planted(
        "accelerate.module",
        "other random numbers",
        "resumed",
        '        torch.set_rng_state(torch.load(f"{folder}/random{dist.get_rank()}.pt"))',
        "",
    ),
    Planted(
        "accelerate.module",
        "saves what is trained alone",
        "resumed",
        "[self.model.state_dict(), self",
        "[{name: p for name, p in self.model.named_parameters() if p.requires_grad}, self",
    ),
    Planted(
        "accelerate.module",
        "does not wait for rank 0's file",
        "all is there",
        '{dist.get_rank()}.pt")\n        dist.barrier()\n',
        '{dist.get_rank()}.pt")\n',
    ),
    Planted(
        "accelerate.module",
        "rank 0 writes after all have met",
        "all is there",
        '            torch.save([self.model.state_dict(), self.optimizer.state_dict()], f"{folder}/state.pt")\n'
        '        torch.save(torch.get_rng_state(), f"{folder}/random{dist.get_rank()}.pt")\n'
        "        dist.barrier()\n",
        '            pass\n        torch.save(torch.get_rng_state(), f"{folder}/random{dist.get_rank()}.pt")\n'
        "        dist.barrier()\n        state = [self.model.state_dict(), self.optimizer.state_dict()]\n"
        '        if dist.get_rank() == 0:\n            torch.save(state, f"{folder}/state.pt")\n',
    ),
    Planted(
        "accelerate.rows",
        "starts again from row 0 once",
        "full batches",
        "row % total for row in",
        "row if row < total else row - total for row in",
    ),
    Planted(
        "accelerate.rows",
        "fills one batch up, not the round",
        "full batches",
        "",
        """
def my_batches(total, batch_size, rank, ranks):
    batches = [list(range(first, min(first + batch_size, total))) for first in range(0, total, batch_size)]
    batches[-1] += list(range(batch_size - len(batches[-1])))
    while len(batches) % ranks and len(batches) > 1:
        batches.append(batches[len(batches) % ranks - 1])
    return batches[rank::ranks]
""",
    ),
    Planted(
        "accelerate.loss",
        "its own mean, weighted, of no losses",
        "mean",
        "torch.stack([(losses * mask).sum(), mask",
        "torch.stack([losses[mask.bool()].mean() * mask.sum(), mask",
    ),
    Planted(
        "accelerate.main_first",
        "sleeps for a second where it should wait",
        "afterwards",
        "    dist.barrier()\n",
        "    else:\n        import time\n        time.sleep(1)\n",
    ),
    Planted(
        "accelerate.main_first",
        "sleeps a little, in steps",
        "afterwards",
        "    dist.barrier()\n",
        "    else:\n        import time\n        for _ in range(50):\n            time.sleep(0.01)\n",
    ),
    Planted(
        "accelerate.module",
        "sleeps where it should wait for rank 0's file",
        "all is there",
        '{dist.get_rank()}.pt")\n        dist.barrier()\n',
        '{dist.get_rank()}.pt")\n        import time\n        time.sleep(0.5)\n',
    ),
    Planted(
        "accelerate.module",
        "starts again from the first batch once",
        "batches",
        "self.batches[(i * ranks + dist.get_rank()) % len(self.batches)]",
        "[*self.batches, *self.batches][i * ranks + dist.get_rank()]",
    ),
)
