"""/v1/realtime with a model that transcribes a turn while it is spoken: texts arrive before the turn ends, and equal
the texts of the same sound sent as a file."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from engine.base.request import FinishReason
from server.speech.growing import GrowingSound
from server.speech.listening import Listening
from server.speech.realtime_events import wave
from server.speech.transcriber import Said
from tests import tiny_realtime
from tests.server.conftest import config_of, maker, ready
from tests.server.speech.test_audio import send
from tests.server.speech.test_realtime import Socket
from tests.server.speech.test_speech_families import watched

pytestmark = pytest.mark.asyncio(loop_scope="session")

LISTENING = {"turn_detection": {"type": "server_vad", "prefix_padding_ms": 0}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server():
    """The state and a client of a server with a tiny Voxtral Realtime."""
    folder = str(tiny_realtime.folder())
    speech = {"transcription_pause": 0.0}
    async with ready(config_of(model={"model": folder, "num_threads": 1})) as state:
        client = maker(state)(model={"model": folder}, speech=speech)
        yield client.state, client


def spoken(*seconds: float, rate: int = 16000) -> np.ndarray:
    """Interleaved samples of silence and noise; `seconds` are the lengths of the parts."""
    draw = np.random.default_rng(1)
    parts = [draw.normal(0, 0.1 if at % 2 else 0.0, int(length * rate)) for at, length in enumerate(seconds)]
    return np.concatenate(parts).clip(-1, 1).astype(np.float32)


async def events_until(socket: Socket, *ends: str) -> list[dict[str, Any]]:
    """Events up to the first one whose type ends with one of `ends`."""
    events: list[dict[str, Any]] = []
    while not events or not events[-1]["type"].endswith(ends):
        events.append(await asyncio.wait_for(socket.events.get(), 60))
    return events


def deltas(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"].endswith(".delta"))


async def fed(socket: Socket, sound: np.ndarray, asked: list[Any], parts: int) -> None:
    """Sends the sound in `parts` pieces; waits after each piece until the engine gets a request."""
    for piece in np.array_split(sound, parts):
        before = len(asked)
        socket.append(piece)
        for _ in range(6000):
            if len(asked) > before:
                break
            await asyncio.sleep(0.005)
        assert len(asked) > before


@pytest.mark.parametrize("rate", [16000, 24000])
async def test_a_turn_is_written_down_while_it_is_spoken(server, monkeypatch, rate):
    state, client = server
    asked = watched(state, monkeypatch)
    socket = Socket(client)
    await socket.opened(format={"type": "audio/pcm", "rate": rate}, **LISTENING)
    sound = spoken(0.2, 2.6, 0.5, rate=rate)
    await fed(socket, sound[: int(2.5 * rate)], asked, 3)
    begun = await events_until(socket, ".delta")
    socket.append(sound[int(2.5 * rate) :])
    events = await events_until(socket, ".completed")
    assert [event["type"].rpartition(".")[2] for event in begun] == ["speech_started", "delta"]
    assert events[-1]["transcript"] == deltas(begun + events) != ""
    start = begun[0]["audio_start_ms"]
    (end,) = [event["audio_end_ms"] for event in events if "audio_end_ms" in event]
    pcm = (sound[start * rate // 1000 : end * rate // 1000] * 32767).astype("<i2").tobytes()
    reply = await send(client, wave(pcm, rate))
    assert reply.json()["text"] == events[-1]["transcript"]
    assert reply.json()["usage"] == events[-1]["usage"]
    await socket.leave()
    assert state.body_budget.used == 0


async def test_long_speech_is_transcribed_in_windows_that_end_where_it_is_quiet(server, monkeypatch):
    state, client = server
    speech = dataclasses.replace(state.config.speech, transcription_window=4.0)
    monkeypatch.setattr(state, "config", dataclasses.replace(state.config, speech=speech))
    asked = watched(state, monkeypatch)
    socket = Socket(client)
    await socket.opened(**LISTENING)
    socket.append(spoken(0.2, 3.0, 0.2, 6.0, 0.5))  # one pause, then windows of two to four seconds
    events = await events_until(socket, ".completed")
    assert events[-1]["transcript"] == deltas(events) != ""
    windows: dict[bytes, int] = {}
    for request in asked:
        windows[request.media[0].hash] = request.media[0].num_tokens
    silence = tiny_realtime.BEFORE + tiny_realtime.DELAY + 11
    seconds = [(rows - silence) * 0.08 for rows in windows.values()]
    assert 3.0 < seconds[0] < 3.3
    assert all(1.9 < each < 4.1 for each in seconds[:-1])
    assert sum(seconds) == pytest.approx(9.7, abs=0.3)
    await socket.leave()


async def test_vllms_form_has_texts_before_the_sound_ends(server, monkeypatch):
    state, client = server
    asked = watched(state, monkeypatch)
    socket = Socket(client)
    await socket.next("websocket.accept")
    await socket.next("session.created")
    socket.say("session.update", model=state.names[0])
    socket.say("input_audio_buffer.commit", final=False)
    sound = spoken(0.2, 2.0)
    await fed(socket, sound, asked, 3)
    begun = await events_until(socket, ".delta")
    socket.say("input_audio_buffer.commit", final=True)
    events = await events_until(socket, ".done")
    assert {event["type"] for event in begun + events} == {"transcription.delta", "transcription.done"}
    assert events[-1]["text"] == deltas(begun + events) != ""
    assert events[-1]["usage"]["prompt_tokens"] == 1 + tiny_realtime.BEFORE + tiny_realtime.DELAY
    rows = asked[-1].media[0].num_tokens
    assert events[-1]["usage"]["total_tokens"] == rows
    await socket.leave()


async def test_a_turn_that_is_cleared_is_forgotten_and_the_next_is_transcribed(server, monkeypatch):
    state, client = server
    asked = watched(state, monkeypatch)
    socket = Socket(client)
    await socket.opened(**LISTENING)
    sound = spoken(0.2, 1.5, 0.6)
    await fed(socket, sound[:20000], asked, 1)
    socket.say("input_audio_buffer.clear")
    events = await events_until(socket, ".cleared")
    socket.append(sound)
    after = await events_until(socket, ".completed")
    (cleared, *_), (first, *_) = ([event for event in each if "item_id" in event] for each in (events, after))
    assert cleared["item_id"] != first["item_id"], "texts came under the name of the first"
    assert after[-1]["transcript"] == deltas(after)
    await socket.leave()
    assert state.body_budget.used == 0


async def test_sound_that_comes_last_while_the_rest_is_resampled_is_transcribed(server, monkeypatch):
    _, client = server
    resampled = GrowingSound._resampled

    def slowly(self, pcm, last):
        for _ in range(2000):
            if self.ended or not len(self.samples):
                break
            time.sleep(0.005)
        return resampled(self, pcm, last)

    sound = spoken(0.2, 2.0, 0.6, rate=24000)
    found = []
    for slow in (False, True):
        if slow:
            monkeypatch.setattr(GrowingSound, "_resampled", slowly)
        socket = Socket(client)
        await socket.opened(format={"type": "audio/pcm", "rate": 24000}, **LISTENING)
        socket.append(sound)
        events = await events_until(socket, ".completed")
        found.append((events[-1]["transcript"], events[-1]["usage"]))
        await socket.leave()
    assert found[0] == found[1]


@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_turn_that_is_committed_while_it_is_spoken_is_transcribed_to_there(server, monkeypatch, by_hand):
    """With `by_hand` the client turns detection off first, so that the turn continues until the client commits it."""
    state, client = server
    asked = watched(state, monkeypatch)
    socket = Socket(client)
    await socket.opened(**LISTENING)
    sound = spoken(0.2, 1.8)
    await fed(socket, sound[:24000], asked, 1)
    if by_hand:
        socket.say("session.update", session={"audio": {"input": {"turn_detection": None}}})
    socket.append(sound[24000:])
    socket.say("input_audio_buffer.commit")
    events = await events_until(socket, ".completed", "error")
    assert events[-1]["transcript"] == deltas(events) != ""
    assert events[-1]["usage"]["seconds"] == 2
    start = next(event["audio_start_ms"] for event in events if "audio_start_ms" in event)
    reply = await send(client, wave((sound[start * 16 :] * 32767).astype("<i2").tobytes(), 16000))
    assert reply.json()["text"] == events[-1]["transcript"]
    await socket.leave()
    assert state.body_budget.used == 0


async def test_a_prompt_is_refused_where_it_is_set(server):
    _, client = server
    socket = Socket(client)
    await socket.opened(**LISTENING)
    socket.say("session.update", session={"audio": {"input": {"transcription": {"prompt": "names"}}}})
    assert "takes audio and no text" in (await socket.next("error"))["error"]["message"]
    socket.append(spoken(0.2, 0.5, 0.6))
    assert (await events_until(socket, ".completed", "error", ".failed"))[-1]["type"].endswith("completed")
    await socket.leave()


async def test_a_token_whose_text_comes_with_the_next_question_is_emitted_with_it():
    texts = iter(["a", "", "é"])  # the third token completes the second token's character
    answers = iter([2, 1])  # tokens of each request's answer

    class Answer:
        async def __aenter__(self):
            return self

        async def __aexit__(self, *error):
            pass

        async def __aiter__(self):
            for _ in range(next(answers)):
                yield SimpleNamespace(finish_reason=FinishReason.NONE, extras={})

    def take(delta, text, said, *more):
        said.token_ids.append(len(said.token_ids))
        said.logprobs.append(said.token_ids[-1])
        return next(texts)

    told, said = [], Said()
    places = SimpleNamespace(take_tokens=lambda count: None, give_tokens=lambda count: None)
    listening = object.__new__(Listening)
    listening._state = SimpleNamespace(places=places, engine=SimpleNamespace(submit=lambda request: Answer()))
    listening._streams, listening._take = set(), take
    listening.on_text = lambda window, text, tokens: told.append((text, tokens))
    for _ in range(2):
        await listening._answer(SimpleNamespace(num_tokens=1, request=None), said, None, 0)
    assert told == [("a", [0]), ("é", [1, 2])]


@pytest.mark.parametrize("cleared", [True, False])
async def test_a_turn_whose_sound_stops_coming_fails_and_the_next_is_transcribed(server, monkeypatch, cleared):
    state, client = server
    limits = dataclasses.replace(state.config.limits, body_idle_timeout=0.3)
    monkeypatch.setattr(state, "config", dataclasses.replace(state.config, limits=limits))
    socket = Socket(client)
    await socket.opened(**LISTENING)
    sound = spoken(0.2, 1.5, 0.6)
    socket.append(sound[:20000])
    failed = (await events_until(socket, ".failed"))[-1]["error"]
    assert failed["code"] == "upload_timeout"
    assert "no audio came for 0.3 s" in failed["message"]
    assert state.places.taken == 0
    if cleared:
        socket.say("input_audio_buffer.clear")
    socket.append(sound[4000:])  # the sound continues
    assert (await events_until(socket, ".completed"))[-1]["transcript"]
    await socket.leave()
    assert state.body_budget.used == 0


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(server, monkeypatch):
    state, client = server
    asked = watched(state, monkeypatch)
    socket = Socket(client)
    await socket.opened(**LISTENING)
    await fed(socket, spoken(0.2, 1.0), asked, 1)
    await socket.leave()
    assert (state.body_budget.used, state.places.taken) == (0, 0)


async def test_a_turn_that_is_open_when_the_server_drains_has_its_text(server, monkeypatch):
    state, client = server
    asked = watched(state, monkeypatch)
    socket = Socket(client)
    await socket.opened(**LISTENING)
    sound = spoken(0.2, 2.5)
    await fed(socket, sound[:20000], asked, 1)
    (exchange,) = state.open_exchanges
    exchange.drain()
    socket.append(sound[20000:])
    events = await events_until(socket, ".completed")
    assert events[-1]["transcript"] == deltas(events) != ""
    while (await asyncio.wait_for(socket.events.get(), 60))["type"] != "websocket.close":
        pass
    await asyncio.wait_for(socket.task, 60)
    assert (state.body_budget.used, state.places.taken) == (0, 0)


async def test_a_text_that_ends_early_is_followed_by_a_window_of_the_rest(server, monkeypatch):
    state, client = server
    asked = watched(state, monkeypatch)
    socket = Socket(client)
    await socket.opened(**LISTENING)
    sound = spoken(0.2, 2.2, 0.6)
    await fed(socket, sound[:32000], asked, 2)
    socket.append(sound[32000:])
    whole = (await events_until(socket, ".completed"))[-1]["transcript"]
    known = asked[-1].prompt_token_ids[len(asked[0].prompt_token_ids) :].tolist()
    place = next(at for at in range(4, len(known)) if known[at] not in known[:at])
    monkeypatch.setattr(state, "vocabulary", dataclasses.replace(state.vocabulary, eos=(known[place],)))
    asked.clear()
    await fed(socket, sound[:32000], asked, 2)
    socket.append(sound[32000:])
    ended = (await events_until(socket, ".completed"))[-1]["transcript"]
    hashes = list(dict.fromkeys(request.media[0].hash for request in asked))
    assert len(hashes) > 1
    assert ended.startswith(state.tokenizer.decode(known[:place], skip_special_tokens=True).strip())
    assert ended != whole
    await socket.leave()
