"""/v1/realtime: speech is transcribed turn by turn; wrong events are refused by name and do not end the session."""

from __future__ import annotations

import asyncio
import base64
from socket import AF_INET, SO_RCVBUF, SOCK_STREAM, SOL_SOCKET
from socket import socket as plain_socket
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import numpy as np
import orjson
import pytest
import uvicorn
from uvicorn.server import ServerState

from examples.embedded_model.spoken import utterances
from server.http.socket_protocol import PIECE
from server.http.socket_protocol import Socket as Protocol
from server.speech.listening import Listening
from server.speech.turns import TurnFinder, Vad
from tests.server.live import listening
from tests.server.speech.test_audio import DIGITS, made_samples

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRANSCRIPTION = "conversation.item.input_audio_transcription."


class Socket:
    """An in-memory websocket client of the ASGI app."""

    def __init__(self, client: Any, query: str = "", headers: tuple = (), protocols: tuple = ()) -> None:
        self.to_app: asyncio.Queue[dict] = asyncio.Queue()
        self.events: asyncio.Queue[dict] = asyncio.Queue()
        scope = {
            "type": "websocket", "http_version": "1.1", "path": "/v1/realtime", "raw_path": b"/v1/realtime",
            "query_string": query.encode(), "root_path": "", "scheme": "ws", "client": ("10.0.0.1", 1),
            "server": ("test", 80), "headers": [(b"host", b"test"), *headers], "subprotocols": list(protocols),
            "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        self.to_app.put_nowait({"type": "websocket.connect"})
        self.task = asyncio.ensure_future(client.app(scope, self.to_app.get, self._send))

    async def _send(self, message: dict) -> None:
        self.events.put_nowait(orjson.loads(message["text"]) if message["type"] == "websocket.send" else message)

    def say(self, kind: str, **fields: Any) -> None:
        self.to_app.put_nowait({"type": "websocket.receive", "text": orjson.dumps({"type": kind, **fields}).decode()})

    def append(self, samples: np.ndarray, size: int = 2400) -> None:
        """Sends float32 samples in pieces."""
        data = (samples * 32767).astype("<i2").tobytes()
        for start in range(0, len(data), 2 * size):
            piece = data[start : start + 2 * size]
            self.say("input_audio_buffer.append", audio=base64.b64encode(piece).decode())

    async def next(self, *kinds: str) -> dict:
        """The next event, which must have one of these types; deltas are skipped unless `kinds` has their type."""
        while True:
            event = await asyncio.wait_for(self.events.get(), 60)
            if event["type"] in kinds or not event["type"].endswith(".delta"):
                assert event["type"] in kinds, event
                return event

    async def leave(self) -> None:
        self.to_app.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await asyncio.wait_for(self.task, 60)

    async def opened(self, **audio: Any) -> None:
        """Waits until the socket is accepted and sets the session up."""
        await self.next("websocket.accept")
        await self.next("session.created")
        audio = {"format": {"type": "audio/pcm", "rate": 16000}, **audio}
        self.say("session.update", session={"type": "transcription", "audio": {"input": audio}})
        await self.next("session.updated")


def spoken(count: int, pause: float) -> tuple[np.ndarray, list[str]]:
    chosen = [entry for entry in utterances() if entry[0].isdigit()][:count]
    quiet = np.zeros(int(pause * 16000), np.float32)
    return np.concatenate([quiet, *(part for _, wave in chosen for part in (wave, quiet))]), [
        name for name, _ in chosen
    ]


async def test_turns_are_found_and_written_down_in_order(client):
    sound, wanted = spoken(3, 1.0)
    socket = Socket(client)
    await socket.opened()
    socket.append(sound)
    heard, before = [], None
    kinds = ("input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", "input_audio_buffer.committed",
             f"{TRANSCRIPTION}delta", f"{TRANSCRIPTION}completed")  # fmt: skip
    grown: dict[str, str] = {}
    edges: dict[str, list[int]] = {}
    while len(heard) < 3:
        event = await socket.next(*kinds)
        name = event["item_id"]
        if event["type"].endswith("delta"):
            grown[name] = grown.get(name, "") + event["delta"]
        elif event["type"].endswith("completed"):
            assert event["transcript"] == grown[name]
            assert event["usage"]["type"] == "duration"
            heard.append(event["transcript"])
        elif event["type"].endswith("committed"):
            assert event["previous_item_id"] == before
            before = name
        else:
            edges.setdefault(name, []).append(event.get("audio_start_ms", event.get("audio_end_ms")))
    assert heard == wanted
    assert all(start < end for start, end in edges.values())
    await socket.leave()
    assert client.state.body_budget.used == 0


async def test_a_client_may_commit_by_itself(client):
    socket = Socket(client)
    await socket.opened(turn_detection=None)
    socket.say("input_audio_buffer.commit", event_id="mine")
    refused = (await socket.next("error"))["error"]
    assert (refused["code"], refused["event_id"]) == ("input_audio_buffer_commit_empty", "mine")
    for _ in range(2):
        socket.append(made_samples(DIGITS), 8000)
        socket.say("input_audio_buffer.commit")
        await socket.next("input_audio_buffer.committed")
        assert (await socket.next(f"{TRANSCRIPTION}completed"))["transcript"] == "118"
    socket.append(made_samples(DIGITS))
    socket.say("input_audio_buffer.clear")
    await socket.next("input_audio_buffer.cleared")
    socket.append(np.zeros(16000, np.float32))
    socket.say("input_audio_buffer.commit")
    await socket.next("input_audio_buffer.committed")
    assert (await socket.next(f"{TRANSCRIPTION}completed"))["transcript"] == ""
    await socket.leave()


async def test_the_official_client_holds_a_session(client):
    openai = pytest.importorskip("openai")
    pcm = (made_samples(DIGITS) * 32767).astype("<i2").tobytes()
    async with (
        listening(client) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as api,
        api.realtime.connect(model=client.state.names[0]) as connection,
    ):
        audio = {"format": {"type": "audio/pcm", "rate": 16000}, "turn_detection": None}
        await connection.session.update(session={"type": "transcription", "audio": {"input": audio}})
        for start in range(0, len(pcm), 6400):
            await connection.input_audio_buffer.append(audio=base64.b64encode(pcm[start : start + 6400]).decode())
        await connection.input_audio_buffer.commit()
        async for event in connection:
            assert event.type != "error", event
            if event.type == f"{TRANSCRIPTION}completed":
                assert event.transcript == "118"
                break


def update(**given: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"audio": {"input": given}}}


