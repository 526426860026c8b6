"""Every legal pair from the command line, with the first losses of ddp; and the files made for other tools."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from course_lib.config.axes import ENGINES
from tests.forked_process import run_course


@pytest.fixture(scope="module", autouse=True)
def narrow_presets():
    """The usual ones: fresh interpreters, which have them, are compared with forked ones."""


ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TINY = shlex.split(
    "--model tiny-bert --max_train_samples 64 --max_eval_samples 32 --max_steps 3 --max_length 16 --logging_steps 1 "
    "--baselines false --progress_bar false --device cpu --mixed_precision no"
)  # in bf16 losses differ by how a sum is cut


def run(*command, cwd=ROOT):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=800, cwd=cwd)


def train(folder, options):
    """`course train` of a tiny model in a fork: what it said, and its summary."""
    done = run_course("train", *TINY, *options.split(), "--output_dir", folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "summary.json").read_text())


def losses_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp") / "run"
    train(folder, "--num_processes 2")
    return losses_of(folder)


@pytest.mark.parametrize("strategy, engine", [pytest.param("zero3", "scratch", marks=pytest.mark.long), ("fsdp", None)])
def test_course_train_with_a_strategy(tmp_path, ddp, strategy, engine):
    chosen = f"--num_processes 2 --strategy {strategy}" + (f" --engine {engine}" if engine else "")
    _, summary = train(tmp_path / "run", chosen)
    # Each rank draws its own dropout masks, the same for every strategy.
    assert losses_of(tmp_path / "run") == pytest.approx(ddp, abs=5e-5)
    assert (summary["strategy"], summary["engine"]) == (strategy, engine or ENGINES[strategy][0])
    assert summary["world_size"] == 2 == len(summary["memory"]["peak_bytes"])
    assert "accuracy" in summary["eval"] and (tmp_path / "run" / "model" / "model.safetensors").exists()
    written = yaml.safe_load((tmp_path / "run" / "accelerate.yaml").read_text())
    if "fsdp_config" in written:  # the model's own class: `fully_shard` derives another, which no other script has
        assert written["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "BertLayer"
    assert ("fsdp_config" in written) == (strategy in ("zero2", "zero3", "fsdp"))


def test_course_train_with_stages_that_fully_shard_splits(tmp_path):
    """Such a run is no FSDP over all ranks, which is all that Accelerate's file could say."""
    stages = "--training_type pipeline --pipeline_parallel_size 2 --batch_size 8"
    _, summary = train(tmp_path / "run", f"--num_processes 4 --strategy fsdp {stages}")
    assert "fsdp_config" not in yaml.safe_load((tmp_path / "run" / "accelerate.yaml").read_text())
    assert (summary["strategy"], summary["engine"], summary["pipeline"]["data_parallel_size"]) == ("fsdp", "torch", 2)
    assert "accuracy" in summary["eval"] and (tmp_path / "run" / "model" / "model.safetensors").exists()


SCRIPT = """
from pathlib import Path
import torch
from course_lib.training.engines.with_deepspeed import leave_shared_memory_operator_out
from accelerate import Accelerator, InitProcessGroupKwargs
leave_shared_memory_operator_out()  # minutes of compiling, for an operator that training never calls
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
said = (f"rank {accelerator.process_index} of {accelerator.num_processes}: {accelerator.distributed_type.value}, "
        f"stage {accelerator.deepspeed_plugin.zero_stage}")
Path(f"said-{accelerator.process_index}").write_text(said)
accelerator.wait_for_everyone()
accelerator.end_training()  # gloo's threads may abort a process that ends with its group open
"""


@pytest.mark.long
def test_the_generated_files_serve_any_script(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig  # here, or each rank would import it anew

    folder = tmp_path / "run"
    train(folder, "--num_processes 2 --strategy zero2 --batch_size 2")
    assert yaml.safe_load((folder / "accelerate.yaml").read_text())["num_processes"] == 2
    assert DeepSpeedConfig(json.loads((folder / "deepspeed.json").read_text())).zero_config.stage == 2
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = run(BIN / "accelerate", "launch", "--config_file", folder / "accelerate.yaml", script, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for rank in range(2):
        assert (tmp_path / f"said-{rank}").read_text() == f"rank {rank} of 2: DEEPSPEED, stage 2"


def test_course_train_in_stages(tmp_path, ddp):
    pipeline = "--num_processes 2 --training_type pipeline"
    said, _ = train(tmp_path / "run", f"{pipeline} --schedule zbv --batch_size 32 --pipeline_chunks 4")
    assert "zbv, 4 stages on 2 ranks × 1, 4 micro-batches" in " ".join(said.split())
    # The same rows as two processes of 16 each; the ranks draw other dropout masks, so only the first loss is near.
    assert losses_of(tmp_path / "run")[0] == pytest.approx(ddp[0], abs=0.1)
