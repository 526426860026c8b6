"""Files of any bytes, types, sizes and encodings: a data set or one clear line, never a traceback of a reader's."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import string
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from course_lib.config import build
from course_lib.data import DataConnector, DataProcessor
from course_lib.errors import CourseError

SECONDS = 600  # of `make long`
SEEDS = 60  # files in `make test`, always the same ones

BLANKS = ["", " ", "\u00a0", "\u200b", "\ufeff", "\x00", "\x85", "\u2028"]
QUOTES = ['"', '""', "'", "\\", '\\"', ",", ";", "|", "\t", "\n", "\r", "\r\n"]
MARKS = [*QUOTES, "#", "=", "{", "}", "[", "]", ":", "\x1b[31m"]
WORDS = ["é", "e\u0301", "😀", "текст", "中文", "a" * 3000, "í\xa0½"]
CODES = ["-1", "0", "1.0", "1e400", "NaN", "nan", "None", "true", "null"]
ODD = BLANKS + MARKS + WORDS + CODES
NUMBERS = [True, False, 0, -1, 1, 2**63, 10**400, 0.5, float("nan"), float("inf")]
VALUES = [None, *NUMBERS, "", "text", "a b", [], ["a"], {}, {"a": 1}, [[1]], "\ud83d", "\x00"]
SUFFIXES = [".csv", ".tsv", ".json", ".jsonl", ".txt", ".parquet", ".arrow"]
PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}
ENCODINGS = ["utf-8"] * 6 + ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "cp1251", "shift_jis"]


def word(draw):
    letters = [[draw.choice(ODD), draw.choice(string.ascii_letters), " ", "word"] for _ in range(draw.randrange(6))]
    return "".join(map(draw.choice, letters))


def delimited(draw):
    separator, names = draw.choice(",;|\t"), ["text", "label", *(word(draw) for _ in range(draw.randrange(3)))]
    draw.shuffle(names)
    end, quote = draw.choice(["\n", "\r\n", "\r"]), draw.choice(["none", "all", "some"])
    clean = draw.random() < 0.4
    rows = [names]
    for _ in range(draw.randrange(40)):
        fields = range(len(names) + (draw.random() < 0.01))
        rows.append([draw.choice(["pos", "neg"]) if clean or draw.random() < 0.9 else word(draw) for _ in fields])
    quoted = {
        "none": str,
        "all": lambda field: '"' + field.replace('"', '""') + '"',
        "some": lambda field: f'"{field}"' if draw.random() < 0.3 else field,
    }[quote]
    start = draw.choice(["", "", "", "sep=;\n", "# about\n", "\n"])
    return start + end.join(separator.join(map(quoted, row)) for row in rows)


def jsonlike(draw):
    strange, usual = draw.choice([0.0, 0.02, 0.2]), draw.choice([["some words", "pos"], ["pos", 0, 1]])

    def value():
        return draw.choice(VALUES) if draw.random() < strange else draw.choice(usual)

    rows = [
        {"text": value(), "label": value(), **({word(draw): value()} if draw.random() < 0.1 else {})}
        for _ in range(draw.randrange(30))
    ]
    forms = [
        lambda: rows,
        lambda: {"text": [row["text"] for row in rows], "label": [row["label"] for row in rows]},
        lambda: {"data": rows, "version": value()},
        value,
    ]
    form = draw.randrange(6)
    if form < 4:
        return json.dumps(forms[form](), indent=draw.choice([None, None, 1]))
    text = "\n".join(json.dumps(row, ensure_ascii=draw.random() < 0.5) for row in rows)
    return text.encode("utf-8", "replace").decode() if form == 4 else text[: draw.randrange(len(text) + 1)]


PLAIN_KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.int8(), pa.uint64(), pa.float16(), pa.float64()]
NESTED_KINDS = [pa.list_(pa.string()), pa.struct([("a", pa.int8())]), pa.dictionary(pa.int8(), pa.string())]
OTHER_KINDS = [pa.bool_(), pa.null(), pa.timestamp("us"), pa.date32(), pa.duration("s"), pa.decimal128(9, 2)]
KINDS = PLAIN_KINDS + NESTED_KINDS + OTHER_KINDS


def columnar(draw, as_parquet):
    size, columns = draw.randrange(30), {}
    for name in ("text", "label", word(draw)):
        kind = draw.choice([pa.string(), pa.string(), draw.choice(KINDS)])
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        values = [draw.choice(["words", "pos", "neg"]) if draw.random() < 0.97 else None for _ in range(size)]
        try:
            column = pa.array(values, plain)
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError):
            column = pa.nulls(size, plain)
            if pa.types.is_integer(plain) or pa.types.is_floating(plain):
                column = pa.array([draw.randrange(3) for _ in range(size)], pa.int8()).cast(plain)
        columns[name] = column.dictionary_encode() if pa.types.is_dictionary(kind) else column
    table, out = pa.table(columns), io.BytesIO()
    if as_parquet:
        pq.write_table(table, out)
    else:
        with draw.choice([pa.ipc.new_file, pa.ipc.new_stream])(out, table.schema) as writer:
            writer.write_table(table)
    return out.getvalue()


def damaged(draw, content):
    """The content cut, or with some bytes changed, now and then."""
    if content and draw.random() < 0.3:
        content = content[: draw.randrange(len(content))]
    if content and draw.random() < 0.2:
        content = bytearray(content)
        for _ in range(draw.randrange(1, 5)):
            content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


CODECS = ["cp1252", "utf-16", "utf-7", "idna", "nonsense", "rot13", "base64", "utf-8"]
OPTIONS = (  # what may be asked for, and of which files
    ("encoding", CODECS, (".csv", ".tsv", ".json", ".jsonl", ".txt")),
    ("quoting", ["none", "minimal", "escaped"], (".csv", ".tsv")),
    ("separator", [",", ";", "|", "tab"], (".csv",)),
    ("text_column", ["text", "label", ""], SUFFIXES),
)


def make(seed, folder):
    """A file, and options to read it with."""
    draw = random.Random(seed)
    suffix = draw.choice(SUFFIXES)
    if suffix in (".parquet", ".arrow"):
        content = columnar(draw, suffix == ".parquet")
    else:
        kinds = [delimited, jsonlike, lambda draw: "\n".join(word(draw) for _ in range(20))]
        usual = jsonlike if "json" in suffix else delimited
        text = (draw.choice(kinds) if draw.random() < 0.2 else usual)(draw)
        content = text.encode(draw.choice(ENCODINGS), "replace")
    if draw.random() < 0.05:
        content = draw.randbytes(draw.randrange(3000))
    packer = draw.choice([*[""] * 8, *PACKERS])
    pack = PACKERS[packer]
    content = pack(damaged(draw, content)) if draw.random() < 0.5 else damaged(draw, pack(content))
    path = folder / f"rows{suffix}{packer}"
    path.write_bytes(content)
    options = {"dataset": str(path), "task": draw.choice(["classification", "classification", "causal_lm"])}
    for name, values, fits in OPTIONS:
        if draw.random() < 0.1 and suffix in fits:
            options[name] = draw.choice(values)
    return path, options


def tried(seed, folder, tokenizer):
    """Whether a file was read and tokenized; what goes beyond one clear line is raised, with the seed."""
    path, options = make(seed, folder)
    try:
        config = build(options | {"max_length": 8}).data
        done = DataProcessor(config, tokenizer).process(DataConnector(config).load())
        assert all(len(rows) and done.facts[split].line(split).isprintable() for split, rows in done.splits.items())
        return True
    except CourseError as error:
        assert error.what and str(error).isprintable() and len(str(error)) < 3000, (seed, str(error))
        return False
    except Exception as error:
        raise AssertionError(f"seed {seed}: {path.name} {options}") from error
    finally:
        path.unlink()


def test_some_files(cache, tmp_path, by_bytes):
    read = [tried(seed, tmp_path, by_bytes) for seed in range(SEEDS)]
    assert 5 < sum(read) < SEEDS, "some are data sets"
    assert not list(Path(tmp_path / "cache").rglob(".*.arrow.*")), "nothing half-written stays"


@pytest.mark.long
def test_ten_minutes_of_files(cache, tmp_path, by_bytes, record_property):
    """Other files in each run, from a seed that a failure tells."""
    begun, seed = time.monotonic(), int(os.environ.get("COURSE_FUZZ_SEED", time.time_ns() // 10**9 * 10**6))
    count = 0
    while time.monotonic() - begun < SECONDS:
        tried(seed + count, tmp_path, by_bytes)
        count += 1
    record_property("files", count)
    assert count > 100
