"""Ranks can always be started where there are GPUs, whatever the caller has done before."""

import json
import os
import subprocess
import sys

import pytest

from tests.gpu.machine import HERE, SITE


def step_on_the_cpu():
    """One backward and one optimizer step: afterwards this process cannot be forked any more."""
    import torch

    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()


def on_a_rank(device):
    import torch
    import torch.distributed as dist

    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    weight = torch.ones(1, device=device, requires_grad=True)
    (weight * (dist.get_rank() + 1)).sum().backward()
    torch.optim.AdamW([weight]).step()
    dist.all_reduce(weight.grad)
    return weight.grad.item(), torch.cuda.device_count()


def loaded_by_workers(folder):
    """Steps of a run whose workers are forked from a rank that has trained already: anew in each epoch."""
    from course_lib.config import build
    from course_lib.training.run import build_trainer

    os.mkdir(folder)
    trainer = build_trainer(
        build(
            {
                "model": "tiny-bert",
                "max_train_samples": 8,
                "max_eval_samples": 8,
                "max_length": 32,
                "batch_size": 4,
                "num_epochs": 2,
                "num_workers": 1,
                "save_steps": 0,
                "keep_best": False,
                "progress_bar": False,
                "watchdog": 0,
                "output_dir": folder,
            }
        ),
        [],
    )[0]
    trainer.train()
    return trainer.state.step, trainer.device.type


def made_here():
    """A model as the trainers make it with `cpu_kernels fast`, whose attention is the course's own."""
    from transformers import BertConfig, BertForSequenceClassification

    from course_lib.training.cpu_kernels import use_fast_kernels

    model = BertForSequenceClassification(
        BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    use_fast_kernels(model)
    return model.train()


def loss_of(model):
    import torch

    loss = model(input_ids=torch.zeros(2, 4, dtype=torch.long), labels=torch.zeros(2, dtype=torch.long)).loss
    loss.backward()
    return loss.item() > 0


def in_a_network(device):
    from course_lib.launching.launch import launch
    from course_lib.launching.netns import not_private

    print("said in its own network")
    first = launch(on_a_rank, device, timeout=240, stream=False)
    step_on_the_cpu()  # this process is not clean any more either
    return not_private(), first, os.environ["TOLD"]


def after_a_step():
    import torch

    from course_lib.errors import LaunchError
    from course_lib.launching.launch import launch
    from course_lib.launching.netns import in_own_network

    step_on_the_cpu()
    found = {device: launch(on_a_rank, device, device=device, timeout=360) for device in ("cpu", "cuda")}
    torch.ones(1, device="cuda")
    found["after the GPU was used"] = launch(on_a_rank, "cuda", device="cuda", timeout=240)
    found["workers"] = launch(loaded_by_workers, "run", num_processes=1, timeout=360, stream=False)[0]
    found["model"] = launch(loss_of, made_here(), device="cpu", timeout=240)
    os.environ["TOLD"] = "now"
    found["network"] = in_own_network(in_a_network, "cuda")
    try:
        launch(on_a_rank, "cpu", device="cpu", start_method="fork")
    except LaunchError as error:
        found["fork"] = str(error)
    return found


@pytest.fixture(scope="module")
def stepped(gpus):
    return gpus.run(after_a_step, timeout=960)


def test_ranks_start_from_a_process_that_has_trained(stepped):
    assert stepped["cpu"] == [(3.0, 0)] * 2, "two ranks that train on the CPU, and see no GPU"
    assert stepped["cuda"] == stepped["after the GPU was used"] == [(3.0, 2)] * 2


def test_a_rank_that_trains_forks_its_loaders_workers(stepped):
    assert stepped["workers"] == (4, "cuda")


def test_ranks_train_a_model_that_the_caller_made(stepped):
    assert stepped["model"] == [True, True]


def test_ranks_start_in_a_network_of_their_own(stepped):
    assert stepped["network"] == ("", [(3.0, 2)] * 2, "now")


def test_to_fork_it_all_the_same_is_refused_in_one_line(stepped):
    assert stepped["fork"] == (
        "ranks that are forked from this process could not train (Unable to handle autograd's threading in combination "
        "with fork-based multiprocessing. See https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork): leave "
        "start_method out, or fork before the first backward, optimizer step or use of a GPU"
    )


def forked():
    """By fork alone: from a clean process, from one that looked for GPUs, and from one that used one."""
    import torch

    from course_lib.errors import LaunchError
    from course_lib.launching.launch import launch

    assert torch.cuda.is_available() and torch.accelerator.device_count() == 2
    clean = [launch(on_a_rank, device, device=device, start_method="fork", timeout=240) for device in ("cpu", "cuda")]
    torch.ones(1, device="cuda").sum()
    try:
        launch(on_a_rank, "cuda", device="cuda", start_method="fork", timeout=240)
    except LaunchError as error:
        return clean, str(error)


def test_a_clean_process_can_be_forked_and_one_that_used_a_gpu_cannot(gpus):
    clean, refused = gpus.run(forked)
    assert clean == [[(3.0, 0)] * 2, [(3.0, 2)] * 2]
    assert refused.startswith("ranks that are forked from this process could not train (Cannot re-initialize CUDA in")


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


def test_what_the_fork_server_imports_asks_no_driver(gpus):
    """To ask is to use it: then no process forked from the server could."""
    around = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    around |= {"GPU_SIM": "2", "PYTHONPATH": os.pathsep.join([str(SITE), str(HERE.parents[1])])}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=around, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[], False, False, None]


