"""What a learner reads of a wrong answer: the case, the ratio, their line, who waits for whom, their table drawn."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from course_lib.grading import check as checking
from course_lib.grading.own_code import registered, told
from course_lib.grading.rules import near, ratio
from course_lib.grading.task import Case, described
from course_lib.grading.tasks import TASKS

SUM = """
import torch.distributed as dist
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
"""
NO_GRADIENT = SUM.replace("        if p.grad is not None:\n    ", "")
RANK_0_ALONE = """
import torch.distributed as dist
def main_first(prepare, read):
    if dist.get_rank() == 0:
        prepare()
        dist.barrier()
    return read()
"""
CIRCLE = """
import torch
import torch.distributed as dist
def ring_all_reduce(tensor):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks > 1:
        dist.recv(torch.empty_like(tensor), (rank - 1) % ranks)
        dist.send(tensor, (rank + 1) % ranks)
"""
UNEVEN = """
import torch
import torch.distributed as dist
def gather_rows(rows, total):
    gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, rows)
    return torch.cat(gathered)[:total]
"""
GPIPE = """
def one_f_one_b(rank, ranks, microbatches):
    return [f"{rank}{kind}{m}" for kind in "FB" for m in range(microbatches)]
"""
BACKWARD_FIRST = GPIPE.replace('"FB"', '"BF"')


ADAMW = """
def adamw_step(weight, gradient, state, step, lr, betas, eps, weight_decay):
    m = state.setdefault("m", 0 * weight)
    v = state.setdefault("v", 0 * weight)
    m.mul_(betas[0]).add_((1 - betas[0]) * gradient)
    v.mul_(betas[1]).add_((1 - betas[1]) * gradient**2)
    weight.mul_(1 - lr * weight_decay)
    weight.sub_(lr * (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps))
"""
L2 = ADAMW.replace(
    "    m = state", "    gradient = gradient + weight_decay * weight\n    weight_decay = 0\n    m = state"
)
UNCORRECTED = ADAMW.replace("/ (1 - betas[0] ** step)", "").replace("/ (1 - betas[1] ** step)", "")
NOT_IN_PLACE = ADAMW.replace("weight.mul_(", "weight = weight * (")
SHARDED_SUM = """
import torch
import torch.distributed as dist
from torch import nn
class ShardedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.shape, ranks = weight.shape, dist.get_world_size()
        self.shard = nn.Parameter(padded(weight).chunk(ranks)[dist.get_rank()].clone())
    def forward(self, x):
        return Sharded.apply(x, self.shard, self.shape)
def padded(weight):
    return nn.functional.pad(weight.flatten(), (0, -weight.numel() % dist.get_world_size()))
def gather(shard, shape):
    whole = torch.empty(dist.get_world_size() * shard.numel())
    dist.all_gather_single(whole, shard.detach())
    return whole[: shape[0] * shape[1]].view(shape)
class Sharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape):
        ctx.save_for_backward(x, shard)
        ctx.shape = shape
        return x @ gather(shard, shape).T
    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        of_shard = None
        of_x = gradient @ gather(shard, ctx.shape)
        if ctx.needs_input_grad[1]:
            of_shard = torch.empty_like(shard)
            dist.reduce_scatter_single(of_shard, padded(gradient.T @ x))
        return of_x, of_shard, None
"""
CRASH = """
import torch
import torch.distributed as dist
def ring_all_reduce(tensor):
    works = [dist.all_reduce(torch.zeros(1 + 7 * (dist.get_rank() == i)), async_op=True) for i in range(3)]
    for work in works:
        work.wait()
"""
WRONG_UNPACKING = """
class Planner:
    def __init__(self, layers, gpus, micro_batches, bandwidth, capacity):
        pass
    def memory(self, data, zero, cut):
        return [1]
    def seconds(self, data, zero, cut):
        return 1.0
    def best(self):
        a, b = [1]
