"""Cost of breaking training on purpose: checkpoints under kills and damage, broken runs, and goodput.

    python benchmarks/reliability.py storage runs goodput     # hours
    python benchmarks/reliability.py storage runs goodput --quick
    python benchmarks/reliability.py runs --trainers fsdp pipeline --seeds 2
    python benchmarks/reliability.py runs --journal benchmarks/reliability-runs.jsonl  # goes on from there

`storage` kills a process that saves for ever at random moments, and flips and cuts the bits of a checkpoint; beside it,
torch.distributed.checkpoint saving into one folder. `runs` is every fault in every phase of every trainer's runs
(:mod:`testing.fault_injection`). `goodput` trains under kills at random moments, 120 per hour on average, each
followed by a new start from the newest checkpoint. Each writes its table, benchmarks/reliability-PART.md; `--quick`
shows one of a handful of cases instead.
"""

import contextlib
import importlib
import itertools
import json
import os
import random
import signal
import threading
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.harness import options, publish, table
from course_lib.parallel.sharding import Shard
from course_lib.training.checkpoints import checkpoint, safetensors_tree, sharded
from course_lib.writing import write_text
from testing import fault_injection
from testing.fault_injection import FAULTS, PHASES, TRAINERS, FaultCase, Result

ELEMENTS = 200_000
KILLS_PER_HOUR = 120


def keep(args: Namespace, part: str, *paragraphs: str) -> None:
    """Write one part's page; a quick one is shown and not kept."""
    if args.quick:
        print(*paragraphs, sep="\n\n", flush=True)
    else:
        publish(f"reliability-{part}", f"Reliability: {part}", ("torch", "transformers", "deepspeed"), *paragraphs)


@dataclass(frozen=True)
class System:
    """A way of keeping checkpoints.

    Attributes:
        save: writes the checkpoint of a step, whose every number is that step.
        load: the different numbers that the newest one holds; raises where it refuses it.
    """

    name: str
    save: Callable[[Path, int], None]
    load: Callable[[Path], set[float]]

    def loads(self, run: Path) -> set[float]:
        """What it holds, or nothing where it is refused."""
        try:
            return self.load(run)
        except (Exception, CheckpointException):  # a torn file leads torch's reader to errors of any kind
            return set()


def save_ours(run: Path, step: int) -> None:
    """As the trainers do: whole tensors, pieces, numbers."""
    weights = torch.full((ELEMENTS,), float(step))

    def files(folder: Path) -> None:
        safetensors_tree.save({"step": step, "weights": weights}, folder / "model.safetensors")
        sharded.save({"model/w": Shard(weights.shape, 0, weights)}, folder)
        (folder / "state.json").write_text(str(step))

    checkpoint.write(run, step, files)
    checkpoint.prune(run, 2)


def load_ours(run: Path) -> set[float]:
    """As the next run does."""
    checkpoint.tidy(run)
    folder = checkpoint.latest(run)
    found, pieces = safetensors_tree.load(folder / "model.safetensors"), sharded.whole(folder, "model/")
    return {
        found["step"],
        float((folder / "state.json").read_text()),
        *found["weights"].unique().tolist(),
        *pieces["w"].unique().tolist(),
    }


def save_one_folder(run: Path, step: int) -> None:
    """Into the same folder again and again."""
    dcp.save({"w": torch.full((ELEMENTS,), float(step)), "step": torch.tensor(step)}, checkpoint_id=run / "one")


def load_one_folder(run: Path) -> set[float]:
    """From that folder."""
    found = {"w": torch.zeros(ELEMENTS), "step": torch.tensor(0)}
    dcp.load(found, checkpoint_id=run / "one")
    return {float(found["step"]), *found["w"].unique().tolist()}


OURS = System("this course's", save_ours, load_ours)
ONE_FOLDER = System("torch.distributed.checkpoint, one folder", save_one_folder, load_one_folder)


