"""bench serve: sends load to any server of the OpenAI API over a socket, and reports its throughput and latencies.

Owner: the bench's main thread. Order: wait for the server, warm it up, read its counters, run the load, read the
counters again, then print, write and plot.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import re
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from server.bench import processes, summary
from server.bench.client import Target
from server.bench.dataset import read_file
from server.bench.options import ServeOptions
from server.bench.progress import Progress
from server.bench.random_media import size_of
from server.bench.share import Share

PROBE_S = 10.0  # timeout of the small requests before and after the load
COUNTERS = re.compile(r"^(?:vllm:)?(\w+?)(?:_total)?(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)
DRAFTED, ACCEPTED = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
LOOKED_UP, FOUND = "prefix_cache_queries", "prefix_cache_hits"


def check(options: ServeOptions) -> None:
    """Check the flags for contradictions. Raises ValueError."""
    Target.of(options.url, options.api_key)
    size_of(options.image_size)
    size_of(options.film_size)
    media = options.images + options.sounds + options.films
    if options.vocab_size and options.endpoint != "completions":
        raise ValueError("--vocab-size: token ids are prompts of --endpoint completions only")
    if options.endpoint == "completions" and (options.turns > 1 or media):
        raise ValueError("--endpoint completions: takes no --turns, --images, --sounds or --films; use chat")
    if options.ramp_to and not options.request_rate:
        raise ValueError("--ramp-to: needs --request-rate, the rate at the beginning")
    if options.dataset != "random":
        read_file(options)
    if media and options.dataset != "random":
        raise ValueError(f"--dataset {options.dataset}: --images, --sounds and --films go with random prompts")
    for name, limit in options.goodput.items():
        if name not in summary.TIMES or isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0:
            raise ValueError(f"--goodput {name}={limit}: must be milliseconds above 0 of {', '.join(summary.TIMES)}")


def get(target: Target, path: str) -> str:
    """The body of a GET. Raises OSError."""
    scheme = "https" if target.secure else "http"
    host = f"[{target.host}]" if ":" in target.host else target.host
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    url = f"{scheme}://{host}:{target.port}{target.prefix}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PROBE_S) as answer:
        return answer.read().decode(errors="replace")


async def first_model(options: ServeOptions) -> str:
    """The model's name once the server answers. Raises ValueError if the server does not answer."""
    target = Target.of(options.url, options.api_key)
    until, logged = time.monotonic() + options.ready_timeout, False
    while True:
        try:
            listed = json.loads(await asyncio.to_thread(get, target, "/v1/models"))
            return options.model or listed["data"][0]["id"]
        except urllib.error.HTTPError as error:
            said = f"HTTP {error.code}: {error.read()[:300].decode(errors='replace')}"
            if error.code in (401, 403):
                given = "takes another --api-key" if options.api_key else "asks for a key; give it with --api-key"
                raise ValueError(f"--url {options.url}: the server {given}: {said}") from None
            if error.code != 503 and options.model:
                return options.model  # the server lists no models
            if error.code != 503:
                hint = "if this is the address of an OpenAI API, it lists no models; name one with --model"
                raise ValueError(f"--url {options.url}: /v1/models answers {said}; {hint}") from None
        except OSError as error:
            said = str(getattr(error, "reason", error))
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"--url {options.url}: /v1/models lists no model; name one with --model") from None
        if time.monotonic() > until:
            raise ValueError(f"--url {options.url}: no server is ready there after {options.ready_timeout:g} s: {said}")
        if not logged:
            print(f"omniloop: waits up to {options.ready_timeout:g} s for {options.url} ({said})", file=sys.stderr)
            logged = True
        await asyncio.sleep(0.2)


def counters(options: ServeOptions) -> dict[str, float]:
    """The server's own counters, summed over labels; empty if it has no /metrics."""
    target = Target.of(options.url, "")
    try:
        text = get(dataclasses.replace(target, prefix=""), "/metrics")
    except OSError:
        return {}
    found: dict[str, float] = {}
    for name, value in COUNTERS.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The growth of the server's counters in the run: acceptance of drafts and hits of the prefix cache."""
    grown = {
        name: after[name] - before.get(name, 0.0) for name in (DRAFTED, ACCEPTED, LOOKED_UP, FOUND) if name in after
    }
    found: dict[str, float] = {}
    if grown.get(DRAFTED):
        found |= {"draft_tokens": grown[DRAFTED], "draft_acceptance": grown.get(ACCEPTED, 0.0) / grown[DRAFTED]}
    if grown.get(LOOKED_UP):
        found["prefix_cache_hit_rate"] = grown.get(FOUND, 0.0) / grown[LOOKED_UP]
    return found


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Make Ctrl-C only call `act`. No effect outside the main thread, which alone receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def measure(options: ServeOptions) -> tuple[dict[str, Any], processes.Outcome]:
    """One run: its numbers and its answers. Ctrl-C ends the load; the results are still reported. Raises ValueError,
    OSError.
    """
    loop = asyncio.get_running_loop()
    model = await first_model(options)
    warm = Share(dataclasses.replace(options, num_prompts=0), model, 0, 1)
    failed = [answer.error for answer in await warm.warm_up() if answer.error]
    if failed:
        raise ValueError(f"the warm-up failed: {failed[0]}")
    before = await loop.run_in_executor(None, counters, options)
    stop, interrupted = asyncio.Event(), asyncio.Event()

    def interrupt() -> None:
        interrupted.set()
        stop.set()

    async def begin() -> None:
        if options.seconds:
            loop.call_later(processes.START_DELAY_S + options.seconds, stop.set)

    with on_interrupt(interrupt), Progress(options.num_prompts * options.turns, "requests") as progress:
        outcome = await processes.run(options, model, progress.show, stop, begin)
    after = await loop.run_in_executor(None, counters, options)
    found = {"model": model, "interrupted": interrupted.is_set()}
    return found | summary.numbers(outcome, options, difference(before, after)), outcome


def report(options: ServeOptions) -> dict[str, Any]:
    """Run, print, write --json and --plot; returns the numbers."""
    check(options)
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found, outcome = runner.run(measure(options))
    print(summary.table(found, options), flush=True)
    if options.json:
        asked = dataclasses.asdict(options) | {"api_key": "", "json": "", "plot": ""}
        whole = {**found, "options": asked, "requests_sent": summary.request_lines(outcome)}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(whole, file, indent=1)
    if options.plot:
        from server.bench.plot import draw_run

        draw_run(options.plot, outcome)
    return found


def run(options: ServeOptions) -> int:
    """The command's exit status: 130 after Ctrl-C, 1 if no request was completed."""
    try:
        found = report(options)
        return 130 if found["interrupted"] else 0 if found["completed"] else 1
    except (ValueError, OSError, RuntimeError) as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 1
