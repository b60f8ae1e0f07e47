"""Errors the engine raises or attaches to a Delta; the server maps them to HTTP (server/errors.py).

`reason` is the stable word of SECURITY's answers; `scope` says how far the damage goes: request < step < device.
`scope_of` derives the scope of any exception that a step raised. An accelerator whose context is lost answers every
later call with an error, so the engine does not retry; the process is restarted.
"""

from __future__ import annotations

import re
from typing import Literal

GrammarReason = Literal["grammar_invalid", "grammar_too_complex"]


class EngineError(Exception):
    """Base of all errors that leave the engine; the text may be sent to a client."""

    reason = "internal_error"
    scope = "request"


class RequestError(EngineError):
    """The request cannot be served as it is (400); `param` names the sampling field, None: the prompt is at fault."""

    reason = "invalid_parameter"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class GrammarError(RequestError):
    """The request's grammar cannot be used (400); `reason` says why."""

    def __init__(self, reason: GrammarReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GrammarBusyError(EngineError):
    """Too many grammars wait to be compiled (429); this grammar was not examined. `retry_after`: seconds."""

    def __init__(self, reason: str, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.reason = reason  # queue_full, or key_busy: the client's own grammars wait
        self.retry_after = retry_after


class GrammarConflictError(RequestError):
    """The row ends (400): its grammar allows no token that the request's other rules allow, or its matcher failed."""

    reason = "grammar_conflict"


class QueueFullError(EngineError):
    """No place in the wait queue (429)."""

    reason = "queue_full"


class QueueTimeoutError(EngineError):
    """A request's deadline passed before its first step (504)."""

    reason = "deadline"


class NotReadyError(EngineError):
    """Starting, draining or dead (503); `reason` says which."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StepFailedError(EngineError):
    """A step raised; its rows end with 500, the next step runs."""

    scope = "step"


class DeviceOutOfMemoryError(EngineError):
    """A step did not fit into the accelerator's memory; its rows end with 503, and later steps are smaller."""

    reason = "device_out_of_memory"
    scope = "step"


class AdmissionError(EngineError):
    """Admission of a request failed although the request passed every check; it ends with 500, other requests go on."""


class InvalidLogitsError(EngineError):
    """A row's logits were NaN or infinite; that row ends with 500."""

    reason = "invalid_logits"

    def __init__(self) -> None:
        super().__init__("the model's output for this request was not a number")


class TokenIdError(EngineError):
    """A row that passed every check held a token id that the model does not have; the row ends with 500."""

    def __init__(self, num_embeddings: int) -> None:
        super().__init__(
            f"a token id of this request was outside of the model's {num_embeddings} embedding rows "
            f"(0 to {num_embeddings - 1}) when it was computed; such requests are to be refused before, so this is a "
            "mistake of the server's"
        )


class DeviceLostError(EngineError):
    """The device or its thread is gone; every request is answered and the process exits."""

    reason = "engine_dead"
    scope = "device"


class ConfigError(EngineError):
    """The engine cannot be built from this configuration or checkpoint: one line, the process does not start."""

    reason = "invalid_request"


class AdapterError(ConfigError):
    """An adapter cannot be loaded (400); the text names the key, the file or the tensors, and no path of the machine.
    `missing`: there is no such adapter (404)."""

    reason = "adapter_invalid"

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class AdapterBusyError(EngineError):
    """Requests use all adapters that host memory may hold (429)."""

    reason = "queue_full"


# Words in the error texts of the runtimes, the vendors' libraries, Triton and our own runtime calls (_fast/launcher).
# "found at least two devices, cuda:0 and cpu" must not match: torch refused before it launched anything.
_OF_A_DEVICE = re.compile(
    r"(cuda|hip|rocm)( driver| runtime)? error|(cu|hip|roc)blas|cusolver|cudnn|miopen|[nr]ccl|triton error|"
    r"device-side assert|(graph|memcpy|event|stream)\w+ returned \d+|exchange returned \d+"
)
_NO_MEMORY = re.compile(r"out of memory|status_alloc_failed|error_?memory_?allocation")


def scope_of(error: BaseException) -> Literal["step", "device"]:
    """The scope of an exception that a step raised.

    Out of memory ends the step: the allocator refused before anything ran. Any other error of the accelerator
    (illegal address, assert, ECC, failed launch, an unknown code) ends the device. Errors of our own code end the step.
    """
    if isinstance(error, EngineError):
        return "device" if error.scope == "device" else "step"
    if not isinstance(error, Exception):  # such as SystemExit: the thread ends
        return "device"
    if is_out_of_memory(error):
        return "step"
    if type(error).__name__ == "AcceleratorError":
        return "device"
    told_from_below = isinstance(error, RuntimeError) and _OF_A_DEVICE.search(str(error).lower())
    return "device" if told_from_below else "step"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the accelerator ran out of memory; Python's MemoryError, which the host raises, does not count."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error).lower()) is not None


def for_rows(error: BaseException) -> EngineError:
    """The error that is reported for the rows of a step that raised `error`."""
    if is_out_of_memory(error):
        return DeviceOutOfMemoryError("the accelerator had no memory left for this request; try again later")
    return StepFailedError("a step of the engine failed; this request was part of it")