def unloadable(system: System, kills: int) -> int:
    """How many of so many SIGKILLs, at random moments of saving, left nothing that loads and is of one step."""
    draw, lost = random.Random(0), 0
    for _ in range(kills):
        with TemporaryDirectory() as place:
            run = Path(place)
            system.save(run, 1)
            begin = time.perf_counter()
            system.save(run, 2)
            period = time.perf_counter() - begin
            pid = os.fork()
            if not pid:
                for step in itertools.count(3):
                    system.save(run, step)
            time.sleep(draw.uniform(0, 4 * period))
            os.kill(pid, signal.SIGKILL)
            ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert ended == -signal.SIGKILL, f"the process that saves ended by itself, with {ended}"
            lost += len(system.loads(run)) != 1
    return lost


def unnoticed(system: System, damage: Callable[[random.Random, bytes], bytes], times: int) -> int:
    """How many times a checkpoint loaded although one of its files was damaged, at a random byte of them all."""
    draw, loaded = random.Random(0), 0
    with TemporaryDirectory() as place:
        run = Path(place)
        system.save(run, 1)
        files = [path for path in run.rglob("*") if path.is_file() and path.name != checkpoint.LATEST]
        sizes = [path.stat().st_size for path in files]
        for _ in range(times):
            path = draw.choices(files, sizes)[0]
            whole = path.read_bytes()
            path.write_bytes(damage(draw, whole))
            loaded += bool(system.loads(run))
            path.write_bytes(whole)
    return loaded


