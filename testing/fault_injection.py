"""Training runs that are broken on purpose, gone on from, and compared with the undisturbed run.

A run is `course train` on real ranks, forked from this process, so that a case takes seconds. One rank
strikes itself, at a step that the seed draws, in the phase that the case names: SIGKILL, SIGTERM,
SIGSTOP, or a disk that is full from then on. Then the run is started once more with
``resume_from_checkpoint: auto``; it has to end as the undisturbed run does, to the bit.
"""

import hashlib
import itertools
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from course_lib.config import build
from course_lib.errors import CourseError
from course_lib.launching.launch import RankError, RanksHung, launch
from course_lib.training import run as runs
from course_lib.training.callbacks.base import Callback
from course_lib.training.checkpoints import checkpoint, formats, sharded

TRAINERS: dict[str, dict[str, Any]] = {
    "basic": {"training_type": "basic"},
    "ddp": {},
    "zero1": {"strategy": "zero1", "engine": "torch"},
    "zero2": {"strategy": "zero2", "engine": "scratch"},
    "zero3": {"strategy": "zero3", "engine": "deepspeed"},
    "fsdp": {"strategy": "fsdp"},
    "pipeline": {"training_type": "pipeline", "pipeline_chunks": 2},
}
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP, "full disk": None}
PHASES = ("data", "forward", "backward", "optimizer", "saving", "evaluating")
STEPS, SAVE_STEPS, EVAL_STEPS = 10, 2, 3
PLAIN: dict[str, Any] = {
    "model": "tiny-gpt2",
    "task": "causal_lm",
    "max_train_samples": 60,
    "max_eval_samples": 8,
    "max_length": 24,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_steps": SAVE_STEPS,
    "eval_steps": EVAL_STEPS,
    "progress_bar": False,
    "baselines": False,
    "device": "cpu",
    "mixed_precision": "no",
    "tracker": "none",
    "watchdog": 5,
    "resume_from_checkpoint": "auto",
}
LIMIT = 120.0  # seconds after which a run counts as hung


@dataclass(frozen=True)
class FaultCase:
    """One fault of one run."""

    trainer: str
    fault: str
    phase: str
    seed: int

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return 1 if self.trainer == "basic" else 2

    @property
    def exists(self) -> bool:
        """A single process that is stopped has no other to notice it."""
        return not (self.trainer == "basic" and self.fault == "SIGSTOP")

    def options(self, folder: Path) -> dict[str, Any]:
        """The run's options; every other run of a sharding trainer saves while it trains on."""
        background = self.seed % 2 == 1 and self.trainer not in ("basic", "ddp", "pipeline")
        return PLAIN | TRAINERS[self.trainer] | {"output_dir": str(folder), "seed": self.seed, "async_save": background}


@dataclass(frozen=True)
class Result:
    """What became of it.

    Attributes:
        struck: the fault happened.
        ending: of the broken run: the exception's name, or ``finished``.
        hung: one of the two runs had to be ended from outside.
        lost: steps between the newest checkpoint, reported or found on the disk, and the one that was gone on from.
        redone: steps made twice.
        finished: the second run came to its end.
        equal: it ended as the undisturbed run did, see :func:`digest`.
    """

    case: FaultCase
    struck: bool
    ending: str
    hung: bool
    lost: int
    redone: int
    finished: bool
    equal: bool


