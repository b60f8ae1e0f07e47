"""The engine's promises: a bad request fails alone, every stream ends, and no resource stays held."""

import asyncio
import random
import threading
import time

import numpy as np
import pytest
import torch

from engine import Engine, EngineConfig, FinishReason, MediaInput, Request, SamplingParams
from engine.base.errors import (
    ConfigError,
    DeviceLostError,
    InvalidLogitsError,
    NotReadyError,
    QueueFullError,
    RequestError,
    StepFailedError,
)
from engine.base.inbox import Stop
from engine.run.loop import MAX_LATE_ITEMS
from tests import tiny
from tests.engine.test_stall import block
from tests.engine_kit import answer, answer_deltas, prompts, quiet, running, text_request

QWEN3 = tiny.checkpoint("qwen3")
PROMPT = list(range(5, 45))


def runtime_of(engine: Engine):
    return engine.inspect().runtime


async def finals(engine: Engine, request: Request) -> list:
    """The last Delta of each choice, errors included."""
    last = {}
    async with engine.submit(request) as stream:
        async for delta in stream:
            last[delta.index] = delta
    return [last[k] for k in range(request.n)]


async def test_first_delta_reports_cached_tokens():
    async with running(QWEN3) as engine:
        first = await answer_deltas(engine, text_request(PROMPT, 4))
        assert first[0][0].cached_tokens == 0
        again = await answer_deltas(engine, text_request(PROMPT, 4))
        assert again[0][0].cached_tokens == 32  # two whole blocks of the 40 tokens
        assert engine.stats.cached_tokens == 32


async def test_first_delta_reports_how_long_the_request_queued():
    async with running(QWEN3, max_num_seqs=1) as engine:
        base = text_request(PROMPT, 30, ignore_eos=True)
        sent = [Request(base.prompt_token_ids, base.sampling, arrival=time.monotonic()) for _ in range(2)]
        first, second = await asyncio.gather(*[answer_deltas(engine, request) for request in sent])
        assert 0 <= first[0][0].queued < second[0][0].queued < 5
        assert all(delta.queued is None for delta in second[0][1:])


async def test_salts_separate_cached_prefixes():
    async with running(QWEN3) as engine:
        for salt, cached in ((b"a", 0), (b"b", 0), (b"a", 32)):
            base = text_request(PROMPT, 2)
            sent = Request(base.prompt_token_ids, base.sampling, cache_salt=salt)
            assert (await answer_deltas(engine, sent))[0][0].cached_tokens == cached


async def test_end_of_sequence_stop_token_length_and_min_tokens():
    async with running(QWEN3) as engine:
        tokens = (await answer(engine, text_request(PROMPT, 12, ignore_eos=True)))[0]
        fifth = tokens[4]
        assert fifth not in tokens[:4]
        for rules, reason in (
            ({"eos_token_ids": (fifth,)}, FinishReason.STOP),
            ({"stop_token_ids": (fifth,)}, FinishReason.STOP_TOKEN),
        ):
            deltas = (await answer_deltas(engine, text_request(PROMPT, 12, **rules)))[0]
            assert [t for d in deltas for t in d.token_ids] == tokens[:5]
            assert deltas[-1].finish_reason is reason
            assert deltas[-1].stop_token_id == (fifth if reason is FinishReason.STOP_TOKEN else None)
        deltas = (await answer_deltas(engine, text_request(PROMPT, 12, eos_token_ids=(fifth,), ignore_eos=True)))[0]
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        late = (await answer(engine, text_request(PROMPT, 12, eos_token_ids=(fifth,), min_tokens=8)))[0]
        assert len(late) >= 8
        assert fifth not in late[:7]


