"""Types of Arrow, in both roles: read rightly, or refused by name with a way out, in one line."""

import datetime
import decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from course_lib.errors import DataError
from tests.data.local_cases import load

DAY = datetime.datetime(2026, 1, 2)
TEXTS, NUMBERS, BOTH = ["yes", "no"], [0, 1], [False, True]
TEXT_LIKE = (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()))
NUMBER_LIKE = (pa.int8(), pa.uint16(), pa.int64(), pa.uint64(), pa.float16(), pa.float64())
VALUES = {
    **dict.fromkeys(TEXT_LIKE, TEXTS),
    **dict.fromkeys(NUMBER_LIKE, NUMBERS),
    pa.dictionary(pa.int8(), pa.int64()): NUMBERS,
    pa.bool_(): BOTH,
    pa.null(): [None, None],
    pa.binary(): [b"yes", b"no"],
    pa.decimal128(20, 2): [decimal.Decimal(2), decimal.Decimal(3)],
    pa.date32(): [DAY.date()] * 2,
    pa.timestamp("us", "UTC"): [DAY] * 2,
    pa.duration("s"): [datetime.timedelta(1)] * 2,
    pa.month_day_nano_interval(): [pa.MonthDayNano([1, 2, 3])] * 2,
    pa.list_(pa.string()): [["a"], ["b"]],
    pa.struct({"a": pa.string()}): [{"a": "b"}] * 2,
    pa.map_(pa.string(), pa.string()): [[("a", "b")]] * 2,
}


pytestmark = pytest.mark.usefixtures("cache")


def write_splits(table, folder):
    """As Parquet where it holds such a column, else as Arrow."""
    for split in ("train", "validation", "test"):
        try:
            pq.write_table(table, folder / f"{split}.parquet")
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            (folder / f"{split}.parquet").unlink(missing_ok=True)
            with pa.OSFile(str(folder / f"{split}.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
                writer.write_table(table)


@pytest.mark.parametrize("role", ["text", "label"])
@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_a_column_of_each_type(kind, role, tmp_path):
    values = VALUES[kind]
    column = pa.array(values, kind.value_type if pa.types.is_dictionary(kind) else kind)
    column = column.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else column
    other = {"label": "text", "text": "label"}[role]
    write_splits(pa.table({role: column, other: pa.array(["first", "second"])}), tmp_path)
    if values is TEXTS or (role == "label" and values in (NUMBERS, BOTH)):
        data = load(tmp_path)
        rows = data.splits["train"]
        if role == "text":
            assert list(rows["text"]) == TEXTS
        else:
            named = [data.label_names[label] for label in rows["label"]]
            assert named == [str(value).lower() for value in values]
        return
    with pytest.raises(DataError, match=rf"column `{role}` .* holds |has no {role} in column") as caught:
        load(tmp_path)
    assert ": " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.0, 0.5], r"holds 0\.5 in row 1"),
        ([0.0, float("inf")], r"holds inf in row 1"),
        ([0.0, 1e300], r"row 1 .*no class"),
        ([2.0**53, 2.0**53 + 2], r"row 1 .*no class"),
        ([0.0, float("nan")], r"row 1 .* has no label"),
        ([0, None], r"row 1 .* has no label"),
    ],
)
def test_values_that_are_no_class_are_named(values, said, tmp_path):
    pq.write_table(pa.table({"label": values, "text": ["a", "b"]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=said):
        load(tmp_path / "train.parquet")