OF_INPUT = "session.audio.input."
WRONG = [
    ("hello", "invalid_json", None),
    ({"type": "response.create"}, "unknown_event", "type"),
    ({"no": "type"}, None, None),
    ({"type": "input_audio_buffer.append"}, "invalid_parameter", "audio"),
    ({"type": "input_audio_buffer.append", "audio": "%%%%"}, "data_url_invalid", None),
    ({"type": "session.update", "session": {"type": "realtime"}}, "invalid_parameter", "session.type"),
    (update(transcription={"model": "other"}), "not_found", "model"),
    (update(transcription={"language": "xx"}), None, "language"),
    (update(format={"type": "audio/pcm", "rate": 4}), None, OF_INPUT + "format.rate"),
    ('{"a":' * 50_000, "invalid_json", None),
    (update(format={"type": "audio/pcmu"}), None, OF_INPUT + "format.type"),
    (update(noise_reduction={"type": "near_field"}), None, OF_INPUT + "noise_reduction"),
    (update(turn_detection={"type": "semantic_vad"}), None, OF_INPUT + "turn_detection.type"),
    (update(turn_detection={"type": "server_vad", "threshold": 7}), None, OF_INPUT + "turn_detection.threshold"),
    ({"type": "session.update", "session": {"include": ["words"]}}, "invalid_parameter", "session.include"),
]  # fmt: skip


