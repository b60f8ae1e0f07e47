"""Lanes: bytes equal orjson's and uvicorn's; slow clients use the transport; no client gets another client's answer."""

import array
import os
import random
import socket
import time

import orjson
import pytest

from _fast.detok import Detokenizer, StopSet, TokenTable
from _fast.histogram import Histogram
from _fast.lane import Lane, deliver

BEFORE, BEHIND = b'data: {"content":', b"}\n\n"
# One text per token id: first the ASCII characters, then longer texts.
TEXTS = ["".join(map(chr, range(128))), "é漢😀\u2028\ufffd", "x" * 5000, "", '"\\\x00\x1f\x7f\x80']
PIECES = [bytes([byte]) for byte in range(256)] + [text.encode() for text in TEXTS]
SPECIAL = len(PIECES)
OFFSETS = array.array("i", [0])
for piece in [*PIECES, b"<s>"]:
    OFFSETS.append(OFFSETS[-1] + len(piece))
TABLE = TokenTable(b"".join(PIECES) + b"<s>", OFFSETS, bytes(SPECIAL) + b"\1")


class Transport:
    """Like asyncio's transport over a socket: writes as much as the socket takes and buffers the rest."""

    def __init__(self, own: socket.socket) -> None:
        self.own = own
        self.held = bytearray()
        self.closing = False
        self.asked = 0

    def is_closing(self) -> bool:
        self.asked += 1
        return self.closing

    def get_write_buffer_size(self) -> int:
        return len(self.held)

    def write(self, data: bytes) -> None:
        self.held += data


class Stream:
    """The stream object that `deliver` finds through a route."""

    lane: Lane | None = None


class Line:
    """One client with an open lane."""

    def __init__(self, room: int = 0, **more: object) -> None:
        self.own, self.client = socket.socketpair()
        if room:
            self.own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        self.client.setblocking(False)
        self.transport = Transport(self.own)
        self.machine = Detokenizer(TABLE, **more)
        self.gaps = Histogram([1.0])
        self.failed: list[Exception] = []
        self.stream = Stream()
        begun = time.monotonic()
        self.lane = Lane(
            self.machine, self.gaps, BEFORE, BEHIND, self.transport, self.own.fileno(), self.failed.append, begun
        )
        self.stream.lane = self.lane
        self.lane.open = True

    def read(self) -> bytes:
        found = bytearray()
        while True:
            try:
                piece = self.client.recv(1 << 16)
            except BlockingIOError:
                return bytes(found)
            if not piece:
                return bytes(found)
            found += piece

    def say(self, *tokens: int) -> int:
        """Delivers the tokens as one step that has rows of this stream only."""
        return deliver({1: (self.stream, 0)}, [1] * len(tokens), list(tokens), [0] * len(tokens), 0, len(tokens))


@pytest.fixture
def line():
    made = []

    def make(**more):
        made.append(Line(**more))
        return made[-1]

    yield make
    for each in made:
        each.own.close()
        each.client.close()


def chunk(text: str) -> bytes:
    frame = BEFORE + orjson.dumps(text) + BEHIND
    return b"%x\r\n%b\r\n" % (len(frame), frame)


def test_chunks_are_orjsons_and_uvicorns(line):
    one = line()
    for at, text in enumerate(TEXTS):
        assert one.say(256 + at) == 1
        assert one.read() == (chunk(text) if text else b"")
    assert one.lane.open
    assert one.machine.num_tokens == sum(one.gaps.counts) == len(TEXTS)


def test_every_character_is_written_as_orjson_writes_it(line):
    one = line()
    for code in [*range(0x20), *range(0x7F, 0xA1), *range(0x20, 0x110000, 997)]:
        if not 0xD800 <= code < 0xE000:
            for byte in chr(code).encode():
                assert one.say(byte) == 1
            assert one.read() == chunk(chr(code))


def test_text_and_counts_continue_when_rows_change_between_lane_and_transport(line):
    draw = random.Random(5)
    for _ in range(100):
        one = line()
        ids = [draw.randrange(-1, SPECIAL + 2) for _ in range(60)]
        texts, alone = [], Detokenizer(TABLE)
        for token in ids:
            if draw.random() < 0.5 and token >= 0:
                assert one.say(token) == 1
            else:
                text = one.machine.feed([token])
                texts += [chunk(text)] if text else []
            texts += [data] if (data := one.read()) else []
        wanted = [chunk(text) for token in ids if (text := alone.feed([token]))]
        assert texts == wanted
        assert (one.machine.num_tokens, one.machine.finish()) == (alone.num_tokens, alone.finish())


def test_two_tokens_of_a_choice_in_one_step_stay_two_chunks(line):
    one = line()
    assert one.say(65, 66, 67) == 3
    assert one.read() == chunk("A") + chunk("B") + chunk("C")


