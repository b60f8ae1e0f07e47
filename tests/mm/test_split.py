"""Films decoded in parts equal, bit for bit, the films decoded as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mm.decode import video
from mm.decode.alarm import Alarm
from mm.decode.frames import FilmPlan
from mm.decode.groups import begins_anew, heals
from mm.decode.magic import sniff
from mm.decode.split import Split
from mm.decode.video import FilmFile
from mm.errors import MediaError
from mm.limits import MediaLimits
from mm.transform.image import Scale
from tests.mm import corpus, made

LIMITS = MediaLimits()
H265 = "log-level=none:keyint=15:min-keyint=15:"
FILMS = {  # container, codec, options, and whether the film has parts
    "h264": ("mp4", "libx264", {"g": "15"}, True),
    "no B-frames": ("mp4", "libx264", {"g": "15", "bf": "0"}, True),
    "pyramid": ("matroska", "libx264", {"g": "20", "bf": "5", "b-pyramid": "normal", "refs": "4"}, True),
    "open groups": ("mp4", "libx264", {"g": "15", "x264-params": "open-gop=1:bframes=3"}, False),
    "slices": ("mov", "libx264", {"g": "15", "slices": "3", "coder": "0"}, True),
    "all keys": ("mp4", "libx264", {"g": "1"}, True),
    "hevc": ("mp4", "libx265", {"x265-params": H265 + "open-gop=0"}, True),
    "hevc, open groups": ("mp4", "libx265", {"x265-params": H265 + "open-gop=1:bframes=4:b-pyramid=1"}, True),
    "vp9": ("webm", "libvpx-vp9", {"g": "15", "deadline": "realtime", "auto-alt-ref": "1", "lag-in-frames": "8"}, True),
    "vp8": ("webm", "libvpx", {"g": "15", "deadline": "realtime"}, False),
    "av1": ("mp4", "libsvtav1", {"preset": "12", "g": "15"}, False),
}


@pytest.fixture(autouse=True)
def splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "_SPLIT_PIXELS", 0)
    monkeypatch.setattr(video, "num_threads", lambda *_: 6)


def moving(count: int, seed: int = 0) -> np.ndarray:
    """uint8 [count, 64, 96, 3]: a picture that moves under changing noise, so that each frame refers to others."""
    draw = np.random.default_rng(seed)
    wide = np.kron(draw.integers(0, 256, (12, 40, 3)), np.ones((8, 8, 1))).astype(np.int16)
    steps = draw.integers(0, 4, (count, 2)).cumsum(0) % (32, 224)
    noise = draw.integers(-12, 13, (count, 64, 96, 1))
    return np.stack([wide[y : y + 64, x : x + 96] for y, x in steps] + noise).clip(0, 255).astype(np.uint8)


def opened(data: bytes, chosen: Any, limits: MediaLimits = LIMITS) -> FilmFile:
    word, plan = sniff(data), FilmPlan(np.asarray(chosen), Scale(64, 96), 0.1)
    assert word is not None
    return FilmFile(data, word, limits, lambda *_: plan, Alarm(30))


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each split film: whether decoding its parts succeeded."""
    seen, real = [], Split.run

    def run(split: Split, *args: Any) -> np.ndarray | None:
        found = real(split, *args)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(Split, "run", run)
    return seen


@pytest.mark.parametrize("name", FILMS)
def test_parts_are_the_whole(name: str, wholes: list[bool]) -> None:
    container, codec, options, has_parts = FILMS[name]
    data = made.film(moving(90), 10, container, codec, options=options)
    every = opened(data, np.arange(90)).decode(Alarm(30))
    draw = np.random.default_rng(1)
    for count in (90, 30, 7):
        chosen = np.sort(draw.choice(90, count, replace=False))
        film = opened(data, chosen)
        assert (film.num_decoders > 1) == has_parts
        np.testing.assert_array_equal(film.decode(Alarm(30), film.num_decoders), every[chosen])
    assert wholes == [True] * 3 * has_parts


def test_films_of_variable_rate_and_turned_films_have_parts(wholes: list[bool]) -> None:
    times = np.random.default_rng(3).integers(10, 200, 60).cumsum().tolist()
    for more in ({"times": times}, {"rotation": 90}):
        data = made.film(moving(60), options={"g": "12"}, **more)  # type: ignore[arg-type]
        chosen = [0, 3, 11, 12, 30, 47, 59]
        film, whole = opened(data, chosen), opened(data, chosen)
        np.testing.assert_array_equal(film.decode(Alarm(30), film.num_decoders), whole.decode(Alarm(30)))
    assert wholes == [True, True]