async def test_wrong_events_are_refused_and_end_nothing(client):
    socket = Socket(client)
    await socket.opened(turn_detection=None)
    for event, code, param in WRONG:
        text = event if isinstance(event, str) else orjson.dumps(event).decode()
        socket.to_app.put_nowait({"type": "websocket.receive", "text": text})
        told = (await socket.next("error"))["error"]
        assert code is None or told["code"] == code, (event, told)
        assert param is None or told["param"] == param, (event, told)
        assert told["type"] == "invalid_request_error"
        assert "a value that is not allowed" not in told["message"], told
        assert ": must be" not in told["message"] or ": got " in told["message"], told
        if param == "type":
            assert told["message"].startswith("type: got response.create; must be one of session.update, ")
    socket.append(made_samples(DIGITS))
    socket.say("input_audio_buffer.commit")
    await socket.next("input_audio_buffer.committed")
    told = await socket.next(f"{TRANSCRIPTION}completed")
    assert told["transcript"] == "118"
    assert "logprobs" not in told
    name = "item.input_audio_transcription.logprobs"
    socket.say("session.update", session={"include": [name]})
    assert (await socket.next("session.updated"))["session"]["include"] == [name]
    socket.append(made_samples(DIGITS))
    socket.say("input_audio_buffer.commit")
    await socket.next("input_audio_buffer.committed")
    first = await socket.next(f"{TRANSCRIPTION}delta")
    assert "".join(entry["token"] for entry in first["logprobs"]) == first["delta"]
    told = await socket.next(f"{TRANSCRIPTION}completed")
    assert "".join(entry["token"] for entry in told["logprobs"]) == told["transcript"] == "118"
    await socket.leave()


async def test_what_the_server_says_is_taken_back(client):
    """Over a socket: whole sessions, nulls and fields of the official client's types that are not read here."""
    websockets = pytest.importorskip("websockets.asyncio.client")
    async with listening(client) as url, websockets.connect(f"{url.replace('http', 'ws')}/v1/realtime") as ws:
        own = orjson.loads(await ws.recv())["session"]
        own["audio"]["input"]["turn_detection"]["silence_duration_ms"] = 700
        vad = {"type": "server_vad", "threshold": None, "idle_timeout_ms": None, "create_response": True}
        nulls = {"format": None, "transcription": None, "noise_reduction": None, "turn_detection": vad}
        for session in (
            own,
            {"type": None, "audio": None, "include": None, "id": "sess_1", "expires_at": 0, "tracing": None},
            {"audio": {"input": None, "output": None}},
            {"type": "transcription", "audio": {"input": {**nulls, "language_hints": ["en"]}}},
        ):
            await ws.send(orjson.dumps({"type": "session.update", "session": session}).decode())
            told = orjson.loads(await ws.recv())
            assert told["type"] == "session.updated", told
            assert told["session"]["audio"]["input"]["format"]["rate"] == 24000
            assert told["session"]["audio"]["input"]["turn_detection"]["silence_duration_ms"] in (700, 500)
        old = {**told["session"], "input_audio_format": None, "input_audio_transcription": {"language": "en", "x": 1}}
        await ws.send(orjson.dumps({"type": "transcription_session.update", "session": old}).decode())
        assert orjson.loads(await ws.recv())["session"]["audio"]["input"]["transcription"]["language"] == "en"
        await ws.send(orjson.dumps({"type": "input_audio_buffer.clear", "future": {}}).decode())
        assert orjson.loads(await ws.recv())["type"] == "input_audio_buffer.cleared"


WRONG_FRAME = b"\x81\x81" + bytes(4) + b"{"  # one byte, masked with zeros


def opening(host: str) -> bytes:
    """The HTTP request that opens a websocket."""
    key = base64.b64encode(bytes(16)).decode()
    head = f"GET /v1/realtime HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    return f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()


async def test_a_client_that_does_not_read_is_no_longer_read_and_then_cut_off(serve):
    """The queue of the client's events is bounded; in the end the server closes the session."""
    client = serve(limits={"stream_stall_timeout": 0.5})
    async with listening(client) as url:
        where = urlsplit(url)
        with plain_socket(AF_INET, SOCK_STREAM) as stalled:
            stalled.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
            stalled.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(stalled, (where.hostname, where.port))
            await loop.sock_sendall(stalled, opening(where.netloc))
            assert (await loop.sock_recv(stalled, 12)) == b"HTTP/1.1 101"

            async def go_on() -> None:
                async with asyncio.timeout(60):
                    while True:
                        await loop.sock_sendall(stalled, WRONG_FRAME * 1000)
                        await asyncio.sleep(0)

            with pytest.raises(ConnectionError):  # the server closes the connection
                await go_on()
        for _ in range(500):
            if not client.state.open_exchanges:
                break
            await asyncio.sleep(0.01)
        assert not client.state.open_exchanges


