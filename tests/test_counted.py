"""No test that `make test` runs demands how a measured time, or the memory that the system gives, comes out.

A machine that is busy turns any of these round. Whoever waits for others does so by ``tests/waiting.py``; what is
allowed besides is in ALLOWED, each with its reason. benchmarks/ measures, and `make long` may.
"""

import ast
import re
import shlex
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
LEFT_OUT = ("gpu", "gpu_sim")  # measure on GPUs; tests/gpu/test_time.py plants its times
CLOCKS = set(
    shlex.split(
        "perf_counter perf_counter_ns monotonic monotonic_ns process_time thread_time cpu_percent cpu_times getrusage"
        " memory_info memory_full_info anonymous_bytes peak_memory_bytes"
    )
)
"""Functions whose results are noisy; ``time.time`` too."""
SAMPLED = {"rss", "uss", "pss", "st_mtime", "ru_maxrss", "elapsed"}
"""Attributes that are."""
ALLOWED = {
    "system/test_machine.py::test_peak_memory_grows_with_what_is_held": "the subject is the system's own figure; "
    "pages that the test writes to are resident, 200 MB of them",
    "system/test_machine.py::test_peak_memory_is_the_process_own_and_not_its_launcher_s": "the same: an interpreter "
    "with two modules against a test that holds 600 MB more than it",
}


def of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def is_long(node):
    """Whether a module or a function is marked, not only one of a function's cases."""
    marks = getattr(node, "decorator_list", [])
    if isinstance(node, ast.Module):
        marks = [part.value for part in node.body if isinstance(part, ast.Assign) and "pytestmark" in names_of(part)]
    each = [part for mark in marks for part in (mark.elts if isinstance(mark, ast.List) else [mark])]
    return any(ast.unparse(mark) == "pytest.mark.long" for mark in each)


def names_of(node):
    """Names and attributes in an expression."""
    return {
        part.id if isinstance(part, ast.Name) else part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Name | ast.Attribute)
    }


def is_noisy(node, noisy):
    text = ast.unparse(node)
    return bool(names_of(node) & (CLOCKS | SAMPLED | noisy)) or "time.time()" in text


def noisy_comparisons(function):
    """Comparisons by size, in a function's assertions, of what is measured."""
    noisy = set()
    for _ in range(3):  # through names that are set from names
        for each in ast.walk(function):
            if (
                isinstance(each, ast.Assign | ast.AugAssign | ast.AnnAssign)
                and each.value is not None
                and is_noisy(each.value, noisy)
            ):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                noisy |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    for each in ast.walk(function):
        if not isinstance(each, ast.Assert):
            continue
        for compared in ast.walk(each.test):
            if (
                isinstance(compared, ast.Compare)
                and is_noisy(compared, noisy)
                and any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in compared.ops)
            ):
                yield ast.unparse(compared)


def files():
    return [
        path
        for path in sorted(TESTS.rglob("*.py"))
        if path.relative_to(TESTS).parts[0] not in LEFT_OUT and path != Path(__file__)
    ]


def test_no_assertion_is_on_a_clock_or_on_the_systems_memory():
    found = {}
    for path in files():
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in (*CLOCKS, *SAMPLED, "time.time()")) or is_long(tree := ast.parse(text)):
            continue
        for function in ast.walk(tree):
            if (
                isinstance(function, ast.FunctionDef)
                and not is_long(function)
                and (comparisons := list(noisy_comparisons(function)))
            ):
                found[f"{path.relative_to(TESTS)}::{function.name}"] = comparisons
    assert {name: seen for name, seen in found.items() if name not in ALLOWED} == {}
    assert found.keys() == ALLOWED.keys(), "what is no longer there is no longer allowed"


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("start = time.perf_counter()\n assert time.perf_counter() - start < 15", 1),
        ("took = time.monotonic() - begin\n assert all(ok) and 0.2 < took", 1),
        ("assert psutil.Process().memory_info().rss < 10", 1),
        ("assert time.time() - began > 3", 1),
        ("lines, end = path, time.monotonic() + 120\n assert time.monotonic() < end and alive", 1),
        ("start = time.perf_counter()\n assert start == 3", 0),
        ("count = len(calls)\n assert count < 3", 0),
    ],
)
def test_planted_assertions_are_found(body, seen):
    (function,) = ast.parse(f"def test():\n {body}").body
    assert len(list(noisy_comparisons(function))) == seen


def test_nothing_is_downloaded_by_a_test_that_is_not_long():
    """What installs or downloads is in fixtures of these files; who asks for one is marked."""
    looked = 0
    for path in files():
        text = path.read_text(encoding="utf-8")
        if path.name == "test_bootstrap.py" or not re.search(r"uv_command\(|import cluster\b|\"apt-get\", \*", text):
            continue  # the first runs a stand-in for each installer
        looked += 1
        tree = of(path)
        tests = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]
        assert is_long(tree) or all(is_long(test) for test in tests if test.args.args), path
    assert looked == 3
