"""Background: a response that runs until it is done, cancelled or deleted, after its HTTP exchange has ended.

Owner: loop. The answer belongs to an exchange without a client (`detached`), which stays open while the answer runs. So
a draining server waits for it and ends it at the timeout, like every other. The response's last state goes to the
store.

    queued -- first token --> in_progress --> completed | incomplete | failed | cancelled
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Message

from server.answers.answer import Answer
from server.answers.choice import Choice
from server.answers.response_items import Output, ResponseObject
from server.errors import ApiError, internal
from server.http.exchange import Exchange, exchange_of
from server.output.response_record import ResponseRecord
from server.output.response_store import Stored

log = logging.getLogger("omniloop.background")
fault = logging.getLogger("omniloop.fault")


async def nowhere(message: Message) -> None:
    """Drop the message: there is no client."""


def detached(request: Request) -> Exchange:
    """An exchange with the same key, id and arrival, for work that outlives the request."""
    exchange = exchange_of(request)
    copy = Exchange(request.scope, nowhere, exchange.state)
    copy.request_id, copy.key_name, copy.arrival = exchange.request_id, exchange.key_name, exchange.arrival
    copy.route, copy.task = exchange.route, None
    copy.place = exchange.place
    return copy


class Background:
    """One running response."""

    def __init__(self, answer: Answer, shape: ResponseObject, entry: Stored, held: ExitStack) -> None:
        self.answer = answer
        self.shape = shape
        self.entry = entry
        self.output = Output(shape)
        self.record = ResponseRecord(shape.at("in_progress"), self.output.items)
        self._held = held  # the answer and its place, until the answer ends
        answer.changed = self._note
        answer.state.open_exchanges.add(answer.exchange)
        self._task = asyncio.get_running_loop().create_task(self._run())
        answer.exchange.task = self._task

    def snapshot(self) -> dict[str, Any]:
        """The response while it runs."""
        return self.shape.at("in_progress" if self.answer.exchange.first_token else "queued")

    def _note(self, choice: Choice | None) -> None:
        """Process a change of the choice, once per step."""
        if choice is not None:
            events, _, entries = choice.drain_events()
            if self.output.grow(events, entries):
                self.record.notify()

    def _whole(self) -> dict[str, Any]:
        return self.shape.ended(self.answer, self.output)

    async def cancel(self) -> None:
        """Cancel the response, and wait until the store has its last state."""
        self.answer.abort()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        exchange, state = self.answer.exchange, self.answer.state
        last = self.shape.at("cancelled")
        try:
            with self._held:
                await self.answer.wait()
                self.output.finish()
                last = await self.answer.in_pool_if_large(self._whole)
        except ApiError as error:
            last = self.shape.failed(error)
        except Exception as error:
            last = self.shape.failed(internal(exchange.request_id))
            fault.error("background response failed: id=%s", exchange.request_id, exc_info=error)
        finally:
            body = orjson.dumps(last)
            state.responses.finish(self.entry, body, last["output"], self.record.cuts)
            self.record.end(orjson.loads(body))  # after this, readers find the response in the store
            state.open_exchanges.discard(exchange)
            if not state.open_exchanges:
                state.idle.set()
            words = " ".join(f"{name}={value}" for name, value in exchange.details.items())
            log.info("%s %s %s", exchange.request_id, last["status"], words)