async def test_of_thousands_of_messages_in_one_read_a_few_are_parsed_at_a_time():
    async def app(scope, receive, send):
        await asyncio.Event().wait()

    settings = uvicorn.Config(app, loop="none", lifespan="off", log_config=None)
    settings.load()
    socket = Protocol(1.0, config=settings, server_state=ServerState(), app_state={})
    socket.connection_made(mock.Mock(get_extra_info=lambda name: None, is_closing=lambda: False))
    socket.data_received(opening("localhost"))
    assert (await socket.receive())["type"] == "websocket.connect"
    await socket.send({"type": "websocket.accept"})
    socket.data_received(WRONG_FRAME * 20_000 + WRONG_FRAME[:3])
    most = PIECE // len(WRONG_FRAME) + 1
    count, longest = 0, 0
    while not socket.queue.empty():
        longest = max(longest, socket.queue.qsize())
        assert (await socket.receive())["text"] == "{"
        count += 1
    assert (count, longest) == (20_000, most), "and none is lost"
    socket.data_received(WRONG_FRAME[3:])
    assert (await socket.receive())["text"] == "{"
    for task in socket.tasks:
        task.cancel()
    socket.connection_lost(None)


async def test_a_socket_that_has_closed_by_itself_is_as_one_that_its_client_has_left():
    """Late events (a bad frame after many others, a missing pong) raise the same error as a client's disconnect."""
    closed = Protocol.__new__(Protocol)
    closed.writable, closed.close_sent, closed.initial_response = asyncio.Event(), True, None
    closed.writable.set()
    with pytest.raises(OSError, match=r"^$"):
        await closed.send({"type": "websocket.send", "text": "late"})


async def test_the_older_form_of_a_session_is_read_too(client):
    socket = Socket(client)
    await socket.opened()
    heard = {"model": client.state.names[0], "language": "en", "prompt": "digits"}
    vad = {"type": "server_vad", "threshold": 0.4, "prefix_padding_ms": 200, "silence_duration_ms": 700}
    session = {"input_audio_format": "pcm16", "input_audio_transcription": heard, "turn_detection": vad}
    socket.say("transcription_session.update", session=session)
    told = (await socket.next("session.updated"))["session"]["audio"]["input"]
    assert (told["transcription"], told["turn_detection"], told["format"]["rate"]) == (heard, vad, 16000)
    await socket.leave()


async def test_a_draining_server_ends_a_session(serve):
    client = serve()
    socket = Socket(client)
    await socket.opened(turn_detection=None)
    socket.append(np.concatenate([made_samples(DIGITS)] * 8), 16000)
    socket.say("input_audio_buffer.commit")
    await socket.next("input_audio_buffer.committed")
    await asyncio.sleep(0)
    client.state.phase = "draining"
    for exchange in list(client.state.open_exchanges):
        exchange.cancel()
    await asyncio.wait((socket.task,), timeout=60)
    assert socket.task.done()
    assert client.state.body_budget.used == client.state.places.taken == 0
    assert not client.state.open_exchanges


@pytest.mark.parametrize("turns", [0, 1])
async def test_a_session_ends_behind_its_turns_when_the_server_drains(serve, turns):
    client = serve()
    socket = Socket(client)
    await socket.opened(turn_detection=None)
    for _ in range(turns):
        socket.append(made_samples(DIGITS), 16000)
        socket.say("input_audio_buffer.commit")
        await socket.next("input_audio_buffer.committed")
    client.state.phase = "draining"
    for exchange in list(client.state.open_exchanges):
        exchange.drain()
    for _ in range(turns):
        assert (await socket.next(f"{TRANSCRIPTION}completed"))["transcript"] == "118"
    assert (await socket.next("websocket.close"))["code"] == 1001
    await asyncio.wait_for(socket.task, 60)
    assert not client.state.open_exchanges