def flipped(draw: random.Random, whole: bytes) -> bytes:
    """One bit is the other."""
    bit = draw.randrange(8 * len(whole))
    return whole[: bit // 8] + bytes([whole[bit // 8] ^ (1 << bit % 8)]) + whole[bit // 8 + 1 :]


def cut(draw: random.Random, whole: bytes) -> bytes:
    """The end is missing."""
    return whole[: draw.randrange(len(whole))]


def storage(args: Namespace) -> None:
    """Kills, flips and truncations."""
    for known in ("torch.distributed is disabled", "Detected an existing checkpoint"):  # both are meant
        warnings.filterwarnings("ignore", message=known)
    rows = []
    for system, (kills, flips, cuts) in (
        (OURS, (30, 50, 20) if args.quick else (1000, 1000, 200)),
        (ONE_FOLDER, (20, 20, 10) if args.quick else (60, 200, 60)),
    ):
        lost = f"{unloadable(system, kills)} of {kills}"
        bits, ends = unnoticed(system, flipped, flips), unnoticed(system, cut, cuts)
        rows.append((system.name, lost, f"{bits} of {flips}", f"{ends} of {cuts}"))
    keep(
        args,
        "storage",
        f"{4 * ELEMENTS / 2**20:.1f} MiB saved in a loop, each kill at a random moment of four savings.",
        table("checkpoints | unloadable after SIGKILL | flipped bits not noticed | truncations not noticed", rows),
    )


def runs(args: Namespace) -> None:
    """Every case, in one table by trainer and fault."""
    faults, phases, seeds = list(FAULTS), list(PHASES), range(args.seeds)
    if args.quick:
        faults, phases, seeds = ["SIGKILL", "full disk"], ["backward", "saving"], range(1)
    lines = args.journal.read_text(encoding="utf-8").splitlines() if args.journal and args.journal.exists() else []
    found = [Result(**each | {"case": FaultCase(**each["case"])}) for each in map(json.loads, lines)]
    about = (
        f"{fault_injection.STEPS} steps, a checkpoint every {fault_injection.SAVE_STEPS}, an evaluation every "
        f"{fault_injection.EVAL_STEPS}; phases {', '.join(phases)}; seeds {list(seeds)}. "
        "A run that a single process trains has nobody to notice that it is stopped."
    )
    for slow in ("deepspeed", "mlflow", "torch._inductor.compile_fx"):  # once here, and not on each rank of each run
        importlib.import_module(slow)
    if found:  # and perhaps nothing is left to run
        keep(args, "runs", about, table(RUNS, of_runs(found)))
    for result in fault_injection.matrix(args.trainers, faults, phases, seeds, {each.case for each in found}):
        found.append(result)
        print(result, flush=True)
        if args.journal:
            write_text(args.journal, "".join(f"{json.dumps(asdict(each))}\n" for each in found))
        keep(args, "runs", about, table(RUNS, of_runs(found)))


RUNS = (
    "trainer | fault | runs broken | gone on | hangs | steps lost beyond the last checkpoint | wrong resumes | "
    "most steps made twice | the broken runs ended by"
)


def of_runs(found: list[Result]) -> Iterator[tuple]:
    """Counts by trainer and fault, and their sum."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in found:
        groups.setdefault((result.case.trainer, result.case.fault), []).append(result)
    for group, results in [*groups.items(), (("all", "all"), found)]:
        endings = Counter(result.ending for result in results).most_common()
        yield (
            *group,
            f"{sum(r.struck for r in results)} of {len(results)}",
            sum(r.finished for r in results),
            sum(r.hung for r in results),
            sum(r.lost for r in results),
            sum(r.finished and not r.equal for r in results),
            max(r.redone for r in results),
            ", ".join(f"{name} {count}" for name, count in endings),
        )


class Killer(threading.Thread):
    """Kills a process of this one's at random moments, as many an hour as asked for, until told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.kills, self.over = 0, threading.Event()

    def run(self) -> None:
        draw = random.Random(3)
        while not self.over.wait(draw.expovariate(KILLS_PER_HOUR / 3600)):
            here = psutil.Process()
            with contextlib.suppress(psutil.NoSuchProcess):  # a rank that has just ended
                if ranks := [child for child in here.children() if child.cmdline() == here.cmdline()]:
                    draw.choice(ranks).kill()
                    self.kills += 1


def calm_seconds(case: FaultCase, folder: Path, options: dict[str, object]) -> float:
    """Seconds of a run that nobody kills."""
    begin = time.perf_counter()
    if error := fault_injection.attempt(case, folder, [], 7200, **options):
        raise error
    return time.perf_counter() - begin


def goodput(args: Namespace) -> None:
    """The same run with and without kills."""
    steps = 100 if args.quick else args.steps
    never = {"eval_steps": 0, "num_epochs": 10**6, "logging_steps": 40}
    more = never | {"max_steps": steps, "save_steps": args.save_steps}
    rows = []
    for trainer in args.trainers[-1:] if args.quick else args.trainers:
        case = FaultCase(trainer, "none", "none", 0)
        with TemporaryDirectory() as place:
            killed = Path(place, "killed")
            calm = [calm_seconds(case, Path(place, "before"), more)]
            killer, starts, begin = Killer(), 1, time.perf_counter()
            killer.start()
            while error := fault_injection.attempt(case, killed, [], 7200, **more):
                if starts > killer.kills:
                    raise error  # of its own
                starts += 1
            killer.over.set()
            seconds = time.perf_counter() - begin
            calm.append(calm_seconds(case, Path(place, "after"), more))
            equal = len({fault_injection.digest(Path(place, each)) for each in ("before", "killed", "after")}) == 1
        rows.append(
            (
                trainer,
                steps,
                ", ".join(f"{each:.0f} s" for each in calm),
                f"{seconds:.0f} s",
                killer.kills,
                starts,
                f"{100 * sum(calm) / 2 / seconds:.0f} %",
                "equal to the bit" if equal else "DIFFERENT",
            )
        )
        keep(
            args,
            "goodput",
            f"{KILLS_PER_HOUR} kills per hour on average, at random moments of a random rank; a "
            f"new start is a fork of a process that has imported everything. A checkpoint every {args.save_steps} "
            "steps. Undisturbed: the same run, with as many checkpoints, before and after. Goodput: the mean of "
            "its times by that with kills.",
            table("trainer | steps | undisturbed | with kills | kills | starts | goodput | final weights", rows),
        )


def main() -> None:
    """Run the parts that were asked for."""
    parts = {"storage": storage, "runs": runs, "goodput": goodput}
    args = options(
        __doc__,
        parts={"nargs": "+", "choices": list(parts)},
        quick={"default": False, "help": "a handful of each"},
        trainers={"nargs": "+", "choices": TRAINERS, "default": list(TRAINERS)},
        seeds={"default": 4, "help": "runs of every fault in every phase of a trainer"},
        journal={"default": None, "type": Path, "help": "results of `runs` as JSON lines: a stopped run goes on there"},
        steps={"default": 6000, "help": "steps of a goodput run"},
        save_steps={"default": 10, "help": "steps between two checkpoints of a goodput run"},
    )
    torch.set_num_threads(1)
    for part in args.parts:
        parts[part](args)


if __name__ == "__main__":
    main()
