"""How grammar compilation delays other streams: the gaps between their chunks, with and without a sender of grammars.

A server of the embedded model (or of --model) answers --streams clients. A sender requests grammars that are not in
the cache, one request at a time: schemas of 10 KB, of 85 KB, and the schemas of tests/structure_corpus/hostile.
Phases without the sender and phases with it alternate, because a shared machine changes from minute to minute.
Prints the 50th and the 99th percentile of the gaps in ms, and how many requests the sender had answered.
Run: python -m tests.bench.beside_compiles [--streams 4] [--seconds 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from examples.embedded_model.blueprint import MODEL_DIR
from examples.embedded_model.teach_tools import served
from server.bench import serve
from server.bench.options import ServeOptions
from server.bench.output import on_loop
from tests.bench.asked import events_of
from tests.structure_corpus.hostile import HOSTILE

BEGIN_S = 0.5  # start of a phase that is not measured
SIZES = {"10 KB": 120, "85 KB": 1000}  # number of properties


def schema(count: int, salt: int) -> dict[str, Any]:
    """A schema of properties whose names contain `salt`: about 85 bytes each."""
    names = [f"name_{salt}_{at}" for at in range(count)]
    word, choice = {"type": "string", "pattern": "^[a-z]{1,20}$"}, {"enum": [f"v{at}" for at in range(8)]}
    return {"type": "object", "properties": {n: word if len(n) % 3 else choice for n in names}, "required": names}


def bodies(kind: str) -> Iterator[bytes]:
    """Requests for one token under a grammar; each grammar is new, as the server caches results and refusals."""
    head = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    if kind in SIZES:
        for salt in itertools.count():
            yield json.dumps(head | {"structured_outputs": {"json": schema(SIZES[kind], salt)}}).encode()
    written = [json.dumps(head | {"structured_outputs": new(of)}).encode() for of in HOSTILE.values()]
    for salt in itertools.count(10):
        yield from (body.replace(b"SALT", b"%d" % salt) for body in written)


def new(of: dict[str, Any]) -> dict[str, Any]:
    """A hostile grammar with the placeholder SALT for a number."""
    ((kind, value),) = of.items()
    if kind == "json":
        return {"json": value, "whitespace_pattern": " {0,SALT}"}
    return {kind: [*value, "SALT"] if kind == "choice" else value + ("|SALT" if kind == "regex" else "\n//SALT")}


class Sender(threading.Thread):
    """Sends requests until it is stopped."""

    def __init__(self, port: int, source: Iterator[bytes]) -> None:
        super().__init__()
        self.port, self.source, self.stopped, self.count = port, source, False, 0

    def run(self) -> None:
        """Sends one request after the other."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self.stopped:
            connection.request("POST", "/v1/chat/completions", next(self.source), {"Content-Type": "application/json"})
            connection.getresponse().read()
            self.count += 1
        connection.close()


def gaps(url: str, streams: int, seconds: float) -> np.ndarray:
    """Seconds between the chunks of each stream; `bench serve` reads the streams in separate processes."""
    asked = ServeOptions(
        url=url,
        num_prompts=100 * streams,
        max_concurrency=streams,
        processes=2,
        num_warmups=0,
        input_len=8,
        output_len=300,
        ignore_eos=True,
        temperature=0.0,
        seconds=BEGIN_S + seconds,
    )
    found, outcome = on_loop(serve.measure(asked))
    if found["failures"]:
        raise RuntimeError(f"the server refused: {found['failures']}")
    events = events_of(outcome.answers)
    inside = (events[:, 0] > outcome.start + BEGIN_S) & (events[:, 1] > 0)  # 0: arrived together with the chunk before
    return events[inside, 1]


def main() -> None:
    """Runs the benchmark and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with served(args.model) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        for kind in (*SIZES, "hostile"):
            source, count = bodies(kind), 0
            alone: list[np.ndarray] = []
            beside: list[np.ndarray] = []
            for _ in range(args.rounds):
                alone.append(gaps(url, args.streams, args.seconds))
                sender = Sender(port, source)
                sender.start()
                beside.append(gaps(url, args.streams, args.seconds))
                sender.stopped = True
                sender.join()
                count += sender.count
            both = np.concatenate(alone), np.concatenate(beside)
            told = [f"{1e3 * np.percentile(each, at):6.2f}" for each in both for at in (50, 99)]
            print(f"{kind:8s} alone {told[0]} {told[1]}   beside {told[2]} {told[3]}   {count} requests", flush=True)


if __name__ == "__main__":
    main()