async def test_a_buffer_is_bounded_and_counted(serve):
    client = serve(media={"audio_max_bytes": 20000}, limits={"body_budget_bytes": 30000})
    socket = Socket(client)
    await socket.opened(turn_detection=None)
    socket.append(np.zeros(9000, np.float32), 9000)
    socket.append(np.zeros(9000, np.float32), 9000)
    assert "commit what is there" in (await socket.next("error"))["error"]["message"]
    other = Socket(client)
    await other.opened(turn_detection=None)
    other.append(np.zeros(9000, np.float32), 9000)
    assert (await other.next("error"))["error"]["code"] == "queue_full"
    await other.leave()
    await socket.leave()
    assert client.state.body_budget.used == 0


async def test_half_a_sample_does_not_shift_what_comes_after(client):
    half = base64.b64encode(b"\x01").decode()
    socket = Socket(client)
    await socket.opened(turn_detection=None)
    for end in ("clear", "commit", "commit"):
        socket.append(made_samples(DIGITS), 8000)
        socket.say("input_audio_buffer.append", audio=half)
        socket.say(f"input_audio_buffer.{end}")
        await socket.next("input_audio_buffer.cleared", "input_audio_buffer.committed")
        if end == "commit":
            assert (await socket.next(f"{TRANSCRIPTION}completed"))["transcript"] == "118"
    await socket.leave()
    assert client.state.body_budget.used == 0


@pytest.mark.parametrize("switched", [{"threshold": 0.4}, None])
async def test_a_turn_that_is_open_when_detection_changes_goes_on(client, switched):
    """The turn continues with the new detection, or without one until the client commits."""
    socket = Socket(client)
    await socket.opened(turn_detection={"type": "server_vad", "silence_duration_ms": 2000})
    sound = made_samples(DIGITS)
    middle = len(sound) * 2 // 3
    socket.append(sound[:middle])
    started = await socket.next("input_audio_buffer.speech_started")
    detection = switched and {"type": "server_vad", "silence_duration_ms": 300, **switched}
    socket.say("session.update", session={"audio": {"input": {"turn_detection": detection}}})
    await socket.next("session.updated")
    socket.append(sound[middle:])
    if switched:
        socket.append(np.zeros(8000, np.float32))
        await socket.next("input_audio_buffer.speech_stopped")
    else:
        socket.say("input_audio_buffer.commit")
    assert (await socket.next("input_audio_buffer.committed"))["item_id"] == started["item_id"]
    assert (await socket.next(f"{TRANSCRIPTION}completed"))["transcript"] == "118"
    await socket.leave()
    assert client.state.body_budget.used == 0


async def test_sound_that_came_before_detection_is_looked_through(client):
    socket = Socket(client)
    await socket.opened(turn_detection=None)
    socket.append(made_samples(DIGITS), 16000)
    detection = {"type": "server_vad", "silence_duration_ms": 900}
    socket.say("session.update", session={"audio": {"input": {"turn_detection": detection}}})
    await socket.next("session.updated")
    socket.append(np.zeros(16000, np.float32))
    for kind in ("speech_started", "speech_stopped", "committed"):
        await socket.next(f"input_audio_buffer.{kind}")
    assert (await socket.next(f"{TRANSCRIPTION}completed"))["transcript"] == "118"
    await socket.leave()


async def test_speech_that_goes_on_behind_a_commit_is_another_turn(client):
    """The new turn begins at once: the loudness of the background is remembered."""
    noise = np.random.default_rng(0).normal(0, 0.1, 24000).astype(np.float32).clip(-1, 1)
    socket = Socket(client)
    await socket.opened()
    socket.append(np.concatenate([np.zeros(8000, np.float32), noise[:12000]]))
    await socket.next("input_audio_buffer.speech_started")
    socket.say("input_audio_buffer.commit")
    await socket.next("input_audio_buffer.committed")
    socket.append(np.concatenate([noise[12000:], np.zeros(12000, np.float32)]))
    kinds = (f"{TRANSCRIPTION}completed", "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped")
    while (told := await socket.next(*kinds))["type"] != kinds[1]:
        pass
    assert 1200 <= told["audio_start_ms"] <= 1300
    await socket.leave()


