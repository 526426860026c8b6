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
from course_lib.parallel.pipeline.simulation import Costs, exact, simulate
from course_lib.parallel.pipeline.validation import in_flight
from tests.parallel.pipeline.test_simulation import LENGTHS, wait

PUBLISHED = json.loads((Path(__file__).parent / "golden" / "published_bubbles.json").read_text())
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
    """No wait where T_F=T_B=T_W, p of M_B, and 2p-1 forwards per worker first: 2p-i of chunk 1, i-1 of chunk 2."""
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


def check_readme_v(row, name, said, sizes, share, more, activation):
    assert list(row["value"].values()) == said
    for ranks in sizes:
        table = building_blocks.squeeze(name, ranks, 4 * ranks, stage_costs(Costs(), 2), "nowhere")
        timeline = simulate(table, stage_costs(Costs(), 2))
        plain = simulate(make("1f1b", ranks, 4 * ranks))
        assert wait(timeline) == share * wait(plain) + more
        assert max(timeline.peak_activations) == activation(ranks)
        assert messages(table) == 2 * messages(plain.schedule)


def check_readme_v_half(row):
    sizes = (2, 4, 6, 8, 16)  # with odd numbers the block is shorter, and the wait less
    check_readme_v(row, "v_half", ["B/2", "1/2x", "2x"], sizes, Fraction(1, 2), 0, lambda p: p // 2 + 1)


def check_readme_v_min(row):
    said = ["2B/3 + O(n) overhead", "1/3x", "2x"]
    check_readme_v(row, "v_min", said, (3, 6, 9, 12, 15), Fraction(2, 3), Fraction(1, 2), lambda p: (p + 4) // 3)


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
    said = row["value"]
    for name, ranks, batch, size in product(("gpipe", "1f1b"), (2, 4, 8), (16, 24), (1, 2)):
        turns, forward, backward = Fraction(batch, size), 3 * size, 5 * size
        letters = {"p": ranks, "m": turns, "b_": Fraction(batch), "b": size, "t_f": forward, "t_b": backward}
        timeline = simulate(make(name, ranks, batch // size), Costs(forward, 4 * size, size))
        ideal = turns * (forward + backward)
        assert (timeline.makespan - ideal) / ideal == value(said["bubble_over_ideal"], **letters)
        assert timeline.makespan == value(said["batch_time"].replace("b'", "b_"), **letters)


ROWS = {
    "zb-t2-1F1B": lambda row: check_bubble_and_peak(row, "1f1b"),
    "zb-t2-ZB-H1": lambda row: check_bubble_and_peak(row, "zb_h1"),
    "zb-t2-ZB-H2": lambda row: check_bubble_and_peak(row, "zb_h2"),
    "zb-t2-worker-mem": check_workers,
    "zb-v-mem": check_zbv,
    "zb-readme-V-Half": check_readme_v_half,
    "zb-readme-V-Min": check_readme_v_min,
    "dualpipe-DualPipe": check_dualpipe,
    "dualpipe-DualPipeV": check_dualpipe,
    "megatron21-bubble": check_megatron,
}


def test_all_that_is_published_is_looked_at():
    assert ROWS.keys() == FORMULAS.keys() and len(PUBLISHED) == len(ROWS) + len(RATES)


@pytest.mark.parametrize("name", ROWS)
def test_published_formula(name):
    ROWS[name](FORMULAS[name])
