"""Between two logged lines no step waits for the GPU: host syncs are counted, and the budget is 0."""

import re
import signal

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.config import build
from course_lib.errors import EXIT_RESUME, TrainingInterrupted
from course_lib.parallel.pipeline.executor import PipelineExecutor
from course_lib.parallel.pipeline.schedules import make
from course_lib.training.callbacks import Callback, FunctionCallback
from course_lib.training.run import build_trainer, train
from tests.gpu import training as t
from tests.long_cases import some

BASE = t.STEPS_ALONE | {"max_steps": 7, "logging_steps": 7, "max_train_samples": 120}
TWO = ["ddp, torch", "ddp, scratch", "zero1, torch", "zero1, scratch", "zero2, torch", "zero2, scratch", "zero3, torch"]
TWO += ["zero3, scratch", "fsdp, torch", "fsdp, scratch", "fsdp, accelerate"]
PIPELINE = {"training_type": "pipeline", "dynamic_padding": False}
"""New lengths would be told between the stages: one length, so that the steps alone are counted."""
TRAINERS = {name: (2, dict(zip(("strategy", "engine"), name.split(", "), strict=True))) for name in TWO} | {
    "basic": (1, {"training_type": "basic"}),
    "one process": (1, {}),
    "ddp, accumulating": (2, {"gradient_accumulation_steps": 2}),
    "pipeline": (2, PIPELINE),
    "pipeline, torch": (2, PIPELINE | {"engine": "torch"}),
    "pipeline, zero bubble": (2, PIPELINE | {"schedule": "zbv"}),
}
MODELS = {
    "causal, unpadded": {"model": "tiny-gpt2", "task": "causal_lm"},
    "causal, eager": {"model": "tiny-gpt2", "task": "causal_lm", "attention": "eager"},
    "masked": {"task": "masked_lm"},
    "eager": {"attention": "eager"},
}


def run_on(gpus, function, options, ranks):
    """A function of the config, on each rank; on one, without a launcher."""
    config = build(BASE | options)
    return [gpus.run(function, config, gpus=1)] if ranks == 1 else gpus.ranks(ranks, function, config)


def syncs_of_steps(config):
    """On a rank: the host syncs of steps 4 to 6, with the files that they came from outside torch; and all races."""
    import gpu_sim

    def told(sync):
        files = re.findall('File "(.*?)"', sync.stack)
        return sync.what, sync.where, [file for file in files if "/torch/" not in file and "gpu_sim" not in file][-1]

    def look(trainer):
        gpu_sim.trace_syncs()
        found.append([told(sync) for sync in gpu_sim.traced_syncs()])

    found = []
    train(config, [FunctionCallback(look)])
    return found[3:6], gpu_sim.findings()


@pytest.mark.parametrize("name", some(TRAINERS, "ddp, accumulating", "zero3, scratch"))
def test_no_trainer_waits_between_logs(gpus, name):
    ranks, options = TRAINERS[name]
    for found in run_on(gpus, syncs_of_steps, options, ranks):
        assert found == ([[], [], []], [])


@pytest.mark.parametrize("name", some(MODELS, "masked"))
def test_no_model_waits_between_logs(gpus, name):
    for found in run_on(gpus, syncs_of_steps, {"training_type": "basic"} | MODELS[name], 1):
        assert found == ([[], [], []], [])


@pytest.mark.long
def test_under_deepspeed_nobody_waits_but_deepspeed(gpus):
    """Its step asks the device for overflows; neither its timers nor anything of ours comes on top."""
    for steps, _ in run_on(gpus, syncs_of_steps, {"strategy": "zero1", "engine": "deepspeed"}, 2):
        files = {file for step in steps for _, _, file in step}
        assert files and not [file for file in files if "/deepspeed/" not in file]


def evaluation(config):
    """On a rank: rows, host syncs and operators in float64 on the device of an evaluation.

    It is the second one: the stages of a pipeline know its lengths already.
    """
    import gpu_sim

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
    assert run_on(gpus, evaluation, options, ranks) == [(40, 3, [])] * ranks


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
    found = run_on(gpus, interrupted, {"max_steps": 8, "logging_steps": 8}, 2)
    for whole, cut, rest in found:
        assert whole[:2] == (0, 8) and rest == whole
        assert cut == (EXIT_RESUME, 5, {})


def test_where_the_device_is_waited_for_anyway_the_vote_is_looked_at(gpus):
    found = run_on(gpus, interrupted, {"max_steps": 6, "logging_steps": 1}, 2)
    for whole, cut, rest in found:
        assert cut[:2] == (EXIT_RESUME, 4) and list(cut[2]) == [1, 2, 3, 4]
        assert cut[2] | rest[2] == whole[2]


def forms_of_letters(config):
    """On a rank: the names of the host syncs while two stages meet a new length; the group knows the host's memory."""
    import gpu_sim

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
    assert run_on(gpus, forms_of_letters, {}, 2) == [[], []]
