"""Ranks can always be started where there are GPUs, whatever the caller has done before."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification

from course_lib import cli
from course_lib.config import build
from course_lib.errors import LaunchError
from course_lib.launching.launch import launch
from course_lib.launching.netns import in_own_network, not_private
from course_lib.training.cpu_kernels import use_fast_kernels
from course_lib.training.run import build_trainer
from tests.gpu import training as t
from tests.gpu.machine import ROOT, SITE


def step_on_the_cpu():
    """One backward and one optimizer step: afterwards this process cannot be forked any more."""
    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()


def on_a_rank(device):
    """A step; a sum over the ranks, and how many GPUs it sees."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    weight = torch.ones(1, device=device, requires_grad=True)
    (weight * (dist.get_rank() + 1)).sum().backward()
    torch.optim.AdamW([weight]).step()
    dist.all_reduce(weight.grad)
    return weight.grad.item(), torch.cuda.device_count()


ON_THE_CPU, ON_GPUS = [(3.0, 0)] * 2, [(3.0, 2)] * 2


def loaded_by_workers(folder):
    """Steps of a run whose workers are forked from a rank that has trained already: anew in each epoch."""
    os.mkdir(folder)
    options = {"max_train_samples": 8, "num_epochs": 2, "num_workers": 1, "output_dir": folder, "device": "auto"}
    trainer = build_trainer(build(t.STEPS_ALONE | options), [])[0]
    trainer.train()
    return trainer.state.step, trainer.device.type


def made_here():
    """A model as the trainers make it with `cpu_kernels fast`, whose attention is the course's own."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=8, **sizes))
    use_fast_kernels(model)
    return model.train()


def loss_of(model):
    loss = model(input_ids=torch.zeros(2, 4, dtype=torch.long), labels=torch.zeros(2, dtype=torch.long)).loss
    loss.backward()
    return loss.item() > 0


def in_a_network():
    print("said in its own network")
    found = launch(on_a_rank, "cuda", stream=False)
    step_on_the_cpu()  # this process is not clean any more either
    return not_private(), found, os.environ["TOLD"]


def after_a_step():
    step_on_the_cpu()
    assert launch(on_a_rank, "cpu", device="cpu") == ON_THE_CPU
    assert launch(on_a_rank, "cuda", device="cuda") == ON_GPUS
    torch.ones(1, device="cuda")
    assert launch(on_a_rank, "cuda", device="cuda") == ON_GPUS
    assert launch(loaded_by_workers, "run", num_processes=1, stream=False) == [(4, "cuda")]
    assert launch(loss_of, made_here(), device="cpu") == [True, True], "a model that the caller made"
    os.environ["TOLD"] = "now"
    assert in_own_network(in_a_network) == ("", ON_GPUS, "now")
    with pytest.raises(LaunchError, match="forked from this process could not train .Unable to handle autograd's thre"):
        launch(on_a_rank, "cpu", device="cpu", start_method="fork")


def test_ranks_start_from_a_process_that_has_trained(gpus):
    gpus.run(after_a_step)


def by_fork():
    """From a clean process, from one that looked for GPUs, and from one that used one."""
    assert torch.cuda.is_available() and torch.accelerator.device_count() == 2
    assert launch(on_a_rank, "cpu", device="cpu", start_method="fork") == ON_THE_CPU
    assert launch(on_a_rank, "cuda", device="cuda", start_method="fork") == ON_GPUS
    torch.ones(1, device="cuda").sum()
    with pytest.raises(LaunchError, match="forked from this process could not train .Cannot re-initialize CUDA in"):
        launch(on_a_rank, "cuda", device="cuda", start_method="fork")


def test_a_clean_process_can_be_forked_and_one_that_used_a_gpu_cannot(gpus):
    gpus.run(by_fork)


IMPORTS = """
import json, os, sys, torch
touched = []

def trap(module, name):
    function = getattr(module, name)
    def trapped(*args, **kwargs):
        touched.append(f"{module.__name__}.{name}")
        return function(*args, **kwargs)
    setattr(module, name, trapped)

for name in ("device_count", "is_available", "init", "_lazy_init", "set_device", "current_device", "synchronize",
             "get_device_properties", "is_bf16_supported", "get_rng_state_all"):
    trap(torch.cuda, name)
for name in ("_cuda_getDeviceCount", "_cuda_init", "_accelerator_getStream", "_accelerator_getDeviceIndex"):
    if hasattr(torch._C, name):
        trap(torch._C, name)
import course_lib.training.run  # all that a caller can have of the course
from course_lib.launching import forks
with forks._planned():
    around = dict(os.environ)
for name in list(sys.modules):
    if name.startswith("course_lib"):
        del sys.modules[name]
os.environ.update(around)
import course_lib.launching.preload
import gpu_sim
assert "transformers" in sys.modules and "course_lib.training.run" in sys.modules
print(json.dumps([touched, gpu_sim.driver_used(), forks.PLAN in os.environ, os.environ.get("PYTHONSAFEPATH")]))
"""


@pytest.mark.usefixtures("gpus")
def test_what_the_fork_server_imports_asks_no_driver():
    """To ask is to use it: then no process forked from the server could."""
    around = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    around |= {"GPU_SIM": "2", "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=around, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[], False, False, None]


def doctor():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["doctor", "--json"]) == 0
    return {each["name"]: each for each in json.loads(out.getvalue())["checks"]}


def test_the_doctor_finds_that_everything_runs(gpus):
    found = gpus.run(doctor)
    states = {name: found[name]["state"] for name in ("plain loop", "CPU processes", "FSDP2", "one GPU", "many GPUs")}
    assert states == dict.fromkeys(states, "ok"), found
    assert found["FSDP2"]["detail"] == "one step taken; each of 2 ranks holds half of the gradient"


TRAIN = (
    "train --model tiny-gpt2 --max_train_samples 64 --max_eval_samples 8 --batch_size 64 --max_steps 1 "
    "--baselines false --num_processes 1 --progress_bar false --output_dir"
)


def out_of_memory(megabytes, folder):
    """What the command line says of a run on a GPU that has no more: exit code, and all of its errors."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(megabytes * 2**20 / total)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = cli.main([*TRAIN.split(), str(folder)])
    return code, errors.getvalue()


@pytest.mark.simulated("it limits the memory of GPUs")
@pytest.mark.parametrize(
    ("megabytes", "told"),
    [
        (8, r"CUDA out of memory\. Tried to allocate.*take a smaller --batch_size and as much more of"),
        (0, r"GPU 0 is full: `nvidia-smi` lists what runs there"),
    ],
)
def test_too_little_memory_is_a_line_at_the_start_and_in_a_step(gpus, tmp_path, megabytes, told):
    code, errors = gpus.run(out_of_memory, megabytes, tmp_path / "run", gpus=1)
    assert code == 1 and "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if line.startswith("course: ")]
    assert re.match("course: " + told, line)
