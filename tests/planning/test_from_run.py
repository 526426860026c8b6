"""What `course plan --calibrate` takes from a run: its record, read back as the plan and the share that made it."""

import json

import pytest
import torch
import yaml

from course_lib import cli
from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.planning import cost, from_run, hardware, host_launch, models
from course_lib.planning.plan import Plan

LENGTH = 512


SUMMARY = {"mixed_precision": "bf16", "tf32": False, "memory": {"peak_bytes": [3 * 2**30, 4 * 2**30]}}
AS_TRAINED = {"loss": "chunked", "head": "gathered", "sequence_parallel": False}


def run_of(folder, plan, model, rate, *, steps=9, device="cuda", warm_up=10.0):
    """The files of a run that took ten seconds to start, and then went at a rate of tokens/s."""
    strategy = f"zero{plan.stage}" if plan.engine == "deepspeed" else plan.engine
    fields = {"model": model, "task": "causal_lm", "dataset": "pydocs", "max_length": LENGTH, "strategy": strategy}
    fields |= {"batch_size": plan.micro_batch, "gradient_accumulation_steps": plan.accumulation}
    fields |= {"mixed_precision": "bf16", "num_processes": plan.gpus}
    build(fields)  # such a run there is
    lines, rows = [], plan.global_batch
    for step in range(1, steps + 1):
        seconds = warm_up + (step - 1) * rows * LENGTH / rate
        speeds = {"samples_per_second": step * rows / seconds, "tokens_per_second": step * rows * LENGTH / seconds}
        lines.append({"step": step, "loss": 2.0, "seconds": seconds, **speeds})
    lines.insert(3, {"step": 3, "eval.loss": 2.0})
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(fields))
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"device": device, "world_size": plan.gpus}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(("engine", "stage"), [("ddp", 0), ("fsdp", 3), ("deepspeed", 2)])
def test_the_share_that_made_a_run_is_found_in_its_record(tmp_path, engine, stage):
    """Planned at 30 % of peak, written down as a run, read back: 30 % and the same plan."""
    model, cluster = models.load("gpt2-xl"), hardware.cluster("H100", 8)
    plan = Plan(LENGTH, engine, stage, data=8, micro_batch=32, accumulation=2, **AS_TRAINED)
    slow = hardware.replace(cluster.accelerator, matmul={"bf16": 0.3})
    rate = cost.estimate(model, plan, hardware.replace(cluster, accelerator=slow)).tokens_per_second
    taught = from_run.calibrate(hardware.cluster("H100", 64), run_of(tmp_path / "run", plan, "gpt2-xl", rate))
    assert taught.plan == plan and taught.steps == 5
    assert taught.measured == pytest.approx(rate) and taught.before > 1.2 * rate
    assert taught.share == (0.45, pytest.approx(0.3, rel=1e-6))
    assert taught.cluster.gpus == 64 and taught.cluster.accelerator.matmul["bf16"] == taught.share[1]
    said = " ".join(taught.lines())
    assert "5 steps of gpt2-xl" in said and "0.45 to 0.3" in said and "4.0 measured" in said
    assert taught.cluster.launch == hardware.LAUNCH and "this host has no H100 to measure it with" in said


def test_the_hosts_time_for_an_operation_is_measured_where_the_device_is(tmp_path, monkeypatch):
    """A run whose steps wait for the host: the share is that of the matmuls beside what was measured."""
    model, cluster = models.load("gpt2"), hardware.cluster("CPU", 2)
    plan = Plan(LENGTH, "ddp", data=2, micro_batch=1, precision="bf16", **AS_TRAINED)
    here = hardware.replace(cluster, launch=0.01)
    rate = cost.estimate(model, plan, here).tokens_per_second
    assert cost.estimate(model, plan, here).launch > 0 == cost.estimate(model, plan, cluster).launch
    monkeypatch.setattr(host_launch, "launch_seconds", lambda device: 0.01 if device.type == "cpu" else None)
    taught = from_run.calibrate(cluster, run_of(tmp_path / "run", plan, "gpt2", rate, device="cpu"))
    assert taught.cluster.launch == 0.01 and taught.launch == (hardware.LAUNCH, 0.01)
    assert taught.cluster.accelerator.matmul["bf16"] <= taught.share[0] * (1 + 1e-6)
    assert "time for one operation, 25 to 1e+04 microseconds, measured on this host" in " ".join(taught.lines())


def test_an_operation_takes_the_host_some_time():
    """Ten blocks take longer than two, on any machine; the rest of a pass is not counted."""
    assert 0 < host_launch.launch_seconds(torch.device("cpu")) < 0.01


@pytest.mark.parametrize("warm_up", [1.0, 1000.0])
def test_the_first_line_is_warm_up_and_not_counted(warm_up, tmp_path):
    folder = run_of(tmp_path / "run", Plan(LENGTH, data=2, micro_batch=4), "gpt2-xl", 1000.0, warm_up=warm_up)
    record = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert from_run.measured(record, folder) == (5, pytest.approx(1000.0), LENGTH)


def test_the_command_says_what_moved(tmp_path, capsys):
    plan = Plan(LENGTH, "fsdp", 3, data=8, micro_batch=4)
    folder = run_of(tmp_path / "run", plan, "gpt2-xl", 60_000.0)
    options = "plan --model gpt2-xl --gpu H100 --gpus 8 --global-batch 64 --sequence-length 512"
    asked, more = options.split(), ["--calibrate", str(folder)]
    speeds = []
    for line in (asked, asked + more):
        assert cli.main([*line, "--json"]) == 0
        said = capsys.readouterr()
        speeds.append(json.loads(said.out)["plans"][0]["tokens_per_second"])
    assert "Moved: the share of bf16's peak" in said.err and speeds[1] < speeds[0]
    assert cli.main(asked + more) == 0
    assert capsys.readouterr().out.startswith("Calibrated by ")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"steps": 5}, "no 5 measured steps"), ({"device": "cpu"}, "was made on cpu"), (None, "no finished run")],
)
def test_what_is_no_use_is_one_line(tmp_path, wrong, says):
    folder = tmp_path / "run"
    if wrong is not None:
        run_of(folder, Plan(LENGTH, "ddp", data=2, micro_batch=4), "gpt2-xl", 1000.0, **wrong)
    with pytest.raises(ConfigError, match=says):
        from_run.calibrate(hardware.cluster("H100", 8), folder)


def test_a_throughput_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match="no share"):
        from_run.matmul_share(models.load("gpt2"), Plan(128, precision="fp32"), hardware.cluster("CPU", 1), 1e15)
