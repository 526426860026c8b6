"""Fixtures `ranks` and `audit` of pytest, there wherever the course is installed, and what tests of engines expect.

``from course_lib.pytest_plugin import assert_moved, assert_order`` gives the two of
:mod:`course_lib.metering.expectations`.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # every session of pytest imports this file, and few need torch for it
    from course_lib.audit import Audited, Layout
    from course_lib.metering.expectations import OnRank

EXPECTATIONS = ("assert_moved", "assert_order")


def __getattr__(name: str) -> Any:
    if name in EXPECTATIONS:
        from course_lib.metering import expectations

        return getattr(expectations, name)
    raise AttributeError(name)


@pytest.fixture
def ranks() -> "Callable[..., Callable[..., list[OnRank]]]":
    """``ranks(2)(function, setup)`` runs a function on CPU ranks over gloo and gives what each did.

    The function, which may be one within the test, is called with what ``setup`` returned, on each rank; the default
    process group is there. For what is given see :func:`course_lib.metering.expectations.on_ranks`.
    """
    from course_lib.metering.expectations import on_ranks

    def of(count: int, timeout: float = 60.0) -> "Callable[..., list[OnRank]]":
        def run(function: Callable[..., Any], setup: Callable[[], Any] | None = None) -> "list[OnRank]":
            return on_ranks(count, function, setup, timeout=timeout)

        return run

    return of


@pytest.fixture
def audit() -> Callable[..., "Audited"]:
    """``audit(make, ranks=4, axes="dp,tp")`` compares one process with every layout, and fails with what is wrong.

    ``make(layout)`` is as :func:`course_lib.audit.audit` takes it; ``layouts`` may be given in place of ``ranks`` and
    ``axes``. Gives the :class:`~course_lib.audit.session.Audited`.
    """
    from course_lib import audit as auditing
    from course_lib.audit import report

    def check(
        make: Any,
        layouts: "Iterable[Layout] | None" = None,
        *,
        ranks: int = 4,
        axes: str = "dp",
        timeout: float = 120.0,
    ) -> "Audited":
        chosen = auditing.layouts(ranks, axes.split(",")) if layouts is None else layouts
        audited = auditing.audit(make, chosen, timeout=timeout)
        if not audited.clean:
            pytest.fail("\n".join(report.lines(audited)), pytrace=False)
        return audited

    return check
