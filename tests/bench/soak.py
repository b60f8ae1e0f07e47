"""Mixed requests for a long time, and the resources still held: `python -m tests.bench.soak [REQUESTS]` (R13, S44).

Two servers with tiny checkpoints run: one generates from text and media, one embeds. A seeded draw sends texts,
schemas, tools, pictures, sounds, films, realtime sessions, embeddings, clients that leave and bad requests; the answers
to texts and media are known tokens. After each tenth of the requests the clients pause until the processes' memory is
stable, as an idle server returns freed memory; then the memory and the ledger of /server_info are read.

    tenth 1 (warm-up) | quiet, memory | tenth 2 | quiet, memory | ...      growth: the last reading minus the first

Prints JSON. Exit status 1: a wrong answer, a server error, a ledger that is not zero, a task warning in the log, or
memory that grew by more than --growth.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.asyncio.client import connect

from tests import pooling_kit, tiny
from tests.end_to_end import refused
from tests.end_to_end.known import Known, answers, conversations
from tests.end_to_end.leavers import STAGES, leave
from tests.end_to_end.process import SMALL, ServerProcess
from tests.end_to_end.wire import ask, greedy, request_bytes, stream
from tests.mm.made import tone

MODEL = "tiny-omni"
PARTS = 10
AT_A_TIME = 24
QUIET_S = 10.0
STILL_S, STILL = 3, 0.005  # memory is stable if it changes by less than this share for STILL_S seconds
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# These caches are full before the first 2,000 requests have ended, so later growth is not a cache's. One request in
# fifty has a new schema, which counts as 0.3 MB. An item of the encoder cache also holds its pixels or mel frames, but
# only its rows are counted.
FLAGS = (
    *SMALL, "--enable-dev-endpoints", "--mm-processor-cache-gb", "0.02", "--grammar-cache-bytes", "8388608",
    "--encoder-cache-tokens", "2048",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "minimum": 0}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
SHARES = {
    "text": 40, "schema": 8, "tools": 6, "image": 8, "audio": 6, "video": 4, "all three": 2, "realtime": 2,
    "embeddings": 8, "leaver": 10, "bad": 6,
}  # fmt: skip


@dataclass
class Tally:
    """Counts of the requests by kind and result."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, kind: str, status: int, right: bool, what: object = "") -> None:
        self.statuses[f"{kind} {status}"] += 1
        if not right or (status >= 500 and status != 501):
            self.wrong.append(f"{kind}: {status} {str(what)[:300]}")


