"""The engines of gpu_drafts: which drafts each has, what is measured on it, and the measurements of one process.

In: folders that gpu_drafts has written. Out: numbers by measure, in a file that grows with each of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import engine.step.parts.drafter
from _fast.layout import SlotWord
from engine import Delta, Engine, EngineConfig, FinishReason, Request, SamplingParams
from engine.base.grammar import Grammar
from engine.base.stats import SettledBy, StepStats
from engine.kernels.sampling.ngram import empty_texts, ngram
from engine.kernels.step_tensors import empty_slots
from engine.step.parts.replay import Replay
from server.bench.timing import chosen_device, times_of
from tests.bench.gpu_offline import TINY_ENGINE

ANSWERS_S = 30.0  # longest time of one run
CURVE = (0.80, 0.53, 0.42)  # survivals of EAGLE-3's drafts: 1.80, 2.33, 2.75 tokens a step
NEVER = (0.0, 0.0, 0.0)
KERNEL, AGAIN = "n-gram kernel", " again"


class Sizes(NamedTuple):
    """How much is asked of a shape."""

    prompt: int = 384
    answer: int = 384
    rows: tuple[int, int, int] = (1, 64, 256)
    runs: tuple[int, int, int] = (4, 3, 2)  # of each number of rows; the first warms up
    texts: tuple[int, int] = (256, 40_000)  # rows and tokens for the n-gram kernel
    layers: int = 5  # of the block drafter
    engine: dict[str, Any] = {}


SIZES = {"8b": Sizes(), "tiny": Sizes(24, 20, (1, 2, 3), (2, 2, 2), (3, 3000), 1, TINY_ENGINE)}


class Measure(NamedTuple):
    """Streams of one engine."""

    name: str
    rows: int  # which number of rows
    cases: str
    rates: tuple[float, ...] | None = None  # survivals from here on; None: those of the start
    drafts: int = 0  # replayed for each row
    rules: dict[str, Any] = {}


class Kind(NamedTuple):
    """An engine: form of the weights, and settings of drafts."""

    weights: str
    drafter: str
    settings: dict[str, Any]
    measures: tuple[Measure, ...]
    starts: str = ""  # cases that read its start


SET = {"rejection_sample_method": "synthetic"}
REPLAYED = {"method": "replay", "synthetic_acceptance_length": 1, "enable_adaptive_verification": False}
DRAWN = {"temperature": 1.0}  # no text of random draws repeats itself
HEAD = {"num_speculative_tokens": 3, "synthetic_acceptance_length": 3.0, **SET}
BLOCK = {"num_speculative_tokens": 7, "synthetic_acceptance_length": 5.0, **SET, "quantization": "fp8"}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
KINDS = {
    "bf16": Kind(
        "", "", {}, (Measure("one", 0, "12"), Measure("many", 1, "4"), Measure("most", 2, "5"),
        Measure("many drawn", 1, "6", rules=DRAWN)), "8",
    ),
    "bf16 eagle3": Kind(
        "", "eagle3", HEAD, (Measure("one", 0, "2"), Measure("many", 1, "4", CURVE), Measure("most", 2, "57", CURVE),
        Measure("most never right", 2, "5", NEVER)), "8",
    ),
    "fp8": Kind("fp8", "", {}, (Measure("one", 0, "13"),)),
    "fp8 dflash": Kind("fp8", "dflash", BLOCK, (Measure("one", 0, "3"),)),
    "bf16 replay": Kind("", "", {**REPLAYED, "num_speculative_tokens": 3}, (Measure("4 tokens", 0, "12"),)),
    "fp8 replay": Kind(
        "fp8", "", {**REPLAYED, "num_speculative_tokens": 7},
        (Measure("8 tokens", 0, "1"), Measure("4 tokens", 0, "1", drafts=3)),
    ),
    "bf16 ngram": Kind("", "", LOOKUP, (Measure("many drawn", 1, "6", rules=DRAWN),)),
    KERNEL: Kind("", "", {}, (), "6"),
    "bf16" + AGAIN: Kind("", "", {}, (), "8"),  # now every kernel is compiled
    "bf16 eagle3" + AGAIN: Kind("", "eagle3", HEAD, (), "8"),
}  # fmt: skip


def cases_of(kind: Kind) -> set[str]:
    """The cases that need an engine."""
    return {case for measure in kind.measures for case in measure.cases} | set(kind.starts)


def prompts_of(rows: int, number: int, sizes: Sizes, vocab: int) -> list[np.ndarray]:
    """The prompts of a run."""
    draw = np.random.default_rng(1000 * rows + number)
    return [draw.integers(2, vocab, sizes.prompt, dtype=np.int32) for _ in range(rows)]


class Notes:
    """The numbers of one engine, in a file from the first on."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, dict[str, Any]()

    def add(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.path.write_text(json.dumps(self.found))


def set_rates(rates: Sequence[float], runtime: Any) -> None:
    """On the device thread: replaces the survivals, which graphs read by their address."""
    own = vars(runtime.executor.backend)
    survivals = (own.get("forwards") or own["_forward"]).survivals
    survivals.copy_(torch.tensor(rates, dtype=survivals.dtype))
    if survivals.is_cuda:
        torch.cuda.synchronize()


def set_drafts(count: int, runtime: Any) -> None:
    """On the device thread: later requests replay so many tokens a step."""
    part = runtime.executor.part(Replay)
    part.config = replace(part.config, num_tokens=count)


async def run(
    own: Engine, prompts: list[np.ndarray], answer: int, rules: dict[str, Any], grammar: Grammar | None = None
) -> dict[str, Any]:
    """Sends prompts at once; numbers of the time in which all streams run."""
    arrived: list[list[tuple[float, int]]] = [[] for _ in prompts]
    steps: list[StepStats] = []
    sampling = SamplingParams(max_tokens=answer, **{"temperature": 0.0, "ignore_eos": True, **rules})

    async def one(number: int) -> None:
        done = asyncio.get_running_loop().create_future()

        def take(delta: Delta) -> None:
            arrived[number].append((time.perf_counter(), len(delta.token_ids)))
            if done.done():
                return
            if delta.finish_reason is FinishReason.ERROR:
                done.set_exception(RuntimeError(f"a request failed: {delta.error!r}"))
            elif delta.finish_reason is not FinishReason.NONE:
                done.set_result(None)

        stream = own.submit(Request(prompts[number], sampling, grammar=grammar))
        stream.subscribe(take)
        try:
            await done
        finally:
            stream.close()

    own.on_step = steps.append
    try:
        await asyncio.wait_for(asyncio.gather(*map(one, range(len(prompts)))), ANSWERS_S)
    finally:
        own.on_step = None
    begun, ended = max(events[0][0] for events in arrived), min(events[-1][0] for events in arrived)
    if ended <= begun:
        raise RuntimeError(f"no time in which all {len(prompts)} streams ran: the first ended before the last began")
    tokens = sum(count for events in arrived for at, count in events if begun < at <= ended)
    rate = tokens / (ended - begun)
    return {"tokens/s": rate, "ms/token": 1e3 * len(prompts) / rate, **of_steps(steps, len(prompts), begun, ended)}


def of_steps(steps: list[StepStats], rows: int, begun: float, ended: float) -> dict[str, Any]:
    """Numbers of the steps in which all rows ran, of the most frequent number of tokens."""
    whole = [step for step in steps if step.num_rows == rows and begun < step.ended_at <= ended]
    if len(whole) < 3:
        return {"steps": len(whole)}
    number, count = Counter(step.num_tokens for step in whole).most_common(1)[0]
    gaps = [
        late.ended_at - early.ended_at
        for early, late in pairwise(whole)
        if late.step_id == early.step_id + 1 and late.num_tokens == early.num_tokens == number
    ]
    free = [step for step in whole if step.settled == SettledBy.LOOP] or whole
    parts = 1e6 * np.array([(step.schedule_s, step.launch_s, step.commit_s, step.wait_s) for step in free])
    found: dict[str, Any] = {
        "steps": len(whole),
        "usual step, tokens": number,
        "usual step, share": count / len(whole),
        "usual step, ms": 1e3 * float(np.median(gaps)) if gaps else None,
        "host, us": float(np.median(parts[:, :3].sum(axis=1))),
        "host by part, us": dict(zip(("schedule", "launch", "commit", "wait"), np.median(parts, axis=0).tolist())),
        "steps in Python": sum(step.by_python for step in whole) / len(whole),
    }
    first, last = whole[0].drafts, whole[-1].drafts
    if first is not None and last is not None:
        drafted, drafts, right = (now - then for now, then in zip(last[:3], first[:3]))
        in_all = rows * (len(whole) - 1)
        found |= {"tokens a step": 1 + right / in_all, "drafts a row": drafts / in_all, "drafted": drafted / in_all}
        found["invalid drafts"] = last.invalid_tokens
    return found


async def measured(name: str, folders: Path, args: argparse.Namespace, notes: Notes) -> None:
    """Starts one engine and measures what its cases need."""
    kind, sizes, cases = KINDS[name], SIZES[args.shape], set(args.cases.split(","))
    speculative = dict(kind.settings)
    if speculative and args.every:
        speculative["enable_adaptive_verification"] = False
    if kind.drafter:
        speculative["model"] = str(folders / kind.drafter)
    if speculative.get("method") == "replay":
        speculative["replay_file"] = str(folders / "recording.jsonl")
    given = {"load_format": "dummy", "device": args.device, "enable_prefix_caching": False, **sizes.engine}
    given["tensor_parallel"] = args.ranks
    config = EngineConfig(str(folders / (kind.weights or "floats")), speculative=speculative, **given)

    async def body(own: Engine) -> None:
        for measure in kind.measures:
            if cases & set(measure.cases):
                await one_measure(own, measure, sizes, notes)

    await started(config, notes, body)


async def started(config: EngineConfig, notes: Notes, body: Callable[[Engine], Awaitable[None]]) -> None:
    """Starts an engine, notes how long that took, and runs `body` with it."""
    own, read_s, load = Engine(config), [0.0], engine.step.parts.drafter.load_drafter

    def timed(*args: Any) -> None:
        begun = time.perf_counter()
        load(*args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        read_s[0] = time.perf_counter() - begun

    begun = time.perf_counter()
    with mock.patch.object(engine.step.parts.drafter, "load_drafter", timed):
        await own.start()
    try:
        notes.add("ready, s", time.perf_counter() - begun)
        notes.add("reading the drafter, s", read_s[0])
        notes.add("phases, s", {phase: round(seconds, 3) for phase, seconds in own.startup.items()})
        await body(own)
    finally:
        await own.stop(5)


async def one_measure(
    own: Engine, measure: Measure, sizes: Sizes, notes: Notes, grammar: Grammar | None = None
) -> None:
    """The best of several runs; a failure is noted."""
    rows, vocab = sizes.rows[measure.rows], own.limits.vocab_size
    try:
        if measure.rates is not None:
            await own.on_device(partial(set_rates, measure.rates))
        if measure.drafts:
            await own.on_device(partial(set_drafts, measure.drafts))
        runs = []
        for number in range(sizes.runs[measure.rows]):
            prompts = prompts_of(rows, number, sizes, vocab)
            runs.append(await run(own, prompts, sizes.answer, measure.rules, grammar))
        best = max(runs[1:], key=lambda one: one["tokens/s"])
        notes.add(measure.name, {**best, "all, tokens/s": [one["tokens/s"] for one in runs]})
    except Exception:
        traceback.print_exc()
        notes.add(f"{measure.name}: error", traceback.format_exc()[-1500:])


def of_kernel(device: str, sizes: Sizes, notes: Notes) -> None:
    """Times the n-gram kernel over texts without a match, of which no cache holds all."""
    rows, length = sizes.texts
    calls = []
    for seed in range(3):
        slots, texts = empty_slots(rows, 1, 1, device, 4), empty_texts(rows, length + 8, rows, device)
        draw = torch.Generator(device=device).manual_seed(seed)
        texts.tokens.random_(0, 1 << 20, generator=draw)
        slots.word(SlotWord.LENGTH).fill_(length)
        runs = torch.full((rows, 6), -3, dtype=torch.int32, device=device)
        runs[:, 0] = torch.arange(rows) + (1 << 21)
        calls.append(partial(ngram, slots, texts, runs, torch.arange(rows, dtype=torch.int32, device=device), 1, 5))
    seconds = times_of(calls, device)
    notes.add("us", {name: 1e6 * value for name, value in zip(("median", "p10", "p90"), seconds)})


def inside(name: str, folders: Path, args: argparse.Namespace, path: Path) -> int:
    """One engine; its numbers go to `path`."""
    if name == KERNEL:
        return noted(path, lambda notes: of_kernel(chosen_device(args.device), SIZES[args.shape], notes))
    return noted(path, lambda notes: asyncio.run(measured(name, folders, args, notes)))


def noted(path: Path, measure: Callable[[Notes], None]) -> int:
    """Runs `measure`, whose numbers go to `path`, as an error does; returns the exit status."""
    notes = Notes(path)
    try:
        measure(notes)
    except Exception:
        traceback.print_exc()
        notes.add("error", traceback.format_exc()[-3000:])
        return 1
    return 0
