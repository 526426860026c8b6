"""The fixture `audit`: passes over what is right, fails with what is wrong."""

import pytest

from tests.audit import subjects

pytest_plugins = ["course_lib.pytest_plugin"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def test_a_right_loop_passes_and_a_wrong_one_fails_with_its_sentence(audit):
    assert [str(verdict.layout) for verdict in audit(subjects.right, ranks=3).verdicts] == ["dp2", "dp3"]
    with pytest.raises(pytest.fail.Exception, match="`head.bias`: 2 of the reference, the size of dp: summed over it"):
        audit(subjects.summed, ranks=2)
