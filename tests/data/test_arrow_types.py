"""Every type of Arrow, in every role: read rightly, or refused by its name with a way out, in one line."""

import datetime
import decimal

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow import types

from course_lib.config import DataConfig
from course_lib.data import DataConnector, arrow_types
from course_lib.data.tables import Raw
from course_lib.errors import DataError

DAY = datetime.datetime(2026, 1, 2)
TEXTS, NUMBERS = ["yes", "no"], [0, 1]
VALUES = {
    pa.string(): TEXTS,
    pa.large_string(): TEXTS,
    pa.string_view(): TEXTS,
    pa.binary(): [b"yes", b"no"],
    pa.large_binary(): [b"yes", b"no"],
    pa.binary_view(): [b"yes", b"no"],
    pa.binary(3): [b"yes", b"nay"],
    **dict.fromkeys(
        (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()), NUMBERS
    ),
    **{kind: [0.0, 1.0] for kind in (pa.float16(), pa.float32(), pa.float64())},
    **{
        kind: [decimal.Decimal(0), decimal.Decimal(1)]
        for kind in (pa.decimal32(5, 2), pa.decimal64(9, 0), pa.decimal128(20, 2), pa.decimal256(50, 1))
    },
    pa.bool_(): [False, True],
    pa.null(): [None, None],
    pa.dictionary(pa.int32(), pa.string()): TEXTS,
    pa.dictionary(pa.int8(), pa.int64()): NUMBERS,
    pa.run_end_encoded(pa.int32(), pa.string()): TEXTS,
    **{kind: [DAY.date()] * 2 for kind in (pa.date32(), pa.date64())},
    **{pa.timestamp(unit, zone): [DAY] * 2 for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC")},
    **{kind: [DAY.time()] * 2 for kind in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))},
    **{pa.duration(unit): [datetime.timedelta(1)] * 2 for unit in ("s", "ms", "us", "ns")},
    pa.month_day_nano_interval(): [pa.MonthDayNano([1, 2, 3])] * 2,
    **{
        kind: [["a"], ["b"]]
        for kind in (
            pa.list_(pa.string()),
            pa.large_list(pa.string()),
            pa.list_(pa.string(), 1),
            pa.list_view(pa.string()),
            pa.large_list_view(pa.string()),
        )
    },
    pa.list_(pa.int64()): [[1], [2]],
    pa.struct({"a": pa.string()}): [{"a": "b"}] * 2,
    pa.map_(pa.string(), pa.string()): [[("a", "b")]] * 2,
    pa.dictionary(pa.int32(), pa.timestamp("s")): [DAY] * 2,
}


def test_all_types_that_pyarrow_tells_apart_are_here():
    kinds = [
        name
        for name in dir(types)
        if name.startswith("is_") and name not in ("is_boolean_value", "is_float_value", "is_integer_value")
    ]
    missing = [name for name in kinds if not any(getattr(types, name)(kind) for kind in VALUES)]
    assert missing == ["is_union"], "which no file holds; the table refuses it"
    assert arrow_types.plain_type(pa.dense_union([pa.field("a", pa.string())])) is None


def array_of(kind):
    values = VALUES[kind]
    if types.is_run_end_encoded(kind):
        return pc.run_end_encode(pa.array(values, kind.value_type))
    if types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)


def splits_of(kind, role, folder):
    """A file with the column in that role, in the form that holds it, and the data set in memory where it can."""
    column = array_of(kind)
    other = pa.array(["first", "second"]) if role == "label" else pa.array(["a", "b"])
    table = pa.table({role: column, {"label": "text", "text": "label"}[role]: other})
    for split in ("train", "validation", "test"):
        with pa.OSFile(str(folder / f"{split}.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    return table


@pytest.mark.parametrize("role", ["text", "label"])
@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_a_column_of_each_type(kind, role, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    table = splits_of(kind, role, data)
    try:
        for split in ("train", "validation", "test"):
            pq.write_table(table, tmp_path / f"{split}.parquet")
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError):
        places = [data]
    else:
        (tmp_path / "parquet").mkdir()
        for split in ("train", "validation", "test"):
            (tmp_path / f"{split}.parquet").rename(tmp_path / "parquet" / f"{split}.parquet")
        places = [data, tmp_path / "parquet"]
    plain = arrow_types.plain_type(kind)
    fits = plain in (pa.string(), pa.binary()) or (role == "label" and plain not in (None, pa.null()))
    for place in places:
        config = DataConfig(dataset=str(place))
        if not fits:
            with pytest.raises(DataError, match=f"column `{role}`|no text|no label|`{role}`") as caught:
                DataConnector(config).load()
            assert ": " in str(caught.value) and "\n" not in str(caught.value)
            continue
        loaded = DataConnector(config).load()
        rows = loaded.splits["train"]
        values = [value.decode() if isinstance(value, bytes) else value for value in VALUES[kind]]
        if role == "text":
            assert list(rows["text"]) == values
        else:
            named = [loaded.label_names[label] for label in rows["label"]]
            assert named == [
                str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else str(int(value))
                for value in values
            ]


@pytest.mark.parametrize(
    ("values", "kind", "role", "said"),
    [
        ([b"\xff\xfe", b"ok"], pa.binary(), "text", r"holds bytes that are no UTF-8 in row 0"),
        ([b"ok", b"\xff"], pa.binary(), "label", r"holds bytes that are no UTF-8 in row 1"),
        ([0.0, 0.5], pa.float32(), "label", r"holds 0\.5 in row 1"),
        ([0.0, float("inf")], pa.float64(), "label", r"holds inf in row 1"),
        ([0.0, 1e300], pa.float64(), "label", r"row 1 .*no class"),
        ([2.0**53, 2.0**53 + 2], pa.float64(), "label", r"row 1 .*no class"),
        ([0.0, float("nan")], pa.float64(), "label", r"row 1 .* has no label"),
    ],
)
def test_values_that_are_none_are_named(values, kind, role, said, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    other = {"label": "text", "text": "label"}[role]
    pq.write_table(pa.table({role: pa.array(values, kind), other: ["a", "b"]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=said):
        DataConnector(DataConfig(dataset=str(tmp_path / "train.parquet"))).load()


def test_a_data_set_in_memory_is_asked_alike():
    raw = Raw(datasets.Dataset.from_dict({"text": [["a"], ["b"]], "when": [DAY, DAY], "label": [1, 2]}))
    assert raw.problem("label") is None
    assert "list" in raw.problem("text")[0] and ".join" in raw.problem("text")[1]
    assert "timestamp" in raw.problem("when")[0] and "astype(str)" in raw.problem("when")[1]
