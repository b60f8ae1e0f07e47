"""The operation of /invocations, for /openapi.json."""

from __future__ import annotations

from typing import Any

from server.dialects.sagemaker.schema import InvocationBody
from server.openapi import Operation, work

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/invocations"): work(
        "invoke", "Server", "The body and the answer of the route that the body's fields choose", InvocationBody,
        dict[str, Any] | list[Any], dict[str, Any],
    ),
}  # fmt: skip
