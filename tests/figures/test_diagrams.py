"""Drawn diagrams: whole, small, readable SVG; and what they show is what the library does."""

import functools
import itertools
import threading
from collections import Counter
from datetime import timedelta
from queue import Queue
from xml.etree import ElementTree

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from course_lib.errors import ConfigError
from course_lib.figures.diagrams import collectives, states
from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.marks import contrast
from course_lib.figures.style import COLOURS
from course_lib.lessons.context import diagrams as sequences
from course_lib.lessons.data_parallel import diagrams as data_parallel
from course_lib.lessons.experts import diagrams as experts
from course_lib.lessons.faults import diagrams as store_keys
from course_lib.lessons.fsdp import diagrams as sharding
from course_lib.lessons.pipeline import diagrams as pipelines
from course_lib.lessons.planning import diagrams as memory
from course_lib.lessons.slow_link import timeline
from course_lib.lessons.start import diagrams as meeting
from course_lib.lessons.tensor import diagrams as tensors
from course_lib.lessons.zero.lab import model_states
from course_lib.parallel import collectives as real_collectives
from course_lib.parallel.pipeline.actions import v_shape
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.simulation import simulate
from course_lib.parallel.ring_attention import Sight
from course_lib.parallel.sequence_layout import SequenceLayout
from course_lib.parallel.topology import RankGrid
from course_lib.planning.memory import Memory

GIB = 2**30
SHARDED = Memory(0.5 * GIB, 0.5 * GIB, 1 * GIB, 12 * GIB, 3 * GIB, 2.5 * GIB, gradients_wait=False)
WAITING = Memory(4 * GIB, 4 * GIB, 8 * GIB, 10 * GIB, 5 * GIB, 0)
SMALL_BATCH = Memory(0.5 * GIB, 4 * GIB, 1 * GIB, 1 * GIB, 0.5 * GIB, 1 * GIB, gradients_wait=False)


def over(draw, *sizes):
    """A drawing at several sizes, each a number or the arguments."""
    return [functools.partial(draw, *(size if isinstance(size, tuple) else (size,))) for size in sizes]


DRAWN = {
    "ring": over(collectives.ring, 2, 3, 4),
    "all_reduce_in_two": over(collectives.all_reduce_in_two, 2, 3, 4, 5),
    "buckets": over(data_parallel.buckets, (), ({"a": 2, "b": 2, "c": 2},)),
    "dealing": over(data_parallel.dealing, (), (24, 4, 2), (10, 4, 3), (5, 2, 4), (8, 4, 1)),
    "no_sync": over(data_parallel.no_sync, 2, 4, 5),
    "rendezvous": over(meeting.rendezvous, (), (1, 2), (2, 3), (1, 1)),
    "step_memory": over(memory.step_memory, (SHARDED, 4), (SHARDED, 6), (WAITING, 4), (SMALL_BATCH, 4)),
    "who_holds_what": over(sharding.who_holds_what, 2, 3, 4),
    "fsdp_cuts": over(sharding.fsdp_cuts, 2, 3, 4),
    "hybrid": over(sharding.hybrid, (), (3, 2), (2, 8)),
    "prefetch": over(sharding.prefetch, (), (2, 1.5), (4, 1.0)),
    "who_waits": over(pipelines.who_waits, ("gpipe", 2), ("gpipe", 3), ("1f1b", 2), ("1f1b", 3)),
    "the_v": over(pipelines.the_v, 2, 4),
    "who_needs_what": over(pipelines.who_needs_what, ()),
    "columns_then_rows": over(tensors.columns_then_rows, 2, 3, 4),
    "sequence_parallel": over(tensors.sequence_parallel, 2, 3, 4),
    "keys_on_the_ring": over(sequences.keys_on_the_ring, 2, 3, 4),
    "who_computes_which_scores": over(sequences.who_computes_which_scores, 2, 3, 4),
    "two_all_to_alls": [lambda n=n: experts.two_all_to_alls(copies(n)) for n in (2, 3, 4)],
    "rank_grid": over(tensors.rank_grid, *(RankGrid(*sizes) for sizes in ((2, 2, 2), (1, 4, 2), (3, 2, 4), (4, 1, 1)))),
    "unit_life": over(states.unit_life, ()),
    "job_life": over(states.job_life, ()),
    "hang": over(states.hang, 2, 3, 4),
    "store_keys": over(store_keys.written_keys, (2, 1), (3, 1), (4, 1)),
}


