"""Request bodies: counted as they arrive, scanned, then decoded into the types of schema/.

Owner: loop; bodies above 128 KiB are scanned and decoded in the pool. In: ASGI messages. Out: a schema struct, or 413,
415, 408, 400. The bytes count against the process-wide budget (http/incoming) until the struct is made. Fields of other
servers are translated before the body is decoded (http/foreign_body).
"""

from __future__ import annotations

import asyncio
import re
from codecs import BOM_UTF8
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request

from _fast import id_lists, json_scan
from server.errors import ApiError, from_validation, invalid, quoted
from server.http.foreign_body import MOST_VALUES, Translation, fields_of, known_names, report, translated_body
from server.http.incoming import Incoming

if TYPE_CHECKING:
    from server.flags.config import LimitsConfig
    from server.state import AppState

T = TypeVar("T", bound=msgspec.Struct)

POOL_BYTES = 2 * MOST_VALUES  # a body of this size cannot have more values
LONG_LIST = 16  # ids in a list; the decoder reads shorter lists
NEAR = 16  # bytes quoted on each side of an error
_AT = re.compile(r"\(byte (\d+)\)$")  # in the decoder's error text
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


async def read_json(request: Request, kind: type[T], limit: int, *, any_type: bool = False) -> T:
    """Read and decode the body as `kind`; the content type must be JSON.

    `any_type`: requests without an Origin may have another type, or none: `curl -d` sends that of forms. A page of
    another site may send a form without asking first (SECURITY S6), and its browser adds an Origin.
    """
    state: AppState = request.scope["exchange"].state
    check_type(request, any_type)
    incoming = Incoming(request, limit)
    try:
        data, limits = await read_bytes(incoming), state.config.limits
        found = decode(data, kind, limits) if len(data) <= POOL_BYTES else await decode_in_pool(state, data, kind)
    finally:
        incoming.close()
    return found[0] if found[1] is None else noted(request, found[0], found[1])


async def decode_in_pool(state: AppState, data: bytes, kind: type[T]) -> tuple[T, Translation | None]:
    return await asyncio.get_running_loop().run_in_executor(state.pool, decode, data, kind, state.config.limits)


def noted(request: Request, body: T, foreign: Translation) -> T:
    """The body, once later errors use the client's names of fields, and the ignored fields are named."""
    request.scope["renamed"] = foreign.renamed
    if foreign.ignored:
        report(request.scope["exchange"], foreign.ignored, fields_of(type(body)))
    return body


def check_type(request: Request, any_type: bool = False) -> None:
    """Raise 415 for a body that is not plain JSON; `any_type`: without an Origin, whatever its type says."""
    kind = encoding = b""
    for name, value in request.scope["headers"]:
        if name == b"content-type":
            kind = value
        elif name == b"content-encoding":
            encoding = value
        elif name == b"origin":
            any_type = False
    if not any_type and kind.partition(b";")[0].strip().lower() != b"application/json":
        raise ApiError(415, "unsupported_media_type", "send the body as Content-Type: application/json")
    if encoding and encoding.strip().lower() != b"identity":
        raise ApiError(415, "unsupported_media_type", "encoded bodies are not taken; send plain JSON")


async def read_bytes(incoming: Incoming) -> bytes:
    """The whole body."""
    piece = await incoming.next()
    if not incoming.more:
        return piece
    pieces = [piece]
    while incoming.more:
        pieces.append(await incoming.next())
    return b"".join(pieces)


def decode(data: bytes, kind: type[T], limits: LimitsConfig) -> tuple[T, Translation | None]:
    """Scan the body, then decode it into `kind`; also its foreign fields, if any. Raises only ApiError."""
    data = data.removeprefix(BOM_UTF8)  # files that PowerShell writes begin with a byte order mark
    names = check_scan(data, limits, limits.json_max_nodes, "the body holds more than {max_nodes} values")
    if not known_names(kind).issuperset(names):
        return decode_foreign(data, kind, limits)
    return decode_values(data, kind) if len(data) <= POOL_BYTES else decode_large(data, kind, limits), None


def decode_foreign(data: bytes, kind: type[T], limits: LimitsConfig) -> tuple[T, Translation]:
    """Decode a scanned body that has foreign fields."""
    try:
        data, foreign = translated_body(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(data, error) from None
    try:
        return decode_values(data, kind) if len(data) <= POOL_BYTES else decode_large(data, kind, limits), foreign
    except ApiError as error:
        raise error.as_sent(foreign.renamed) from None


def decode_large(data: bytes, kind: type[T], limits: LimitsConfig) -> T:
    """Decode long lists of ids separately, in pieces between which other threads run; the rest must have few values."""
    names = {name.encode(): name for name in kind.__struct_fields__}
    lists = id_lists.find(data, LONG_LIST)
    short = without(data, lists)
    if any(short.count(b'"%s"' % name) > 1 for name in names.keys() & {name for name, *_ in lists}):
        short, lists = data, []  # the body repeats this name, and its last value counts
    check_scan(short, limits, MOST_VALUES, _MANY_VALUES)
    body = decode_values(short, kind)
    for name, index, start, end in lists:
        if name in names:
            ids = getattr(body, names[name])
            append_ids(ids if index < 0 else ids[index], data, start, end)
    return body


def check_scan(data: bytes, limits: LimitsConfig, most: int, too_many: str) -> list[bytes]:
    """Raise the scan's error; returns the outermost object's names as they are written."""
    code, at, names = json_scan.scan(data, limits.json_max_depth, most)
    if code != json_scan.OK:
        text = too_many if code == json_scan.TOO_MANY_NODES else _SCAN_TEXTS[code]
        raise invalid(None, text.format(max_depth=limits.json_max_depth, max_nodes=most, at=at), "invalid_json")
    return names


def decode_values(data: bytes, kind: type[T]) -> T:
    """Decode in one call."""
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
    """The body with only one id in each long list; from this id the decoder knows the list's type."""
    starts, ends = [0, *(end for *_, end in lists)], [*(start for *_, start, _ in lists), len(data)]
    return b"".join(map(data.__getitem__, map(slice, starts, ends)))


def append_ids(ids: list[int], data: bytes, start: int, end: int) -> None:
    """Append the integers between `start` and `end`; other threads may run between two pieces."""
    while start < end:
        piece, start = id_lists.read(data, start, end)
        ids += piece


def decode_loosely(data: bytes, kind: type[T]) -> T:
    """Decode a body in which integers are written as 16.0: slow, so only after the strict decoder found a float."""
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
    """The error for a body that is not JSON; it quotes the place in the client's text."""
    text = "the body is not valid JSON"
    if not data.strip():
        text = "the body is empty; send a JSON object"
    elif "truncated" in str(error):
        text += ": it ends too early"
    elif "utf-8" in str(error).lower():  # msgspec raised UnicodeDecodeError before 0.23, and DecodeError since
        text += ": its text is not UTF-8"
    elif found := _AT.search(str(error)):
        at = int(found[1])
        text += f", near {quoted(data[max(0, at - NEAR) : at + NEAR].decode(errors='replace'))}"
    return invalid(None, text, "invalid_json")
