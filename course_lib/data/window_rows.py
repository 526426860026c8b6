"""The rows of tokens that a window of texts makes: a pure function of the texts and their order."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.data.conversations import Chat
from course_lib.data.packing import best_fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
"""`input_ids`, `length` and, see :class:`course_lib.data.collating.Collator`, `documents` and `answers`."""


class LazyRow(NamedTuple):
    """A row that is made when it is needed.

    Attributes:
        size: about how long it is, to compare with others.
        make: makes it.
    """

    size: int
    make: Callable[[], Row]


class Named(NamedTuple):
    """A text, and where it is from, for an error."""

    text: str
    where: str


def plain_tokens(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, without special ones."""
    if not texts:
        return []
    return tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]


def in_pieces(ids: Sequence[int], size: int) -> list[list[int]]:
    """Tokens cut into pieces of at most a size."""
    return [list(ids[start : start + size]) for start in range(0, len(ids), size)]


@dataclass(frozen=True)
class WindowRows:
    """Makes the rows of a window.

    Attributes:
        tokenizer: of the model.
        max_length: tokens of a row, at most.
        separator: the token that ends a text.
        packs: by best fit; else the texts are one stream, cut into blocks, of which the last may be shorter.
        chat: for conversations: each is a row, made when it is needed, unless they are packed.
    """

    tokenizer: "PreTrainedTokenizerBase"
    max_length: int
    separator: int
    packs: bool = False
    chat: Chat | None = None

    def __call__(self, texts: Sequence[Named]) -> list[LazyRow]:
        """The rows in the order of their first texts; by best fit, of their numbers."""
        if self.chat is not None and not self.packs:
            return [LazyRow(len(one.text), functools.partial(self._talk, one)) for one in texts]
        if self.packs:
            return [LazyRow(row["length"], functools.partial(dict, row)) for row in self._packed(texts)]
        stream = [token for ids in self._ended(texts) for token in ids]
        return [
            LazyRow(len(ids), functools.partial(dict, input_ids=ids, length=len(ids)))
            for ids in in_pieces(stream, self.max_length)
        ]

    def _ended(self, texts: Sequence[Named]) -> list[list[int]]:
        plain = plain_tokens(self.tokenizer, [one.text for one in texts if one.text.strip()])
        return [[*ids, self.separator] for ids in plain]

    def _packed(self, texts: Sequence[Named]) -> list[Row]:
        if self.chat is None:
            pieces: list[Row] = [
                {"input_ids": piece} for ids in self._ended(texts) for piece in in_pieces(ids, self.max_length)
            ]
        else:
            pieces = [talk for talk in map(self._talk, texts) if any(talk["answers"])]
        lengths = [len(piece["input_ids"]) for piece in pieces]
        rows = []
        for plan in best_fit(lengths, self.max_length):
            joined = {
                name: [value for piece in plan for value in pieces[piece][name]]
                for name in ("input_ids", "answers")
                if name in pieces[0]
            }
            documents = [lengths[piece] for piece in plan]
            rows.append(joined | {"documents": documents, "length": sum(documents)})
        return rows

    def _talk(self, one: Named) -> Row:
        assert self.chat is not None
        talk = self.chat(one.text, one.where).cut(self.max_length)
        return {"input_ids": talk.input_ids, "answers": talk.answers, "length": len(talk.input_ids)}
