"""bench throughput: the tokens per second of the engine alone, without HTTP and text.

Owner: the command's loop. Random token ids, greedy, answers of full length, all sent at once; the model's flags are the
server's (`--load-format dummy` needs no weights). The first run warms up and is left out.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from server.bench.engine_alone import Crowd, opened, random_prompts, run_crowd
from server.bench.options import ThroughputOptions
from server.bench.output import finish, on_loop
from server.bench.progress import Progress
from server.flags.config import Config


def run(options: ThroughputOptions, config: Config) -> int:
    """The command's exit status."""
    return finish(options, on_loop(measure(options, config)))


async def measure(options: ThroughputOptions, config: Config) -> dict[str, float]:
    draw = np.random.default_rng(options.random_seed)
    crowds = []
    async with opened(config) as engine:
        with Progress(1 + options.runs, "runs") as progress:
            for at in range(1 + options.runs):
                prompts = random_prompts(engine, options.num_prompts, options.input_len, draw)
                crowds.append(await run_crowd(engine, prompts, options.output_len))
                progress.show(at + 1)
        return rates(options, crowds[1:]) | {f"startup_{name}_s": took for name, took in engine.startup.items()}


def rates(options: ThroughputOptions, crowds: list[Crowd]) -> dict[str, Any]:
    """Medians over the runs; minimum and maximum of the output rate."""
    made = [crowd.tokens / crowd.seconds for crowd in crowds]
    tokens_in = options.num_prompts * options.input_len
    return {
        "output_tokens_per_s": statistics.median(made),
        "output_tokens_per_s_least": min(made),
        "output_tokens_per_s_most": max(made),
        "total_tokens_per_s": statistics.median((tokens_in + crowd.tokens) / crowd.seconds for crowd in crowds),
        "requests_per_s": statistics.median(options.num_prompts / crowd.seconds for crowd in crowds),
        "rows_per_step": statistics.median(crowd.rows / crowd.steps for crowd in crowds),
        "host_us_per_step": statistics.median(crowd.host_s / crowd.steps * 1e6 for crowd in crowds),
    }
