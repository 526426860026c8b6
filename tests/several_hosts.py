"""Hosts for the tests of a file."""

import contextlib
from collections.abc import Iterator

import pytest

from course_lib.errors import LaunchError
from testing.virtual_hosts import Host, hosts


@contextlib.contextmanager
def hosts_or_skip(count: int) -> Iterator[tuple[Host, ...]]:
    """So many hosts; where there can be none, what asks for them says that it was not run, and why."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(hosts(count))
        except LaunchError as error:
            pytest.skip(f"not run: {error}")
        yield found