async def test_prompt_logprobs_equal_in_one_go_and_in_chunks():
    wanted = None
    for chunk in (0, 7):
        async with running(QWEN3, max_prefill_chunk=chunk) as engine:
            for _ in range(2):  # the second time the prompt is cached, but must be computed again
                deltas = (await answer_deltas(engine, text_request(PROMPT, 2, prompt_logprobs=3, logprobs=2)))[0]
                got = deltas[0].prompt_logprobs
                assert got[0] is None
                assert [entry.token_id for entry in got[1:]] == PROMPT[1:]
                assert deltas[0].cached_tokens == 0
                wanted = wanted or got
                assert got == wanted
                logprobs = [entry for delta in deltas for entry in delta.logprobs]
                assert all(entry.rank == 1 and len(entry.top_ids) == 2 for entry in logprobs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_token_ids": np.zeros(0, np.int32)}, "at least one"),
        ({"prompt_token_ids": np.zeros(600, np.int32)}, "maximum context length is 512 tokens. However"),
        ({"prompt_token_ids": np.array([-1], np.int32)}, "token id -1"),
        ({"prompt_token_ids": np.array([tiny.VOCAB_SIZE], np.int32)}, "out of range"),
        ({"n": 0}, "n=0"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(max_tokens=2, min_tokens=3)}, "min_tokens"),
        ({"sampling": SamplingParams(stop_token_ids=(tiny.VOCAB_SIZE,))}, "token id"),
        ({"sampling": SamplingParams(logprobs=21)}, "logprobs"),
        ({"sampling": SamplingParams(allowed_token_ids=(7, 8), bad_words=((7,), (8,)))}, "bad_words forbid every id"),
        ({"sampling": SamplingParams(min_tokens=1, allowed_token_ids=(7,), stop_token_ids=(7,))}, "allow another"),
        ({"media": (MediaInput("image", bytes(16), ((0, 2),), 2, {}),)}, "image"),
        ({"positions": np.zeros((3, 5), np.int32)}, "positions"),
        ({"positions": np.zeros((3, len(PROMPT)), np.int32)}, r"\[1, prompt_len\] is needed"),
    ],
)
async def test_bad_requests_are_refused_before_the_device_thread(change, words):
    async with running(QWEN3) as engine:
        fields = {"prompt_token_ids": np.asarray(PROMPT, np.int32), "sampling": SamplingParams(), **change}
        with pytest.raises(RequestError, match=words):
            engine.submit(Request(**fields))
        assert len((await answer(engine, text_request(PROMPT, 3)))[0]) == 3


async def test_full_queue_refuses_and_recovers():
    async with running(QWEN3, max_num_seqs=2, max_num_queued_reqs=3) as engine:
        streams = [engine.submit(text_request(PROMPT, 50, ignore_eos=True)) for _ in range(5)]
        with pytest.raises(QueueFullError, match="holds 5"):
            engine.submit(text_request(PROMPT, 1))
        for stream in streams:
            stream.close()
        assert len((await answer(engine, text_request(PROMPT, 3)))[0]) == 3


async def test_a_request_whose_logits_are_not_numbers_ends_alone():
    async with running(QWEN3) as engine:
        wanted = await answer(engine, text_request(PROMPT, 10, ignore_eos=True))
        model = runtime_of(engine).model
        plain = model.logits

        def broken(hidden, *adapters):
            logits = plain(hidden, *adapters)
            if len(logits) == 2:
                logits[1, 3] = float("nan")
            return logits

        model.logits = broken
        one, two = await asyncio.gather(
            finals(engine, text_request(PROMPT, 10, ignore_eos=True)),
            finals(engine, text_request(PROMPT[:20], 10, ignore_eos=True)),
        )
        reasons = sorted([one[0].finish_reason, two[0].finish_reason])
        assert reasons == [FinishReason.LENGTH, FinishReason.ERROR]
        error = next(d.error for d in (one[0], two[0]) if d.error)
        assert isinstance(error, InvalidLogitsError)
        model.logits = plain
        assert await answer(engine, text_request(PROMPT, 10, ignore_eos=True)) == wanted


async def test_a_failed_step_ends_its_rows_and_the_next_step_runs(caplog):
    async with running(QWEN3) as engine:
        wanted = await answer(engine, text_request(PROMPT, 10, ignore_eos=True))
        model = runtime_of(engine).model
        plain, calls = model.forward, 0

        def broken(batch):
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("planted")
            return plain(batch)

        model.forward = broken
        ended = await finals(engine, text_request(PROMPT, 10, n=3, ignore_eos=True))
        assert {delta.finish_reason for delta in ended} == {FinishReason.ERROR}
        assert all(isinstance(delta.error, StepFailedError) for delta in ended)
        assert "planted" in caplog.text
        await quiet(engine)
        assert await answer(engine, text_request(PROMPT, 10, ignore_eos=True)) == wanted


async def test_a_tower_that_refuses_ends_only_the_requests_that_show_the_item(caplog):
    folder = tiny.checkpoint("omni")
    async with running(folder) as engine:
        pad = tiny.IDS["<|IMAGE|>"]
        item = MediaInput("image", b"x" * 16, ((1, 4),), 4, {"pixel_values": np.zeros((3, 5), np.float32)})
        bad = Request(np.array([1, pad, pad, pad, pad, 2], np.int32), SamplingParams(temperature=0.0), media=(item,))
        failed, fine = await asyncio.gather(finals(engine, bad), answer(engine, text_request(PROMPT, 8)))
        assert failed[0].finish_reason is FinishReason.ERROR
        assert len(fine[0]) == 8


