"""The fixture `audit` of pytest, there wherever the course is installed: a gradient on every layout, as a test."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # every session of pytest imports this file, and few audit
    from course_lib.audit import Audited, Layout


@pytest.fixture
def audit() -> Callable[..., "Audited"]:
    """``audit(make, ranks=4, axes="dp,tp")`` compares one process with every layout, and fails with what is wrong.

    ``make(layout)`` is as :func:`course_lib.audit.audit` takes it; ``layouts`` may be given in place of ``ranks`` and
    ``axes``. Gives the :class:`~course_lib.audit.session.Audited`.
    """
    from course_lib import audit as auditing
    from course_lib.audit import report

    def check(make: Any, layouts: "Iterable[Layout] | None" = None, *, ranks: int = 4, axes: str = "dp",
              timeout: float = 120.0) -> "Audited":
        chosen = auditing.layouts(ranks, axes.split(",")) if layouts is None else layouts
        audited = auditing.audit(make, chosen, timeout=timeout)
        if not audited.clean:
            pytest.fail("\n".join(report.lines(audited)), pytrace=False)
        return audited

    return check