"""
RESUME = """
import copy, random
import numpy as np
import torch
def checkpoint(run, state=None):
    if state is not None:
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.schedule.load_state_dict(state["schedule"])
        run.shuffle.set_state(state["shuffle"])
        run.order, run.place, run.step = list(state["order"]), state["place"], state["step"]
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        return
    return copy.deepcopy({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(),
        "schedule": run.schedule.state_dict(), "shuffle": run.shuffle.get_state(), "order": run.order,
        "place": run.place, "step": run.step, "torch": torch.get_rng_state(), "python": random.getstate()})
"""
ALWAYS_RANK_0 = "def culprit(ranks):\n    return 0, 'dead', 1\n"


def read(name, source, capsys, monkeypatch):
    """The lines that `check` prints of an answer; its ranks wait for two seconds."""
    monkeypatch.setattr(checking, "SECONDS_PER_CASE", 2.0)
    scope = {"__name__": "answer"}
    exec(compile(source, registered(f"answer {name}", source), "exec"), scope)
    checking.check(name, scope[TASKS[name].function])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        (
            "ddp.average",
            SUM,
            [
                "each number is twice the expected one, on 2 ranks: a sum over them, not a mean?",
                "case 1 of 4: 2 ranks, weights [",
                "at most 1 point\n",
            ],
        ),
        (
            "ddp.average",
            NO_GRADIENT,
            [
                "TypeError: ",
                "(in line 5 of yours, `dist.all_reduce(p.grad)`)",
                "case 2 of 4: 1 rank, ",
                "frozen ",
                "tied [1, ",
                "unused 3",
            ],
        ),
        (
            "accelerate.main_first",
            RANK_0_ALONE,
            [
                "a hang: rank 1 has returned from your function",
                "; rank 0 waits for it in barrier #1 (line 6 of yours, `dist.barrier()`)",
                "case 2 of 3: 2 ranks",
            ],
        ),
        (
            "ddp.ring",
            CIRCLE,
            [
                "a hang: rank 0 waits for rank 1 in recv #1 from rank 1",
                "rank 1 waits for rank 0 in recv",
                "(line 7 of yours, `dist.recv(",
            ],
        ),
        (
            "evaluation.gather",
            UNEVEN,
            ["rank 0 issued all_gather #1 of float32 (1, 2)", "where rank 1 all_gather #1 of float32 (0, 2)"],
        ),
        (
            "pipeline.1f1b",
            GPIPE,
            [
                "your table, · is waiting:",
                "rank 4 |········0 ",
                "|\n       ranks 5, microbatches 8".replace("ranks 5", "case 1 of 4: ranks 5"),
            ],
        ),
        ("pipeline.1f1b", BACKWARD_FIRST, ["has 0B0 before 0F0", "rank 4  4B0 4B1 "]),
        ("loop.adamw", L2, [" in step 1; found: ", "these are Adam's weights: the decay is in the gradient"]),
        ("loop.adamw", UNCORRECTED, [" in step 1; found: ", "these are the weights without bias correction"]),
        ("loop.adamw", NOT_IN_PLACE, ["the weights are as they were: change `weight` itself, in place"]),
        (
            "fsdp.module",
            SHARDED_SUM,
            [
                "no   output (2)\n       from step 1 on; `gradients` is wrong in step 0 already",
                "each number is twice the expected one, on 2 ranks: a sum over them, not a mean?",
            ],
        ),
        ("ddp.ring", CRASH, ["ddp.ring: 0 of 8 points"]),
        (
            "plan.planner",
            WRONG_UNPACKING,
            [
                "found: ValueError: not enough values to unpack",
                "(in line 10 of yours",
                "layers = [{'parameters': ",
                "'seconds': ",
                "gpus = ",
                "capacity = ",
            ],
        ),
        ("faults.resume", RESUME, ["not as it was at the checkpoint: the state of `np.random`\n"]),
        (
            "faults.resume",
            RESUME.replace('        random.setstate(state["python"])\n', ""),
            ["not as it was at the checkpoint: the state of `random`, the state of `np.random`\n"],
        ),
        (
            "faults.hang",
            ALWAYS_RANK_0,
            ["found: (0, 'dead', 1)", "sequence, collective, elements; ... for one that", "rank 2, alive:  "],
        ),
    ],
)
def test_what_check_says(name, source, said, capsys, monkeypatch):
    out = read(name, source, capsys, monkeypatch)
    for part in said:
        assert part in out
    assert not any(native in out for native in ("unbound_buffer", "/pytorch/", "gloo", "terminate called", "frame #"))


def test_ratios():
    right = np.array([1.0, -2.0, 0.0, 4.0])
    for factor, ranks, said in (
        (2, 2, "a sum over them, not a mean?"),
        (3, 3, "a sum over them"),
        (2, 1, "is twice"),
        (0.5, 2, "divided by their number once too often?"),
        (-1, 2, "wrong sign"),
        (1.5, 2, "1.5 times the expected one"),
        (0, 2, "all of it is zero"),
        (np.nan, 2, "not finite"),
    ):
        assert said in ratio(factor * right, right, ranks)
    assert ratio(right + 1, right, 2) == "" == ratio(right, np.zeros(4), 2)
    one = np.array([2.0])
    assert ratio(3.895 * one, one, 2) == "" == ratio(-0.083 * one, one, 3) and "a sum over" in ratio(2 * one, one, 2)
    miss = near([{"loss": 2 * right}, {"loss": right}], "loss", [right, right])
    assert miss.rank == 0 and "a sum over them" in miss.note


def test_a_case_in_words():
    case = Case(
        3,
        {
            "weights": [np.zeros((2, 3)), np.zeros(4)],
            "rows": [[np.zeros(2)] * 2] * 3,
            "lr": 0.5,
            "tied": [1, 2],
            "frozen": None,
            "at": {"a": np.zeros((1, 1))},
        },
    )
    assert described(case) == "3 ranks, weights [2x3, 4], rows 3 of 2 of 2, lr 0.5, tied [1, 2], at {a 1x1}"
    assert described(case, on_ranks=False).startswith("weights")
    assert len(described(Case(1, {"a": [np.zeros(size) for size in range(99)]}))) == 220
    whole = {"layers": [{"parameters": 10**9 + i} for i in range(20)], "gpus": 4}
    told_of = dict(line.split(" = ") for line in described(Case(1, whole), False).replace("\n ", " ").splitlines())
    assert {name: eval(text) for name, text in told_of.items()} == whole, "long ones without arrays are Python"


def test_an_exception_tells_the_last_line_of_the_learners_own_code():
    source = "import json\ndef inner():\n    return json.loads('{')\ndef outer():\n    return inner()\n"
    scope = {}
    exec(compile(source, registered("answer x", source), "exec"), scope)
    try:
        scope["outer"]()
    except ValueError as error:
        assert told(error, "answer x").endswith("(in line 3 of yours, `return json.loads('{')`)")
        assert "line" not in told(error, None).partition("char")[2]
    error = RuntimeError("[/__w/pytorch/pytorch/third_party/gloo/x.cc:78] Timed out waiting 10000ms")
    assert told(error, None) == "RuntimeError: Timed out waiting 10000ms"


@pytest.mark.parametrize("kind", ["ipynb", "py"])
def test_a_syntax_error_is_told_before_torch_is_imported(tmp_path, kind):
    source = "import torch\n\n\ndef ring_all_reduce(tensor):\n    return tensor +\n"
    cell = {
        "cell_type": "code",
        "source": source.splitlines(keepends=True),
        "outputs": [],
        "execution_count": None,
        "metadata": {"nbgrader": {"grade_id": "ddp-ring", "solution": True}},
    }
    path = tmp_path / f"mine.{kind}"
    path.write_text(
        source if kind == "py" else json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )
    program = textwrap.dedent(f"""
        import sys
        from course_lib.cli import main
        code = main(["check", {str(path)!r}])
        print(code, "torch" in sys.modules)
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    said = ended.stdout + ended.stderr
    assert "line 5 is not Python (invalid syntax), `return tensor +`" in said
    assert ended.stdout.splitlines()[-1] in ("1 False", "2 False")
    assert ("ddp.ring: line 5" in said) == (kind == "ipynb")
