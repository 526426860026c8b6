"""What the cases of this room assert is told with its values."""

import pytest

pytest.register_assert_rewrite("tests.parallel.fsdp_cases")