def test_rows_are_taken_up_to_the_first_that_ends_or_has_no_lane(line):
    one, other = line(), line()
    bare = Stream()
    routes = {1: (one.stream, 0), 2: (other.stream, 0), 3: (bare, 0)}
    ids, tokens = [1, 9, 2, 1, 3, 1, 2, 1], [65, 66, 67, -1, 68, 69, 70, 71]
    finishes = [0, 0, 0, 0, 0, 0, 1, 0]
    assert deliver(routes, ids, tokens, finishes, 0, 8) == 4  # consumed: request 9 has no route, and -1 is no token
    assert deliver(routes, ids, tokens, finishes, 5, 8) == 6
    assert deliver(routes, ids, tokens, finishes, 7, 8) == 8
    assert deliver(routes, ids, tokens, finishes, 8, 99) == 8
    assert (one.read(), other.read()) == (chunk("A") + chunk("E") + chunk("G"), chunk("C"))


def test_a_call_has_an_end(line):
    one = line()
    assert one.say(*[65] * 200) == 64
    assert one.read() == chunk("A") * 64


@pytest.mark.parametrize("why", ["waiting", "closing", "closed", "shut", "raises", "ended"])
def test_a_lane_that_may_not_write_does_nothing(line, why):
    one = line()
    if why == "waiting":
        one.transport.held += b"before"
    elif why == "closing":
        one.transport.closing = True
    elif why == "closed":
        one.lane.close()
        one.lane.open = True
    elif why == "shut":
        one.lane.open = False
    elif why == "raises":
        one.lane.close()
        one.transport.get_write_buffer_size = None  # type: ignore[method-assign, assignment]
        one.stream.lane = Lane(one.machine, one.gaps, BEFORE, BEHIND, one.transport, 0, one.failed.append, 0)
        one.stream.lane.open = True
    else:
        one.machine.finish()
    assert one.say(65) == 0
    assert one.read() == b""
    assert one.machine.num_tokens == sum(one.gaps.counts) == 0
    assert not one.stream.lane.open


def test_what_a_full_socket_leaves_goes_to_the_transport_and_the_lane_waits(line):
    one = line(room=4096)
    said = 0
    while one.say(258):
        said += 1
    assert said > 0
    assert not one.lane.open
    assert one.read() + one.transport.held == chunk("x" * 5000) * said
    one.transport.held.clear()
    assert one.say(258) == 0, "until it is opened again"
    one.lane.open = True
    assert one.say(65) == 1
    assert one.read() == chunk("A")


def test_a_reader_that_has_left_is_left_to_the_transport(line):
    one, other = line(), line()
    one.client.close()
    routes = {1: (one.stream, 0), 2: (other.stream, 0)}
    assert deliver(routes, [1, 2], [65, 66], [0, 0], 0, 2) == 2
    assert one.transport.held == chunk("A")
    assert (other.read(), one.failed) == (chunk("B"), [])


def test_a_transport_that_raises_harms_its_own_row_only(line):
    one, other = line(), line()
    one.client.close()
    fault = RuntimeError("Cannot call write() after write_eof()")

    def write(data: bytes) -> None:
        raise fault

    one.transport.write = write  # type: ignore[method-assign]
    routes = {1: (one.stream, 0), 2: (other.stream, 0)}
    assert deliver(routes, [1, 2], [65, 66], [0, 0], 0, 2) == 2
    assert (one.failed, other.read()) == ([fault], chunk("B"))


def test_a_descriptor_that_another_client_has_now_is_not_written_to(line):
    one = line()
    fd = one.own.fileno()
    one.transport.closing = True  # asyncio's transports set `closing` first and close the socket later
    one.own.close()
    other = line()
    if other.own.fileno() != fd:
        os.dup2(other.own.fileno(), fd)
    assert one.say(65) == 0
    assert other.read() == b""


def test_the_transport_is_asked_once_for_each_token(line):
    one = line()
    one.say(65, 66)
    one.say(67)
    assert one.transport.asked == 3


def test_texts_with_a_beginning_or_stop_strings_of_their_own_have_no_lane(line):
    transport = line().transport
    for machine in (Detokenizer(TABLE, StopSet([b"a"])), Detokenizer(TABLE, first=lambda token: b"")):
        with pytest.raises(ValueError, match="by the engine's word only"):
            Lane(machine, Histogram([]), b"", b"", transport, 0, print, 0.0)


def test_a_special_token_is_counted_and_not_emitted(line):
    one, with_special = line(), line(skip_special=False)
    assert (one.say(SPECIAL), one.read(), one.machine.num_tokens) == (1, b"", 1)
    assert (with_special.say(SPECIAL), with_special.read()) == (1, chunk("<s>"))
    assert (one.lane.written_at, with_special.lane.written_at) == (0.0, with_special.lane.last_at)
