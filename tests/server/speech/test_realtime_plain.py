"""/v1/realtime in vLLM's protocol: the turns up to a final commit become one text."""

from __future__ import annotations

import logging

import numpy as np
import orjson
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from server.speech.listening import Listening
from server.speech.speech_stream import InOrder
from tests.server.live import listening
from tests.server.speech.test_realtime import Socket, spoken

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_vllms_form_of_a_session_is_read_too(client):
    socket = Socket(client)
    await socket.next("websocket.accept")
    created = await socket.next("session.created")
    assert created["id"].startswith("sess_")
    assert created["created"] > 0
    socket.say("session.update", model="other")
    assert (await socket.next("error"))["code"] == "model_not_found"
    socket.say("session.update", model=client.state.names[0])
    sound, wanted = spoken(3, 1.0)
    for _ in range(2):
        socket.say("input_audio_buffer.commit", final=False)
        socket.append(sound)
        socket.say("input_audio_buffer.commit", final=True)
        text = ""
        while (event := await socket.next("transcription.delta", "transcription.done"))["type"].endswith("delta"):
            text += event["delta"]
        assert event["text"] == text == " ".join(wanted)
        assert event["usage"]["total_tokens"] > event["usage"]["completion_tokens"] > 0
    for wrong, code in (
        ("{", "invalid_json"),
        ({"type": "x"}, "unknown_event"),
        ({"type": "session.update", "model": 3}, "invalid_event"),
        ({"type": "input_audio_buffer.append", "audio": "%%%%"}, "invalid_audio"),
    ):
        given = wrong if isinstance(wrong, str) else orjson.dumps(wrong).decode()
        socket.to_app.put_nowait({"type": "websocket.receive", "text": given})
        told = await socket.next("error")
        assert (told["code"], type(told["error"])) == (code, str)
    socket.append(np.zeros(16000, np.float32))
    socket.say("input_audio_buffer.commit", final=True)
    assert (await socket.next("transcription.done"))["text"] == ""
    await socket.leave()
    assert client.state.body_budget.used == 0


async def test_a_session_of_vllms_form_begins_before_its_sound(client):
    socket = Socket(client)
    await socket.opened()
    socket.append(np.zeros(8000, np.float32))
    socket.say("session.update", model=client.state.names[0])
    assert "before the first audio" in (await socket.next("error"))["error"]["message"]
    await socket.leave()


async def test_a_turn_that_fails_is_reported_and_the_text_goes_on(client, monkeypatch):
    socket = Socket(client)
    await socket.next("websocket.accept")
    await socket.next("session.created")
    socket.say("session.update", model=client.state.names[0])
    sound, wanted = spoken(3, 1.0)
    heard, turns = Listening.run, iter(range(3))

    async def run(self, recording):
        said = await heard(self, recording)
        if next(turns) == 1:
            raise RuntimeError("a fault")
        return said

    monkeypatch.setattr(Listening, "run", run)
    socket.append(sound)
    socket.say("input_audio_buffer.commit", final=True)
    assert (await socket.next("error"))["code"] == "processing_error"
    assert (await socket.next("transcription.done"))["text"] == " ".join(wanted)
    await socket.leave()


async def test_sound_of_a_session_without_detection_is_transcribed_at_its_end(client):
    socket = Socket(client)
    await socket.opened(turn_detection=None)
    socket.say("session.update", model=client.state.names[0])
    sound, wanted = spoken(1, 0.3)
    socket.append(sound)
    socket.say("input_audio_buffer.commit", final=True)
    while (event := await socket.next("transcription.delta", "transcription.done"))["type"].endswith("delta"):
        pass
    assert event["text"] == wanted[0]
    await socket.leave()


async def test_windows_that_a_fault_has_ended_leave_nothing_for_the_next_turn():
    order = InOrder(lambda: " ")
    order.add(0, "one ", ())
    order.add(1, "late", ())
    order.add(1, "", ())
    order.skip()
    assert order.add(order.front, "two", ()) == " two"
    order.add(order.front, "", ())
    assert order.add(order.front, "three", ()) == " three"
    assert order.text == "one two three"


async def test_a_refused_socket_is_answered_and_logged_as_no_fault(client, caplog):
    """A refused socket is no error, with any number of fields in its query."""
    caplog.set_level(logging.ERROR)
    async with listening(client) as url:
        address = url.replace("http", "ws") + "/v1/realtime?" + "&".join(f"field{at}=1" for at in range(40))
        async with connect(address) as socket:
            assert b"session.created" in await socket.recv(decode=False)
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"{address}&model=other")
    assert (refused.value.response.status_code, caplog.records) == (404, [])