class Soak:
    """The clients of both servers."""

    def __init__(self, port: int, embedding_port: int, known: dict[str, Known], seed: int, kinds: list[str]) -> None:
        self.port, self.embedding_port, self.known = port, embedding_port, known
        self.draw = random.Random(seed)
        self.shares = {kind: SHARES[kind] for kind in kinds or SHARES}
        self.tally = Tally()
        self.bad = refused.cases()
        self.vectors: dict[str, list[float]] = {}
        self.kinds: dict[str, Callable[[str], Awaitable[None]]] = {
            "text": self.text, "schema": self.schema, "tools": self.tools, "realtime": self.realtime,
            "embeddings": self.embeddings, "leaver": self.leaver, "bad": self.refused,
        }  # fmt: skip

    async def part(self, count: int, until: float) -> None:
        """Sends `count` requests, or fewer if the time `until` is reached."""
        places = asyncio.Semaphore(AT_A_TIME)

        async def one(kind: str) -> None:
            try:
                await self.kinds.get(kind, self.media)(kind)
            except (OSError, asyncio.IncompleteReadError) as error:
                self.tally.note(kind, 0, False, repr(error))
            finally:
                places.release()

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await places.acquire()
                if time.monotonic() > until:
                    break
                kind = self.draw.choices([*self.shares], [*self.shares.values()])[0]
                self.tally.sent[kind] += 1
                group.create_task(one(kind))

    def salt(self) -> dict[str, str]:
        """A random salt for half of the requests, so that no cache holds their content."""
        return {"cache_salt": f"{self.draw.getrandbits(63):x}"} if self.draw.random() < 0.5 else {}

    async def text(self, kind: str) -> None:
        count, known = self.draw.randint(1, 24), self.known["text"]
        body = greedy(known.prompt_token_ids, count, **self.salt())
        await self.compare(kind, COMPLETION, body, known.token_ids[:count])

    async def media(self, kind: str) -> None:
        count = self.draw.randint(1, 12)
        body = greedy(None, count, messages=conversations()[kind], **self.salt())
        await self.compare(kind, CHAT, body, self.known[kind].token_ids[:count])

    async def compare(self, kind: str, path: str, body: dict[str, Any], wanted: list[int]) -> None:
        if self.draw.random() < 0.7:
            got = await stream(self.port, path, body)
            self.tally.note(kind, got.status, got.done and got.token_ids == wanted, got.error or got.token_ids)
            return
        reply = await ask(self.port, "POST", path, body)
        right = reply.status == 200 and reply.json()["choices"][0]["token_ids"] == wanted
        self.tally.note(kind, reply.status, right, reply.content)

    async def schema(self, kind: str) -> None:
        """One request in four has a new schema, which is compiled and later evicted."""
        schema = SCHEMA
        if self.draw.random() < 0.25:
            schema = {**SCHEMA, "description": f"{self.draw.getrandbits(63):x}"}
            schema["properties"] = {**SCHEMA["properties"], f"n{self.draw.getrandbits(20)}": {"type": "boolean"}}  # type: ignore[dict-item]
        body = {
            "messages": [{"role": "user", "content": "Fill it in."}],
            "max_tokens": 64,
            "seed": self.draw.getrandbits(30),
            "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
        }
        reply = await ask(self.port, "POST", CHAT, body)
        right, choice = reply.status == 200, {}
        if right:
            choice = reply.json()["choices"][0]
            if choice["finish_reason"] == "stop":
                right = {"name", "count"} <= json.loads(choice["message"]["content"]).keys()
        self.tally.note(kind, reply.status, right, choice or reply.content)

    async def tools(self, kind: str) -> None:
        tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
        body = {
            "messages": [{"role": "user", "content": "Look."}],
            "max_tokens": 64,
            "tools": [tool],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        }
        reply = await ask(self.port, "POST", CHAT, body)
        right = reply.status == 200
        if right:
            right = all(
                call["function"]["name"] == "look"
                for call in reply.json()["choices"][0]["message"].get("tool_calls") or ()
            )
        self.tally.note(kind, reply.status, right, reply.content)

    async def realtime(self, kind: str) -> None:
        """A session of one turn; one session in four leaves before its answer."""
        sound = (tone(0.6, hertz=300) * 32767).astype("<i2").tobytes()
        async with connect(f"ws://127.0.0.1:{self.port}/v1/realtime", max_size=None) as socket:
            await socket.recv()

            async def say(name: str, **fields: Any) -> None:
                await socket.send(json.dumps({"type": name, **fields}))

            await say("session.update", model=MODEL)
            await say("input_audio_buffer.commit", final=False)
            await say("input_audio_buffer.append", audio=base64.b64encode(sound).decode())
            await say("input_audio_buffer.commit", final=True)
            if self.draw.random() < 0.25:
                return
            async with asyncio.timeout(60):
                while not (event := json.loads(await socket.recv()))["type"].endswith((".done", "error")):
                    pass
        self.tally.note(kind, 200, event["type"] == "transcription.done", event)

    async def embeddings(self, kind: str) -> None:
        text = f"the {self.draw.choice(['cat', 'dog', 'bird'])} and the {self.draw.choice(['hat', 'bag'])}"
        reply = await ask(self.embedding_port, "POST", "/v1/embeddings", {"input": text})
        right = reply.status == 200
        if right:
            vector = reply.json()["data"][0]["embedding"]
            before = self.vectors.setdefault(text, vector)
            right = max(abs(a - b) for a, b in zip(before, vector, strict=True)) < 1e-3
        self.tally.note(kind, reply.status, right, reply.content)

    async def leaver(self, kind: str) -> None:
        name = self.draw.choice(["text", "text", "image", "audio"])
        body = greedy(None, 200, messages=conversations()[name], stream=True)
        data = request_bytes("POST", CHAT, body)
        way, how = self.draw.choice(STAGES), self.draw.choice(["reset", "close"])
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await leave(self.port, data, way, how, self.draw.random())

    async def refused(self, kind: str) -> None:
        case = self.draw.choice(self.bad)
        try:
            reply = await ask(self.port, case.method, case.path, case.body, headers=case.headers)
        except ConnectionError:
            return  # the connection's reset may overtake the refusal of a long body
        self.tally.note(kind, reply.status, reply.status == case.status, f"{case.name}: {reply.content!r}")


