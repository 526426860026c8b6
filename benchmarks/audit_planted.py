"""`course audit` on wrong gradients reported in other projects, rebuilt small.

python -m benchmarks.audit_planted      # from the repository's root; writes benchmarks/audit-planted.md
"""

from benchmarks.harness import options, publish, table
from course_lib.audit import audit
from tests.audit.upstream import TOLD


def main() -> None:
    """Audit each, and write the table."""
    options(__doc__)
    rows = []
    for told in TOLD:
        (verdict,) = audit(told.make, [told.layout]).verdicts
        named = [finding.sentence for finding in verdict.wrong if finding.name in told.names]
        said = named[0] + (f"; so {len(named) - 1} more" if len(named) > 1 else "")
        rows.append((told.where, told.what, told.layout, f"{verdict.losses_apart[0]:.0e}", said))
    publish(
        "audit-planted",
        "Planted gradients",
        ("torch",),
        "Small trainings in our own words, after what these issues and pull requests tell "
        "(`tests/audit/upstream.py`); that the audit says so of each is a test. The loss is that of the first "
        "step.",
        table("told in | what went wrong | layout | loss apart | the audit says", rows),
    )


if __name__ == "__main__":
    main()
