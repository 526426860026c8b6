"""Between two logged lines no step waits for the GPU: host syncs are counted, and the budget is 0."""

import signal

import pytest

from course_lib.config import build
from course_lib.errors import EXIT_RESUME, TrainingInterrupted
from course_lib.training.callbacks import Callback, FunctionCallback
from tests.long_cases import some

BASE = {
    "model": "tiny-bert",
    "max_steps": 7,
    "logging_steps": 7,
    "max_train_samples": 120,
    "max_eval_samples": 32,
    "batch_size": 4,
    "max_length": 32,
    "eval_steps": 0,
    "save_steps": 0,
    "keep_best": False,
    "baselines": False,
    "progress_bar": False,
    "watchdog": 0.0,
    "device": "cuda",
    "output_dir": "out",
}
TRAINERS = {
    "basic": (1, {"training_type": "basic"}),
    "one process": (1, {}),
    "ddp, torch": (2, {"engine": "torch"}),
    "ddp, scratch": (2, {"engine": "scratch"}),
    "ddp, accumulating": (2, {"gradient_accumulation_steps": 2}),
    "zero1, torch": (2, {"strategy": "zero1", "engine": "torch"}),
    "zero1, scratch": (2, {"strategy": "zero1", "engine": "scratch"}),
    "zero2, torch": (2, {"strategy": "zero2", "engine": "torch"}),
    "zero2, scratch": (2, {"strategy": "zero2", "engine": "scratch"}),
    "zero3, torch": (2, {"strategy": "zero3", "engine": "torch"}),
    "zero3, scratch": (2, {"strategy": "zero3", "engine": "scratch"}),
    "fsdp, torch": (2, {"strategy": "fsdp", "engine": "torch"}),
    "fsdp, scratch": (2, {"strategy": "fsdp", "engine": "scratch"}),
    "fsdp, accelerate": (2, {"strategy": "fsdp", "engine": "accelerate"}),
    # New lengths would be told between the stages: one length, so that the steps alone are counted.
    "pipeline": (2, {"training_type": "pipeline", "dynamic_padding": False}),
    "pipeline, torch": (2, {"training_type": "pipeline", "engine": "torch", "dynamic_padding": False}),
    "pipeline, zero bubble": (2, {"training_type": "pipeline", "schedule": "zbv", "dynamic_padding": False}),
}
MODELS = {
    "causal, unpadded": {"model": "tiny-gpt2", "task": "causal_lm"},
    "causal, eager": {"model": "tiny-gpt2", "task": "causal_lm", "attention": "eager"},
    "masked": {"task": "masked_lm"},
    "eager": {"attention": "eager"},
}


def run_on_gpus(function, options, ranks):
    """On the machine with GPUs: a function of the config, on each rank."""
    from course_lib.launching.launch import launch

    config = build(BASE | options)
    if ranks == 1:
        return [function(config)]
    return launch(function, config, num_processes=ranks, device="cuda", start_method="fork", stream=False)


def syncs_of_steps(config):
    """On a rank: the names of the host syncs of steps 4 to 6, and all races."""
    import gpu_sim

    from course_lib.training.run import train

    found = []

    def look(trainer):
        gpu_sim.trace_syncs()
        found.append([f"{sync.what} at {sync.where}" for sync in gpu_sim.traced_syncs()])

    train(config, [FunctionCallback(look)])
    return found[3:6], gpu_sim.findings()


@pytest.mark.parametrize("name", some(TRAINERS, "ddp, accumulating", "zero3, scratch"))
def test_no_trainer_waits_between_logs(gpus, name):
    ranks, options = TRAINERS[name]
    for found in gpus.run(run_on_gpus, syncs_of_steps, options, ranks, gpus=ranks):
        assert found == ([[], [], []], [])


@pytest.mark.parametrize("name", some(MODELS, "masked"))
def test_no_model_waits_between_logs(gpus, name):
    for found in gpus.run(run_on_gpus, syncs_of_steps, {"training_type": "basic"} | MODELS[name], 1, gpus=1):
        assert found == ([[], [], []], [])


def sites_of_syncs(config):
    """On a rank: the innermost file outside torch that each host sync of steps 4 and 5 came from, and their number."""
    import traceback
    from unittest import mock

    import gpu_sim
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from course_lib.training.run import train

    sites, seen = [], []

    def noting(function):
        def noted(*args, **kwargs):
            before = gpu_sim.host_syncs() - len(sites)
            result = function(*args, **kwargs)
            if gpu_sim.host_syncs() - len(sites) > before:
                files = [frame.filename for frame in traceback.extract_stack()]
                own = ("/torch/", "gpu_sim", "test_host_syncs")
                sites.append(next(file for file in reversed(files) if not any(part in file for part in own)))
            return result

        return noted

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return noting(func)(*args, **(kwargs or {}))

    looking = [
        Look(),
        *(
            mock.patch(name, noting(function))
            for name, function in {
                "torch.cuda.synchronize": torch.cuda.synchronize,
                "torch.tensor": torch.tensor,
            }.items()
        ),
    ]

    def look(trainer):
        seen.append(gpu_sim.host_syncs())
        for each in looking:
            if trainer.state.step == 3:
                each.__enter__()
            if trainer.state.step == 5:
                each.__exit__(None, None, None)

    train(config, [FunctionCallback(look)])
    return sites, seen[4] - seen[2]


