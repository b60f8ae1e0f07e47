"""/v1/audio/*: recordings in every form, long ones cut at pauses and joined in order, wrong input refused."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from examples.embedded_model.spoken import utterances
from server.flags.config import LimitsConfig
from server.http.uploads import FormReader
from server.speech.realtime_events import wave
from server.speech.segments import Segment, Transcript
from server.speech.segments import body as written
from tests.mm import made
from tests.server.conftest import quiet
from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATH, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
MEDIA = Path(__file__).parents[3] / "examples" / "media"
DIGITS = (MEDIA / "digits-118.wav").read_bytes()
BOUNDARY = "b7e1"


def form(file: bytes | None = DIGITS, **fields: Any) -> bytes:
    """A multipart body; a list repeats its field."""
    parts = []
    for name, value in fields.items():
        for text in value if isinstance(value, list) else [value]:
            said = str(text).lower() if isinstance(text, bool) else str(text)
            parts.append(f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{said}\r\n'.encode())
    if file is not None:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        parts.append(head.encode() + b"Content-Type: audio/wav\r\n\r\n" + file + b"\r\n")
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


HEADERS = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


async def send(client: Any, file: bytes | None = DIGITS, path: str = PATH, **fields: Any) -> Any:
    return await client.post(path, body=form(file, **fields), headers=HEADERS)


def long_recording(count: int, pause: float = 1.5) -> tuple[bytes, list[str]]:
    """Utterances with pauses between them, as FLAC, and their texts."""
    chosen = [entry for entry in utterances() if entry[0].isdigit()][:count]
    quiet_part = np.zeros(int(pause * 16000), np.float32)
    pieces = [part for _, wave in chosen for part in (wave, quiet_part)]
    return made.sound(np.concatenate(pieces)[None], 16000, "flac", "flac"), [text for text, _ in chosen]


async def test_json_is_the_text_and_the_seconds(client):
    reply = await send(client)
    assert reply.status == 200
    assert reply.json() == {"text": "118", "usage": {"type": "duration", "seconds": 2}}


async def test_what_a_recording_took_is_in_the_log_and_the_metrics(client, caplog):
    histograms = [client.state.metrics.histograms[f"mm_{part}_seconds"] for part in ("decode", "prepare", "encode")]
    before = [each.buckets()[-1][1] for each in histograms]
    with caplog.at_level(logging.INFO, "omniloop"):
        assert (await send(client, long_recording(6)[0])).status == 200
    (told,) = (record.fields for record in caplog.records if hasattr(record, "fields"))
    assert (told["media"], told["media_cached"]) == (1, 0)
    assert min(told["media_decode_ms"], told["media_prepare_ms"]) > 0
    assert [each.buckets()[-1][1] > was for each, was in zip(histograms, before)] == [True] * 3


async def test_every_form_holds_the_same_words(client):
    times = r"00:00:0\d[.,]\d{3} --> 00:00:0\d[.,]\d{3}"
    text = await send(client, response_format="text")
    assert (text.content, text.reply_headers["content-type"]) == (b"118\n", "text/plain; charset=utf-8")
    srt = await send(client, response_format="srt")
    assert re.fullmatch(rf"1\n{times}\n118\n\n", srt.content.decode())
    vtt = await send(client, response_format="vtt")
    assert re.fullmatch(rf"WEBVTT\n\n{times}\n118\n\n", vtt.content.decode())
    assert vtt.reply_headers["content-type"] == "text/vtt; charset=utf-8"


async def test_verbose_json_computes_its_numbers_as_whisper_does(client):
    reply = (await send(client, response_format="verbose_json", language="en", temperature=0)).json()
    assert (reply["task"], reply["language"], reply["text"]) == ("transcribe", "english", "118")
    (segment,) = reply["segments"]
    assert 0 <= segment["start"] < segment["end"] <= reply["duration"]
    assert segment["text"] == "118"
    assert len(segment["tokens"]) == 3
    assert -1 < segment["avg_logprob"] <= 0
    assert segment["compression_ratio"] == 3 / len(zlib.compress(b"118"))
    assert segment["no_speech_prob"] is None
    assert segment["seek"] == round(100 * segment["start"])


async def test_the_official_client_reads_every_form_and_the_stream(client):
    async with listening(client) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        audio = api.audio.transcriptions
        word = ("stop.ogg", (MEDIA / "word-stop.ogg").read_bytes())
        assert (await audio.create(model="omniloop", file=("a.wav", DIGITS))).text == "118"
        assert (await audio.create(model="omniloop", file=word, response_format="text")).strip() == "Stop."
        verbose = await audio.create(
            model="omniloop", file=word, response_format="verbose_json", timestamp_granularities=["segment"]
        )
        assert [segment.text for segment in verbose.segments] == ["Stop."]
        events = [event async for event in await audio.create(model="omniloop", file=("a.wav", DIGITS), stream=True)]
        deltas = "".join(event.delta for event in events if event.type == "transcript.text.delta")
        assert deltas == events[-1].text == "118"
        assert events[-1].type == "transcript.text.done"
        usage = events[-1].usage
        assert usage.input_tokens == usage.input_token_details.audio_tokens + usage.input_token_details.text_tokens
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        with pytest.deprecated_call():  # the newest clients deprecate this call
            assert (await api.audio.translations.create(model="omniloop", file=word)).text


async def test_a_stream_serves_both_families_of_clients(client):
    reply = await send(client, stream=True, stream_continuous_usage_stats=True)
    *chunks, done, last = reply.events()
    assert last == "[DONE]"
    assert done["type"] == "transcript.text.done"
    assert done["choices"] == []
    assert done["usage"]["completion_tokens"] == done["usage"]["output_tokens"] == 4
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == done["text"] == "118"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
    assert all("usage" in chunk for chunk in chunks)
    bare = await send(client, stream=True, stream_include_usage=False)
    assert "usage" not in bare.events()[-2]


async def test_a_stream_reports_how_far_each_window_is(client):
    data, _ = long_recording(3)
    events = (await send(client, data, stream=True, return_progress=True)).events()[:-1]
    reports = [event for event in events if event["type"] == "transcript.prompt_progress"]
    windows = {report["window"] for report in reports}
    assert windows == set(range(len(windows)))
    assert len(windows) > 1
    for window in windows:
        own = [report["prompt_progress"] for report in reports if report["window"] == window]
        assert [each["processed"] for each in own] == sorted({each["processed"] for each in own})
        assert own[-1]["processed"] == own[-1]["total"] > 0
    plain = (await send(client, data, stream=True)).events()[:-1]
    assert plain[-1]["text"] == events[-1]["text"] != ""
    assert all("prompt_progress" not in event for event in plain)
    whole = await send(client, data, return_progress=True)
    assert whole.json()["text"] == events[-1]["text"]


async def test_a_long_recording_is_cut_at_its_pauses_and_joined_in_order(client):
    data, words = long_recording(12)
    reply = (await send(client, data, response_format="verbose_json")).json()
    segments = reply["segments"]
    assert len(segments) == len(words)
    right = sum(segment["text"] == word for segment, word in zip(segments, words))
    assert right >= len(words) - 1, [segment["text"] for segment in segments]
    assert reply["text"] == " ".join(segment["text"] for segment in segments)
    times = [time for segment in segments for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    streamed = await send(client, data, stream=True)
    assert streamed.events()[-2]["text"] == reply["text"]
    joined = await send(client, data, language="ja")
    assert joined.json()["text"] == reply["text"].replace(" ", "")


@pytest.mark.full
async def test_half_an_hour_is_written_down_without_a_lost_or_doubled_word(client):
    data, words = long_recording(40, 1.2)
    whole = np.concatenate([made_samples(data)] * 16)
    flac = made.sound(whole[None], 16000, "flac", "flac")
    assert len(whole) > 1800 * 16000 * 0.9
    body = form(flac, response_format="verbose_json")
    reply = await client.call("POST", PATH, body=body, headers=HEADERS).finish(900)
    found = [segment["text"] for segment in reply.json()["segments"]]
    assert len(found) == 16 * len(words)
    assert sum(a == b for a, b in zip(found, words * 16)) >= 0.93 * len(found)


def made_samples(data: bytes) -> np.ndarray:
    import av

    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
    samples = np.concatenate(frames)
    return samples.astype(np.float32) / (32768 if samples.dtype == np.int16 else 2**31)


async def test_silence_says_nothing(client):
    silent = made.sound(np.zeros((1, 48000), np.float32), 16000, "wav", "pcm_s16le")
    assert (await send(client, silent)).json() == {"text": "", "usage": {"type": "duration", "seconds": 3}}
    assert (await send(client, silent, response_format="verbose_json")).json()["segments"] == []
    assert (await send(client, silent, stream=True)).events()[-2]["text"] == ""


class Asked:
    """Records the texts that the renderer gets and the requests that the engine gets."""

    def __init__(self, client: Any, monkeypatch: Any) -> None:
        self.texts: list[str] = []
        self.requests: list[Any] = []
        engine, renderer = client.state.engine, client.state.renderer
        submit, chat = engine.submit, renderer.chat

        async def received(messages, **named):
            self.texts.append(messages[0]["content"][1]["text"])
            return await chat(messages, **named)

        monkeypatch.setattr(renderer, "chat", received)
        monkeypatch.setattr(engine, "submit", lambda request: self.requests.append(request) or submit(request))


async def test_the_instruction_is_the_operators_with_the_clients_words_behind_it(serve, monkeypatch):
    client = serve(speech={"transcription_prompt": "Write in {language}:"})
    asked = Asked(client, monkeypatch)
    await send(client, language="de", prompt=" Names: Ada. ")
    await send(client)
    await send(client, path=TRANSLATIONS)
    await send(client, path=TRANSLATIONS, to_language="fr", language="de")
    assert asked.texts == [
        "Write in German:\nNames: Ada.",
        "Write in the language spoken:",
        "Translate the recording into English.",
        "Translate the recording into French.",
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("top_k", 3),
        ("min_p", 0.1),
        ("seed", 7),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.5),
    ],
)
async def test_sampling_fields_reach_the_engine(client, monkeypatch, field, value):
    asked = Asked(client, monkeypatch)
    await send(client, **{field: value})
    assert getattr(asked.requests[0].sampling, field) == value


async def test_fields_other_than_sampling_have_effect(serve, monkeypatch):
    client = serve(scheduler={"scheduling_policy": "priority"})
    asked = Asked(client, monkeypatch)
    assert (await send(client, max_completion_tokens=1)).json()["text"] == "1"
    await send(client, priority=3, cache_salt="mine")
    assert asked.requests[1].priority == 3
    assert asked.requests[1].cache_salt != asked.requests[0].cache_salt
    assert (await send(client, model="other")).error["reason"] == "not_found"


CASES = [
    ({"language": "xx"}, 400, "invalid_parameter", "language"),
    ({"response_format": "yaml"}, 400, "invalid_parameter", "response_format"),
    ({"response_format": "diarized_json"}, 501, "not_implemented", "response_format"),
    ({"response_format": "srt", "stream": True}, 400, "invalid_parameter", "stream"),
    ({"stream_include_usage": True}, 400, "invalid_parameter", "stream_include_usage"),
    ({"temperature": 3}, 400, "invalid_parameter", "temperature"),
    ({"temperature": "warm"}, 400, "invalid_parameter", "temperature"),
    ({"seed": 1.5}, 400, "invalid_parameter", "seed"),
    ({"max_completion_tokens": 0}, 400, "invalid_parameter", "max_completion_tokens"),
    ({"timestamp_granularities[]": ["page"]}, 400, "invalid_parameter", "timestamp_granularities"),
    ({"timestamp_granularities[]": ["segment"]}, 400, "invalid_parameter", "timestamp_granularities"),
    (
        {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
        501, "not_implemented", "timestamp_granularities",
    ),
    ({"hotwords": "Ada"}, 501, "not_implemented", "hotwords"),
    ({"use_beam_search": True}, 501, "not_implemented", "use_beam_search"),
    ({"n": 2}, 501, "not_implemented", "n"),
    ({"prompt": "a" * 20000}, 400, "invalid_parameter", "prompt"),
    ({"temperature": [0, 1]}, 400, "invalid_parameter", "temperature"),
    ({"file": None}, 400, "invalid_parameter", "file"),
    ({"file": b""}, 400, "invalid_parameter", "file"),
    ({"file": b"no sound at all"}, 400, "media_unsupported", "file"),
    ({"file": DIGITS[:60]}, 400, "media_invalid", "file"),
    ({"file": made.png(made.noise(8, 8))}, 400, "media_unsupported", "file"),
    ({"padding": "a" * (300 << 10)}, 400, "invalid_multipart", None),
    ({"x": ["a"] * 70}, 400, "invalid_multipart", None),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "status", "reason", "param"), CASES)
async def test_wrong_input_is_refused_by_name(client, fields, status, reason, param):
    reply = await send(client, **fields)
    assert (reply.status, reply.error["reason"], reply.error["param"]) == (status, reason, param), reply.error
    assert client.state.body_budget.used == 0


async def test_a_text_stays_within_its_subtitle():
    segment = Segment(0.0, 1.0, " one --> two\n\n \r\n00:00:03,000\n")
    transcript = Transcript("transcribe", "", 1.0, segment.text, [segment])
    assert written(transcript, "srt") == "1\n00:00:00,000 --> 00:00:01,000\none -> two\n00:00:03,000\n\n"
    assert written(transcript, "vtt") == "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\none -> two\n00:00:03,000\n\n"


TEXTS = [
    ({"prompt": "é" * 10000}, "prompt: has 20000 bytes; at most 16384 are read"),
    (
        {"file": wave(bytes(320), 16000)},
        "0.02 seconds: it has 0.01; send a longer one",
    ),
]


@pytest.mark.parametrize(("fields", "text"), TEXTS)
async def test_refusals_say_what_came(client, fields, text):
    assert text in (await send(client, **fields)).error["message"]


async def test_a_file_under_another_name_is_refused_by_it(client):
    reply = await client.post(PATH, body=WHOLE.replace(b'name="file"', b'name="audio"'), headers=HEADERS)
    assert reply.error["message"] == "audio: is a file; the form's file is named file"


WHOLE = form()
BODIES = [
    (WHOLE[:-40], HEADERS["content-type"], 400, "invalid_multipart"),
    (b"", HEADERS["content-type"], 400, "invalid_multipart"),
    (b"hello", HEADERS["content-type"], 400, "invalid_multipart"),
    (WHOLE, "multipart/form-data", 400, "invalid_multipart"),
    (WHOLE, f"multipart/form-data; boundary={'b' * 300}", 400, "invalid_multipart"),
    (WHOLE, "application/json", 415, "unsupported_media_type"),
    (WHOLE.replace(b'; name="file"', b""), HEADERS["content-type"], 400, "invalid_multipart"),
    (WHOLE.replace(b'; filename="a.wav"', b""), HEADERS["content-type"], 422, "invalid_parameter"),
    (WHOLE.replace(b'name="file"', b'name="other"'), HEADERS["content-type"], 400, "invalid_parameter"),
    (WHOLE[: WHOLE.rindex(b"--" + BOUNDARY.encode())] + WHOLE, HEADERS["content-type"], 400, "invalid_parameter"),
    (form(None, prompt="x").replace(b"x\r\n--", b"\xff\r\n--"), HEADERS["content-type"], 400, "invalid_parameter"),
]


@pytest.mark.parametrize(("body", "kind", "status", "reason"), BODIES)
async def test_bodies_that_are_no_form_are_refused(client, body, kind, status, reason):
    reply = await client.post(PATH, body=body, headers={"content-type": kind})
    assert (reply.status, reply.error["reason"]) == (status, reason), reply.error


async def test_uploads_are_counted_while_they_stream(serve):
    client = serve(media={"audio_max_bytes": 100_000}, limits={"body_budget_bytes": 1 << 20})
    body = form(b"RIFF" + bytes(500_000))
    pieces = [body[at : at + 10_000] for at in range(0, len(body), 10_000)]
    call = client.call("POST", PATH, body=pieces, headers=HEADERS)
    reply = await call.finish()
    assert (reply.status, reply.error["reason"]) == (413, "request_too_large")
    assert len(call.pieces) > 30, "the rest was not read"
    promised = await client.post(PATH, body=body[:100], headers={**HEADERS, "content-length": str(10**9)})
    assert promised.status == 413
    assert client.state.body_budget.used == 0
    small = serve(limits={"body_budget_bytes": 10_000})
    large = await small.post(PATH, body=form(b"RIFF" + bytes(100_000)), headers=HEADERS)
    assert (large.status, large.error["reason"]) == (429, "queue_full")
    assert small.state.body_budget.used == 0


async def test_an_upload_in_small_pieces_is_the_same(client):
    body = form()
    pieces = [body[at : at + 777] for at in range(0, len(body), 777)]
    assert (await client.call("POST", PATH, body=pieces, headers=HEADERS).finish()).json()["text"] == "118"


async def test_a_large_file_is_never_copied_whole():
    reader = FormReader(BOUNDARY.encode(), "file", 1 << 26, LimitsConfig())
    piece, count = bytes(range(256)) * 256, 512  # 32 MiB
    tracemalloc.start()
    try:
        reader.feed(form(b"")[: -len(f"\r\n--{BOUNDARY}--\r\n")])
        for _ in range(count):
            reader.feed(piece)
        reader.feed(f"\r\n--{BOUNDARY}--\r\n".encode())
        file = reader.finished().file
        assert file is not None
        content = file.getvalue()
        assert content is file.getvalue(), "the same bytes, not a copy of them"
        assert tracemalloc.get_traced_memory()[1] < 1.3 * len(content), "the file was held twice"
    finally:
        tracemalloc.stop()
    assert content == piece * count


async def test_a_recording_may_be_longer_than_a_prompts_sound_up_to_its_own_limit(serve, state):
    data, words = long_recording(3)
    limits = state.media.limits
    try:
        state.media.limits = replace(limits, audio_max_seconds=1.0, transcription_max_seconds=60.0)
        assert len((await send(serve(), data)).json()["text"].split()) == len(words)
        state.media.limits = replace(limits, transcription_max_seconds=2.0)
        reply = await send(serve(), data)
        assert (reply.status, reply.error["reason"]) == (400, "media_too_large")
    finally:
        state.media.limits = limits
    assert state.media.ledger()["media_reserved_bytes"] == 0


async def test_windows_run_together_only_where_places_are_free(serve):
    data, words = long_recording(6)
    client = serve()
    with client.state.places.hold(client.state.places.limit - 1, ""):
        assert len((await send(client, data)).json()["text"].split()) == len(words)
    assert client.state.places.taken == 0


async def test_a_client_that_leaves_ends_everything(client):
    data, _ = long_recording(12)
    call = client.call("POST", PATH, body=form(data, stream=True), headers=HEADERS).start()
    async with asyncio.timeout(20):
        await call.wrote.wait()
    call.leave()
    await call.finish()
    held = await quiet(client.state)
    assert held["used"] == 0
    assert client.state.places.taken == 0
    assert client.state.media.ledger()["media_requests"] == 0


async def begun(client: Any, data: bytes, monkeypatch: Any) -> Any:
    """A call whose recording is being transcribed, and its exchange."""
    call = client.call("POST", PATH, body=form(data), headers=HEADERS).start()
    submitted, submit = asyncio.Event(), client.state.engine.submit
    with monkeypatch.context() as patch:
        patch.setattr(client.state.engine, "submit", lambda request: submitted.set() or submit(request))
        async with asyncio.timeout(20):
            await submitted.wait()
    (exchange,) = client.state.open_exchanges
    return call, exchange


async def test_a_draining_server_ends_a_recording(client, monkeypatch):
    call, exchange = await begun(client, long_recording(12)[0], monkeypatch)
    exchange.cancel()
    await call.finish()
    assert (call.status, call.error["reason"]) == (503, "draining")


async def test_an_operator_ends_a_transcription_with_the_text_so_far(client, monkeypatch):
    data, words = long_recording(12)
    call, exchange = await begun(client, data, monkeypatch)
    exchange.answer_open.abort()
    await call.finish()
    assert call.status == 200
    assert len(call.json()["text"].split()) < len(words)


async def test_times_that_are_over_end_a_recording(serve):
    data, _ = long_recording(6)
    reply = await send(serve(limits={"request_timeout": 0.001}), data)
    assert (reply.status, reply.error["reason"]) == (504, "deadline")


async def test_a_model_without_audio_refuses_a_recording(tiny_client):
    reply = await send(tiny_client)
    assert (reply.status, reply.error["reason"]) == (501, "not_implemented")
