"""Architectures of transformers in every way to train, beside one process; the whole table is a long test."""

from pathlib import Path

import pytest

from benchmarks import architectures
from testing.architectures import ARCHITECTURES, WAYS, Outcome, outcomes


def where_it_does_not_agree(found):
    return {way: (str(outcome), outcome.line) for way, outcome in found.items() if not outcome.agrees}


@pytest.mark.parametrize(
    ("architecture", "task", "ways", "refused"),
    [
        # parameters that no loss uses: torch's DDP and its ZeRO have to look for them
        ("xlnet", "causal_lm", ("ddp torch", "zero1 torch", "zero2 scratch", "fsdp scratch"), ()),
        ("roformer", "masked_lm", ("ddp torch", "pipeline"), ()),
        # an encoder that calls layer.forward(…), past the layers' hooks
        ("squeezebert", "masked_lm", ("ddp torch", "zero3 scratch", "fsdp torch", "fsdp scratch"), ()),
        # lists of lists of layers
        ("funnel", "masked_lm", ("fsdp scratch", "tensor"), ("tensor",)),
        # transformers' plan, with norms of heads; a layout that a forward shows
        ("qwen3", "causal_lm", ("tensor", "pipeline"), ()),
        pytest.param("gemma2", "causal_lm", ("tensor", "pipeline"), (), marks=pytest.mark.long),
        pytest.param("xlm-roberta", "masked_lm", ("tensor", "pipeline"), (), marks=pytest.mark.long),
    ],
)
def test_trains_as_one_process_does(tmp_path, architecture, task, ways, refused):
    found = outcomes(tmp_path, architecture, task, ways)
    apart = where_it_does_not_agree(found)
    assert set(apart) == set(refused) and all(not found[way].crashed for way in refused), apart


def test_smoothed_labels_travel_through_a_pipeline(tmp_path, monkeypatch):
    monkeypatch.setitem(WAYS, "pipeline", WAYS["pipeline"] | {"label_smoothing_factor": 0.2})
    plain = outcomes(tmp_path, "gpt2", "causal_lm", ("pipeline",))["pipeline"]
    assert not plain.agrees and plain.loss > 1e-3, "the plain loop has none"


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "task"), [(name, task) for name, (_, _, tasks) in ARCHITECTURES.items() for task in tasks]
)
def test_every_way_agrees_or_says_in_a_line_why_not(tmp_path, monkeypatch, architecture, task):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = outcomes(tmp_path, architecture, task, timeout=200.0)
    assert set(found) == set(WAYS)
    apart = where_it_does_not_agree(found)
    assert {way: apart[way] for way in apart if not found[way].line or found[way].crashed} == {}
    assert not [outcome.line for outcome in found.values() if "\n" in outcome.line]


def test_what_an_outcome_says():
    assert str(Outcome(3e-7, 2e-9)) == "3e-07" and str(Outcome(line="no")) == "refused"
    assert str(Outcome(3e-3, 2e-9)) == "**3e-03, 2e-09**" and str(Outcome(line="no", crashed=True)) == "**crash**"


def test_the_page_is_read_back_to_the_letter_and_every_cell_of_it_agrees_or_is_refused():
    page = (Path(architectures.__file__).parent / "architectures.md").read_text()
    rows, date = architectures.page_rows(page), page.split("`, ")[1].split(": transformers")[0]
    assert architectures.page_of(rows, date) == page
    assert {way for row in rows.values() for way in row} == set(WAYS) and len(rows) == 82
    assert all(
        outcome.agrees or (outcome.line and not outcome.crashed) for row in rows.values() for outcome in row.values()
    )