def copies(ranks):
    """(ranks, experts) copies of tokens, as a router might choose."""
    return [[10 * (1 + (3 * expert + rank) % 7) for expert in range(12)] for rank in range(ranks)]


EACH = [pytest.param(draw, id=f"{name}-{number}") for name, draws in DRAWN.items() for number, draw in enumerate(draws)]


def meet(one, other, least=0.0):
    """Whether two rectangles (left, top, right, bottom) share more than an edge."""
    return (
        min(one[2], other[2]) - max(one[0], other[0]) > least and min(one[3], other[3]) - max(one[1], other[1]) > least
    )


def around(box):
    return box.x, box.y, box.right, box.bottom


def flaws(diagram: Diagram) -> list[str]:
    """What cannot be read: labels on labels, off the page, across the edge of a box, under a line, or too pale."""
    found = []
    extents = [(label, label.extent) for label in diagram.labels]
    for (one, a), (other, b) in itertools.combinations(extents, 2):
        if meet(a, b):
            found.append(f"`{one.text}` lies on `{other.text}`")
    for label, extent in extents:
        if label.size < 11:
            found.append(f"`{label.text}` is {label.size} px")
        if extent[0] < 2 or extent[2] > diagram.width - 2 or extent[1] < 2 or extent[3] > diagram.height - 2:
            found.append(f"`{label.text}` is cut off")
        ground = "#FFFFFF"
        for box in diagram.boxes:
            if meet(extent, around(box), 1.0) and not label.ground:
                inside = (
                    box.x <= extent[0]
                    and box.y <= extent[1] + 2
                    and box.right >= extent[2]
                    and box.bottom >= extent[3] - 2
                )
                if not inside and (box.stroke != "none" or box.fill != "#FFFFFF"):
                    found.append(f"`{label.text}` crosses the edge of a box")
                ground = box.fill
        if contrast(label.colour, ground) < 4.4:
            found.append(f"`{label.text}` is pale: {contrast(label.colour, ground):.1f}")
        for arrow in diagram.arrows:
            if not label.ground and any(crosses(extent, *pair) for pair in itertools.pairwise(arrow.points)):
                found.append(f"`{label.text}` lies under a line")
    return found


def crosses(extent, start, end):
    """Whether a line goes through the inside of a rectangle, by walking along it."""
    left, top, right, bottom = extent
    points = (
        (start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]))
        for share in (step / 200 for step in range(201))
    )
    return any(left + 1 < x < right - 1 and top + 1 < y < bottom - 1 for x, y in points)


@pytest.mark.parametrize("draw", EACH)
def test_a_diagram_is_small_whole_and_readable(draw):
    diagram = draw()
    text = diagram._repr_svg_()
    assert len(text.encode()) < 25_000
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert root.get("viewBox") == f"0 0 720 {diagram.height:g}" and root.get("role") == "img"
    assert root.find(f"{space}title").text == diagram.title == root.get("aria-label")
    assert root.find(f"{space}desc").text == diagram.description and len(diagram.description) > 80
    assert len(list(root.iter(f"{space}text"))) == len(diagram.labels)
    assert repr(diagram) == f"{diagram.title}. {diagram.description}"
    assert flaws(diagram) == []


def test_flaws_are_found():
    diagram = Diagram("A title", "A description")
    assert flaws(diagram) == []
    diagram.text(100, 100, "one")
    diagram.text(110, 102, "other")
    diagram.text(719, 200, "off the page")
    diagram.box(290, 190, 20, 20)
    diagram.text(300, 200, "wider than its box")
    diagram.text(300, 300, "crossed", size=9)
    diagram.arrow((200, 300), (400, 300))
    assert flaws(diagram) == [
        "`one` lies on `other`",
        "`off the page` is cut off",
        "`wider than its box` crosses the edge of a box",
        "`crossed` is 9 px",
        "`crossed` lies under a line",
    ]


# --- What is shown is what the library does ---------------------------------------------------------------------------


