"""Clients, some of which disconnect at a random moment, in every way in which a socket can be closed.

`crowd` sends a number of requests, with a bound on the open ones. Answers of clients that stay are compared with the
known tokens. A leaving client disconnects within the headers, within the body, right after its request, or after some
events. Half of these clients close with RST.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.end_to_end.known import Known, conversations
from tests.end_to_end.wire import Connection, Stream, ask, greedy, read_events, request_bytes

STAGES = ("headers", "body", "sent", "queued", "first event", "middle")


@dataclass
class Tally:
    """How each request ended, and which answers were wrong."""

    ways: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def body_of(draw: random.Random, known: dict[str, Known]) -> tuple[str, str, dict[str, Any], list[int]]:
    """(name, path, body, tokens): mostly text, some pictures, sounds and films."""
    name = draw.choice([*["text"] * 6, "image", "audio", "video", "all three"])
    count = draw.randint(1, 12)
    wanted = known[name].token_ids[:count]
    if name == "text":
        prompt = known[name].prompt_token_ids
        return name, "/v1/completions", greedy(prompt, count, stream=draw.random() < 0.8), wanted
    body = greedy(None, count, messages=conversations()[name], stream=draw.random() < 0.8)
    return name, "/v1/chat/completions", body, wanted


async def crowd(
    port: int,
    known: dict[str, Known],
    count: int,
    seed: int,
    share: float = 0.2,
    at_a_time: int = 64,
    fresh: bool = False,
) -> Tally:
    """Sends `count` requests; a `share` of the clients leave. `fresh`: no request shares media with another one."""
    draw, tally = random.Random(seed), Tally()
    places = asyncio.Semaphore(at_a_time)

    async def one(number: int) -> None:
        name, path, body, wanted = body_of(draw, known)
        if fresh:
            body["cache_salt"] = f"{draw.getrandbits(63):x}"
        way = draw.choice(STAGES) if draw.random() < share else "stays"
        how = "reset" if draw.random() < 0.5 else "close"
        async with places:
            tally.ways[way] += 1
            if way == "stays":
                await stay(port, path, body, wanted, f"{number} {name}", tally)
            else:
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                    data = request_bytes("POST", path, {**body, "stream": True, "max_tokens": 200})
                    await leave(port, data, way, how, draw.random())

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))
    return tally


async def stay(port: int, path: str, body: dict[str, Any], wanted: list[int], label: str, tally: Tally) -> None:
    if body["stream"]:
        async with Connection(port) as connection:
            await connection.send(request_bytes("POST", path, body))
            got = await read_events(connection, Stream())
        if got.token_ids != wanted or not got.done:
            tally.wrong.append(f"{label}: {got.status} {got.token_ids} instead of {wanted}")
        return
    reply = await ask(port, "POST", path, body)
    if reply.status != 200 or reply.json()["choices"][0]["token_ids"] != wanted:
        tally.wrong.append(f"{label}: {reply.status} {reply.content[:200]!r}")


async def leave(port: int, data: bytes, way: str, how: str, where: float) -> None:
    """Sends `data`, a streaming request, and leaves. `where`, 0 to 1: the sent part of the headers or the body."""
    head = data.index(b"\r\n\r\n") + 4
    async with Connection(port) as connection:
        if way == "headers":
            await connection.send(data[: 1 + int(where * (head - 2))])
        elif way == "body":
            await connection.send(data[: head + int(where * (len(data) - head - 1))])
        else:
            await connection.send(data)
        if way == "queued":
            await asyncio.sleep(0.02 * where)
        elif way == "first event":
            await read_events(connection, Stream(), until=1)
        elif way == "middle":
            await read_events(connection, Stream(), until=2 + int(20 * where))
        if how == "reset":
            connection.reset()
