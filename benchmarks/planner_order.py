"""Planner's order of strategies compared with the measured order.

    python -m benchmarks.planner_order    # from the repository's root; writes benchmarks/planner-order.md

Two questions. Of two published runs of one model on the same GPUs with different strategies: is the faster one
predicted to be? And of all layouts that make up a batch on so many GPUs: where does the one stand that a sweep over
thousands of runs found to be best (nanotron's)?
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.harness import options, publish, table
from benchmarks.planner import PUBLISHED, publication
from benchmarks.planner_rows import READERS, Setting, mosaic, nanotron
from course_lib.planning import cost, memory
from course_lib.planning.plan import Plan

CLEAR = 1.05
"""Two measurements nearer to each other than this have no order."""
ROOM_GIB = 72
"""What the swept layouts may hold: an H100's 80 GB less what the runtime takes."""


@dataclass(frozen=True)
class Pair:
    """Two published runs of one model on the same GPUs; speeds are those of the first over those of the second."""

    first: str
    second: str
    measured: float
    predicted: float

    @property
    def right(self) -> bool:
        """The one that was faster is predicted to be."""
        return (self.measured > 1) == (self.predicted > 1)


@dataclass(frozen=True)
class Place:
    """A layout that was found to be best, among all that fit."""

    row: str
    layout: str
    place: int
    """1: predicted to be the fastest as well."""
    fitting: int
    predicted_best: str
    behind: float
    """By how much the predicted best is faster than it, in the planner's own seconds."""


def pairs() -> list[Pair]:
    """Every two rows of a publication with one model, GPUs and sequence length that differ in strategy, and in speed
    clearly."""
    groups: dict[tuple, list[tuple[str, Setting]]] = defaultdict(list)
    for row in json.loads(PUBLISHED.read_text(encoding="utf-8")):
        read = READERS.get(row["kind"], ("", mosaic))[1]
        setting = None if row["kind"] not in READERS or read is mosaic else read(row)
        if setting is not None:
            model, plan, cluster, _ = setting
            same = (
                publication(row["source"]),
                model.hidden,
                model.layers,
                model.vocab,
                cluster.accelerator.name,
                plan.gpus,
                plan.sequence_length,
            )
            groups[same].append((row["id"], setting))
    found = []
    for group in groups.values():
        for (first, one), (second, other) in itertools.combinations(group, 2):
            measured = one[3] / other[3]
            if _strategy(one[1]) != _strategy(other[1]) and not 1 / CLEAR < measured < CLEAR:
                found.append(Pair(first, second, measured, _speed(one) / _speed(other)))
    return found


def _strategy(plan: Plan) -> tuple:
    """What makes two plans different strategies rather than different sizes."""
    return (
        plan.engine,
        plan.stage,
        plan.tensor > 1,
        plan.pipeline > 1,
        plan.context > 1,
        plan.checkpointing,
        plan.precision,
        plan.compiled,
    )


def _speed(setting: Setting) -> float:
    return cost.estimate(*setting[:3]).tokens_per_second


def places() -> list[Place]:
    """nanotron's best layouts among every data x tensor x pipeline x ZeRO-0 or -1 x micro-batch of the same batch."""
    rows = [row for row in json.loads(PUBLISHED.read_text(encoding="utf-8")) if row["kind"] == "best_config"]
    return [_place(row["id"], row["config"]["gbs_sequences"], nanotron(row)) for row in rows]


def _place(row: str, batch: int, setting: Setting) -> Place:
    model, best, cluster, measured = setting
    plans = {
        _layout(plan): plan
        for plan in _layouts(best, batch, model.layers)
        if memory.estimate(model, plan).total / 2**30 <= ROOM_GIB
    } | {_layout(best): best}
    speeds = {layout: _speed((model, plan, cluster, measured)) for layout, plan in plans.items()}
    order = sorted(speeds, key=lambda layout: -speeds[layout])
    mine = _layout(best)
    return Place(row, mine, order.index(mine) + 1, len(order), order[0], speeds[order[0]] / speeds[mine] - 1)


def _layouts(like: Plan, batch: int, layers: int) -> Iterator[Plan]:
    powers = (1, 2, 4, 8, 16, 32)
    for tensor, pipeline, micro, stage in itertools.product(powers, powers, (1, 2, 4, 8, 16), (0, 1)):
        data = like.gpus // (tensor * pipeline)
        whole = data and data * tensor * pipeline == like.gpus and batch % (data * micro) == 0
        if whole and pipeline <= layers and (data > 1 or stage == 0):
            yield replace(
                like,
                data=data,
                tensor=tensor,
                pipeline=pipeline,
                stage=stage,
                micro_batch=micro,
                accumulation=batch // (data * micro),
            )


def _layout(plan: Plan) -> str:
    return f"dp {plan.data} × tp {plan.tensor} × pp {plan.pipeline}, ZeRO-{plan.stage}, micro-batch {plan.micro_batch}"


def main() -> None:
    """Compare, and write the page."""
    options(__doc__)
    found = pairs()
    order = [
        (it.first, it.second, f"{it.measured:.2f}", f"{it.predicted:.2f}", "right" if it.right else "**wrong**")
        for it in found
    ]
    swept = [
        (it.row, it.layout, f"{it.place} of {it.fitting}", it.predicted_best, f"{it.behind:.0%}") for it in places()
    ]
    publish(
        "planner-order",
        "The order of strategies, beside published measurements",
        (),
        "Written by `python -m benchmarks.planner_order`. Published runs of one model on the same GPUs whose "
        f"strategies differ and whose speeds differ by more than {CLEAR - 1:.0%}: the faster one is predicted to be in "
        f"{sum(pair.right for pair in found)} of {len(found)}.",
        table("first | second | measured, first / second | predicted | order", order, right=(2, 3)),
        "The layouts that nanotron's sweep found to be best, among all of the same batch that fit. The planner "
        "calls none of them slow, and takes for faster what the sweep, on that network, did not: more data "
        "parallelism.",
        table("row | best of the sweep | its place | predicted best | faster by", swept, right=(2, 4)),
    )


if __name__ == "__main__":
    main()
