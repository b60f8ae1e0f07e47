"""ApiError: how every request is refused, and the catalogue of texts that clients may receive.

Owner: none, values. In: our own checks, engine and media errors, schema violations. Out: a status, a stable `reason`, a
text of ours, the path of the field. A library's exception is never turned into text: it may hold addresses, paths and
versions (SECURITY S10). Client values appear escaped and truncated.
"""

from __future__ import annotations

import http
import re
from collections.abc import Mapping
from typing import Literal

import msgspec
import orjson

from engine.base.errors import (
    AdapterError,
    DeviceOutOfMemoryError,
    EngineError,
    NotReadyError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
)
from mm.errors import MediaError
from server.render.errors import RenderError, escaped

MAX_TEXT = 1024
Protocol = Literal["openai", "anthropic", "ollama", "tei"]  # forms of an error's body
quoted = escaped  # quotes a client's value in an error

# Error types of /v1/messages by status; any other 4xx is invalid_request_error, any other 5xx api_error.
MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# Error types of text-embeddings-inference by status; any other is Validation.
TEI_TYPES = {424: "Backend", 429: "Overloaded", 503: "Unhealthy", 504: "Backend"}

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    499: "RequestAbortedError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ApiError(Exception):
    """A refusal with all data of its answer."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message[:MAX_TEXT]
        self.param = param
        self.headers = headers or {}
        self.close = close  # close the connection after this answer

    @property
    def type(self) -> str:
        return TYPES.get(self.status) or http.HTTPStatus(self.status).phrase

    def as_sent(self, renamed: Mapping[str, str]) -> ApiError:
        """The error with the client's name of its field; `renamed`: path of our field -> the client's name."""
        param = self.param or ""
        for path, name in renamed.items():
            rest = param.removeprefix(path)
            if param.startswith(path) and rest[:1] in ("", ".", "["):
                message = self.message.removeprefix(path)
                text = f"{name}{message}" if message != self.message else f"{name}: {message}"
                return ApiError(self.status, self.reason, text, name + rest, self.headers, self.close)
        return self

    def body_in(self, protocol: Protocol, request_id: str) -> bytes:
        """The error's body in a protocol."""
        if protocol == "anthropic":
            return self.messages_body(request_id)
        if protocol == "ollama":
            return self.text_body()
        return self.tei_body() if protocol == "tei" else self.body()

    def text_body(self) -> bytes:
        """The error object of Ollama: a text."""
        return orjson.dumps({"error": self.named_message()})

    def status_in(self, protocol: Protocol) -> int:
        """The status of the answer in a protocol."""
        if protocol != "tei":
            return self.status
        if self.status == 400:
            return 413 if self.reason == "context_length_exceeded" else 422
        return 424 if self.status in (500, 501) else self.status

    def tei_body(self) -> bytes:
        """The error object of text-embeddings-inference."""
        word = TEI_TYPES.get(self.status_in("tei"), "Validation")
        return orjson.dumps({"error": self.message, "error_type": word})

    def body(self) -> bytes:
        """The error object of API.md 3.2."""
        content = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return orjson.dumps({"error": {**content, "reason": self.reason}})

    def named_message(self) -> str:
        """The message with the name of the field, for bodies without a field for `param`."""
        if self.param and self.param not in self.message:
            return f"{self.param}: {self.message}"[:MAX_TEXT]
        return self.message

    def messages_body(self, request_id: str) -> bytes:
        """The error object of API.md section 12."""
        other = "invalid_request_error" if self.status < 500 else "api_error"
        message = self.message
        if self.reason == "context_length_exceeded" and (found := _TOO_LONG.match(message)):
            most, got = int(found[1]), int(found[2])  # clients of this API match on these words
            message = f"prompt is too long: {got} tokens > {most if got > most else most - 1} maximum"
        else:
            message = self.named_message()
        details = {"error_code": self.reason}
        content = {"type": MESSAGES_TYPES.get(self.status, other), "message": message, "details": details}
        return orjson.dumps({"type": "error", "error": content, "request_id": request_id})


def size_within(text: str, most: int) -> int:
    """Bytes of a client's text; for a text with more characters than `most`, the number of characters, which
    is faster.
    """
    return len(text) if len(text) > most else len(text.encode())


def invalid(param: str | None, message: str, reason: str = "invalid_parameter") -> ApiError:
    return ApiError(400, reason, message, param)


