"""Losses and weights of the runs on GPUs beside the plain loop's on the CPU: the same rows, the same seed."""

from benchmarks.hardware import strategies
from benchmarks.hardware.findings import Findings, Settings
from course_lib.config import build
from course_lib.training.run import train


def run(settings: Settings, findings: Findings) -> None:
    """Train once on the CPU, and compare what the section on strategies left."""
    folder = settings.room("parity") / "cpu"
    findings.note(
        f"The largest difference of any of {strategies.STEPS} losses (nats per token) and of any final "
        "weight from one process on the CPU in fp32. At most "
        f"{strategies.LOSS:g} / {strategies.WEIGHT:g} in fp32 without TF32, {strategies.LOW_LOSS:g} / "
        f"{strategies.LOW_WEIGHT:g} in 16 bits."
    )
    train(build(strategies.oracle(folder)))
    wanted = strategies.trace(folder)
    losses = [wanted.losses[step] for step in sorted(wanted.losses)]
    findings.note(f"The CPU's losses: {', '.join(f'{loss:.4f}' for loss in losses)}.")
    table = findings.table("strategy", "engine", "", "precision", "ranks", "loss / weight", "result")
    trained = strategies.read_cases(settings.room("strategies"))
    for case, place in trained:
        if case.precision == "fp16":
            findings.leave_out(case.label, "its scaler may skip steps, which the CPU takes")
            continue
        apart = "", ""
        with findings.trying(f"{case.label}, beside the CPU") as attempt:
            apart = strategies.trace(place).apart(wanted)
            strategies.check(apart, case.precision)
        table.row(
            case.strategy,
            case.engine,
            case.name,
            case.precision.replace("no", "fp32"),
            case.ranks,
            strategies.shown(apart) if apart[0] != "" else "",
            attempt.word,
        )
    here = [case for case, _ in trained]
    for case in strategies.cases(settings):
        if case not in here:
            findings.leave_out(case.label, "it was not trained")
    if not trained:
        findings.leave_out("all of it", "no run on a GPU came to its end")  # why not, the section on strategies says
