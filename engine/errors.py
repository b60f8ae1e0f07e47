"""Errors the engine raises or attaches to a Delta; the server maps them to HTTP (server/errors.py).

`reason` is the stable word of SECURITY's answers; `scope` says how far the damage goes: request < step < device.
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of everything that leaves the engine; the text is fit for a client."""

    reason = "internal_error"
    scope = "request"


class RequestError(EngineError):
    """The request cannot be served as it is (400)."""

    reason = "invalid_parameter"


class QueueFullError(EngineError):
    """No place in the wait queue (429)."""

    reason = "queue_full"


class NotReadyError(EngineError):
    """Starting, draining or dead (503); `reason` says which."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StepFailedError(EngineError):
    """A step raised; its rows end with 500, the next step runs."""

    scope = "step"


class InvalidLogitsError(EngineError):
    """A row's logits were NaN or infinite; that row ends with 500."""

    reason = "invalid_logits"


class DeviceLostError(EngineError):
    """The device or its thread is gone; every request is answered and the process exits."""

    reason = "engine_dead"
    scope = "device"


class ConfigError(EngineError):
    """The engine cannot be built from this configuration or checkpoint: one line, the process does not start."""

    reason = "invalid_request"