def doctor():
    import contextlib
    import io

    from course_lib.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["doctor", "--json"]) == 0
    return {each["name"]: each for each in json.loads(out.getvalue())["checks"]}


def test_the_doctor_finds_that_everything_runs(gpus):
    found = gpus.run(doctor, timeout=960)
    states = {name: found[name]["state"] for name in ("plain loop", "CPU processes", "FSDP2", "one GPU", "many GPUs")}
    assert states == dict.fromkeys(states, "ok"), found
    assert found["FSDP2"]["detail"] == "one step taken; each of 2 ranks holds half of the gradient"


def out_of_memory(folder):
    """What the command line says of a run that a GPU of 8 MB cannot hold, or a GPU without any room: code and lines."""
    import contextlib
    import io

    import torch

    from course_lib import cli

    said = []
    total = torch.cuda.get_device_properties(0).total_memory
    for megabytes in (8, 0):
        torch.cuda.set_per_process_memory_fraction(megabytes * 2**20 / total)
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            code = cli.main(
                [
                    "train",
                    "--model",
                    "tiny-gpt2",
                    "--max_train_samples",
                    "64",
                    "--max_eval_samples",
                    "8",
                    "--batch_size",
                    "64",
                    "--max_steps",
                    "1",
                    "--baselines",
                    "false",
                    "--num_processes",
                    "1",
                    "--progress_bar",
                    "false",
                    "--output_dir",
                    f"{folder}/{megabytes}",
                ]
            )
        said.append(
            (
                code,
                [line for line in errors.getvalue().splitlines() if line.startswith("course: ")],
                "Traceback" in errors.getvalue(),
            )
        )
    return said


@pytest.mark.simulated("it limits the memory of GPUs")
def test_too_little_memory_is_a_line_at_the_start_and_in_a_step(gpus, tmp_path):
    (first, (step,), torn), (code, (start,), also_torn) = gpus.run(out_of_memory, str(tmp_path), gpus=1, timeout=400)
    assert first == code == 1 and not torn and not also_torn
    assert step.startswith("course: CUDA out of memory. Tried to allocate")
    assert "take a smaller --batch_size and as much more of" in step
    assert start.startswith("course: GPU 0 is full: `nvidia-smi` lists what runs there")
