"""`course audit` on wrong gradients reported in other projects, rebuilt small.

python -m benchmarks.audit_planted      # from the repository's root; writes benchmarks/audit-planted.md
"""

from pathlib import Path

from course_lib.audit import audit
from course_lib.system import machine
from course_lib.writing import write_text
from tests.audit.upstream import TOLD

HERE = Path(__file__).parent


def main() -> None:
    """Audit each, and write the table."""
    rows = []
    for told in TOLD:
        (verdict,) = audit(told.make, [told.layout]).verdicts
        named = [finding.sentence for finding in verdict.wrong if finding.name in told.names]
        said = named[0] + (f"; so {len(named) - 1} more" if len(named) > 1 else "")
        rows.append(f"| {told.where} | {told.what} | {told.layout} | {verdict.losses_apart[0]:.0e} | {said} |")
    text = (
        f"# Planted gradients\n\n{machine.measured_on('torch')}\n\n"
        "Small trainings in our own words, after what these issues and pull requests tell "
        "(`tests/audit/upstream.py`); that the audit says so of each is a test. The loss is that of the first "
        "step.\n\n"
        "| told in | what went wrong | layout | loss apart | the audit says |\n|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )
    write_text(HERE / "audit-planted.md", text)
    print(text)


if __name__ == "__main__":
    main()
