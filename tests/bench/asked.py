"""Sends the requests of a case of gpu_serve to a server, with the options, clients and answers of `server/bench`.

A case is one load, or several that run together: streams without rules, streams with rules, and a second case at the
same time. All loads start when all have drawn their prompts. They end after a time or after a number of answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from server.bench import processes
from server.bench.dataset import FIRST_ID, WORDS
from server.bench.options import ServeOptions
from server.bench.output import on_loop
from server.bench.reply import Reply
from server.bench.summary import times_of
from tests.bench.loads import Case
from tests.bench.shapes import SHAPES

STREAMS_PER_PROCESS, PICTURES_PER_PROCESS, MOST_PROCESSES = 32, 4, 8
# Least gap between tokens of an answer, from which the number of prompts is computed.
LEAST_GAP_S, LEAST_PICTURE_GAP_S = 0.0004, 0.004
LEAST_DRAWN = 1000
# Bytes per word: the shapes' tokenizer has one token for each byte.
WORD = sum(len(word) + 1 for word in WORDS) / len(WORDS)


@dataclass(frozen=True, slots=True)
class Came:
    """The clients' results for one case: the case's own answers, and the failures of all loads that ran with it."""

    begun: float
    answers: list[Reply]
    failures: tuple[str, ...] = ()  # error messages in place of answers
    until: float = 0.0  # when the load ended or had nothing more to send
    cpu_s: float = 0.0  # CPU seconds of all clients


def parts_of(url: str, shape: str, asked: Case, seconds: float, answers: int, folder: Path) -> list[ServeOptions]:
    """The loads of a case; those of its second case (`asked.background`) come last."""
    whole = options_of(url, shape, asked, seconds, answers, folder)
    rules = ({}, asked.streams - asked.ruled), (dict(asked.fields), asked.ruled)
    found = [
        replace(
            whole, max_concurrency=count, extra_body=fields, seed=asked.seed + at, processes=processes_of(asked, count)
        )
        for at, (fields, count) in enumerate(rules)
        if count
    ]
    return found + (
        parts_of(url, shape, asked.background, seconds, answers, folder) if asked.background is not None else []
    )


def processes_of(asked: Case, streams: int) -> int:
    return min(MOST_PROCESSES, -(-streams // (PICTURES_PER_PROCESS if asked.picture else STREAMS_PER_PROCESS)))


def options_of(url: str, shape: str, asked: Case, seconds: float, answers: int, folder: Path) -> ServeOptions:
    """Options of `bench serve` for a case; unequal lengths go into a file of prompts."""
    config = SHAPES[shape]
    vocab = min(config.get("special", {}).values(), default=0) or config["vocab_size"]
    options = ServeOptions(
        url=url,
        endpoint="chat" if asked.picture else "completions",
        num_prompts=most_prompts(asked, seconds, answers),
        num_warmups=0,
        temperature=0.0,
        ignore_eos=True,
    )
    ((prompt, answer), *others) = asked.lengths
    if asked.picture:
        width, height = asked.picture
        options = replace(options, images=1, image_size=f"{width}x{height}", image_format=asked.coding)
        return replace(options, num_media=int(asked.cached), input_len=round(prompt / WORD), output_len=answer)
    if others:
        file = folder / f"prompts-{asked.seed}.jsonl"
        write_prompts(file, asked, vocab)
        return replace(options, dataset="jsonl", dataset_path=str(file))
    return replace(options, vocab_size=vocab, input_len=prompt, output_len=answer, prefix_len=asked.prefix)


def most_prompts(asked: Case, seconds: float, answers: int) -> int:
    """An upper bound on the number of prompts: the time or the number of answers ends the load."""
    if asked.once:
        return len(asked.lengths)
    gap_s = LEAST_PICTURE_GAP_S if asked.picture else LEAST_GAP_S
    tokens = sum(answer for _, answer in asked.lengths) / len(asked.lengths)
    fastest = asked.streams * (2 + int(seconds / (tokens * gap_s)))
    return min(fastest, 4 * max(answers, LEAST_DRAWN) + 4 * asked.streams)


def write_prompts(file: Path, asked: Case, vocab: int) -> None:
    """Writes random ids of the case's lengths, one prompt per line."""
    draw = random.Random(asked.seed)
    with file.open("w") as out:
        for prompt, answer in asked.lengths:
            ids = [draw.randrange(FIRST_ID, vocab) for _ in range(prompt)]
            out.write(json.dumps({"prompt": ids, "max_tokens": answer}) + "\n")


