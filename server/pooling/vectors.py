"""Turn the engine's arrays into the vectors of an answer: activation, fewer dimensions, and three formats.

Owner: loop or pool, pure functions. Arrays go into the answer directly: orjson writes float32 arrays, base64 takes
their bytes, and no number of a vector becomes a Python object. Sums are float32, as in the reference libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import orjson

from _fast import base64_text
from engine.base.model_config import Activation, PoolingConfig
from server.errors import invalid, quoted

Format = Literal["float", "base64", "bytes"]
FORMATS = ("float", "base64", "bytes")
DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
EMPTY = "an empty text"
LARGE = 16384  # numbers of an answer from which it is formatted in the pool


def activated(array: np.ndarray, activation: Activation) -> np.ndarray:
    """Apply an activation along the last axis of a float32 array [..., width]."""
    if activation == "normalize":
        norm = np.sqrt(np.square(array).sum(axis=-1, keepdims=True))
        return array / np.maximum(norm, np.float32(1e-12))
    if activation == "sigmoid":
        with np.errstate(over="ignore"):  # exp of a large number is inf, and 1 / inf is right
            return 1 / (1 + np.exp(-array))
    if activation == "relu":
        return np.maximum(array, 0)
    if activation in ("log1p", "log1p_twice"):
        once = np.log1p(np.maximum(array, 0))
        return once if activation == "log1p" else np.log1p(once)
    if activation == "softmax":
        shifted = np.exp(array - array.max(axis=-1, keepdims=True))
        return shifted / shifted.sum(axis=-1, keepdims=True)
    return array


def check_dimensions(pooling: PoolingConfig, asked: int | None, width: int) -> None:
    """Check the field `dimensions`."""
    if asked is None:
        return
    if pooling.dimensions is None or pooling.task != "embed":
        raise invalid("dimensions", "dimensions: this model's vectors cannot be cut; leave the field out")
    if pooling.dimensions and asked not in pooling.dimensions and asked != width:
        listed = ", ".join(map(str, pooling.dimensions))
        raise invalid("dimensions", f"dimensions: got {asked}; this model has {listed}")
    if not 1 <= asked <= width:
        raise invalid("dimensions", f"dimensions: got {asked}; must be 1 to {width}")


def finished(
    array: np.ndarray, activation: Activation, use_activation: bool | None, dimensions: int | None
) -> np.ndarray:
    """An array as its client gets it: truncated first, then activated."""
    cut = array if dimensions is None else array[..., :dimensions]
    return cut if use_activation is False else activated(cut, activation)


def of_tokens(lines: np.ndarray, ids: np.ndarray, pooling: PoolingConfig, task: str, role: str) -> np.ndarray:
    """lines [len(ids), width] of an input's tokens -> the lines for a task, [tokens, its width].

    `role`: query, document or anything else; some models leave out the punctuation of documents.
    """
    if pooling.skipped and role == "document":
        selected = ~np.isin(ids, pooling.skipped)
        lines, ids = lines[selected], ids[selected]
    at = 0
    for name, head in pooling.heads_of_tokens.items():
        width = head.layers[-1].out_features if pooling.token_heads else lines.shape[1]
        if name == task:
            first, last = head.dropped
            selected = lines[first : len(lines) - last, at : at + width]
            return selected if pooling.step_tag is None else selected[ids == pooling.step_tag]
        at += width
    raise AssertionError(f"{task} is none of this model's tasks")


def format_of(asked: str | None, dtype: str | None, endianness: str | None) -> tuple[Format, np.dtype[Any]]:
    """Check the fields encoding_format, embed_dtype and endianness."""
    form = "float" if asked is None else asked
    if form not in FORMATS:
        raise invalid(
            "encoding_format", f"encoding_format: got {quoted(form) or EMPTY}; must be one of {', '.join(FORMATS)}"
        )
    kind = "float32" if dtype is None else dtype
    if kind not in DTYPES:
        raise invalid("embed_dtype", f"embed_dtype: got {quoted(kind) or EMPTY}; must be one of {', '.join(DTYPES)}")
    if kind != "float32" and form == "float":
        raise invalid("embed_dtype", "embed_dtype: numbers in JSON have none; send encoding_format base64 or bytes")
    if endianness not in (None, "native", "little"):
        raise invalid("endianness", f"endianness: got {quoted(endianness) or EMPTY}; must be native or little")
    return form, DTYPES[kind]  # type: ignore[return-value]


def written(array: np.ndarray, form: Format, dtype: np.dtype[Any]) -> Any:
    """An array inside a JSON answer."""
    if form == "float":
        return np.ascontiguousarray(array, np.float32)
    return orjson.Fragment(base64_text.quoted(np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)))


def as_json(content: Any) -> bytes:
    """JSON in which arrays are lists of numbers."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def as_bytes(arrays: Sequence[np.ndarray], dtype: np.dtype[Any], about: dict[str, Any]) -> tuple[bytes, bytes]:
    """Arrays one after the other, and the header with the place of each."""
    parts = [np.ascontiguousarray(array, dtype).tobytes() for array in arrays]
    data, start = [], 0
    for index, (array, part) in enumerate(zip(arrays, parts)):
        said = {"index": index, "embed_dtype": dtype.name, "endianness": "little", "shape": list(array.shape)}
        data.append({**said, "start": start, "end": start + len(part)})
        start += len(part)
    return b"".join(parts), orjson.dumps({**about, "data": data})
