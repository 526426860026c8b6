"""The simulator against every published bubble: rates to the printed digit, formulas evaluated from their text."""

import json
import re
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from course_lib.parallel.pipeline.actions import COMMUNICATION, F, Schedule
from course_lib.parallel.pipeline.fitted import building_blocks, zero_bubble
from course_lib.parallel.pipeline.fitted.search import stage_costs
from course_lib.parallel.pipeline.passes import lower
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.simulation import Costs, Timeline, exact, simulate
from course_lib.parallel.pipeline.validation import in_flight

PUBLISHED = json.loads((Path(__file__).parent / "golden" / "published_bubbles.json").read_text())
LENGTHS = [(1, 1, 1), (3, 2, 1), (2, 3, 1), (10, 10, 7), (5, 6, 4)]


def longest(timeline: Timeline) -> Fraction:
    """The longest time of a rank from its own first action to its last."""
    return Fraction(max(row[-1].end - row[0].start for row in timeline.rows))


def wait(timeline: Timeline) -> Fraction:
    """How long the rank waits that takes longest."""
    return longest(timeline) * timeline.stage_bubble


# Rates: Zero Bubble Pipeline Parallelism, tables 5, 6 and 8.

ACTIVATIONS = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}
"""Hidden size and heads of the paper's models (its table 3), at 1024 tokens: they set what W needs of an activation."""
NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb_h1", "ZB-H2": "zb_h2"}


def table_and_costs(config):
    ranks, microbatches, schedule = config["p"], config["m"], config["schedule"]
    hidden, heads = ACTIVATIONS[config["model"]]
    held, kept = 34 * hidden + 5 * heads * 1024, 32 * hidden
    costs = Costs(config["T_F"], config["T_B"], config["T_W"], config["T_comm"], held, kept)
    if schedule in ("ZB-1p", "ZB-2p"):
        return zero_bubble.fit(ranks, microbatches, costs, int(schedule[3]) * ranks * held), costs
    if schedule == "ZB-V":
        costs = stage_costs(costs, 2)
        return zero_bubble.fit_v(ranks, microbatches, costs), costs
    stages = config["interleave_chunks"]
    return make(NAMES[schedule], ranks, microbatches, stages), stage_costs(costs, stages)


RATES = [row for row in PUBLISHED if row["kind"] == "bubble_rate"]


def test_all_rates_are_looked_at():
    assert len(RATES) == 35 and {row["config"]["schedule"] for row in RATES} == {*NAMES, "ZB-1p", "ZB-2p", "ZB-V"}


@pytest.mark.parametrize("row", RATES, ids=lambda row: row["id"])
def test_published_rate(row):
    config = row["config"]
    table, costs = table_and_costs(config)
    timeline = simulate(table, costs)
    rate = timeline.stage_bubble
    if config["schedule"] == "1F1B-I":
        # Its authors' simulator lets all but the first micro-batch of a group start the next lap without waiting for
        # the message that closes the loop: ours waits, which takes p messages more, no more and no less.
        optimistic = simulate(WithoutTheLoop(**vars(table)), costs)
        assert timeline.makespan - optimistic.makespan == config["p"] * exact(config["T_comm"])
        work = exact(config["T_F"]) + exact(config["T_B"]) + exact(config["T_W"])
        turns = config["m"] + Fraction(config["p"] - 1, config["interleave_chunks"])
        assert timeline.makespan == turns * work + 2 * (table.stages - 1) * exact(config["T_comm"])
        rate = optimistic.bubble
    assert round(float(rate), 4) == row["value"]["bubble_rate"]


class WithoutTheLoop(Schedule):
    """Between the last rank and the first, only the first micro-batch of each group waits for its input."""

    def source(self, action):
        source = super().source(action)
        closes = source and {self.stage_ranks[source[0]], self.stage_ranks[action.stage]} == {0, self.ranks - 1}
        return None if closes and action.microbatch % self.ranks else source


# Formulas.


def value(text, **names):
    """The number that a formula such as ``(p-1)(T_F+T_B-2T_W)`` gives."""
    product_signs = re.sub(r"(?<=[\d)])\s*(?=[A-Za-z(])", "*", text)
    return eval(product_signs, {}, names)


FORMULAS = {row["id"]: row for row in PUBLISHED if row["kind"] == "bubble_formula"}
SIZES = [(2, 8), (3, 9), (4, 16), (6, 24)]