class Witness(Callback):
    """Notes on the main rank where the run began, and what was done and saved, as empty files: they fit a full disk."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()

    def newest(self, what: str) -> int:
        """The last step noted of a kind, or 0."""
        return max((int(path.name.split("-")[1]) for path in self.folder.glob(f"{what}-*")), default=0)

    def _note(self, what: str, trainer: Any) -> None:
        if trainer.is_main:
            (self.folder / f"{what}-{trainer.state.step}").touch()

    def on_train_begin(self, trainer: Any) -> None:
        self._note("began", trainer)

    def on_step_end(self, trainer: Any) -> None:
        self._note("done", trainer)

    def on_save(self, trainer: Any, folder: Path) -> None:
        if not trainer.config.output.async_save:  # else it is only begun
            self._note("saved", trainer)


class FaultInjector(Callback):
    """Lets one rank come to harm in a phase of a step."""

    def __init__(self, case: FaultCase, mark: Path):
        draw = random.Random(repr(case))
        self.case, self.mark = case, mark
        self.rank = draw.randrange(case.ranks)
        steps = {"saving": range(SAVE_STEPS, STEPS, SAVE_STEPS), "evaluating": range(EVAL_STEPS, STEPS, EVAL_STEPS)}
        # Steps count from 1; during a step the state still shows the one before.
        self.step = draw.choice([*steps.get(case.phase, range(1, STEPS))])
        self.operation = draw.randrange(1, 40 if self.rank == 0 else 4)
        self.trainer: Any = None
        self.saving = False

    def strike(self, *_: Any) -> None:
        """Once: a run that goes on by itself is not struck again."""
        if self.trainer.state.step != self.step or self.mark.exists():
            return
        self.mark.touch()
        number = FAULTS[self.case.fault]
        if number:
            os.kill(os.getpid(), number)
        else:  # every write of this process fails from now on, Python's and safetensors' alike
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def on_train_begin(self, trainer: Any) -> None:
        if trainer.rank == self.rank:
            self.trainer = trainer
            getattr(self, f"in_{self.case.phase}")(trainer)

    def at_phase(self, trainer: Any, *names: str) -> None:
        phases = trainer.phases

        def watched(name: str) -> Any:
            if name in names:
                self.strike()
            return phases(name)

        watched.seconds, watched.settle = phases.seconds, phases.settle  # type: ignore[attr-defined]
        trainer.phases = watched

    def in_data(self, trainer: Any) -> None:
        self.at_phase(trainer, "data")

    def in_optimizer(self, trainer: Any) -> None:
        self.at_phase(trainer, "optimizer")

    def in_forward(self, trainer: Any) -> None:
        def forward(module: torch.nn.Module, _: Any) -> None:
            if module.training:
                self.strike()

        self.middle(trainer).register_forward_pre_hook(forward)

    def in_backward(self, trainer: Any) -> None:
        def forward(_: Any, __: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(self.strike)

        self.middle(trainer).register_forward_hook(forward)

    def middle(self, trainer: Any) -> torch.nn.Module:
        """A module about half-way through what this rank holds of the model."""
        norms = [module for module in trainer.model.modules() if isinstance(module, torch.nn.LayerNorm)]
        return norms[len(norms) // 2]

    def in_saving(self, trainer: Any) -> None:
        """Before a file operation that is drawn, or after the last."""
        put = trainer.saver.put

        def hook(event: str, _: Any) -> None:
            if self.saving and event in ("open", "os.mkdir", "os.rename", "os.remove", "os.chmod", "shutil.rmtree"):
                self.operation -= 1
                if not self.operation:
                    self.strike()

        def put_checkpoint(write_files: Callable[[Path], None]) -> None:
            self.saving = trainer.state.step == self.step
            put(write_files)
            self.strike()

        sys.addaudithook(hook)
        trainer.saver.put = put_checkpoint

    def in_evaluating(self, trainer: Any) -> None:
        gather = trainer.ranks.gather

        def gathered(tensors: Any) -> Any:
            self.strike()
            return gather(tensors)

        trainer.ranks.gather = gathered


def train(options: dict[str, Any], callbacks: list[Callback]) -> None:
    """What `course train` does on a rank."""
    torch.set_num_threads(1)
    runs.train(build(options), callbacks)


def attempt(
    case: FaultCase, folder: Path, callbacks: list[Callback], timeout: float = LIMIT, **options: Any
) -> Exception | None:
    """Run until the end or the fault; gives what the launcher raised."""
    try:
        launch(
            train,
            case.options(folder) | options,
            callbacks,
            num_processes=case.ranks,
            timeout=timeout,
            device="cpu",
            stream=False,
        )
    except (RankError, RanksHung, CourseError) as error:
        return error
    return None


def digest(folder: Path) -> str:
    """SHA-256 of the trained model, and of the weights, optimizer states and random streams of the last step."""
    last = checkpoint.latest(folder)
    found = hashlib.sha256(last.name.encode())
    for path in [folder / "model" / "model.safetensors", *sorted(last.glob("*.safetensors"))]:
        found.update(path.name.encode() + path.read_bytes())
    if formats.is_sharded(last):  # a file of shards has them in the order in which they were made
        for name, tensor in sorted(sharded.whole(last, "").items()):
            found.update(name.encode() + tensor.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def undisturbed(trainer: str, seed: int) -> str:
    """The digest of the run without a fault.

    Raises:
        Exception: whatever ended it.
    """
    with TemporaryDirectory() as place:
        if error := attempt(FaultCase(trainer, "none", "none", seed), Path(place), []):
            raise error
        return digest(Path(place))


def broken(case: FaultCase, wanted: str) -> Result:
    """Break a run, go on, and compare its model with the undisturbed run's."""
    with TemporaryDirectory() as place:
        run, mark = Path(place, "run"), Path(place, "struck")
        before, after = Witness(Path(place, "before")), Witness(Path(place, "after"))
        first = attempt(case, run, [before, FaultInjector(case, mark)])
        saved = max([before.newest("saved"), *(int(folder.name[-6:]) for folder in whole(run))])
        second = attempt(case, run, [after])
        began = after.newest("began")
        return Result(
            case,
            mark.exists(),
            type(first).__name__ if first else "finished",
            any(isinstance(error, RanksHung) for error in (first, second)),
            max(0, saved - began),
            max(0, before.newest("done") - began),
            second is None,
            not second and digest(run) == wanted,
        )


def whole(run: Path) -> Iterator[Path]:
    """The newest whole checkpoint of a run, if it has one."""
    if checkpoint.in_order(run):
        yield checkpoint.latest(run)


def matrix(
    trainers: Iterable[str],
    faults: Iterable[str],
    phases: Iterable[str],
    seeds: Iterable[int],
    done: Container[FaultCase] = (),
) -> Iterator[Result]:
    """Every fault in every phase of every trainer's runs, one after the other, but for those that are ``done``."""
    for trainer, seed in itertools.product(trainers, seeds):
        cases = [FaultCase(trainer, fault, phase, seed) for fault, phase in itertools.product(faults, phases)]
        if left := [case for case in cases if case.exists and case not in done]:
            wanted = undisturbed(trainer, seed)
            yield from (broken(case, wanted) for case in left)
