"""Injected failures: /debug/faults, only with --debug-faults; for tests, never for production.

Owner: loop. In: a fault as JSON: point, kind, and its parameters (engine/base/faults). Out: the armed faults and those
that have happened. DELETE disarms all faults, and hanging ones continue.
"""

from __future__ import annotations

import dataclasses

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.base.faults import FOREVER_S, Fault, Faults
from server.errors import invalid
from server.http.body import read_json
from server.http.exchange import state_of
from server.routes.dev import line
from server.routes.endpoint import json_response

MOST_BYTES = 4096


class FaultBody(msgspec.Struct):
    """The fault to inject."""

    point: str
    kind: str
    count: int = 1
    seconds: float = FOREVER_S
    token: int = -1
    size: int = 0


async def arm(request: Request) -> Response:
    """Arm a fault, which then happens `count` times."""
    body = await read_json(request, FaultBody, MOST_BYTES)
    faults = faults_of(request)
    try:
        faults.arm(Fault(body.point, body.kind, body.count, body.seconds, body.token, body.size))
    except ValueError as error:
        raise invalid("kind", str(error)) from None
    return list_faults(faults)


async def show(request: Request) -> Response:
    return list_faults(faults_of(request))


async def disarm(request: Request) -> Response:
    faults = faults_of(request)
    faults.clear()
    return list_faults(faults)


def faults_of(request: Request) -> Faults:
    faults = state_of(request).engine.config.faults
    assert faults is not None, "the routes are there with the flag only"
    return faults


def list_faults(faults: Faults) -> Response:
    armed = [dataclasses.asdict(each) for each in faults.armed]
    for fault in armed:
        del fault["slots"]  # the device thread changes this field
    return json_response({"armed": armed, "happened": dict(faults.happened)})


ROUTES = [
    line("/debug/faults", arm, "POST"),
    line("/debug/faults", show, "GET"),
    line("/debug/faults", disarm, "DELETE"),
]