def lettered(row, **more):
    """Sizes and lengths under which a formula is looked at, under the paper's letters."""
    even = "T_F=T_B=T_W" in str(row)
    for (ranks, microbatches), (forward, backward, weight) in product(SIZES, [(1, 1, 1)] if even else LENGTHS):
        letters = {"p": ranks, "m": microbatches, "T_F": forward, "T_B": backward, "T_W": weight, "M_B": 5, "M_W": 2}
        yield ranks, microbatches, Costs(forward, backward, weight, activation=5, kept=2), letters


def check_bubble_and_peak(row, name):
    for ranks, microbatches, costs, letters in lettered(row):
        timeline = simulate(make(name, ranks, microbatches), costs)
        assert wait(timeline) == value(row["value"]["bubble"], **letters)
        assert max(timeline.peak_activations) == value(row["value"]["peak_activation"], **letters)


def check_workers(row):
    for ranks, microbatches, costs, letters in lettered(row):
        for name, text in (("zb_h1", row["value"]["ZB-H1 worker i"]), ("zb_h2", row["value"]["ZB-H2 worker i"])):
            peaks = simulate(make(name, ranks, microbatches), costs).peak_activations
            assert peaks == tuple(value(text, i=worker, **letters) for worker in range(1, ranks + 1))


def check_zbv(row):
    assert row["value"] == {
        "bubble": "0 when T_F=T_B=T_W",
        "peak_activation": "p*M_B",
        "warmup": "2p-1 forwards per worker: 2p-i of chunk 1, i-1 of chunk 2",
    }
    for ranks, microbatches in SIZES:
        table = make("zbv", ranks, microbatches)
        timeline = simulate(table, stage_costs(Costs(), 2))
        assert wait(timeline) == 0 and set(timeline.peak_activations) == {ranks}
        for worker, (down, up) in enumerate((table.stages_of(rank) for rank in range(ranks)), start=1):
            row_of = table.rows[worker - 1]
            first = next(index for index, action in enumerate(row_of) if action.kind != F)
            warm = [action.stage for action in row_of[: first - 1]]  # the forward before it is of the steady pattern
            assert (warm.count(down), warm.count(up)) == (2 * ranks - worker, worker - 1)


def messages(table):
    return sum(action.kind in COMMUNICATION for row in lower(table).rows for action in row)


