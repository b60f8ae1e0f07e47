"""Rows from clients: embeddings in place of text or of a picture, as the bytes of a file (SECURITY S32).

Pure functions, pool. In: base64 of a safetensors file with one dense tensor [n, width] of float32, float16 or bfloat16,
or of bare float32 numbers, as /v1/embeddings writes them. Out: float32 [n, width], all within LARGEST, and a digest.
Nothing is unpickled. The header gives every size before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mm.errors import MediaError
from mm.sources import decode_base64, parse_base64

MAX_HEADER = 4096  # bytes of a safetensors header, which names one tensor
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}
FLOATS, WHOLE = ("F32", "F16", "BF16"), ("I64",)
LARGEST = 2.0**31  # the squares of a row must have a finite sum in float32; otherwise the first norm returns NaN


@dataclass(frozen=True, slots=True)
class ClientRows:
    """Embedding rows that a client sent."""

    numbers: np.ndarray  # float32 [n, width]
    digest: bytes  # 16 bytes that name the numbers


def read_rows(text: str, width: int, most: int, param: str) -> ClientRows:
    """Decode 1 <= n <= most rows. MediaError gives the number of rows and what is allowed."""
    try:
        rows = _numbers(_decoded(text, most * width * 4), FLOATS, (0, width))
        if not 1 <= len(rows) <= most:
            raise _refused(f"the tensor has {len(rows)} rows; 1 to {most} are allowed")
        if not max(rows.max(), -rows.min()) <= LARGEST:  # NaN, too
            raise _refused(f"the tensor holds numbers that are not finite, or beyond {LARGEST:.0f}")
    except MediaError as error:
        error.param = param
        raise
    return ClientRows(rows, digest_of(rows))


def read_grid(text: str, param: str) -> np.ndarray:
    """int64 [1, 3]: a picture's patches along time, rows and columns, as the families with grids count them."""
    try:
        grid = _numbers(_decoded(text, 24), WHOLE, (0, 3))
        if grid.shape != (1, 3) or grid.min() < 1 or grid.max() > 1 << 15:
            raise _refused("a grid is one line of three numbers from 1 on: time, rows, columns")
    except MediaError as error:
        error.param = param
        raise
    return grid


def digest_of(*arrays: np.ndarray) -> bytes:
    """A digest of the arrays' shapes, types and numbers, 16 bytes."""
    found = hashlib.sha256(b"rows")
    for array in arrays:
        found.update(repr((array.shape, array.dtype.str)).encode())
        found.update(np.ascontiguousarray(array).data)
    return found.digest()[:16]


def _decoded(text: str, most: int) -> bytes:
    source = parse_base64(text)
    if source.size > most + MAX_HEADER + 8:
        raise _refused(f"the tensor has {source.size} bytes; at most {most} are allowed")
    return decode_base64(source)


def _numbers(data: bytes, kinds: tuple[str, ...], shape: tuple[int, int]) -> np.ndarray:
    """The tensor of a safetensors file, or bare numbers. A 0 in `shape` allows any length."""
    header_len = int.from_bytes(data[:8], "little")
    if data[8:9] != b"{" or header_len > min(MAX_HEADER, len(data) - 8):
        if kinds is WHOLE or len(data) % (4 * shape[1]):
            raise _refused(f"send base64 of a safetensors file, or float32 numbers in lines of {shape[1]}")
        return np.frombuffer(data, "<f4").reshape(-1, shape[1])
    kind, got, start, end = _entry(data[8 : 8 + header_len])
    if kind not in kinds:
        raise _refused(f"the tensor's type is {kind[:16]!r}; {', '.join(kinds)} are read")
    if len(got) != 2 or got[1] != shape[1]:
        raise _refused(f"the tensor's shape is {got[:8]}; [n, {shape[1]}] is needed")
    body = memoryview(data)[8 + header_len :]
    if (start, end) != (0, len(body)) or end != got[0] * got[1] * _BYTES[kind]:
        raise _refused("the file's header and its length disagree")
    if kind == "BF16":
        return (np.frombuffer(body, "<u2").astype("<u4") << 16).view("<f4").reshape(got)
    wide = {"F32": "<f4", "F16": "<f2", "I64": "<i8"}[kind]
    return np.frombuffer(bytes(body), wide).reshape(got).astype(np.int64 if kind == "I64" else np.float32)


def _entry(header: bytes) -> tuple[str, list[int], int, int]:
    """Type, shape, start and end of the only tensor in the file."""
    try:
        listed = json.loads(header)
    except (ValueError, RecursionError):
        listed = None
    listed = listed if isinstance(listed, dict) else {}
    tensors = {name: entry for name, entry in listed.items() if name != "__metadata__"}
    if len(tensors) != 1:
        raise _refused(f"a safetensors file with one tensor is needed; this one has {len(tensors)}")
    (entry,) = tensors.values()
    if not isinstance(entry, Mapping) or not isinstance(entry.get("dtype"), str):
        raise _refused("the file's header cannot be read")
    shape, place = _whole(entry.get("shape"), 8), _whole(entry.get("data_offsets"), 2)
    if len(place) != 2:
        raise _refused("the file's header cannot be read")
    return entry["dtype"], shape, place[0], place[1]


def _whole(value: Any, most: int) -> list[int]:
    if not isinstance(value, list) or len(value) > most or not all(type(n) is int and 0 <= n < 1 << 40 for n in value):
        raise _refused("the file's header cannot be read")
    return value


def _refused(message: str) -> MediaError:
    return MediaError(400, "embedding_invalid", message)
