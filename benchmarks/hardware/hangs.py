"""The watchdog over NCCL: ranks that hang in several ways, and whom the reports blame."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.hardware.findings import Findings, Settings
from course_lib.errors import CourseError
from course_lib.hangs.watchdog import Watchdog, read_reports
from course_lib.launching.launch import RankError, RanksHung, launch

CULPRIT, STEPS, STEP = 1, 4, 2
PATIENCE = 4.0
"""Seconds without progress after which the watchdog reports."""
SECONDS = 90


def sleeps() -> None:
    """The rank does something else, for ever."""
    while True:
        time.sleep(0.05)


def is_stopped() -> None:
    """The rank's process stands still."""
    os.kill(os.getpid(), signal.SIGSTOP)


def is_killed() -> None:
    """The rank is gone."""
    os.kill(os.getpid(), signal.SIGKILL)


def skips() -> None:
    """The rank leaves a collective out, and is one behind from there on."""


FAULTS: dict[str, Callable[[], None]] = {
    "sleeps": sleeps,
    "is stopped": is_stopped,
    "is killed": is_killed,
    "leaves out a collective": skips,
}


def on_rank(fault: str, is_async: bool, folder: Path) -> None:
    """Steps of one all-reduce each, as of gradients; one rank comes to harm before that of step 2."""
    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    gradients = torch.ones(1 << 16, device=device)
    dist.all_reduce(gradients)
    torch.cuda.synchronize()
    with Watchdog(PATIENCE, folder) as dog:
        for step in range(STEPS):
            dog.beat(step)
            if dist.get_rank() == CULPRIT and step == STEP:
                FAULTS[fault]()
                if FAULTS[fault] is skips:
                    continue
            if is_async:
                dist.all_reduce(gradients, async_op=True).wait()
            else:
                dist.all_reduce(gradients)
            gradients.sum().item()  # as a trainer reads its loss: the host waits for the GPU
    if dist.get_rank() == CULPRIT:
        time.sleep(SECONDS)  # it has no group to leave while the others hang


def blamed(fault: str, is_async: bool, ranks: int, folder: Path) -> tuple[set[int], int, str]:
    """Run it: the ranks that the reports name, how many reports there are, and the first report's sentence."""
    try:
        launch(on_rank, fault, is_async, folder, num_processes=ranks, device="cuda", timeout=SECONDS)
    except (RankError, RanksHung, CourseError) as error:
        print(str(error)[:2000], flush=True)
    reports = read_reports(folder)
    named = {verdict.rank for report in reports for verdict in report.verdicts}
    return named, len(reports), reports[0].summary if reports else "no report was written"


def run(settings: Settings, findings: Findings) -> None:
    """Every fault with synchronous and asynchronous collectives; the culprit has to be named, alone."""
    if settings.gpus < 2:
        findings.leave_out(
            "all of it", "there is one GPU, and NCCL gives each rank one of its own: a rank alone waits for nobody"
        )
        return
    findings.note(
        f"{settings.gpus} ranks, one all-reduce per step; rank {CULPRIT} comes to harm before that of step "
        f"{STEP}. The watchdog's reports, {PATIENCE:g} s later, have to name rank {CULPRIT} and no other."
    )
    table = findings.table("rank 1", "collectives", "named", "reports", "the report's words", "result")
    for fault in FAULTS:
        for is_async in (False, True):
            kind = "asynchronous" if is_async else "synchronous"
            named, reports, words = set(), 0, ""
            with findings.trying(f"rank {CULPRIT} {fault}, {kind} collectives") as attempt:
                folder = settings.room("hangs") / f"{fault} {kind}".replace(" ", "-")
                named, reports, words = blamed(fault, is_async, settings.gpus, folder)
                if named != {CULPRIT}:
                    raise AssertionError(f"the reports name {sorted(named) or 'nobody'}: {words}")
            table.row(
                fault,
                kind,
                ", ".join(f"rank {rank}" for rank in sorted(named)) or "nobody",
                reports,
                words,
                attempt.word,
            )