async def test_death_of_the_thread_ends_every_request(caplog):
    engine = Engine(EngineConfig(model=str(QWEN3), num_threads=1, num_gpu_blocks_override=64))
    await engine.start()
    heard = []
    engine.on_death = heard.append
    runtime = runtime_of(engine)

    class Gone(BaseException):
        pass

    def broken(plan):
        raise Gone

    streams = [asyncio.create_task(finals(engine, text_request(PROMPT, 200, ignore_eos=True))) for _ in range(3)]
    await asyncio.sleep(0.02)
    runtime.executor.launch_forward = broken
    for ended in await asyncio.wait_for(asyncio.gather(*streams), 60):
        assert ended[0].finish_reason is FinishReason.ERROR
        assert isinstance(ended[0].error, DeviceLostError)
    assert engine.state == "dead"
    assert isinstance(heard[0], Gone)
    with pytest.raises(NotReadyError):
        engine.submit(text_request(PROMPT, 1))
    await engine.stop(1)


async def test_random_leavers_leave_nothing():
    draw = random.Random(5)
    async with running(QWEN3, max_num_seqs=8, num_gpu_blocks_override=48, max_model_len=160) as engine:

        async def visit(prompt: np.ndarray) -> None:
            request = text_request(prompt, draw.randrange(1, 40), n=draw.choice([1, 1, 1, 3]), ignore_eos=True)
            limit = draw.choice([None, None, 0, 1, 5])
            async with engine.submit(request) as stream:
                seen = 0
                if limit == 0:
                    await asyncio.sleep(draw.random() * 0.02)
                    return
                async for _ in stream:
                    seen += 1
                    if limit is not None and seen >= limit:
                        return

        for _ in range(5):
            await asyncio.gather(*[visit(prompt) for prompt in prompts(40, tiny.FIRST_SPECIAL, draw.randrange(99))])
            held = await quiet(engine)
            assert held["refs"] == held["table_rows"] == held["positions"] == 0


async def test_abort_gives_the_reader_a_final_delta():
    async with running(QWEN3) as engine:
        stream = engine.submit(text_request(PROMPT, 400, n=2, ignore_eos=True))
        await anext(stream)
        stream.abort()
        rest = [delta async for delta in stream]
        assert sorted(delta.index for delta in rest if delta.finish_reason is FinishReason.ABORT) == [0, 1]


async def test_stop_choice_ends_one_choice_only():
    async with running(QWEN3) as engine:
        seen, stopped = {0: 0, 1: 0}, threading.Event()
        block(engine, 10, stopped)  # the device waits until the reader has read
        async with engine.submit(text_request(PROMPT, 30, n=2, ignore_eos=True)) as stream:
            async for delta in stream:
                seen[delta.index] += len(delta.token_ids)
                if delta.index == 0 and seen[0] >= 3:
                    stream.stop_choice(0)
                    stopped.set()
        assert seen[0] < 30
        assert seen[1] == 30


async def test_stop_lets_open_requests_finish_and_refuses_new_ones():
    engine = Engine(EngineConfig(model=str(QWEN3), num_threads=1, num_gpu_blocks_override=64))
    await engine.start()
    task = asyncio.create_task(answer(engine, text_request(PROMPT, 60, ignore_eos=True)))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(engine.stop(10))
    await asyncio.sleep(0)
    with pytest.raises(NotReadyError, match="draining"):
        engine.submit(text_request(PROMPT, 1))
    assert len((await task)[0]) == 60
    await stopping


async def test_a_stop_that_comes_with_the_last_abort_while_a_step_runs_ends_the_thread():
    engine = Engine(EngineConfig(model=str(QWEN3), num_threads=1, num_gpu_blocks_override=64))
    await engine.start()
    device = engine.inspect()
    launch = device.launch_sample

    def launch_then_leave(*args):
        launch(*args)
        device.launch_sample = launch
        device.abort(stream.first_id)
        device.inbox.put(Stop())

    device.launch_sample = launch_then_leave
    stream = engine.submit(text_request(PROMPT, 50, ignore_eos=True))
    await asyncio.get_running_loop().run_in_executor(None, device.thread.join, 5)
    assert not device.thread.is_alive()
    await engine.stop(0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 10_000}, "holds 512"),
        ({"max_model_len": 1}, "--max-model-len 1: a prompt and its answer need at least 2 tokens"),
        ({"max_num_seqs": 8, "cudagraph_capture_sizes": (4, 9)}, "--cudagraph-capture-sizes 9: a step has 1 to 8 rows"),
        ({"num_gpu_blocks_override": 4, "max_model_len": 200}, "at most 64"),
        ({"dtype": "float16"}, "float16"),
        ({"device": "cuda"}, "cpu"),
        ({"model": "/nowhere"}, "nowhere"),
    ],
)
async def test_wrong_settings_do_not_start(settings, words):
    engine = Engine(EngineConfig(**{"model": str(QWEN3), "num_threads": 1, **settings}))
    with pytest.raises(ConfigError, match=words):
        await engine.start()
    await engine.stop(1)


