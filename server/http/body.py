"""Request bodies: counted as they arrive, scanned, then decoded into the types of schema/.

Owner: loop; bodies above 128 KiB are scanned and decoded in the pool. In: ASGI messages. Out: a schema struct, or 413,
415, 408, 400. What Content-Length promises is checked first and never believed. The bytes stay counted against the
process-wide budget until the struct is made.
"""

from __future__ import annotations

import asyncio
import re
import time
from codecs import BOM_UTF8
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request

from _fast import id_lists, json_scan
from server.errors import ApiError, from_validation, invalid, shown
from server.http.exchange import ClientGone
from server.http.started import Started

if TYPE_CHECKING:
    from server.flags.config import LimitsConfig
    from server.state import AppState

T = TypeVar("T")

MOST_VALUES = 1 << 16  # that a decoder makes in its one call, which holds the GIL for up to 10 ms
POOL_BYTES = 2 * MOST_VALUES  # a body of so many bytes has no more values
LONG_LIST = 16  # ids; shorter lists are the decoder's
GRACE_S = 5.0  # before the minimum rate counts
NEAR = 16  # bytes that are shown on each side of a fault
_AT = re.compile(r"\(byte (\d+)\)$")  # in what the decoder says
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}

_SCAN_TEXTS = {
    json_scan.TOO_DEEP: "the body nests deeper than {max_depth} levels",
    json_scan.NOT_FINITE: "the body holds NaN or Infinity at byte {at}; numbers must be finite",
    json_scan.LONE_SURROGATE: "the body holds half of a surrogate pair at byte {at}; send whole characters",
    json_scan.INTEGER_TOO_LARGE: "the body holds an integer beyond 64 bits at byte {at}",
}
_MANY_VALUES = (
    f"a body above {POOL_BYTES >> 10} KiB may hold {MOST_VALUES} values besides lists of at least {LONG_LIST} integers "
    "that stand under its keys or in a list there; this one holds more: send it as several requests"
)


async def read_json(request: Request, kind: type[T], limit: int) -> T:
    """The body as `kind`; the content type must be JSON."""
    state: AppState = request.scope["exchange"].state
    check_type(request)
    data = await read_bytes(request, limit)
    try:
        if len(data) > POOL_BYTES:
            return await asyncio.get_running_loop().run_in_executor(state.pool, decode, data, kind, state.config.limits)
        return decode(data, kind, state.config.limits)
    finally:
        state.body_budget.give(len(data))


def check_type(request: Request) -> None:
    kind = encoding = b""
    for name, value in request.scope["headers"]:
        if name == b"content-type":
            kind = value
        elif name == b"content-encoding":
            encoding = value
    if kind.partition(b";")[0].strip().lower() != b"application/json":
        raise ApiError(415, "unsupported_media_type", "send the body as Content-Type: application/json")
    if encoding and encoding.strip().lower() != b"identity":
        raise ApiError(415, "unsupported_media_type", "encoded bodies are not taken; send plain JSON")


async def read_bytes(request: Request, limit: int) -> bytes:
    """The whole body; its length stays taken from the budget, the caller gives it back."""
    state: AppState = request.scope["exchange"].state
    limits, budget = state.config.limits, state.body_budget
    promised = promised_length(request)
    if promised > limit:
        raise too_large(limit)
    if promised > budget.limit - budget.used:
        budget.take(promised)  # says 429
    begun = time.monotonic()
    pieces: list[bytes] = []
    size = 0
    try:
        while True:
            message = await next_piece(request, limits, begun)
            piece: bytes = message.get("body", b"")
            if size + len(piece) > limit:
                raise too_large(limit)
            budget.take(len(piece))
            size += len(piece)
            pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            check_rate(limits, size, time.monotonic() - begun)
    except BaseException:
        budget.give(size)
        raise


async def next_piece(request: Request, limits: LimitsConfig, begun: float) -> dict[str, Any]:
    """The next message; what has come already is taken without a deadline."""
    receiving: Coroutine[Any, Any, dict[str, Any]] = request.receive()  # type: ignore[assignment]
    try:
        waiting = receiving.send(None)
    except StopIteration as received:
        message: dict[str, Any] = received.value
    else:
        left = begun + limits.body_timeout - time.monotonic()
        try:
            async with asyncio.timeout(min(limits.body_idle_timeout, left)):
                message = await Started(receiving, waiting)
        except TimeoutError:
            raise upload_timeout() from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


