"""Something else in the place of a library's name, or of an environment variable, for a while.

This is patching, by whatever name, and the last resort: only where another library acts by itself and has neither an
argument nor a hook nor a class to derive from. What is ours gets one of those instead. Each user says why beside its
call, and docs/process-settings.md has the list.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[Any]:
    """While the block runs, ``owner.name`` is ``new``, for all threads; gives what it was.

    Args:
        owner: a module, a class or an object.
        name: of an attribute that it has.
        new: what others find there meanwhile.
    Raises:
        AttributeError: the owner has no such attribute, in this version of its library.
    """
    before = getattr(owner, name)
    is_own = name in vars(owner)  # else a base class's, which shows again once this one is gone
    kept = vars(owner).get(name)  # not `before`, which of a class's static method is the function in it
    setattr(owner, name, new)
    try:
        yield before
    finally:
        if is_own:
            setattr(owner, name, kept)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """While the block runs, these variables are set; afterwards the environment is as it was, whatever was changed."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