def check_readme(row, name, said, share, activation):
    """Its bubble rates are shares of B, 1F1B's: shares of the same wait, where F, I and W are equally long."""
    assert list(row["value"].values()) == said
    for ranks, microbatches in SIZES:
        plain = simulate(make("1f1b", ranks, microbatches))
        table = make(name, ranks, microbatches)
        timeline = simulate(table, stage_costs(Costs(), table.stages // ranks))
        assert wait(timeline) == share * wait(plain)
        assert max(timeline.peak_activations) == activation(ranks)
        assert messages(table) == int(said[2][0]) * messages(plain.schedule)


def check_readme_1f1b(row):
    check_readme(row, "1f1b", ["(p-1)/(m+p-1)=B", "1x", "1x"], 1, lambda p: p)
    for ranks, microbatches in SIZES:
        rate = value(row["value"]["bubble_rate"].removesuffix("=B"), p=Fraction(ranks), m=microbatches)
        assert simulate(make("1f1b", ranks, microbatches)).stage_bubble == rate


def check_readme_v_half(row):
    assert row["value"] == {"bubble_rate": "B/2", "activation": "1/2x", "pipeline_comm": "2x"}
    for ranks in (2, 4, 6, 8, 16):  # with odd numbers the block is shorter, and the wait less
        table = building_blocks.squeeze("v_half", ranks, 4 * ranks, stage_costs(Costs(), 2), "nowhere")
        timeline = simulate(table, stage_costs(Costs(), 2))
        plain = simulate(make("1f1b", ranks, 4 * ranks))
        assert wait(timeline) == wait(plain) / 2
        assert max(timeline.peak_activations) == (ranks + 2) // 2  # p / 2 and one
        assert messages(table) == 2 * messages(plain.schedule)


def check_readme_v_min(row):
    assert row["value"] == {"bubble_rate": "2B/3 + O(n) overhead", "activation": "1/3x", "pipeline_comm": "2x"}
    for ranks in (3, 6, 9, 12, 15):
        table = building_blocks.squeeze("v_min", ranks, 4 * ranks, stage_costs(Costs(), 2), "nowhere")
        timeline = simulate(table, stage_costs(Costs(), 2))
        plain = simulate(make("1f1b", ranks, 4 * ranks))
        assert wait(timeline) == wait(plain) * 2 / 3 + Fraction(1, 2)
        assert max(timeline.peak_activations) == (ranks + 4) // 3
        assert messages(table) == 2 * messages(plain.schedule)


def check_deepseek(row, name):
    """DeepSeek's B is the whole backward; a stage of 1F1B and ZB1P is a PP-th of the model."""
    assert row["value"]["activation_per_device"] == "PP" and row["value"]["params_per_device"] == "1x"
    for ranks, microbatches, costs, letters in lettered(row):
        letters = {"PP": ranks, "F": letters["T_F"], "B": letters["T_B"] + letters["T_W"], "W": letters["T_W"]}
        timeline = simulate(make(name, ranks, microbatches), costs)
        assert wait(timeline) == value(row["value"]["bubble"], **letters)
        assert max(timeline.peak_activations) == 5 * value(row["value"]["activation_per_device"], **letters)


def check_dualpipe(row):
    """DualPipe runs its mirror image on the other half of the devices: DualPipeV is one half, so its wait is both's.

    The formula takes F to be as long as the gradient of the input.
    """
    assert row["value"]["params_per_device"] == "2x"
    for ranks, lengths, share in product((2, 3, 4, 6), [(1, 1, 1), (10, 10, 7), (3, 3, 2)], (5, 4)):
        _, backward, weight = lengths
        pair = Fraction(sum(lengths) * share, 5)
        table = make("dualpipev", ranks, 4 * ranks)
        timeline = simulate(table, Costs(*lengths, pair=pair))
        letters = {"PP": Fraction(table.stages), "FB": pair, "B": backward + weight, "W": weight}
        expected = value(row["value"]["bubble"].replace("F&B", "FB"), **letters)
        assert timeline.makespan - timeline.busy[-1] == expected
        assert max(in_flight(table)) == value(row["value"]["activation_per_device"], **letters)
        assert len(table.stages_of(0)) == 2


def check_megatron(row):
    for name, ranks, batch, size in product(("gpipe", "1f1b"), (2, 4, 8), (16, 24), (1, 2)):
        letters = {"p": ranks, "m": batch // size, "b_": batch, "b": size, "t_f": 3 * size, "t_b": 5 * size}
        timeline = simulate(make(name, ranks, batch // size), Costs(3 * size, 4 * size, size))
        ideal = letters["m"] * (letters["t_f"] + letters["t_b"])
        assert (timeline.makespan - ideal) / ideal == value(
            row["value"]["bubble_over_ideal"], **letters | {"m": Fraction(letters["m"])}
        )
        assert timeline.makespan == value(
            row["value"]["batch_time"].replace("b'", "b_"), **letters | {"b_": Fraction(batch)}
        )


ROWS = {
    "zb-t2-1F1B": lambda row: check_bubble_and_peak(row, "1f1b"),
    "zb-t2-ZB-H1": lambda row: check_bubble_and_peak(row, "zb_h1"),
    "zb-t2-ZB-H2": lambda row: check_bubble_and_peak(row, "zb_h2"),
    "zb-t2-worker-mem": check_workers,
    "zb-v-mem": check_zbv,
    "zb-readme-1F1B": check_readme_1f1b,
    "zb-readme-ZB1P": lambda row: check_readme(row, "zb_h1", ["B/3", "1x", "1x"], Fraction(1, 3), lambda p: p),
    "zb-readme-ZB2P": lambda row: check_readme(row, "zb_h2", ["0", "2x", "1x"], 0, lambda p: 2 * p - 1),
    "zb-readme-ZBV": lambda row: check_readme(row, "zbv", ["0", "1x", "2x"], 0, lambda p: p),
    "zb-readme-V-Half": check_readme_v_half,
    "zb-readme-V-Min": check_readme_v_min,
    "dualpipe-1F1B": lambda row: check_deepseek(row, "1f1b"),
    "dualpipe-ZB1P": lambda row: check_deepseek(row, "zb_h1"),
    "dualpipe-DualPipe": check_dualpipe,
    "dualpipe-DualPipeV": check_dualpipe,
    "megatron21-bubble": check_megatron,
}


def test_all_formulas_are_looked_at():
    assert ROWS.keys() == FORMULAS.keys() and len(ROWS) == 16 and len(PUBLISHED) == 51


@pytest.mark.parametrize("name", ROWS)
def test_published_formula(name):
    ROWS[name](FORMULAS[name])
