"""Lessons by papermill, on the GPUs where a lesson can use as many as there are."""

import subprocess
import sys
from pathlib import Path

import nbformat

from benchmarks.hardware.findings import Findings, Settings, failed, first_line
from benchmarks.hardware.processes import ROOT

GPUS = {"01_basic_loop": 1, "05_zero_stages": 4}
"""GPUs that a lesson wants for its default parameters; all others want two."""
AUTO = ("02_data_parallel", "03_accelerate", "04_distributed_evaluation", "06_fsdp", "08_tensor_and_hybrid")
"""Lessons that also start more ranks than that: their parameter ``device`` is auto, all others' cuda."""
ON_CPU = ("10_faults_and_hangs",)
"""Lessons without that parameter."""
ALONE = ("01_basic_loop", "09_plan_and_simulate")
"""Quick ones on one GPU: one that uses it, and one whose ranks are on the CPU of a machine that has one."""
TOGETHER = ("01_basic_loop", "08_tensor_and_hybrid", "09_plan_and_simulate")
"""Quick ones on several."""
SHORTER = {"01_basic_loop": {"steps": 10, "model": "tiny-bert"}}
"""Parameters of the quick run."""
SECONDS = 240
"""For one lesson; with ``--full`` five times that."""


def run(settings: Settings, findings: Findings) -> None:
    """Execute the lessons, each in a process of its own."""
    everything = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
    quick = ALONE if settings.gpus == 1 else TOGETHER
    chosen = everything if settings.full else [name for name in everything if name in quick and not settings.tiny]
    table = findings.table("lesson", "parameters", "seconds", "result")
    for name in chosen:
        if findings.is_late(name):
            continue
        parameters = {} if settings.full else dict(SHORTER.get(name, {}))
        if name not in ON_CPU and settings.gpus >= GPUS.get(name, 2):
            parameters["device"] = "auto" if name in AUTO else "cuda"
        with findings.trying(f"lesson {name}") as attempt:
            _execute(
                ROOT / "notebooks" / f"{name}.ipynb",
                parameters,
                settings.room("lessons") / name,
                SECONDS * (5 if settings.full else 1),
            )
        shown = ", ".join(f"{key} = {value}" for key, value in parameters.items()) or "its own"
        table.row(name, shown, f"{attempt.seconds:.0f}", attempt.word)
    if settings.tiny:
        with findings.trying("a notebook of one cell") as attempt:
            folder = settings.room("lessons") / "one-cell"
            _execute(_one_cell(folder), {"device": "cuda"}, folder, SECONDS)
        table.row("(a notebook of one cell)", "device = cuda", f"{attempt.seconds:.0f}", attempt.word)
    if rest := [name for name in everything if name not in chosen]:
        findings.leave_out(", ".join(rest), "`--full` runs all lessons")
    findings.note(
        "A lesson whose parameters do not name a device starts its ranks on the CPU, on this machine with GPUs."
    )


def _one_cell(folder: Path) -> Path:
    """A notebook that adds on its device, in the place of a lesson, which takes half a minute."""
    folder.mkdir(parents=True)
    cells = [
        nbformat.v4.new_code_cell("device = 'cpu'", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("import torch\nassert torch.ones(3, device=device).sum().item() == 3"),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "one.ipynb")
    return folder / "one.ipynb"


def _execute(notebook: Path, parameters: dict[str, object], folder: Path, seconds: float) -> None:
    """Papermill, as a user calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    given = " ".join(f"-p {key} {value}" for key, value in parameters.items())
    command = [sys.executable, "-m", "papermill", str(notebook), str(folder / "done.ipynb"), "--cwd", str(folder)]
    command += f"{given} --no-progress-bar -k python3".split()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    print(ended.stdout, ended.stderr)
    if ended.returncode:
        raised = [line for line in ended.stderr.splitlines() if line[:1].isalpha() and "Error" in line]
        why = first_line(raised[-1] if raised else ended.stderr[-300:])
        raise failed(why, why)
