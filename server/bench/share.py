"""Load: sends one process's share of the conversations on schedule, within its concurrency, and collects the replies.

Owner: one event loop of one process. In: ServeOptions and the share's number. Out: Replies. Bodies of first turns, with
their media, are made before the load starts.

    draw bodies -- connect -- wait for the common start -- send each when it is due and a place is free -- answers
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orjson

from server.bench.client import Client, Target
from server.bench.dataset import Conversation, Turn, conversations, warm_up
from server.bench.options import ServeOptions
from server.bench.reply import Reply

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def arrivals(options: ServeOptions) -> np.ndarray:
    """Seconds from the start at which each conversation is due; zeros if only concurrency bounds the rate."""
    count = options.num_prompts
    if not options.request_rate:
        return np.zeros(count)
    draw = np.random.default_rng(options.seed)
    units = draw.gamma(options.burstiness, 1 / options.burstiness, count)  # gaps at a rate of 1 per second
    if not options.ramp_to:
        return np.cumsum(units) / options.request_rate
    rates = np.linspace(options.request_rate, options.ramp_to, count)
    return np.cumsum(units / rates)


class Share:
    """The conversations first, first + step, ... of a benchmark."""

    def __init__(self, options: ServeOptions, model: str, first: int, step: int) -> None:
        self.options = options
        self.model = model
        self.first, self.step = first, step
        self.path = PATHS[options.endpoint]
        self.due = arrivals(options)
        self.conversations = list(conversations(options, first, step))
        self.bodies = [self.body(self.asked(one, [], one.turns[0])) for one in self.conversations]
        self.places = options.max_concurrency // step + (first < options.max_concurrency % step)

    def asked(self, one: Conversation, history: list[dict[str, Any]], turn: Turn) -> dict[str, Any]:
        """The fields that a turn adds to the body."""
        if self.options.endpoint == "completions":
            return {"prompt": turn.content, "max_tokens": turn.max_tokens}
        messages = [*one.before, *history, {"role": "user", "content": turn.content}]
        return {"messages": messages, "max_tokens": turn.max_tokens}

    def body(self, asked: dict[str, Any]) -> bytes:
        options = self.options
        fields: dict[str, Any] = {"model": self.model, **asked, "stream": options.stream}
        if options.stream:
            fields["stream_options"] = {"include_usage": True}
        if options.temperature >= 0:
            fields["temperature"] = options.temperature
        if options.ignore_eos:
            fields["ignore_eos"] = True
        return orjson.dumps(fields | options.extra_body)

    async def run(self, start: float, record: Callable[[Reply], None], stop: asyncio.Event) -> None:
        """Run all conversations, from `start` (time.perf_counter) on; `stop` cuts off those that are open."""
        client = Client(self.client_target(), self.options.request_timeout, record)
        load, stopped = asyncio.ensure_future(self.all(client, start)), asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((load, stopped), return_when=asyncio.FIRST_COMPLETED)
            load.cancel()
            await asyncio.wait((load,))
            if not load.cancelled():
                load.result()
        finally:
            load.cancel()
            stopped.cancel()
            client.close()

    async def all(self, client: Client, start: float) -> None:
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        count = len(self.conversations)
        if self.places:
            waiting = iter(range(count))
            places = range(self.first, self.first + self.step * min(self.places, count), self.step)
            await asyncio.gather(*(self.one_after_another(client, waiting, start, place) for place in places))
        else:
            numbers = (one.number for one in self.conversations)
            await asyncio.gather(*(self.converse(client, at, start, place) for at, place in enumerate(numbers)))

    def client_target(self) -> Target:
        return Target.of(self.options.url, self.options.api_key)

    async def one_after_another(self, client: Client, waiting: Iterator[int], start: float, place: int) -> None:
        """Run conversations in one place, each after the one before has ended."""
        for at in waiting:
            await self.converse(client, at, start, place)

    async def converse(self, client: Client, at: int, start: float, place: int) -> None:
        """Run all turns of a conversation, until the first failure."""
        one = self.conversations[at]
        due = start + float(self.due[one.number])
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        history: list[dict[str, Any]] = []
        body = self.bodies[at]
        for number, turn in enumerate(one.turns):
            more = number + 1 < len(one.turns)
            if number:
                body = self.body(self.asked(one, history, turn))
            asked = Reply(one.number, number, due if not number else 0.0, place)
            answer = await client.ask(self.path, body, asked, more)
            if answer.error or not more:
                return
            history.append({"role": "user", "content": turn.content})
            history.append({"role": "assistant", "content": answer.text})

    async def warm_up(self) -> list[Reply]:
        """Send the warm-up requests, which the results exclude."""
        found: list[Reply] = []
        client = Client(self.client_target(), self.options.request_timeout, found.append)
        for number in range(self.options.num_warmups):
            one = warm_up(self.options, number)
            body = self.body(self.asked(one, [], one.turns[0]))
            await client.ask(self.path, body, Reply(one.number, 0))
        client.close()
        return found