@pytest.mark.long
def test_under_deepspeed_nobody_waits_but_deepspeed(gpus):
    """Its step asks the device for overflows; neither its timers nor anything of ours comes on top."""
    options = {"strategy": "zero1", "engine": "deepspeed"}
    for sites, syncs in gpus.run(run_on_gpus, sites_of_syncs, options, 2, gpus=2):
        assert len(sites) == syncs > 0
        assert {site.partition("/deepspeed/")[2] for site in sites} == {
            "runtime/utils.py",
            "runtime/zero/stage_1_and_2.py",
            "accelerator/cuda_accelerator.py",
        }


def evaluation(config):
    """On a rank: rows, host syncs and operators in float64 on the device of an evaluation.

    It is the second one: the stages of a pipeline know its lengths already.
    """
    import gpu_sim
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from course_lib.training.run import build_trainer

    doubles = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.is_cuda and made.dtype == torch.float64:
                doubles.append(str(func))
            return made

    trainer = build_trainer(config)[0]
    trainer.evaluate("validation")
    before = gpu_sim.host_syncs()
    with Look():
        rows = trainer.evaluate("validation")["rows"]
    found = rows, gpu_sim.host_syncs() - before, doubles
    trainer.engine.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        pytest.param(1, {"training_type": "basic"}, marks=pytest.mark.long),
        pytest.param(2, {"training_type": "pipeline"}, marks=pytest.mark.long),
    ],
)
def test_an_evaluation_waits_at_its_end_and_not_for_each_batch(gpus, ranks, options):
    """Losses, predictions and labels come down, each in one shard, and are added up there: MPS has no float64."""
    options = options | {"max_eval_samples": 40, "eval_batch_size": 2}
    assert gpus.run(run_on_gpus, evaluation, options, ranks, gpus=ranks) == [(40, 3, [])] * ranks


class Signalled(Callback):
    """Asks one rank to stop after a step, and keeps the losses."""

    def __init__(self, rank, at):
        self.rank, self.at, self.losses = rank, at, {}

    def on_step_end(self, trainer):
        if (trainer.rank, trainer.state.step) == (self.rank, self.at):
            signal.raise_signal(signal.SIGTERM)

    def on_log(self, trainer, line):
        self.losses[line["step"]] = line.get("loss")


def interrupted(config):
    """On a rank: what a run without and one with an interruption leave."""
    from course_lib.training.run import build_trainer

    def run(callback, **options):
        trainer = build_trainer(config.replace(**options), [callback])[0]
        trainer.output_dir.mkdir(exist_ok=True)
        try:
            trainer.train()
            code = 0
        except TrainingInterrupted as error:
            code = error.exit_code
        return code, trainer.state.step, callback.losses

    return (
        run(Signalled(-1, 0), output_dir="whole"),
        run(Signalled(1, 3), output_dir="cut"),
        run(Signalled(-1, 0), output_dir="cut", resume_from_checkpoint="auto"),
    )


def test_all_ranks_stop_at_the_same_step_and_go_on_as_if_nothing_had_been(gpus):
    """Asked after step 3, a rank votes with step 4, and the sum is looked at when step 5 has been queued."""
    found = gpus.run(run_on_gpus, interrupted, {"max_steps": 8, "logging_steps": 8}, 2, gpus=2)
    for whole, cut, rest in found:
        assert whole[:2] == (0, 8) and rest == whole
        assert cut == (EXIT_RESUME, 5, {})


def test_where_the_device_is_waited_for_anyway_the_vote_is_looked_at(gpus):
    found = gpus.run(run_on_gpus, interrupted, {"max_steps": 6, "logging_steps": 1}, 2, gpus=2)
    for whole, cut, rest in found:
        assert cut[:2] == (EXIT_RESUME, 4) and list(cut[2]) == [1, 2, 3, 4]
        assert cut[2] | rest[2] == whole[2]


def forms_of_letters(config):
    """On a rank: the names of the host syncs while two stages meet a new length; the group knows the host's memory."""
    import gpu_sim
    import torch
    import torch.distributed as dist
    from accelerate import PartialState

    from course_lib.parallel.pipeline.executor import PipelineExecutor
    from course_lib.parallel.pipeline.schedules import make

    state = PartialState(backend="cpu:gloo,cuda:nccl")
    stage = torch.nn.Linear(4, 4).to(state.device)
    executor = PipelineExecutor(
        make("1f1b", ranks=2, microbatches=2),
        {dist.get_rank(): stage},
        lambda output, target: output.sum(),
        device=state.device,
    )
    found = []
    for length in (3, 5):
        batch = torch.zeros(4, length, 4, device=state.device)
        gpu_sim.trace_syncs()
        gpu_sim.traced_syncs()
        executor.step(batch, targets=batch)
        found.append([f"{sync.what} at {sync.where}" for sync in gpu_sim.traced_syncs()])
    dist.barrier()
    return found[1]


def test_stages_tell_each_other_of_a_new_length_by_the_host(gpus):
    assert gpus.run(run_on_gpus, forms_of_letters, {}, 2, gpus=2) == [[], []]
