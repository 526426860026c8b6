"""Plain values as bytes: JSON, and the bytes of arrays behind it.

What crosses the border of a sandbox is this and nothing else. Reading it runs no code of the writer's, takes memory
in proportion to what was read, and refuses whatever it does not know.
"""

import json
import math
import struct
from typing import Any

import numpy as np

from course_lib.grading.task import Plain

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64")
MAX_JSON_BYTES = 1 << 20  # parsed, a hostile text takes some thirty times its length
MAX_DIMENSIONS = 8
_ARRAY = "$array"
_LENGTH = struct.Struct("<Q")


class NotPlain(ValueError):
    """Bytes that are no packed value, or a value that cannot be packed."""


def pack(value: Plain) -> bytes:
    """A plain value as bytes.

    Raises:
        NotPlain: it holds something else, or its text is longer than MAX_JSON_BYTES.
    """
    arrays: list[bytes] = []

    def other(leaf: Any) -> Any:
        if isinstance(leaf, np.generic):
            return leaf.item()
        if not isinstance(leaf, np.ndarray) or leaf.dtype.name not in DTYPES:
            raise NotPlain(f"a {type(leaf).__name__} is not plain data")
        arrays.append(np.ascontiguousarray(leaf).tobytes())
        return {_ARRAY: [leaf.dtype.name, list(leaf.shape)]}

    try:
        text = json.dumps(value, default=other).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NotPlain(str(error)) from None
    if len(text) > MAX_JSON_BYTES:
        raise NotPlain(f"{len(text)} bytes of text, the limit is {MAX_JSON_BYTES}: hand numbers over as arrays")
    return _LENGTH.pack(len(text)) + text + b"".join(arrays)


def unpack(data: bytes) -> Plain:
    """The value that `pack` made into bytes; arrays are copies of their own.

    Raises:
        NotPlain: they are anything else.
    """
    if len(data) < _LENGTH.size:
        raise NotPlain("no length")
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if length > MAX_JSON_BYTES or end > len(data):
        raise NotPlain("a length beyond the end")
    at = end

    def array(node: dict[str, Any]) -> Any:
        nonlocal at
        if _ARRAY not in node:
            return node
        try:
            name, shape = node[_ARRAY]
            fits = (
                name in DTYPES
                and len(shape) <= MAX_DIMENSIONS
                and all(type(side) is int and side >= 0 for side in shape)
            )
        except (TypeError, ValueError):
            fits = False
        if not fits or len(node) != 1:
            raise NotPlain("no array of a known kind")
        count, dtype = math.prod(shape), np.dtype(name)
        if count * dtype.itemsize > len(data) - at or (not count and math.prod(s or 1 for s in shape) > len(data)):
            raise NotPlain("an array beyond the end")
        values = np.frombuffer(data, dtype, count, at).reshape(shape).copy()
        at += count * dtype.itemsize
        return values

    try:
        value = json.loads(data[_LENGTH.size : end].decode(), object_hook=array)
    except (ValueError, RecursionError) as error:
        raise NotPlain(str(error)) from None
    if at != len(data):
        raise NotPlain("bytes behind the end")
    return value