async def held(port: int) -> tuple[dict[str, int], dict[str, int]]:
    """Resources still held once the server has had time to become idle, and the numbers of its process."""
    end = time.monotonic() + QUIET_S
    while True:
        ledger = (await ask(port, "GET", "/server_info?config_format=json")).json()["ledger"]
        found = {name: count for name, count in ledger["held"].items() if count}
        if not found or time.monotonic() > end:
            return found, ledger["process"]
        await asyncio.sleep(0.1)


def resident(pid: int) -> int:
    """Bytes of resident memory without pages of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


async def trimmed(pid: int) -> int:
    """Resident memory once it is stable: an idle server returns freed memory and may still import modules."""
    before, still = 0, 0
    while still < STILL_S:
        found = resident(pid)
        still = still + 1 if abs(found - before) < STILL * before else 0
        before = found
        await asyncio.sleep(1.0)
    return before


async def run(
    servers: dict[str, ServerProcess], known: dict[str, Known], options: argparse.Namespace
) -> dict[str, Any]:
    generating, embedding = servers.values()
    soak = Soak(generating.port, embedding.port, known, options.seed, options.only)
    readings: list[dict[str, Any]] = []
    begun = time.monotonic()
    for part in range(PARTS):
        until = begun + options.seconds * (part + 1) / PARTS if options.seconds else float("inf")
        count = 1 << 60 if options.seconds else options.requests // PARTS
        await soak.part(count, until)
        reading: dict[str, Any] = {"sent": soak.tally.sent.total(), "seconds": round(time.monotonic() - begun, 1)}
        memory = await asyncio.gather(*(trimmed(process.pid) for process in servers.values()))
        for (name, process), num_bytes in zip(servers.items(), memory, strict=True):
            left, numbers = await held(process.port)
            reading[name] = {"held": left, **numbers, "resident_bytes": num_bytes}
        readings.append(reading)
        print(json.dumps(reading), file=sys.stderr, flush=True)
    tally = soak.tally
    bytes_of = {name: [reading[name]["resident_bytes"] for reading in readings] for name in servers}
    growth = {name: round(values[-1] / values[0] - 1, 4) for name, values in bytes_of.items()}
    return {
        "seed": options.seed,
        "sent": dict(tally.sent),
        "statuses": dict(sorted(tally.statuses.items())),
        "wrong": tally.wrong[:20],
        "num_wrong": len(tally.wrong),
        "growth_after_first_tenth": growth,
        "readings": readings,
    }


def faults_of(found: dict[str, Any], most_growth: float) -> list[str]:
    """The reasons why the run failed."""
    last = found["readings"][-1]
    faults = [f"{found['num_wrong']} wrong answers"] if found["num_wrong"] else []
    for name, growth in found["growth_after_first_tenth"].items():
        if growth > most_growth:
            faults.append(f"{name}: memory grew by {growth:.1%}")
        faults += [f"{name}: {held} held when idle" for held in [last[name]["held"]] if held]
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=int, nargs="?", default=20_000)
    parser.add_argument("--seconds", type=float, default=0.0, help="go on for so long, whatever the number of requests")
    parser.add_argument(
        "--growth", type=float, default=0.02, help="share by which memory may grow after the first tenth"
    )
    parser.add_argument("--only", nargs="*", default=[], choices=SHARES, help="these kinds of requests, to find a leak")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folders = {"generating": tiny.checkpoint("omni"), "embedding": pooling_kit.embedder("qwen3")}
    known = answers()
    servers: dict[str, ServerProcess] = {}
    try:
        for name, folder in folders.items():
            served = ("--model", str(folder), "--served-model-name", MODEL, *FLAGS)
            servers[name] = ServerProcess(*served).spawn().wait_ready()
        found = asyncio.run(run(servers, known, options))
        faults = faults_of(found, options.growth)
        for name, server in servers.items():
            server.signal()
            if status := server.wait():
                faults.append(f"{name}: exit status {status}")
            faults += [f"{name}: {line}" for line in server.log.splitlines() if is_fault(line)]
    finally:
        for server in servers.values():
            server.close()
    print(json.dumps({**found, "faults": faults}, indent=1))
    return bool(faults)


def is_fault(line: str) -> bool:
    words = ("Traceback", "never awaited", "was destroyed but it is pending", "exception was never retrieved")
    return any(word in line for word in words) or ("drained: " in line and "nothing is held" not in line)


if __name__ == "__main__":
    sys.exit(main())