def check_rate(limits: LimitsConfig, size: int, seconds: float) -> None:
    if seconds > GRACE_S and size < (seconds - GRACE_S) * limits.min_upload_rate:
        raise upload_timeout()


def too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the body is larger than {limit} bytes")


def upload_timeout() -> ApiError:
    return ApiError(408, "upload_timeout", "the body arrived too slowly", close=True)


def promised_length(request: Request) -> int:
    for name, value in request.scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 20 else 0
    return 0


def decode(data: bytes, kind: type[T], limits: LimitsConfig) -> T:
    """Scan, then typed decode. Raises ApiError only."""
    data = data.removeprefix(BOM_UTF8)  # files that PowerShell writes begin with a byte order mark
    check_scan(data, limits, limits.json_max_nodes, "the body holds more than {max_nodes} values")
    return decode_values(data, kind) if len(data) <= POOL_BYTES else decode_large(data, kind, limits)


def decode_large(data: bytes, kind: type[T], limits: LimitsConfig) -> T:
    """Long lists of ids apart, for others get their turn while they are read; what is left must not be much."""
    names = {name.encode(): name for name in kind.__struct_fields__}  # type: ignore[attr-defined]
    lists = id_lists.find(data, LONG_LIST)
    short = without(data, lists)
    if any(short.count(b'"%s"' % name) > 1 for name in names.keys() & {name for name, *_ in lists}):
        short, lists = data, []  # a name that stands there twice: the last one counts
    check_scan(short, limits, MOST_VALUES, _MANY_VALUES)
    body = decode_values(short, kind)
    for name, index, start, end in lists:
        if name in names:
            ids = getattr(body, names[name])
            append_ids(ids if index < 0 else ids[index], data, start, end)
    return body


def check_scan(data: bytes, limits: LimitsConfig, most: int, too_many: str) -> None:
    code, at = json_scan.scan(data, limits.json_max_depth, most)
    if code != json_scan.OK:
        text = too_many if code == json_scan.TOO_MANY_NODES else _SCAN_TEXTS[code]
        raise invalid(None, text.format(max_depth=limits.json_max_depth, max_nodes=most, at=at), "invalid_json")


def decode_values(data: bytes, kind: type[T]) -> T:
    """The decoder's one call."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise from_validation(error) from None
        return decode_loosely(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(data, error) from None


def without(data: bytes, lists: list[tuple[bytes, int, int, int]]) -> bytes:
    """The body with one id in each long list, by which the decoder knows the list's type."""
    starts, ends = [0, *(end for *_, end in lists)], [*(start for *_, start, _ in lists), len(data)]
    return b"".join(map(data.__getitem__, map(slice, starts, ends)))


def append_ids(ids: list[int], data: bytes, start: int, end: int) -> None:
    """The integers between `start` and `end`; other threads get their turn between two pieces."""
    while start < end:
        piece, start = id_lists.read(data, start, end)
        ids += piece


def decode_loosely(data: bytes, kind: type[T]) -> T:
    """Integers may arrive as 16.0: the slow way, taken only after the strict one met a float."""
    try:
        return msgspec.convert(whole_numbers(msgspec.json.decode(data)), kind)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(data, error) from None


def whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, dict):
        return {key: whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    return value


def malformed(data: bytes, error: Exception) -> ApiError:
    """Where a body stops being JSON, in the client's own text."""
    text = "the body is not valid JSON"
    if not data.strip():
        text = "the body is empty; send a JSON object"
    elif "truncated" in str(error):
        text += ": it ends too early"
    elif isinstance(error, UnicodeDecodeError):
        text += ": its text is not UTF-8"
    elif found := _AT.search(str(error)):
        at = int(found[1])
        text += f", near {shown(data[max(0, at - NEAR) : at + NEAR].decode(errors='replace'))}"
    return invalid(None, text, "invalid_json")
