"""Mixed requests with aborts on several ranks, one of which is late at random: nothing hangs, nothing stays held.

Random weights of a real shape, without HTTP. Requests are plain, seeded, with several choices, rules, log-probabilities
of answers and of prompts; a share of them is left at a random token. Meanwhile kernels that only wait are launched on
a random rank's stream, for up to --late milliseconds, several times a second. A step that brings nothing for --patience
seconds counts as a hang, and ends the run. At the end the ledger must be zero. Prints JSON, and writes it into --out
(gpu_rank_chaos.json); exit status 1: a hang, an answer with an error, or something still held. On a CPU the ranks are
simulated, and a late rank sleeps before its forward.
Run: python -m tests.bench.gpu_rank_chaos [--ranks 2] [--requests 10000] [--shape 0.6b] [--late 50] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine import Engine, EngineConfig, FinishReason, Request, SamplingParams
from tests.bench import targets
from tests.bench.gpu_offline import TINY_ENGINE, device_name
from tests.bench.shapes import SHAPES, write_folder
from tests.engine_kit import quiet

FILE = "gpu_rank_chaos.json"
CYCLES_PER_MS = 1_500_000  # of a kernel that waits
OPEN = 192  # requests at a time
PAUSE_S = 0.15  # between two delays, on average
KINDS: tuple[tuple[int, dict[str, Any]], ...] = (  # share, sampling
    (50, {"temperature": 0.0}),
    (20, {"temperature": 0.9, "top_p": 0.9}),
    (10, {"temperature": 0.7, "presence_penalty": 0.5, "logit_bias": ((7, 1.0),)}),
    (10, {"temperature": 0.0, "logprobs": 3}),
    (5, {"temperature": 0.0, "bad_words": ((7, 8), (9,))}),
    (5, {"temperature": 0.0, "prompt_logprobs": 1}),
)


class Chaos:
    """One run. Owner: the loop."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self.engine, self.args, self.draw = engine, args, random.Random(args.seed)
        self.ended: collections.Counter[str] = collections.Counter()
        self.delays, self.newest = 0, time.perf_counter()
        engine.on_step = lambda _stats: self._note()

    def _note(self) -> None:
        self.newest = time.perf_counter()

    async def run(self) -> dict[str, Any]:
        """Sends all requests; returns what happened."""
        begun, hang = time.perf_counter(), False
        work = asyncio.create_task(self._all())
        late = asyncio.create_task(self._delay())
        while not work.done() and not hang:
            await asyncio.wait([work], timeout=0.5)
            hang = not work.done() and time.perf_counter() - self.newest > self.args.patience
        late.cancel()
        found = {"requests": sum(self.ended.values()), "ended": dict(self.ended), "delays": self.delays, "hang": hang}
        found["seconds"] = round(time.perf_counter() - begun, 1)
        if hang:
            return found
        await work
        try:
            await quiet(self.engine, 10)
            return {**found, "held": {}}
        except AssertionError as error:
            return {**found, "held": str(error)}

    async def _all(self) -> None:
        gate = asyncio.Semaphore(OPEN)

        async def one() -> None:
            async with gate:
                self.ended[await self._one()] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(self.args.requests):
                group.create_task(one())

    async def _one(self) -> str:
        draw, limits = self.draw, self.engine.limits
        rules = draw.choices([rules for _, rules in KINDS], [share for share, _ in KINDS])[0]
        length = draw.choice((draw.randint(1, 40), draw.randint(1, self.args.longest)))
        ids = np.array([draw.randrange(2, limits.vocab_size) for _ in range(length)], np.int32)
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 60), ignore_eos=True, seed=draw.randrange(1 << 30), **rules
        )
        leaves = draw.randint(0, 30) if draw.random() < 0.25 else None
        count = 0
        async with self.engine.submit(Request(ids, sampling, n=draw.choice((1, 1, 1, 3)))) as stream:
            async for delta in stream:
                if delta.finish_reason is FinishReason.ERROR:
                    return f"error: {delta.error}"
                count += len(delta.token_ids)
                if leaves is not None and count >= leaves:
                    return "left"
        return "complete"

    async def _delay(self) -> None:
        delay = on_devices if self.args.device != "cpu" else on_host
        hold = delay(self.engine)
        while True:
            await asyncio.sleep(self.draw.expovariate(1 / PAUSE_S))
            hold(self.draw.randrange(self.args.ranks), self.draw.uniform(0.1, self.args.late))
            self.delays += 1


def on_devices(engine: Engine) -> Callable[[int, float], None]:
    """A function that launches a waiting kernel on a rank's stream: (rank, milliseconds)."""
    import torch

    runtime = engine.inspect().runtime
    assert runtime is not None
    ranks = runtime.executor.ranks

    def hold(rank: int, milliseconds: float) -> None:
        accelerator = ranks[rank].accelerator
        assert accelerator is not None
        with torch.cuda.device(accelerator.device), torch.cuda.stream(accelerator.compute):
            torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))

    return hold


def on_host(engine: Engine) -> Callable[[int, float], None]:
    """A function that makes a simulated rank sleep before its next forward."""
    runtime = engine.inspect().runtime
    assert runtime is not None
    late: dict[int, float] = {}
    model: Any = runtime.model

    def sleeping(rank: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            time.sleep(late.pop(rank, 0.0) / 1e3)
            return forward(*args)

        return slow

    for rank, member in enumerate(model.members):
        member.forward = sleeping(rank, member.forward)
    return late.__setitem__


async def inside(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Starts the engine, runs the chaos, and stops."""
    more = TINY_ENGINE if args.shape.startswith("tiny") else {"max_num_seqs": 128}
    given = {"load_format": "dummy", "device": args.device, "tensor_parallel": args.ranks, **more}
    served = Engine(EngineConfig(str(folder), **given))
    await served.start()
    found = await Chaos(served, args).run()
    if found["hang"]:
        print(json.dumps(found), flush=True)
        targets.keep(args.out, FILE, args.shape, {"device": device_name(args.device), **found})
        os._exit(1)  # nothing else ends a process whose device hangs
    await served.stop(5)
    return found


def is_clean(found: dict[str, Any]) -> bool:
    """Whether nothing hung, failed or is still held."""
    return not (found["hang"] or found["held"] or any(what.startswith("error") for what in found["ended"]))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--shape", default="0.6b", choices=SHAPES)
    parser.add_argument("--longest", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--late", type=float, default=50, help="most milliseconds of a delay")
    parser.add_argument(
        "--patience", type=float, default=30, help="seconds without a step until the run counts as hung"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(inside(args, write_folder(Path(name) / "model", SHAPES[args.shape])))
    print(json.dumps(found), flush=True)
    targets.keep(args.out, FILE, args.shape, {"device": device_name(args.device), **found})
    return int(not is_clean(found))


if __name__ == "__main__":
    sys.exit(main())
