"""The cost of text on the host: prompts in, tokens out; a table, and JSON with --json.

`feed` passes one token per call, as a stream does; `whole` passes a list in one call. `chat` is the time to render and
tokenize short conversations, to the pool and back. `late` is how late the event loop wakes from 1 ms of sleep while a
prompt of about 100,000 tokens is rendered. Run: python -m tests.bench.bench_text [--json FILE]
"""

import argparse
import asyncio
import json
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.base.request import Delta, TokenLogprob
from server.output.choices import ChoiceStream
from server.output.logprobs import TokenNames
from server.output.text import StopStrings, TextStream
from server.render.chat import RenderConfig, Renderer
from server.render.load_tokenizer import load_tokenizer

EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"
TEXT = "The quick brown fox jumps over the lazy dog, 漢字 and 😀 too.\n"
STOPS = {
    "none": [],
    "four": ["\n\nHuman:", "</s>", "END", "Observation:"],
    "32x256": ["T" * 255 + chr(65 + k % 26) * (1 + k // 26) for k in range(32)],
}


def best(work, count, rounds=5):
    """Microseconds per item, best of several rounds."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds) / count * 1e6


def output_cases(tokenizer):
    ids = tokenizer.encode(TEXT * 2000)
    found = {}
    for name, texts in STOPS.items():
        stops = StopStrings(texts)

        def feed(stops=stops):
            take = TextStream(tokenizer, stops).feed
            for token_id in ids:
                take((token_id,))

        found[f"feed, stops {name}"] = best(feed, len(ids))
    found["whole"] = best(lambda: tokenizer.decode(ids), len(ids))
    deltas = [Delta(0, [token_id]) for token_id in ids[:20_000]]

    def choice():
        take = ChoiceStream(tokenizer, 0, STOPS["four"]).take
        for delta in deltas:
            take(delta)

    found["choice (Delta to Piece)"] = best(choice, len(deltas))
    entries = [TokenLogprob(k, -1.0, 1, ids[:20], [-1.0] * 20) for k in ids[:500]]
    names = TokenNames(tokenizer)
    for top in (0, 5, 20):
        found[f"chat logprobs, top {top}"] = best(lambda top=top: names.chat(entries, top), len(entries))
    return found


async def input_cases(tokenizer, pool):
    renderer = Renderer(tokenizer, RenderConfig(1 << 20), pool)
    found = {}
    for turns in (1, 20):
        messages = [{"role": "user" if k % 2 == 0 else "assistant", "content": TEXT} for k in range(turns)]
        times = []
        for _ in range(200):
            start = time.perf_counter()
            await renderer.chat(messages)
            times.append(time.perf_counter() - start)
        found[f"chat, {turns} messages"] = statistics.median(times) * 1e6
    late = []

    async def beat():
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - start - 0.001)

    task = asyncio.create_task(beat())
    start = time.perf_counter()
    prompt = await renderer.chat([{"role": "user", "content": TEXT * 4600}])
    found["long prompt, per token"] = (time.perf_counter() - start) / len(prompt) * 1e6
    task.cancel()
    found["long prompt, tokens"] = len(prompt)
    found["late p50"], found["late max"] = statistics.median(late) * 1e6, max(late) * 1e6
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer = load_tokenizer(EMBEDDED)
    with ThreadPoolExecutor(2) as pool:
        found = output_cases(tokenizer) | asyncio.run(input_cases(tokenizer, pool))
    for name, value in found.items():
        print(f"{name:30} {value:12.3f}" + ("" if name.endswith("tokens") else " µs"))
    if args.json:
        args.json.write_text(json.dumps({"machine": platform.processor() or platform.machine(), "microseconds": found}))


if __name__ == "__main__":
    main()
