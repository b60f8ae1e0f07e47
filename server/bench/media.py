"""bench media: the time of a picture, a sound and a film from request to first token, part by part, without HTTP.

Owner: the command's loop. Every item is drawn at random. Only the parts named `again` repeat an item: `load again` hits
the processor's cache, `first token again` hits the prefix cache and the encoder's cache.

    render (template, tokens) | load (unpack, decode, prepare) | first token (encoder, prefill, sampling)
                                                               | encoder |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from engine import Engine, FinishReason, Request, SamplingParams
from mm.splice import splice
from server.bench.options import MediaBenchOptions, ServeOptions
from server.bench.output import finish, on_loop
from server.bench.random_media import Part, film, picture, size_of, sound
from server.flags.config import Config
from server.start import folders, load
from server.state import AppState

KINDS: dict[str, Callable[[np.random.Generator, ServeOptions], Part]] = {
    "image": picture, "audio": sound, "video": film
}  # fmt: skip


def run(options: MediaBenchOptions, config: Config) -> int:
    """The command's exit status."""
    for size in (options.image_size, options.film_size):
        size_of(size)
    return finish(options, on_loop(measure(options, config)))


async def measure(options: MediaBenchOptions, config: Config) -> dict[str, float]:
    """Medians in milliseconds, by modality and part. Raises EngineError."""
    state = AppState(config)
    found: dict[str, float] = {}
    try:
        await folders.fetch(state)
        state.engine = Engine(config.engine(state.folder, state.download.drafter))
        await load.load(state)
        if state.media is None:
            raise ValueError(
                f"{config.model_names[0]} takes text only; use --model MODEL with one that takes images, audio or video"
            )
        reads = state.media.processor.modalities if state.media.processor is not None else frozenset()
        for kind, make in KINDS.items():
            if kind in reads & {*state.engine.model.modalities}:
                runs = [await one(state, options, make, number) for number in range(1 + options.runs)][1:]
                found |= {f"{kind}_{name}": median(each[name] for each in runs) for name in runs[0]}
    finally:
        if state.media is not None:
            await state.media.close()
        if getattr(state, "engine", None) is not None:
            await state.engine.stop(0.0)
        state.pool.shutdown()
    return found


async def one(
    state: AppState,
    options: MediaBenchOptions,
    make: Callable[[np.random.Generator, ServeOptions], Part],
    number: int,
) -> dict[str, float]:
    """Times of all parts of one item."""
    assert state.media is not None
    sizes = ServeOptions(
        image_size=options.image_size, image_format=options.image_format, sound_seconds=options.sound_seconds,
        film_seconds=options.film_seconds, film_size=options.film_size,
    )  # fmt: skip
    part = make(np.random.default_rng([options.random_seed, number]), sizes)
    marks = [time.perf_counter()]
    content = [part, {"type": "text", "text": "What is this?"}]
    prompt = await state.renderer.chat([{"role": "user", "content": content}])
    marks.append(time.perf_counter())
    processed = await state.media.load(prompt.media)
    marks.append(time.perf_counter())
    await state.media.load(prompt.media)
    marks.append(time.perf_counter())
    spliced = splice(prompt.token_ids, prompt.slots, processed, state.media.processor)
    request = Request(
        spliced.prompt_token_ids,
        SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        media=spliced.media,
        positions=spliced.positions,
        position_delta=spliced.position_delta,
    )
    encoder_s = 0.0
    for _ in range(2):
        encoder_s += await first_token(state.engine, request)  # the second time, the encoder's rows are cached
        marks.append(time.perf_counter())
    names = ("render_ms", "load_ms", "load_again_ms", "first_token_ms", "first_token_again_ms")
    times = {name: (late - early) * 1e3 for name, early, late in zip(names, marks, marks[1:])}
    times["encoder_ms"] = encoder_s * 1e3
    return times | {"tokens": float(sum(spliced.counts.values())), "prepared_bytes": float(processed[0].nbytes)}


async def first_token(engine: Engine, request: Request) -> float:
    """Wait until the only token of a request arrives; returns the seconds that the encoders took."""
    encoder_s = 0.0
    async with engine.submit(request) as stream:
        async for delta in stream:
            encoder_s += delta.encode_s
            if delta.finish_reason is FinishReason.ERROR and delta.error is not None:
                raise delta.error
    return encoder_s