async def test_turns_that_wait_are_counted_until_they_are_transcribed(client, monkeypatch):
    budget, go_on = client.state.body_budget, asyncio.Event()
    heard = Listening.run

    async def run(self, recording):
        await go_on.wait()
        return await heard(self, recording)

    monkeypatch.setattr(Listening, "run", run)
    socket = Socket(client)
    await socket.opened(turn_detection=None)
    for _ in range(2):
        socket.append(made_samples(DIGITS), 8000)
        socket.say("input_audio_buffer.commit")
        await socket.next("input_audio_buffer.committed")
    each = 2 * len(made_samples(DIGITS))
    assert budget.used == 2 * each
    go_on.set()
    for left in (each, 0):
        await socket.next(f"{TRANSCRIPTION}completed")
        assert budget.used in (left, 0)
    await socket.leave()
    assert budget.used == 0


async def test_a_turn_that_is_too_long_goes_on_as_another(serve):
    client = serve(media={"audio_max_seconds": 0.8})
    socket = Socket(client)
    await socket.opened()
    sound, _ = spoken(4, 0.1)
    socket.append(np.concatenate([sound, np.zeros(12000, np.float32)]))
    kinds: list[str] = []
    names: dict[str, set[str]] = {}
    while kinds.count("completed") < 2 or kinds.count("completed") < kinds.count("speech_started"):
        event = await asyncio.wait_for(socket.events.get(), 60)
        kinds.append(event["type"].rpartition(".")[2])
        names.setdefault(kinds[-1], set()).add(event["item_id"])
    assert kinds.count("speech_stopped") < kinds.count("speech_started")
    assert names["speech_started"] == names["committed"] == names["completed"]
    await socket.leave()
    assert client.state.body_budget.used == 0


async def test_keys_origins_models_and_paths_are_checked_before_the_socket_opens(serve, tiny_client):
    guarded = serve(server={"api_key": ("secret",)})
    bearer = ((b"authorization", b"Bearer secret"),)
    refused = [
        (Socket(guarded), 401),
        (Socket(guarded, protocols=("realtime", "openai-insecure-api-key.wrong")), 401),
        (Socket(guarded, "model=other", bearer), 404),
        (Socket(guarded, "intent=conversation", bearer), 400),
        (Socket(serve(), headers=((b"origin", b"http://elsewhere.example"),)), 403),
        (Socket(serve(phase="draining")), 503),
        (Socket(tiny_client), 501),  # the model takes no audio
    ]
    for socket, status in refused:
        await asyncio.wait_for(socket.task, 60)
        assert (await socket.next("websocket.http.response.start"))["status"] == status
    for allowed in ({"headers": bearer}, {"protocols": ("realtime", "openai-insecure-api-key.secret")}):
        socket = Socket(guarded, **allowed)
        told = await socket.next("websocket.accept")
        assert told["subprotocol"] == ("realtime" if "protocols" in allowed else None)
        await socket.leave()


async def test_a_client_that_leaves_ends_everything(client):
    socket = Socket(client)
    await socket.opened(turn_detection=None)
    socket.append(np.concatenate([made_samples(DIGITS)] * 8), 16000)
    socket.say("input_audio_buffer.commit")
    await socket.next("input_audio_buffer.committed")
    await socket.leave()
    for _ in range(500):
        held = client.state.engine.ledger()
        if not (held["streams"] or held["live_rows"] or client.state.places.taken):
            break
        await asyncio.sleep(0.01)
    assert (held["streams"], held["live_rows"], client.state.places.taken) == (0, 0, 0)
    assert client.state.media.ledger()["media_requests"] == 0


async def test_turns_begin_and_end_with_energy_whatever_the_pieces():
    draw = np.random.default_rng(0)
    sound = draw.normal(0, 0.002, 16000 * 6).astype(np.float32)  # steady noise is not speech
    sound[16000:32000] += draw.normal(0, 0.1, 16000).astype(np.float32)
    sound[64000:72000] += draw.normal(0, 0.1, 8000).astype(np.float32)
    vad = Vad(silence_duration_ms=400)
    found = []
    for size in (len(sound), 160, 333):
        finder = TurnFinder(16000, vad)
        found.append([edge for at in range(0, len(sound), size) for edge in finder.feed(sound[at : at + size])])
    assert found[0] == found[1] == found[2]
    assert [(edge.begins, edge.at) for edge in found[0]] == [
        (True, 16000 - 4800), (False, 32000 + 6400), (True, 64000 - 4800), (False, 72000 + 6400),
    ]  # fmt: skip
