"""Pipelines and split layers on GPUs: every schedule, tied weights, ZeRO-1, docs/strategies.md's commands."""

import shlex

import pytest
import torch
import torch.distributed as dist

from course_lib import cli
from course_lib.commands.options import config_from, given_fields
from course_lib.config.parallel import PipelineConfig
from course_lib.parallel.pipeline import tied
from course_lib.parallel.topology import RankGrid
from course_lib.training.engines import process_group
from tests.gpu import training as t
from tests.gpu.machine import ROOT

SCHEDULES = PipelineConfig.__annotations__["schedule"].__args__
ONE = {"training_type": "pipeline", "batch_size": 4, "pipeline_chunks": 4, "eval_batch_size": 2}  # rows of a pipeline
TWO = ONE | {"batch_size": 2, "pipeline_chunks": 2, "data_parallel_size": 2}


def runs_of(schedules, base, **options):
    return [(schedule, base | {"schedule": schedule} | options) for schedule in schedules]


@pytest.mark.parametrize(
    ("schedules", "order"),
    [(("1f1b", "zbv"), "late"), *(pytest.param(SCHEDULES, order, marks=pytest.mark.long) for order in t.ORDERS)],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_two_stages(gpus, plain, tmp_path, schedules, order):
    t.agree(t.trained(gpus, tmp_path, 2, runs_of(schedules, ONE), environment=t.ORDERS[order]), plain)


@pytest.mark.parametrize("strategy", ["zero1", pytest.param("ddp", marks=pytest.mark.long)])
def test_the_ends_of_three_stages_share_a_weight(gpus, plain, tmp_path, strategy):
    """Only they send it: the stage between them has met them before."""
    runs = runs_of(("1f1b", "zb_h1"), ONE, strategy=strategy)
    found = t.trained(gpus, tmp_path, 3, runs, environment={"GPU_SIM_TIMEOUT": "20"})
    t.agree(found, plain)


def sums_a_shared_weight():
    """The gradient of a weight that the outer two of three stages hold; nothing else uses their group."""
    process_group.use_own_gpu()
    dist.init_process_group(process_group.GPU_BACKENDS)
    rank, group = dist.get_rank(), RankGrid(1, 3, 1).groups().pp
    stage = torch.nn.Linear(4, 1, bias=False, device="cuda")
    stage.weight.grad = torch.full_like(stage.weight, rank + 1.0)
    tied.sum_shared_gradients([{0: "weight", 2: "weight"}], {rank: stage}, [0, 1, 2], group)
    return stage.weight.grad.flatten().tolist()


def test_two_of_three_ranks_use_a_group_whose_communicator_stands(gpus):
    """As NCCL wants it: a group's first call is one of all its ranks."""
    found = gpus.ranks(3, sums_a_shared_weight, environment={"GPU_SIM_TIMEOUT": "10"})
    assert found == [[4.0] * 4, [2.0] * 4, [4.0] * 4]


@pytest.mark.long
def test_four_stages(gpus, plain, tmp_path):
    runs = runs_of(("gpipe", "1f1b", "zb_h1", "zb_h2"), ONE)
    t.agree(t.trained(gpus, tmp_path, 4, runs), plain)


@pytest.mark.long
def test_two_pipelines_save_and_other_layouts_go_on(gpus, plain, tmp_path):
    runs = runs_of(("zbv", "interleaved"), TWO, strategy="zero1", **t.SAVING)
    t.agree(t.trained(gpus, tmp_path, 4, runs), plain)
    came = {"resume_from_checkpoint": t.saved(tmp_path, ("zbv",))}
    others = [("pipeline", ONE | {"schedule": "1f1b"} | came), t.of(("fsdp", "torch"), **came)]
    t.agree(t.trained(gpus, tmp_path / "again", 2, others), plain, from_step=t.SAVED_AT)


def test_stages_that_fully_shard_splits(gpus, plain, tmp_path):
    runs = runs_of(("1f1b", "zb_h1"), TWO, strategy="fsdp")
    t.agree(t.trained(gpus, tmp_path, 4, runs), plain)


def test_stages_of_split_layers(gpus, plain, tmp_path):
    runs = runs_of(("1f1b",), ONE, tensor_parallel_size=2)
    t.agree(t.trained(gpus, tmp_path, 4, runs), plain)


@pytest.mark.long
def test_layers_over_two_ranks(gpus, plain, tmp_path):
    shared = {"batch_size": 4, "eval_batch_size": 2, "tensor_parallel_size": 2}
    runs = [("ddp", shared), ("fsdp, sequence", shared | {"strategy": "fsdp", "sequence_parallel": True})]
    t.agree(t.trained(gpus, tmp_path, 2, runs), plain)


@pytest.mark.long
def test_torchs_runtime(gpus, plain, tmp_path):
    runs = runs_of(("gpipe", "1f1b", "interleaved", "zbv"), ONE, engine="torch")
    t.agree(t.trained(gpus, tmp_path, 2, runs), plain)


def shown():
    """The pipeline commands of docs/strategies.md."""
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith("course train") and "pipeline" in line]


@pytest.mark.long
@pytest.mark.parametrize("line", shown())
def test_what_the_readme_shows_runs(gpus, tmp_path, monkeypatch, line):
    monkeypatch.chdir(ROOT)
    arguments = cli.parse(shlex.split(line, comments=True)[1:])
    ranks = config_from(arguments).run.num_processes
    asked = given_fields(arguments)
    found = gpus.ranks(ranks, t.whole_run, tmp_path / "run", asked)
    summary = found[0][0]
    assert [findings for _, findings in found] == [[]] * ranks
    assert (summary["training_type"], summary["device"], summary["world_size"]) == ("pipeline", "cuda", ranks)
    assert summary["train"]["steps"] == 3 and summary["eval"]["rows"] == 16 and "majority_class" in summary["baselines"]
    assert (tmp_path / "run" / "accelerate.yaml").exists() and (tmp_path / "run" / "model").is_dir()
