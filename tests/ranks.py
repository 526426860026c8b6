"""Real ranks for tests: forked from pytest's process, over gloo on the CPU, and gone before the test goes on."""

import functools
import importlib
import inspect

import pytest
import torch
import torch.distributed as dist

from course_lib.launching.launch import launch


def joined(function, *args, **kwargs):
    """Calls the function within a process group of all ranks."""
    dist.init_process_group("gloo")
    try:
        return function(*args, **kwargs)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks():
    """A function (n) that gives a call on n ranks: ``ranks(4)(function, *args)`` is what each rank returned, by rank.

    What a rank raises is a ``RankError`` here, with the rank's traceback; a ``CourseError`` is raised as it was.
    ``ranks(4, join=True)`` has the ranks in a process group; any other option is one of ``launch``.
    """

    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))  # imports sympy, here once and not in every rank,
    importlib.import_module("torch._dynamo")  # which an optimizer imports

    def on(number, join=False, **options):
        call = functools.partial(launch, num_processes=number, **{"device": "cpu", "stream": False} | options)
        return functools.partial(call, joined) if join else call

    return on


def on_ranks(*numbers, **options):
    """Makes a test run on every one of N ranks in a process group, once for each of the numbers.

    What it asserts is asserted on every rank, and told with the rank's number. It may ask for fixtures; each rank has
    pytest's own objects, forked, and what a rank does to them is gone with it.
    """

    def decorate(test):
        own = list(inspect.signature(test).parameters.values())

        @pytest.mark.parametrize("number_of_ranks", numbers, ids=lambda number: f"{number}-ranks")
        @functools.wraps(test)
        def on_each_rank(ranks, number_of_ranks, **fixtures):
            ranks(number_of_ranks, join=True, **options)(test, **fixtures)

        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("ranks", "number_of_ranks")]
        on_each_rank.__signature__ = inspect.Signature([*own, *added])
        return on_each_rank

    return decorate
