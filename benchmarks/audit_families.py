"""Transformers' `DistributedConfig` under `course audit`: families of models by tp, fsdp and experts.

python -m benchmarks.audit_families      # from the repository's root; writes benchmarks/audit-families.md
"""

from benchmarks.harness import options, publish, table
from course_lib.audit import Audited, Layout, audit
from course_lib.errors import CourseError
from course_lib.training.audited_models import ModelOnEngine

DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "olmo2", "cohere", "granite", "phi3")
EXPERTS = ("olmoe", "mixtral", "qwen3_moe", "qwen2_moe")
LAYOUTS = (Layout(tp=2), Layout(shard=2), Layout(shard=2, tp=2))


def audited(family: str) -> dict[str, Audited]:
    """The layers split, and for a mixture its experts too; by what the table adds to the layout."""
    if family not in EXPERTS:
        return {"": audit(ModelOnEngine(family, "transformers"), LAYOUTS)}
    split = ModelOnEngine(family, "transformers", split_experts=True)
    return {
        "": audit(ModelOnEngine(family, "transformers"), [*LAYOUTS, Layout(ep=2)]),
        ", experts one by one": audit(split, [Layout(tp=2)]),
    }


def rows(family: str) -> list[tuple]:
    """A row of the table per layout; the last cell is empty where nothing is wrong."""
    try:
        runs = audited(family)
    except CourseError as error:
        return [(family, "", "", "", f"not run: {' '.join(str(error).split())[:300]}")]
    found: list[tuple] = []
    for what, run in runs.items():
        for verdict in run.verdicts:
            said = ""
            if verdict.wrong:
                said = verdict.wrong[0].sentence
            elif not verdict.clean:
                said = f"weights apart by {verdict.weights_apart:.1e}, losses by {verdict.loss_apart:.1e}"
            agree = f"{len(verdict.gradients) - len(verdict.wrong)} of {len(verdict.gradients)}"
            found.append((family, f"{verdict.layout}{what}", f"{verdict.losses_apart[0]:.0e}", agree, said))
        found += [(family, f"{layout}{what}", "", "", f"not run: {why}") for layout, why in run.refused.items()]
    return found


def main() -> None:
    """Audit all, and write the table."""
    options(__doc__)
    publish(
        "audit-families",
        "Transformers' `DistributedConfig` under `course audit`",
        ("torch", "transformers"),
        "Models of two layers, built from their own config classes; shard is its FSDP, ep its experts over "
        "the ranks of FSDP.",
        table(
            "family | layout | loss apart | gradients that agree | said",
            [row for family in (*DENSE, *EXPERTS) for row in rows(family)],
        ),
    )


if __name__ == "__main__":
    main()