def real_sends(ranks, monkeypatch):
    """What the library's ring sends, on threads in the place of ranks: (phase, step, source, to, part, shares).

    Part p has p + 1 elements, and of rank r the value 2 to the r: so a message tells which part it is, and whose sum.
    """
    log, here = [], threading.local()
    lines = {pair: Queue() for pair in itertools.product(range(ranks), repeat=2)}

    def exchange(sent, to, received, source, group):
        here.step += 1
        shares = frozenset(rank for rank in range(ranks) if int(sent[0]) >> rank & 1)
        log.append((here.phase, here.step, here.rank, to, sent.numel() - 1, shares))
        lines[here.rank, to].put(sent.clone())
        received.copy_(lines[source, here.rank].get(timeout=600))

    def run(rank):
        here.rank = rank
        parts = [torch.full((part + 1,), 2**rank) for part in range(ranks)]
        for here.phase in ("reduce-scatter", "all-gather"):
            here.step = 0
            if here.phase == "reduce-scatter":
                real_collectives.reduce_scatter(parts[rank], parts)
            else:
                real_collectives.all_gather(parts, parts[rank])

    monkeypatch.setattr(real_collectives, "_exchange", exchange)
    monkeypatch.setattr(real_collectives, "_position", lambda group: (here.rank, ranks))
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert not any(thread.is_alive() for thread in threads)
    return log


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_rings_arrows_are_what_the_library_sends(ranks, monkeypatch):
    diagram = collectives.ring(ranks)
    arrows = [arrow.means for arrow in diagram.arrows if arrow.means]
    middle = len(arrows) // 2
    phases = [phase for phase in ("reduce-scatter", "all-gather") for _ in arrows[:middle]]
    drawn = [(phase, *send) for phase, send in zip(phases, arrows, strict=True)]
    sent = real_sends(ranks, monkeypatch)
    assert len(sent) == 2 * (ranks - 1) * ranks
    assert sorted(drawn, key=str) == sorted(sent, key=str)
    last = [box.means for box in diagram.boxes if box.means[:2] == ("all-gather", "all sums")]
    assert len(last) == ranks**2 and {shares for *_, shares in last} == {frozenset(range(ranks))}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_who_holds_what_is_the_byte_formula(ranks):
    diagram = sharding.who_holds_what(ranks)
    boxes = [box for box in diagram.boxes if box.means]
    assert len(boxes) == 4 * ranks * 3
    bytes_of = {"parameters": 4, "gradients": 4, "optimizer states": 8}
    for stage, rank in itertools.product(range(4), range(ranks)):
        own = [box.means for box in boxes if box.means[:2] == (stage, rank)]
        assert sum(bytes_of[kind] * share for *_, kind, share in own) == pytest.approx(
            sum(model_states(stage, ranks, 1).values())
        ), "as lesson 05's table"
    for box in boxes:
        assert box.height == pytest.approx(200 / 16 * bytes_of[box.means[2]] * box.means[3]), "heights are bytes"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_fsdps_cuts_are_the_flat_parameters_and_dtensors_own(ranks):
    shapes = {"a": (3, 3), "b": (4, 2), "c": (3, 1)}
    diagram = sharding.fsdp_cuts(ranks)
    flat = torch.arange(-(-20 // ranks) * ranks).chunk(ranks)
    names = "a" * 9 + "b" * 8 + "c" * 3
    for rank in range(ranks):
        drawn = "".join(box.means[2] for box in diagram.boxes if box.means[:2] == ("flat", rank))
        assert drawn == "".join(names[place] for place in flat[rank] if place < 20)
        for name, (rows, columns) in shapes.items():
            shards = torch.arange(rows * columns).view(rows, columns).chunk(ranks)  # as DTensor's Shard(0) does
            held = shards[rank].flatten().tolist() if rank < len(shards) else []
            assert held == [box.means[3] for box in diagram.boxes if box.means[:3] == ("rows", rank, name)]


def test_buckets_leave_in_the_librarys_order_when_their_last_gradient_is_there():
    diagram = data_parallel.buckets({"a": 3, "b": 2, "c": 2, "d": 1}, bucket_size=3, first_bucket=1, send_per_unit=2)
    order = [box.means[1:] for box in diagram.boxes if box.means[0] == "backward"]
    assert order == [("d", 0), ("c", 1), ("b", 1), ("a", 2)]
    sent = [box.means[1:] for box in diagram.boxes if box.means[0] == "all-reduce"]
    assert sent == [(0, 1, 3), (1, 5, 13), (2, 13, 19)]


@pytest.mark.parametrize("held", [SHARDED, WAITING, SMALL_BATCH], ids=["sharded", "waiting", "small batch"])
def test_the_highest_column_of_a_step_is_the_formulas_peak(held):
    columns = {}
    for box in memory.step_memory(held).boxes:
        if box.means[0] != "key":
            number, phase, kind, size = box.means
            columns.setdefault((number, phase), {})[kind] = size
    totals = {column: sum(kinds.values()) for column, kinds in columns.items()}
    assert max(totals.values()) == held.total and len(columns) == 10
    peak = max(totals, key=totals.get)[1]
    assert peak == ("backward" if held is SMALL_BATCH else "loss")
    first, last = columns[0, "forward"], columns[9, "update"]
    assert first["activations"] == held.activations / 4 and ("gradients" in first) == held.gradients_wait
    assert last == {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}


@pytest.mark.parametrize(
    ("rows", "batch_size", "ranks"), [(10, 4, 2), (24, 4, 2), (10, 4, 3), (5, 2, 4), (8, 4, 1), (9, 4, 3)]
)
def test_rows_are_dealt_as_accelerate_deals_them(rows, batch_size, ranks):
    sampler = BatchSampler(range(rows), batch_size, drop_last=False)
    dealt = data_parallel.dealt_rows(rows, batch_size, ranks)
    assert dealt == [list(BatchSamplerShard(sampler, ranks, rank)) for rank in range(ranks)]
    diagram = data_parallel.dealing(rows, batch_size, ranks)
    drawn = [box.means[1:] for box in diagram.boxes if box.means[0] == "dealt"]
    assert sorted(row for *_, row, again in drawn if not again) == list(range(rows)), "each row once, and again dashed"
    assert len(drawn) == sum(len(batch) for batches in dealt for batch in batches)


def test_no_sync_leaves_one_all_reduce():
    kinds = [box.means for box in data_parallel.no_sync(3).boxes if box.means[0] != "lane"]
    assert [number for lane, number, kind in kinds if kind == "all-reduce" and lane == 0] == [0, 1, 2]
    assert [number for lane, number, kind in kinds if kind == "all-reduce" and lane == 1] == [2]


def test_every_rank_asks_the_store():
    diagram = meeting.rendezvous(2, 2)
    assert [box.means[1:] for box in diagram.boxes if box.means[0] == "rank"] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    for verb in ("starts", "asks"):
        assert [arrow.means[1] for arrow in diagram.arrows if arrow.means[0] == verb] == [0, 1, 2, 3]


def test_prefetch_is_drawn_as_the_engine_waits():
    """By the paper's time line, which tests/lessons/test_slow_link.py compares with the engine."""
    diagram = sharding.prefetch(3, 0.8)
    for row, ahead in enumerate((False, True)):
        step = timeline(3, 1.0, 0.8, 0.8, ahead)
        drawn = [box.means[1:] for box in diagram.boxes if box.means[0] == row]
        assert drawn == [span for span in (*step.link, *step.compute) if span[3] > span[2]] and len(drawn) == 15
    assert diagram.title.endswith(f"{timeline(3, 1.0, 0.8, 0.8, True).waited:.1f}")


def test_hybrid_links_a_row_for_shards_and_a_column_for_copies():
    diagram = sharding.hybrid(2, 3)
    shard_of = dict(box.means for box in diagram.boxes if box.means)
    assert shard_of == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}
    links = {arrow.means for arrow in diagram.arrows}
    assert links == {(0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5)}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_schedules_cells_are_its_table(name):
    diagram = pipelines.who_waits(name, 3, 4)
    spans = [box.means for box in diagram.boxes if box.means[0] != "lane"]
    timeline = simulate(make(name, 3, 4))
    assert spans == [span for row in timeline.rows for span in row] and len(spans) == 24


def test_the_v_is_the_librarys_placement():
    assert tuple(box.means for box in pipelines.the_v(3).boxes) == tuple(enumerate(v_shape(3, 2)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_cut_sequence_is_cut_as_the_exchanges_cut_it(ranks):
    """By the area that is filled: a slice of the tokens at both ends, some columns between, whole where gathered."""
    diagram = tensors.sequence_parallel(ranks)
    parts = [box for box in diagram.boxes if box.means]
    assert len(parts) == 6 * ranks
    for rank in range(ranks):
        own = [box for box in parts if box.means[1] == rank]
        first = own[2]
        tokens = [(box.y - first.y) / first.height for box in own], [box.height / first.height for box in own]
        columns = [box.width / first.width for box in own]
        assert tokens[0] == pytest.approx([rank / ranks, rank / ranks, 0, 0, 0, rank / ranks])
        assert tokens[1] == pytest.approx([1 / ranks, 1 / ranks, 1, 1, 1, 1 / ranks])
        assert columns == pytest.approx([1, 1, 1, 1 / ranks, 1, 1])
    sends = [arrow.means for arrow in diagram.arrows if arrow.means]
    assert sorted(sends) == sorted((name, rank) for name in ("all_gather", "reduce_scatter") for rank in range(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_keys_on_the_ring_are_where_the_ring_has_them_and_grey_is_what_nobody_sees(ranks):
    diagram, sight = sequences.keys_on_the_ring(ranks), Sight(SequenceLayout(4 * ranks, ranks), causal=True)
    boxes = {box.means[:2]: box for box in diagram.boxes if box.means}
    assert len(boxes) == ranks * ranks
    for (rank, step), box in boxes.items():
        assert box.means[2] == (rank - step) % ranks
        assert (box.fill == COLOURS["idle"]) == (not list(sight.blocks(rank, box.means[2])))
        if step:
            assert (step - 1, (rank - 1) % ranks, rank) in {arrow.means for arrow in diagram.arrows}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_scores_are_drawn_with_the_rank_that_computes_them(ranks):
    drawn = [box.means for box in sequences.who_computes_which_scores(ranks).boxes if box.means]
    for zigzag in (False, True):
        layout = SequenceLayout(2 * ranks, ranks, zigzag)
        work = Counter(rank for of_zigzag, _, _, rank in drawn if of_zigzag == zigzag)
        assert [work[rank] for rank in range(ranks)] == [layout.pairs(rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_experts_are_drawn_on_their_ranks_and_lines_are_the_copies_that_travel(ranks):
    counts, share = copies(ranks), 12 // ranks
    diagram = experts.two_all_to_alls(counts)
    boxes = {box.means[:2]: box for box in diagram.boxes if box.means}
    for expert in range(12):
        box, home = boxes["expert", expert], boxes["rank", expert // share]
        assert home.x < box.x < box.right < home.right and home.y < box.y < box.bottom < home.bottom
        assert box.means[2] == sum(row[expert] for row in counts)
    lines = {arrow.means[:3]: arrow.means[3] for arrow in diagram.arrows}
    assert lines == {
        (way, one, other): sum(
            counts[one if way == "there" else other][(other if way == "there" else one) * share + place]
            for place in range(share)
        )
        for way in ("there", "back")
        for one in range(ranks)
        for other in range(ranks)
    }


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 2), (3, 1, 2)])
def test_the_grids_links_are_its_groups(sizes):
    grid = RankGrid(*sizes)
    diagram = tensors.rank_grid(grid)
    assert sorted(box.means for box in diagram.boxes if box.means) == sorted(
        grid.coordinates(rank)[:3] for rank in range(grid.world_size)
    )
    links = sorted(arrow.means for arrow in diagram.arrows)
    assert links == sorted(
        (axis, *pair) for axis in ("dp", "pp", "tp") for line in grid.lines(axis) for pair in itertools.pairwise(line)
    )


@pytest.mark.parametrize(
    "draw",
    [
        lambda: collectives.ring(1),
        lambda: collectives.ring(9),
        lambda: sharding.who_holds_what(8),
        lambda: sharding.fsdp_cuts(5),
        lambda: data_parallel.buckets({"a": 1}),
        lambda: data_parallel.dealing(99),
        lambda: data_parallel.no_sync(9),
        lambda: meeting.rendezvous(3),
        lambda: memory.step_memory(SHARDED, 9),
        lambda: tensors.rank_grid(RankGrid(1, 8, 4)),
    ],
)
def test_what_does_not_fit_on_the_page_is_refused(draw):
    with pytest.raises(ConfigError, match="a diagram"):
        draw()


def test_a_rank_waits_for_the_key_that_ends_in_the_missing_ranks_number():
    """gloo's group of two, of which rank 1 never comes; and the picture of it."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(torch.distributed.DistStoreError, match=r"keys: \S*/1$"):
        torch.distributed.ProcessGroupGloo(store, 0, 2, timedelta(seconds=0.2))
    drawn = store_keys.written_keys(2, missing=1)
    texts = [label.text for label in drawn.labels]
    assert "wait for …/1" in texts and "…/1: nothing" in texts and "wait for …/0" not in texts
    arrows = {arrow.means for arrow in drawn.arrows}
    assert (0, "store") in arrows and (1, "store") not in arrows
