"""DataProcessor: from text to token ids, cached on disk, and to the collator that makes batches of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from course_lib.config import DataConfig
from course_lib.data.cache import FORMAT, batches, cached_map, column, column_digest, digest, folder
from course_lib.data.collating import Collator
from course_lib.data.connector import TextData
from course_lib.data.conversations import Chat, template
from course_lib.data.packed_rows import pack
from course_lib.data.plain_files import contents
from course_lib.data.shards import Shards
from course_lib.data.split_facts import SplitFacts, class_counts, repeated
from course_lib.data.window_rows import WindowRows, in_pieces, plain_tokens
from course_lib.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Collator", "DataProcessor", "ProcessedData", "as_torch"]

TENSOR_CORES = 8
"""Products of 16-bit matrices are fastest on GPUs where their sizes are multiples of this."""
FEATURES = datasets.Features({"input_ids": datasets.List(datasets.Value("int32")), "length": datasets.Value("int32")})
UNCUT = datasets.Features(FEATURES | {"uncut": datasets.Value("int32")})
"""With the tokens of each text before it was cut."""

ANSWERED = datasets.Features(FEATURES | {"answers": datasets.List(datasets.Value("bool"))})

TOKENS = 1
"""Part of every fingerprint, by which a checkpoint knows its data; raised when the same texts give other tokens."""

Counts = tuple[int, ...]
"""Tokens of all texts of a split, texts that are cut, tokens that are left out, rows that texts are packed into, and
texts that are left out."""


@dataclass(frozen=True)
class ProcessedData:
    """Tokenized splits."""

    splits: dict[str, datasets.Dataset]
    """Columns `input_ids` (list of int32), `length` (tokens, int32) and, for classification, `labels` (int64); where
    whole texts share rows, `documents` (list of int32, the length of each); of conversations, `answers` (list of bool,
    whether a token is of an answer)."""
    label_names: tuple[str, ...] | None
    task: str
    fingerprint: str
    """Names the token ids, the labels and their order; the same in every process."""
    notes: tuple[str, ...] = ()
    """See :class:`course_lib.data.connector.TextData`."""
    facts: Mapping[str, SplitFacts] = field(default_factory=dict)
    """What each split holds, and what was cut of it."""
    shards: Shards | None = None
    """The training text where it is streamed: there is no split `train` then."""
    make_rows: WindowRows | None = None
    """Makes its rows, a window at a time."""


class DataProcessor:
    """Tokenizes text for a task.

    Classification truncates each text at `max_length` tokens. Language modelling joins all texts of a split, each
    ended by the tokenizer's eos (or sep) token, into one stream and cuts it into blocks of `max_length` tokens; the
    rest that fills no block is dropped, and a block may hold parts of several texts, which see each other. With
    `packing` best_fit whole texts are packed into rows instead (:mod:`course_lib.data.packing`), and see each other
    not; a longer text is cut into pieces, which count as texts. Of conversations the answers alone are learnt
    (:mod:`course_lib.data.conversations`), and each has a row of its own unless packed; what is beyond `max_length` is
    cut off, and one that has no answer left is left out.

    Args:
        config: task, length, padding and masking.
        tokenizer: of the model.
        max_positions: tokens that the model can place, where that is known.

    Attributes:
        max_length: tokens of an example or a block: the config's, or max_positions or the tokenizer's own limit where
            that is less.
    """

    def __init__(self, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", max_positions: int | None = None):
        self.config, self.tokenizer, self.max_positions = config, tokenizer, max_positions
        limits = (config.max_length, max_positions, tokenizer.model_max_length)
        self.max_length = min(int(limit) for limit in limits if limit)
        self.packs = config.packing == "best_fit"
        self.chat: Chat | None = None
        if config.chat_template:
            tokenizer.chat_template = template(config.chat_template)

    def process(self, data: TextData) -> ProcessedData:
        """Every split as token ids; a second call, or another rank, reads what the first one wrote.

        Raises:
            DataError: the tokens fill no block, a text gives no tokens, or the cache cannot be written.
            ModelError: the tokenizer lacks a token that the task needs.
        """
        classifies, tokenizer_digest = self.config.task == "classification", self._tokenizer_digest()
        ways, notes = ["best_fit"] * self.packs, list(data.notes)
        tokenize = self._truncate_split if classifies else self._pack_split if self.packs else self._cut_split
        if data.conversations:
            self.chat, tokenize = Chat(self.tokenizer), self._answer_split
            ways += ["conversations", self.tokenizer.get_chat_template()]
        names = {
            split: digest(TOKENS, classifies, self.max_length, tokenizer_digest, column_digest(rows, "text"), *ways)
            for split, rows in data.splits.items()
        }
        splits, facts, again = dict[str, datasets.Dataset](), dict[str, SplitFacts](), repeated(data.splits)
        for split, rows in data.splits.items():
            splits[split], counts = tokenize(rows, split, digest(FORMAT, names[split]))
            if data.conversations:
                notes.append(f"{split}: the loss is over the {answers_in(splits[split]):,} tokens of answers alone")
            facts[split] = SplitFacts(
                len(rows), class_counts(rows, data.label_names), again[split], self.max_length, *counts
            )
        labels = [column_digest(rows, "labels") for rows in splits.values() if classifies]
        make_rows = None
        if data.shards is not None:
            make_rows = self.window_rows(data.conversations)
            held = [(file.name, file.stat().st_size) for file in data.shards.files]  # no sum: it would read them all
            names["train"] = digest(TOKENS, self.max_length, tokenizer_digest, ways, held, self.config.stream_window)
        return ProcessedData(
            splits,
            data.label_names,
            self.config.task,
            digest(names, data.label_names, labels),
            tuple(notes),
            facts,
            data.shards,
            make_rows,
        )

    def window_rows(self, conversations: bool = False) -> WindowRows:
        """Function that makes the rows of a window of streamed texts, or of conversations as JSON.

        Raises:
            ModelError: the tokenizer lacks a token or a template that the task needs.
        """
        chat = Chat(self.tokenizer) if conversations else None
        return WindowRows(self.tokenizer, self.max_length, 0 if chat else self._separator(), self.packs, chat)

    def collator(self, device_type: str = "cpu") -> Collator:
        """Collator that makes batches of the rows, for that kind of device.

        Raises:
            ModelError: the tokenizer lacks a token that the task needs.
        """
        config, ordinary, multiple = self.config, None, self.config.pad_to_multiple_of
        if multiple is None and device_type == "cuda" and not config.has_one_length:
            multiple = TENSOR_CORES
        if config.task == "masked_lm":
            ordinary = np.array(sorted(set(self.tokenizer.get_vocab().values()) - set(self.tokenizer.all_special_ids)))
        return Collator(
            config.task,
            self._token("pad"),
            self.tokenizer.padding_side,
            pad_to=None if config.dynamic_padding else self.max_length,
            pad_to_multiple_of=multiple,
            max_positions=self.max_positions,
            mlm_probability=config.mlm_probability,
            mask_token_id=self._token("mask") if config.task == "masked_lm" else None,
            ordinary=ordinary,
        )

    def _truncate_split(self, rows: datasets.Dataset, split: str, key: str) -> tuple[datasets.Dataset, Counts]:
        """Each text as at most max_length tokens, with its label."""

        def truncated(batch: pa.Table) -> dict[str, Any]:
            texts = batch["text"].to_pylist()
            options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
            tokens = self.tokenizer(texts, **options)["input_ids"]
            uncut = [len(ids) for ids in tokens]
            long = [row for row, length in enumerate(uncut) if length > self.max_length]
            if long:
                cut = self.tokenizer(
                    [texts[row] for row in long], truncation=True, max_length=self.max_length, **options
                )
                for row, ids in zip(long, cut["input_ids"], strict=True):
                    tokens[row] = ids
            return {"input_ids": tokens, "length": [len(ids) for ids in tokens], "uncut": uncut}

        tokens = cached_map(
            rows.select_columns("text"), truncated, key=key, features=UNCUT, describe=f"Tokenizing {split}"
        )
        length, uncut = column(tokens, "length"), column(tokens, "uncut")
        if (row := pc.index(length, pa.scalar(0, pa.int32())).as_py()) >= 0:
            raise DataError(
                f"row {row} (from 0) of the {split} split gives no tokens", "leave such rows out, or use another model"
            )
        labels = cached_map(
            rows.select_columns("label"),
            lambda batch: {"labels": batch["label"]},
            key=digest(FORMAT, "labels", column_digest(rows, "label")),
            features=datasets.Features({"labels": datasets.Value("int64")}),
            describe=f"Labels of {split}",
        )
        all_tokens = pc.sum(uncut).as_py()
        counts = all_tokens, pc.sum(pc.greater(uncut, length)).as_py(), all_tokens - pc.sum(length).as_py()
        return datasets.concatenate_datasets([tokens.select_columns(list(FEATURES)), labels], axis=1), counts

    def _cut_split(self, rows: datasets.Dataset, split: str, key: str) -> tuple[datasets.Dataset, Counts]:
        """All texts as blocks of max_length tokens."""
        counted = folder() / f"{key}.tokens"
        blocks = cached_map(
            rows.select_columns("text"),
            _Blocks(self.tokenizer, self._separator(), self.max_length, counted),
            key=key,
            features=FEATURES,
            describe=f"Tokenizing {split}",
        )
        if not len(blocks):
            raise DataError(
                f"the {split} split has too little text for one block of max_length {self.max_length} tokens",
                "give a smaller --max_length, or more text",
            )
        tokens = int(counted.read_text(encoding="utf-8"))
        return blocks, (tokens, 0, tokens - len(blocks) * self.max_length)

    def _pack_split(self, rows: datasets.Dataset, split: str, key: str) -> tuple[datasets.Dataset, Counts]:
        """Whole texts packed into rows of at most max_length tokens; a longer text in pieces."""
        separator, size = self._separator(), self.max_length

        def pieces(batch: pa.Table) -> dict[str, Any]:
            texts = [[*ids, separator] for ids in plain_tokens(self.tokenizer, batch["text"].to_pylist())]
            parts = [piece for ids in texts for piece in in_pieces(ids, size)]
            uncut = [0 if start else len(ids) for ids in texts for start in range(0, len(ids), size)]
            return {"input_ids": parts, "length": list(map(len, parts)), "uncut": uncut}

        tokens = cached_map(
            rows.select_columns("text"),
            pieces,
            key=digest("pieces", key),
            features=UNCUT,
            describe=f"Tokenizing {split}",
        )
        uncut = column(tokens, "uncut")
        packed = pack(tokens.remove_columns("uncut"), size, key, f"Packing {split}")
        return packed, (pc.sum(uncut).as_py(), pc.sum(pc.greater(uncut, size)).as_py(), 0, len(packed))

    def _answer_split(self, rows: datasets.Dataset, split: str, key: str) -> tuple[datasets.Dataset, Counts]:
        """Conversations of at most max_length tokens, those of answers marked; packed, or each in a row."""
        begun = 0

        def conversations(batch: pa.Table) -> dict[str, Any]:
            nonlocal begun
            assert self.chat is not None
            texts = batch["text"].to_pylist()
            made = [
                self.chat(text, f"row {row} (from 0) of the {split} split") for row, text in enumerate(texts, begun)
            ]
            begun += len(texts)
            uncut = [len(one.input_ids) for one in made]
            made = [one.cut(self.max_length) for one in made]
            return {
                "input_ids": [one.input_ids for one in made],
                "answers": [one.answers for one in made],
                "length": [len(one.input_ids) for one in made],
                "uncut": uncut,
            }

        def answered(batch: pa.Table) -> dict[str, pa.ChunkedArray]:
            kept = batch.filter(pa.array([any(row) for row in batch["answers"].to_pylist()]))
            return {name: kept[name] for name in ANSWERED}

        tokens = cached_map(
            rows.select_columns("text"),
            conversations,
            key=key,
            features=datasets.Features(ANSWERED | UNCUT),
            describe=f"Tokenizing {split}",
        )
        kept = cached_map(
            tokens, answered, key=digest("answered", key), features=ANSWERED, describe=f"Looking for answers in {split}"
        )
        if not len(kept):
            raise DataError(
                f"no conversation of the {split} split has an answer within max_length {self.max_length}",
                "raise --max_length, or give turns of the role assistant",
            )
        length, uncut = column(tokens, "length"), column(tokens, "uncut")
        tokens_of_all, cut = pc.sum(uncut).as_py(), pc.sum(pc.greater(uncut, length)).as_py()
        counts = tokens_of_all, cut, tokens_of_all - pc.sum(column(kept, "length")).as_py()
        left_out = len(tokens) - len(kept)
        if not self.packs:
            return kept, (*counts, 0, left_out)
        packed = pack(kept, self.max_length, key, f"Packing {split}")
        return packed, (*counts, len(packed), left_out)

    def _separator(self) -> int:
        """The token that ends a text."""
        for token in (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id):
            if token is not None:
                return token
        raise ModelError("the tokenizer has no eos and no sep token to put between texts", "set tokenizer.eos_token")

    def _token(self, role: str) -> int:
        token = getattr(self.tokenizer, f"{role}_token_id")
        if token is None:
            raise ModelError(f"the tokenizer has no {role} token", f"set tokenizer.{role}_token")
        return token

    def _tokenizer_digest(self) -> str:
        """Names what the tokenizer makes of a text."""
        tokenizer = self.tokenizer
        special = [tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.truncation_side]
        if not tokenizer.is_fast:
            settings = {
                name: contents(Path(value)) if isinstance(value, str) and Path(value).is_file() else repr(value)
                for name, value in tokenizer.init_kwargs.items()
            }
            return digest(type(tokenizer).__name__, settings, tokenizer.get_vocab(), special)
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # A call leaves its truncation and padding behind; each call here sets its own.
        return digest(state | {"truncation": None, "padding": None}, special)


def answers_in(rows: datasets.Dataset) -> int:
    """Tokens of answers."""
    return sum(pc.sum(pc.list_flatten(answers)).as_py() for answers in batches(rows, "answers"))


class _Blocks:
    """Cuts the tokens of batch after batch, in order, into blocks; what fills none waits for the next batch."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", separator: int, size: int, counted: Path):
        self.tokenizer, self.separator, self.size = tokenizer, separator, size
        self.rest: list[int] = []
        self.tokens, self.counted = 0, counted  # written batch by batch, so that it stands once the blocks do

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        stream = self.rest
        for tokens in plain_tokens(self.tokenizer, batch["text"].to_pylist()):
            stream += [*tokens, self.separator]
        whole = len(stream) // self.size * self.size
        self.tokens += whole
        self.counted.write_text(str(self.tokens + len(stream) - whole), encoding="utf-8")
        self.rest = stream[whole:]
        blocks = [stream[start : start + self.size] for start in range(0, whole, self.size)]
        return {"input_ids": blocks, "length": [self.size] * len(blocks)}


def as_torch(dataset: datasets.Dataset) -> datasets.Dataset:
    """A processed split for plain PyTorch or the Hugging Face Trainer: rows of int64 tensors.

    Columns `input_ids`, `attention_mask` (all ones: rows are not padded yet) and, for classification, `labels`. The
    labels of language modelling are made by a collator: :class:`Collator`, which also reads rows that texts share and
    conversations, or transformers' DataCollatorForLanguageModeling.
    """
    mask = [[1] * length for length in dataset["length"][:]]
    dataset = dataset.remove_columns("length")
    return dataset.add_column("attention_mask", mask, feature=datasets.List(datasets.Value("int8"))).with_format(
        "torch"
    )
