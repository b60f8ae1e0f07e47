"""The steps that every endpoint of the engine takes once its jobs are prepared.

Owner: loop, the handler's task. In: an Answer that has been submitted. Out: the endpoint's response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response

from server import beam
from server.answer import Answer


async def json_body(answer: Answer, build: Callable[[], dict[str, Any]]) -> Response:
    """Waits for the end of the answer, and returns what `build` makes of it; large bodies are built in the pool."""
    if answer.asked.beam:
        await beam.search(answer)
    await answer.wait()
    data = await answer.in_pool_if_large(lambda: orjson.dumps(build()))
    return Response(data, media_type="application/json")
