"""Lines of our own engines, changed one at a time: each that changes a gradient is caught."""

from pathlib import Path

import pytest
import torch

from benchmarks.audit_mutants import MUTANTS, said
from course_lib.audit import Layout
from course_lib.audit.finding import explain

PARALLEL = Path(__file__).parents[2] / "course_lib" / "parallel"

FEW = [
    next(mutant for mutant in MUTANTS if mutant.engine == engine and not mutant.equivalent)
    for engine in ("ddp", "zero1", "zero3", "experts")
]


def test_each_mutant_s_line_is_there():
    sources = {mutant.module: (PARALLEL / f"{mutant.module}.py").read_text(encoding="utf-8") for mutant in MUTANTS}
    lines = {module: [line.strip() for line in source.splitlines()] for module, source in sources.items()}
    assert [mutant for mutant in MUTANTS if lines[mutant.module].count(mutant.line) <= mutant.at] == []


def check(mutant):
    told = said(mutant)
    assert bool(told) != bool(mutant.equivalent), told or f"{mutant} was not seen"


@pytest.mark.parametrize("mutant", FEW, ids=lambda mutant: f"{mutant.engine}: {mutant.line[:40]}")
def test_a_mutant_is_caught(mutant):
    check(mutant)


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.engine}: {mutant.line[:40]}")
def test_every_mutant_is_caught_or_equivalent(mutant):
    check(mutant)


def test_a_gradient_of_uninitialized_memory_has_a_sentence_too():
    """A mutant's had a factor whose square no float holds."""
    right = torch.ones(4, dtype=torch.float64)
    finding = explain("w", {0: 1e200 * right, 1: 1e200 * right}, right, {}, Layout(dp=2), 1e-9, 1.0)
    assert finding.kind == "factor" and not finding.axes
