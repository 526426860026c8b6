"""Transformers' `DistributedConfig` under `course audit`: families of models by tp, fsdp and experts.

python -m benchmarks.audit_families      # from the repository's root; writes benchmarks/audit-families.md
"""

from pathlib import Path

from course_lib.audit import Audited, Layout, audit
from course_lib.errors import CourseError
from course_lib.system import machine
from course_lib.training.audited_models import ModelOnEngine
from course_lib.writing import write_text

HERE = Path(__file__).parent
DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "olmo2", "cohere", "granite", "phi3")
EXPERTS = ("olmoe", "mixtral", "qwen3_moe", "qwen2_moe")
LAYOUTS = (Layout(tp=2), Layout(shard=2), Layout(shard=2, tp=2))


def audited(family: str) -> tuple[Audited, Audited | None]:
    """The layers split, and for a mixture its experts too."""
    layers = audit(ModelOnEngine(family, "transformers"), [*LAYOUTS, *([Layout(ep=2)] if family in EXPERTS else [])])
    if family not in EXPERTS:
        return layers, None
    return layers, audit(ModelOnEngine(family, "transformers", split_experts=True), [Layout(tp=2)])


def rows(family: str) -> list[str]:
    """A line of the table per layout."""
    try:
        runs = audited(family)
    except CourseError as error:
        return [f"| {family} | | | | not run: {' '.join(str(error).split())[:300]} |"]
    lines = []
    for run, what in zip(runs, ("", ", experts one by one"), strict=True):
        for verdict in run.verdicts if run else []:
            agree = len(verdict.gradients) - len(verdict.wrong)
            said = (
                verdict.wrong[0].sentence
                if verdict.wrong
                else ""
                if verdict.clean
                else (f"weights apart by {verdict.weights_apart:.1e}, losses by {verdict.loss_apart:.1e}")
            )
            lines.append(
                f"| {family} | {verdict.layout}{what} | {verdict.losses_apart[0]:.0e} | "
                f"{agree} of {len(verdict.gradients)} | {said} |"
            )
        lines += [
            f"| {family} | {layout}{what} | | | not run: {why} |"
            for layout, why in (run.refused.items() if run else ())
        ]
    return lines


def main() -> None:
    """Audit all, and write the table."""
    lines = [line for family in (*DENSE, *EXPERTS) for line in rows(family)]
    text = (
        f"# Transformers' `DistributedConfig` under `course audit`\n\n"
        f"{machine.measured_on('torch', 'transformers')}\n\n"
        "Models of two layers, built from their own config classes; shard is its FSDP, ep its experts over "
        "the ranks of FSDP.\n\n"
        "| family | layout | loss apart | gradients that agree | said |\n|---|---|---|---|---|\n"
        + "\n".join(lines)
        + "\n"
    )
    write_text(HERE / "audit-families.md", text)
    print(text)


if __name__ == "__main__":
    main()
