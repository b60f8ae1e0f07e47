"""Damaged inputs are refused or accepted within seconds, without another error; also over HTTP and WebSockets."""

from __future__ import annotations

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.end_to_end import hostile
from tests.end_to_end.conftest import MODEL, server_process
from tests.fuzz.targets import MOST_S, REFUSALS, TARGETS
from tests.fuzz.wire_targets import UPGRADE, http_seeds, socket_seeds

__all__ = ["server_process"]
ODD = [b"", b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\1", b"\0\0\0\x08", b"{", b'"', b"\r\n"]
HOWS = ("write", "insert", "cut", "repeat", "move")
SILENCE_S, AT_A_TIME = 0.25, 16
EDITS = st.lists(
    st.tuples(
        st.integers(0, 1 << 20),
        st.sampled_from(HOWS),
        st.one_of(st.sampled_from(ODD), st.binary(max_size=8)),
    ),
    max_size=8,
)


def damaged(data: bytes, edits: list[tuple[int, str, bytes]]) -> bytes:
    """Applies the edits to `data`. Many edits fall near the beginning, where headers are."""
    for number, how, piece in edits:
        at = number % (len(data) + 1) if number % 3 else number % min(len(data) + 1, 64)
        size = max(1, len(piece))
        if how == "write":
            data = data[:at] + piece + data[at + len(piece) :]
        elif how == "insert":
            data = data[:at] + piece + data[at:]
        elif how == "cut":
            data = data[:at] if number % 2 else data[:at] + data[at + size :]
        elif how == "repeat":
            data = data[:at] + data[at : at + 64] * 3 + data[at:]
        else:
            data = data[at:] + data[:at] if number % 5 == 0 else data[:at] + data[at + size :] + data[at : at + size]
    return data


def run(name: str, examples: int) -> None:
    target = TARGETS[name]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < 1000,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.sampled_from(target.seeds()), edits=EDITS)
    def once(seed: bytes, edits: list[tuple[int, str, bytes]]) -> None:
        data = damaged(seed, edits)
        begun = time.thread_time()
        with contextlib.suppress(*REFUSALS):
            target.call(data)
        assert time.thread_time() - begun < MOST_S

    for seed in target.seeds():
        target.call(seed)  # an undamaged seed, accepted or refused, reaches the parsers
    once()


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_inputs_are_refused_or_taken(name):
    run(name, 120)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TARGETS)
def test_many_damaged_inputs_are_refused_or_taken(name):
    run(name, 50_000)


def known_answer(port: int) -> tuple[int, object]:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    status, content = hostile.ask(port, "POST", "/v1/completions", body)
    return status, content.split(b'"choices"')[-1].split(b'"usage"')[0]


def exchange(port: int, data: bytes) -> bytes:
    """The bytes received until the server closes the connection or is silent for SILENCE_S."""
    found = b""
    with hostile.dial(port) as link:
        link.settimeout(SILENCE_S)
        with contextlib.suppress(OSError):
            link.sendall(data)
            while len(found) < 1 << 20 and (piece := link.recv(1 << 16)):
                found += piece
    return found


def over_sockets(server: object, seed: int, rounds: int) -> None:
    """Sends damaged requests and frames; the server still answers other clients as before."""
    port = server.port  # type: ignore[attr-defined]
    draw, calm = random.Random(seed), known_answer(port)
    assert calm[0] == 200
    sent = []
    for number in range(rounds):
        of_socket = number % 3 == 0
        data = draw.choice(socket_seeds() if of_socket else http_seeds())
        edits = [
            (draw.randrange(1 << 20), draw.choice(HOWS), draw.choice([*ODD, draw.randbytes(6)]))
            for _ in range(draw.randint(0, 6))
        ]
        sent.append(UPGRADE + damaged(data, edits) if of_socket else damaged(data, edits))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        answers = list(pool.map(partial(exchange, port), sent))
    for data, found in zip(sent, answers, strict=True):
        assert not found or found.startswith(b"HTTP/1."), (data, found[:80])
        assert b" 500 " not in found.partition(b"\r\n")[0], (data, found[:300])
    statuses = {found[9:12] for found in answers if found}
    assert {b"101", b"200", b"400"} <= statuses  # valid and damaged inputs were among them
    assert known_answer(port) == calm
    assert server.alive  # type: ignore[attr-defined]
    assert "Traceback" not in server.log  # type: ignore[attr-defined]


def test_damaged_requests_and_frames_leave_the_server_as_it_was(server_process):
    over_sockets(server_process, 0, 150)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_damaged_requests_and_frames_leave_the_server_as_it_was(server_process):
    over_sockets(server_process, 1, 20_000)