def not_here(param: str | None, message: str) -> ApiError:
    """A feature of the API that this server does not have (yet): refused by name, never ignored."""
    return ApiError(501, "not_implemented", message, param)


def not_found(message: str, param: str | None = None) -> ApiError:
    return ApiError(404, "not_found", message, param)


def queue_full(retry_after: int, message: str = "") -> ApiError:
    text = message or "the wait queue is full; try again later"
    return ApiError(429, "queue_full", text, headers={"retry-after": str(retry_after)})


def unavailable(reason: str, message: str, retry_after: int = 1) -> ApiError:
    return ApiError(503, reason, message, headers={"retry-after": str(retry_after)}, close=reason == "draining")


def deadline(message: str) -> ApiError:
    return ApiError(504, "deadline", message)


def internal(request_id: str) -> ApiError:
    return ApiError(500, "internal_error", f"internal error; request id {request_id}")


def context_length(limit: int, got: int, param: str) -> ApiError:
    """The prompt is too long. Clients match on the beginning of this text."""
    return ApiError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {got} input tokens, "
        f"which leaves no room for an answer. Please shorten the prompt to at most {limit - 1} tokens.",
        param,
    )


def from_engine(error: EngineError, retry_after: int = 1, param: str | None = None) -> ApiError:
    """The answer for an error that the engine raised or attached to a Delta. `param`: the field if the error
    names none.
    """
    if isinstance(error, QueueFullError):
        return queue_full(retry_after)
    if isinstance(error, QueueTimeoutError):
        return deadline("no token within --queue-timeout")
    if isinstance(error, NotReadyError):
        return unavailable(error.reason, str(error), 1)
    if isinstance(error, RequestError):
        return ApiError(400, error.reason, str(error), error.param or param)
    if isinstance(error, DeviceOutOfMemoryError):
        return unavailable(error.reason, str(error), 5)
    if error.scope == "device":
        return unavailable("engine_dead", "the engine stopped working; this server is restarting", 10)
    return ApiError(500, error.reason, "the engine could not finish this request")


def adapter_refused(error: AdapterError, param: str | None, prefix: str = "") -> ApiError:
    """An adapter that cannot be loaded: 404 if there is none, else 400."""
    if error.missing:
        return not_found(f"{prefix}{error}", param)
    return ApiError(400, error.reason, f"{prefix}{error}", param)


def from_media(error: MediaError) -> ApiError:
    headers = {"retry-after": str(max(1, round(error.retry_after)))} if error.retry_after else None
    return ApiError(error.status, error.reason, error.message, error.param, headers)


def from_render(error: RenderError) -> ApiError:
    return ApiError(error.status, error.reason, error.message, error.param)


_TOO_LONG = re.compile(r"^This model's maximum context length is (\d+) tokens\. However, your prompt contains (\d+) ")
_WRONG_TYPE = re.compile(r"^Expected `([^`]{1,80})`, got `([^`]{1,40})`(?: - at `\$([^`]*)`)?$")
_MISSING = re.compile(r"^Object missing required field `([^`]{1,80})`(?: - at `\$([^`]*)`)?$")
_WORDS = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "array": "a list"}
_WORDS |= {"object": "an object", "null": "null"}


def from_validation(error: msgspec.ValidationError) -> ApiError:
    """A schema violation in our words; an error of unknown form gets a text without detail."""
    text = str(error)
    if found := _WRONG_TYPE.match(text):
        expected, got, path = found.groups()
        allowed = [_WORDS.get(word, "") for word in expected.split(" | ") if word != "null"] or ["null"]
        if all(allowed):
            param = path_of(path)
            where = f"{param}: " if param else "the body: "
            return invalid(param, f"{where}got {_WORDS.get(got, 'something else')}; must be {' or '.join(allowed)}")
    if found := _MISSING.match(text):
        param = path_of(f"{found.group(2) or ''}.{found.group(1)}")
        return invalid(param, f"{param}: is missing and required")
    at = text.rpartition(" - at `$")[2].rstrip("`") if " - at `$" in text else ""
    param = path_of(at) if len(at) < 200 else None
    return invalid(param, f"{param}: has a value that is not allowed" if param else "the body has a value not allowed")


def path_of(path: str | None) -> str | None:
    """A path such as `.messages[0].role` without its first dot; None if it is empty."""
    return (path or "").removeprefix(".") or None
