"""bench latency: the time of batches of equal requests in the engine alone, from their start to the last token.

Owner: the command's loop. Random token ids, greedy, answers of full length; the model's flags are the server's. The
first runs of a batch size warm up and are left out.
"""

from __future__ import annotations

import numpy as np

from server.bench.engine_alone import Crowd, opened, random_prompts, run_crowd
from server.bench.options import LatencyOptions
from server.bench.output import finish, on_loop
from server.bench.progress import Progress
from server.flags.config import Config


def run(options: LatencyOptions, config: Config) -> int:
    """The command's exit status."""
    return finish(options, on_loop(measure(options, config)))


async def measure(options: LatencyOptions, config: Config) -> dict[str, float]:
    draw = np.random.default_rng(options.random_seed)
    found: dict[str, float] = {}
    runs = options.warm_runs + options.runs
    async with opened(config) as engine:
        with Progress(runs * len(options.batch_sizes), "runs") as progress:
            for number, size in enumerate(options.batch_sizes):
                crowds = []
                for at in range(runs):
                    prompts = random_prompts(engine, size, options.input_len, draw)
                    crowds.append(await run_crowd(engine, prompts, options.output_len))
                    progress.show(number * runs + at + 1)
                found |= times(options, size, crowds[options.warm_runs :])
    return found


def times(options: LatencyOptions, size: int, crowds: list[Crowd]) -> dict[str, float]:
    """Times of batches of one size."""
    whole = [crowd.seconds * 1e3 for crowd in crowds]
    firsts = [(first - crowd.begun) * 1e3 for crowd in crowds for first in crowd.firsts]
    found = {f"batch_{size}_ms_mean": float(np.mean(whole))}
    found |= {f"batch_{size}_ms_p{share}": float(np.percentile(whole, share)) for share in options.percentiles}
    found[f"batch_{size}_ttft_ms_p50"] = float(np.median(firsts))
    if options.output_len > 1:
        gaps = [
            (last - first) / (options.output_len - 1) * 1e3
            for crowd in crowds
            for first, last in zip(crowd.firsts, crowd.lasts)
        ]
        found[f"batch_{size}_tpot_ms_p50"] = float(np.median(gaps))
    return found