def load(
    parts: Sequence[ServeOptions],
    model: str,
    num_background: int = 0,
    warm_s: float = 0.0,
    measure_s: float = 0.0,
    warm: Callable[[], None] | None = None,
    answers: int = 0,
) -> Came:
    """Runs the clients and calls `warm` after the warm-up. All loads end measure_s later, or after `answers` answers.

    The last `num_background` parts send their requests too, but their answers are not in the result.
    """
    return on_loop(asking(parts, model, len(parts) - num_background, warm_s, measure_s, warm, answers))


async def asking(
    parts: Sequence[ServeOptions],
    model: str,
    num_own: int,
    warm_s: float,
    measure_s: float,
    warm: Callable[[], None] | None,
    answers: int,
) -> Came:
    stop, gate = asyncio.Event(), asyncio.Barrier(len(parts) + 1)
    counts = [0] * len(parts)
    most = [0, 0.0]  # number of answers that ends the load, set after the warm-up; time at which the load was ended

    def end() -> None:
        most[1] = most[1] or time.perf_counter()
        stop.set()

    def ended(at: int, count: int) -> None:
        counts[at] = count
        if most[0] and sum(counts[:num_own]) >= most[0]:
            end()

    async def watch() -> None:
        await gate.wait()
        await asyncio.sleep(processes.START_DELAY_S + warm_s)
        most[0] = sum(counts[:num_own]) + answers if answers else 0
        if warm is not None:
            await asyncio.to_thread(warm)
        await asyncio.sleep(measure_s)
        end()

    watching = asyncio.create_task(watch())
    try:
        async with asyncio.TaskGroup() as group:
            runs = [
                group.create_task(processes.run(part, model, lambda count, at=at: ended(at, count), stop, gate.wait))
                for at, part in enumerate(parts)
            ]
    finally:
        watching.cancel()
    outcomes = [run.result() for run in runs]
    failures = tuple(answer.error for outcome in outcomes for answer in outcome.answers if answer.error)
    own: list[Reply] = []
    for at, outcome in enumerate(outcomes[:num_own]):
        own += (replace(answer, place=answer.place + 1000 * at) for answer in outcome.answers if not answer.error)
    until = most[1] or max((answer.sent for answer in own), default=0.0)
    begun, cpu_s = min(outcome.start for outcome in outcomes[:num_own]), sum(outcome.cpu_s for outcome in outcomes)
    return Came(begun, own, failures, until, cpu_s)


def events_of(answers: Sequence[Reply]) -> np.ndarray:
    """[events after each answer's first, 2]: time of the event, and seconds since the event before."""
    each = [np.stack((one.first + np.cumsum(one.gaps), one.gaps), 1) for one in answers if one.gaps]
    return np.concatenate(each) if each else np.zeros((0, 2))


def summary(came: Came, since: float, until: float) -> dict[str, float]:
    """The numbers of one case; times in milliseconds."""
    begun = [one for one in came.answers if one.sent >= since and 0 < one.first <= until]
    ended = [one for one in came.answers if not one.cut and one.end <= until]
    if not begun or not ended:
        raise RuntimeError("no request began and ended within the time measured; measure for longer")
    per_event = sum(one.tokens for one in ended) / sum(one.events for one in ended)  # an event may carry several tokens
    events = events_of(came.answers)
    gaps = events[(events[:, 0] >= since) & (events[:, 0] <= until), 1] * 1e3
    by_event = (len(gaps) + len(begun)) * per_event / (until - since)
    wait = [times_of(one)["ttft"] for one in begun]
    found = {name: float(np.percentile(wait, share)) for name, share in (("TTFT p50", 50), ("TTFT p99", 99))}
    found |= {name: float(np.percentile(gaps, share)) for name, share in (("ITL p50", 50), ("ITL p99", 99))}
    inside = [one for one in ended if one.end >= since]
    by_answer = rate_of_equal(inside) if len({one.tokens for one in ended}) == 1 else float("nan")
    tpot = [times["tpot"] for times in map(times_of, inside) if "tpot" in times]
    return {
        "output": by_event if np.isnan(by_answer) else by_answer,
        "output by event": by_event,
        **found,
        "TPOT": float(np.median(tpot)) if tpot else 0.0,
        "answers": float(len(inside)),
        "failures": float(len(came.failures)),
        "tokens per event": per_event,
    }


def rate_of_equal(ended: Sequence[Reply]) -> float:
    """Tokens per second of whole answers of equal length; nan if a connection has not ended two answers."""
    rate, places = 0.0, {one.place for one in ended}
    for place in places:
        ends = sorted(one.end for one in ended if one.place == place)
        rate += (len(ends) - 1) * ended[0].tokens / (ends[-1] - ends[0]) if len(ends) > 1 else float("nan")
    return rate