async def test_the_shortest_context_is_served():
    async with running(QWEN3, max_model_len=2) as engine:
        assert [len(choice) for choice in await answer(engine, text_request([5], 1))] == [1]


async def test_dummy_weights_are_the_same_for_the_same_seed():
    answers = []
    for seed in (0, 0, 1):
        async with running(QWEN3, load_format="dummy", seed=seed) as engine:
            answers.append(await answer(engine, text_request(PROMPT, 8, ignore_eos=True)))
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


async def test_compute_threads_change_no_bit():
    answers = []
    torch_threads: list[int] = []  # read on the stream's thread: torch has this number per thread
    for threads in (1, 2, 3):
        async with running(QWEN3, num_threads=threads) as engine:
            runtime_of(engine).executor.backend.stream.launch(lambda: torch_threads.append(torch.get_num_threads()))
            deltas = (await answer_deltas(engine, text_request(PROMPT, 8, logprobs=5, ignore_eos=True)))[0]
            answers.append([entry for delta in deltas for entry in delta.logprobs])
    assert answers[0] == answers[1] == answers[2]
    assert torch_threads == [1, 1, 1]


async def test_media_of_a_refused_request_leaves_nothing():
    async with running(tiny.checkpoint("omni"), max_num_seqs=2, max_num_queued_reqs=1) as engine:
        runtime = runtime_of(engine)
        pad = tiny.IDS["<|IMAGE|>"]
        item = MediaInput("image", b"y" * 16, ((1, 4),), 4, {"pixel_values": np.zeros((3, 5), np.float32)})
        full = [engine.submit(text_request(PROMPT, 100, ignore_eos=True)) for _ in range(3)]
        for stream in full:
            if stream is not full[2]:  # the third waits in the queue
                await anext(stream)
        # The loop's check would refuse this request; the device thread must handle it as well.
        request = Request(np.array([1, pad, pad, pad, pad, 2], np.int32), SamplingParams(), media=(item,))
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[int]] = loop.create_future()
        submit = runtime.admission.submit

        def refused(given: Request, first_id: int) -> None:
            submit(given, first_id)
            loop.call_soon_threadsafe(done.set_result, list(runtime.admission.refused))

        runtime.admission.submit = refused
        engine.inspect().submit(request, 999)
        assert await asyncio.wait_for(done, 60) == [999]
        assert engine.ledger()["encoder_entries"] == 0
        assert runtime.media.encoder.find(item.hash) is None
        for stream in full:
            stream.close()


async def test_a_crowd_is_admitted_while_its_first_step_runs():
    async with running(QWEN3, max_num_batched_tokens=64, max_num_seqs=64) as engine:
        runtime, entered, go = runtime_of(engine), threading.Event(), threading.Event()
        admitted: list[int] = []
        launch = runtime.executor.launch_forward

        def noted(plan):
            admitted.append(len(runtime.admission.rows))
            return launch(plan)

        runtime.executor.launch_forward = noted
        held = asyncio.ensure_future(engine.on_device(lambda _: entered.set() or go.wait(60)))
        await asyncio.to_thread(entered.wait, 10)
        sent = [engine.submit(text_request([*PROMPT, k], 2)) for k in range(30)]
        go.set()
        await held
        for stream in sent:
            async with stream:
                assert [delta async for delta in stream]
        assert admitted[0] == MAX_LATE_ITEMS  # 41 tokens each: more than a step of 64 holds


async def test_a_sibling_that_takes_a_slot_freed_in_the_same_step_is_reported_as_new():
    """Row 0 has a sibling. Row 1 ends with its first token, and the sibling gets the slot of row 1."""
    async with running(QWEN3) as engine:
        engine.pause()
        first = engine.submit(text_request(PROMPT, 8, n=2, ignore_eos=True))
        second = engine.submit(text_request(PROMPT[::-1], 1, ignore_eos=True))
        engine.resume()
        queued: dict[int, float | None] = {}
        async with first, second:
            async for delta in first:
                queued.setdefault(delta.index, delta.queued)
            assert [delta.finish_reason async for delta in second] == [FinishReason.LENGTH]
        assert set(queued) == {0, 1}
        assert None not in queued.values(), "each choice's first news say how long it was queued"
