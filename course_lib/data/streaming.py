"""Training text that is never held whole: shards read as they come, in an order that can be entered at any row.

An epoch's order is that of its shards, a permutation, and within it of windows: so many consecutive rows, shuffled
among themselves. Both follow from the seed, the epoch and the window's number alone. So a position is a few numbers,
and what comes after it is had by reading one window again; a shuffle buffer's position would be all that it holds.

The rows of a window are numbered, and dealt to ranks as by a distributed sampler: a global batch has the same rows for
any number of them.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from course_lib.data.window_rows import LazyRow, Named, Row
from course_lib.errors import DataError

if TYPE_CHECKING:
    from course_lib.data.shards import Shards


@dataclass(frozen=True)
class Place:
    """Place in a stream: the row that comes next, and the window that it is in.

    Attributes:
        epoch: from 0.
        row: rows of the epoch in the global batches before it, of all ranks.
        micro: micro-batches of a rank that are done of the next global batch.
        window: number of a window that begins at or before the row. All else than epoch and row may be 0: then the rows
            before are made once more, to be counted.
        window_row: rows of the epoch before that window.
        shard, shard_row: where in the order of the epoch's shards the window begins.
    """

    epoch: int = 0
    row: int = 0
    micro: int = 0
    window: int = 0
    window_row: int = 0
    shard: int = 0
    shard_row: int = 0


class TextStream(IterableDataset[Row]):
    """Rows of this rank, one after another, for a ``DataLoader`` with the same ``batch_size``.

    A row has `input_ids` and whatever else makes it, ``ignore``, true for filler that evens out the last batch, and in
    the last row of a batch ``place``, the state after it. Workers of a loader take its batches in turn.

    Args:
        shards: the texts.
        make_rows: makes the rows of a window of texts, the same for the same texts.
        window: texts that are shuffled together, and as many are held.
        seed: decides the order, together with the epoch.
        rank: of this process.
        world_size: ranks that share the rows.
        batch_size: rows that the loader makes a batch of.
        accumulation: such batches of each rank in a global batch.
        global_batch_size: rows of all ranks in a step; default: all that the three above hold. Where it is less, filler
            makes up for the rest.
        drop_last: leave out the last rows of an epoch where they fill no global batch.
        endless: go on with the next epoch at the end of one.
    """

    def __init__(  # noqa: PLR0913 -- the shape of a global batch, as a loader and a sampler name it
        self,
        shards: "Shards",
        make_rows: Callable[[Sequence[Named]], Sequence[LazyRow]],
        *,
        window: int = 10_000,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        batch_size: int = 1,
        accumulation: int = 1,
        global_batch_size: int | None = None,
        drop_last: bool = False,
        endless: bool = False,
    ):
        self.shards, self.make_rows, self.window, self.seed = shards, make_rows, window, seed
        self.rank, self.world_size, self.batch_size, self.accumulation = rank, world_size, batch_size, accumulation
        self.places = batch_size * world_size * accumulation
        self.global_batch_size = global_batch_size or self.places
        self.drop_last, self.endless = drop_last, endless
        self.place = Place()

    # --- where it stands ---

    def state_dict(self) -> dict[str, int]:
        """Place of the next batch, in plain numbers, for any number of ranks; see :class:`Place`.

        It is of whole batches: within one, of the next. A loader with workers iterates copies; take ``place`` of the
        batch's last row then.
        """
        return asdict(self.place)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there, when it is next iterated. Of the state ``epoch`` and ``row`` are enough."""
        known = {field.name for field in fields(Place)}
        self.place = Place(**{name: value for name, value in state.items() if name in known})

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch, when it is next iterated; nothing where it stands there already, or further on.

        Loaders call this before each iteration, Accelerate's with a count of its own, which begins at 0 where a run
        goes on: that must not undo what was loaded. ``load_state_dict({"epoch": 0})`` goes back.
        """
        if epoch > self.place.epoch:
            self.place = Place(epoch)

    # --- the order ---

    def texts(self, at: Place) -> Iterator[tuple[int, int, Named]]:
        """The epoch's texts from a place's window on: the shard, by its place in the order, the row, the text."""
        order = np.random.default_rng([self.seed, at.epoch]).permutation(len(self.shards)).tolist()
        for position in range(at.shard, len(order)):
            start, name = at.shard_row if position == at.shard else 0, self.shards.name(order[position])
            for row, text in enumerate(self.shards.read(order[position], start), start):
                yield position, row, Named(text, f"{name}, row {row} (from 0)")

    def windows(self, at: Place) -> Iterator[tuple[Place, Sequence[LazyRow]]]:
        """The epoch's windows from a place's on, each with the place where it begins, and its rows in their order."""
        texts, here = self.texts(at), replace(at, row=at.window_row, micro=0)
        begun = next(texts, None)
        while begun is not None:
            held = [named for _, _, named in itertools.chain([begun], itertools.islice(texts, self.window - 1))]
            draw = np.random.default_rng([self.seed, at.epoch, here.window + 1])
            rows = self.make_rows([held[text] for text in draw.permutation(len(held))])
            rows = [rows[row] for row in draw.permutation(len(rows))]
            begun = next(texts, None)
            yield here, rows
            shard, shard_row = begun[:2] if begun else (len(self.shards), 0)
            after = here.row + len(rows)
            here = Place(at.epoch, after, 0, here.window + 1, after, shard, shard_row)

    def global_batches(self, at: Place) -> Iterator[tuple[Place, list[LazyRow]]]:
        """The epoch's global batches from a place on, with where each begins; the last may have fewer rows."""
        held, begun = list[LazyRow](), at
        for window, rows in self.windows(at):
            for row, lazy in enumerate(rows, window.window_row):
                if row < at.row:
                    continue
                if not held:
                    begun = replace(window, row=row)
                held.append(lazy)
                if len(held) == self.global_batch_size:
                    yield begun, held
                    held = []
        if held and not self.drop_last:
            yield begun, held

    def deal(self, batch: Sequence[LazyRow]) -> list[list[tuple[LazyRow, bool]]]:
        """This rank's micro-batches of a global batch, with whether a row is filler: every N-th row is its own."""
        filler = min(batch, key=lambda lazy: lazy.size)
        rows = [(lazy, False) for lazy in batch] + [(filler, True)] * (self.places - len(batch))
        own = rows[self.rank :: self.world_size]
        return [own[start : start + self.batch_size] for start in range(0, len(own), self.batch_size)]

    def __iter__(self) -> Iterator[Row]:
        worker = get_worker_info()
        own, among = (worker.id, worker.num_workers) if worker else (0, 1)
        turn, first = 0, self.place.epoch
        while self.endless or self.place.epoch == first:
            at, seen = self.place, False
            batches = self.global_batches(at)
            following = next(batches, None)
            while following is not None:
                (begun, batch), following, seen = following, next(batches, None), True
                after = following[0] if following else Place(at.epoch + 1)
                for number, rows in enumerate(self.deal(batch)):
                    if begun.row == at.row and number < at.micro:
                        continue
                    is_last = number + 1 == self.accumulation
                    mine, turn = turn % among == own, turn + 1
                    self.place = after if is_last else replace(begun, micro=number + 1)
                    if mine:
                        for place, (lazy, is_filler) in enumerate(rows, 1):
                            made = lazy.make() | {"ignore": is_filler}
                            yield made | {"place": self.state_dict()} if place == len(rows) else made
            if not seen and at.row == 0:
                raise DataError("the training shards hold no rows", "give files with text, or leave out --drop_last")
            self.place = Place(at.epoch + 1)