def test_damaged_films_are_decoded_as_a_whole(wholes: list[bool]) -> None:
    """A decoder that conceals damage may copy from the part before; a decoder of one part lacks that part.

    In the damaged group the decoder's threads copy from frames that are partly done, so each run differs there.
    """
    for first in (20, 25, 45):
        data = corpus.damaged(moving(60), first, first + 2, group=20)
        film, whole = opened(data, np.arange(60)), opened(data, np.arange(60))
        assert film.num_decoders == 3
        found = made.outcome(lambda film=film: film.decode(Alarm(30), 3))  # type: ignore[misc]
        expected = made.outcome(lambda whole=whole: whole.decode(Alarm(30)))  # type: ignore[misc]
        if isinstance(expected, MediaError):
            assert str(found) == str(expected)
        else:
            sound = np.arange(60) // 20 != first // 20
            np.testing.assert_array_equal(found[sound], expected[sound])
    assert wholes == [False] * 3


def test_a_tripped_alarm_ends_all_decoders() -> None:
    film, alarm = opened(made.film(moving(40), options={"g": "10"}), np.arange(40)), Alarm()
    alarm.trip()
    with pytest.raises(MediaError) as caught:
        film.decode(alarm, film.num_decoders)
    assert caught.value.reason == "media_too_complex"


def test_decoders_follow_parts_threads_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made.film(moving(40), options={"g": "10"})
    film = opened(data, np.arange(40))
    assert film.num_decoders == 4
    assert film.cost < film.split_cost < 5 * film.cost
    assert opened(data, [35, 36]).num_decoders == 1
    tight = MediaLimits(request_decoded_bytes=film.cost)
    assert opened(data, np.arange(40), tight).num_decoders == 1
    monkeypatch.setattr(video, "num_threads", lambda *_: 3)
    assert opened(data, np.arange(40)).num_decoders == 3
    monkeypatch.setattr(video, "_SPLIT_PIXELS", 1 << 27)
    assert opened(data, np.arange(40)).num_decoders == 1


def test_packets_are_read_within_their_bounds() -> None:
    avcc = b"\x01\x64\x00\x28\xff"
    assert begins_anew(memoryview(b"\0\0\0\1\x06\0\0\0\2\x65\0"), "h264", avcc)
    for packet in (b"", b"\0", b"\0\0\0\0", b"\xff\xff\xff\xff\x61\x65", b"\0\0\0\1\x06\0\0\0\2"):
        assert not begins_anew(memoryview(packet), "h264", avcc)
    assert not begins_anew(memoryview(b"\0\0\0\1\x65\0"), "h264", b"\0\0\0\1\x67")
    assert not begins_anew(memoryview(b""), "vp9", b"")


def test_pictures_that_begin_a_gradual_refresh_are_no_start(wholes: list[bool]) -> None:
    options = {"g": "12", "bf": "0", "x264-params": "intra-refresh=1"}
    data = made.film(moving(60), options=options)
    every = opened(data, np.arange(60)).decode(Alarm(30))
    for chosen in ([30, 50], [14], [59]):
        film = opened(data, chosen)
        assert film.num_decoders == 1
        np.testing.assert_array_equal(film.decode(Alarm(30)), every[chosen])


def test_recovery_points_are_found_behind_other_messages() -> None:
    avcc, other = b"\x01\x64\x00\x28\xff", b"\x05\xff\x02" + b"\x11" * 257

    def packet(messages: bytes) -> memoryview:
        return memoryview((len(messages) + 1).to_bytes(4, "big") + b"\x06" + messages + b"\0\0\0\2\x41\0")

    for before in (b"", other):
        assert heals(packet(before + b"\x06\x01\x44\x80"), "h264", avcc)
        assert not heals(packet(before + b"\x06\x01\xc4\x80"), "h264", avcc)
    for cut in (b"", b"\xff", b"\x06", b"\x06\x01", b"\xff\xff\xff", b"\x05\xff\xff"):
        assert not heals(packet(cut), "h264", avcc)


def test_a_packet_of_countless_units_is_read_in_part() -> None:
    avcc, before = b"\x01\x64\x00\x28\xff", b"\0\0\0\1\x09"
    assert begins_anew(memoryview(before * 63 + b"\0\0\0\1\x65"), "h264", avcc)
    assert not begins_anew(memoryview(before * 64 + b"\0\0\0\1\x65"), "h264", avcc)
