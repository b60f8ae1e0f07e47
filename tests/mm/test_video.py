"""Films: the right frames, scaled during decoding, from every container and codec on the list (SECURITY S21)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from mm.decode import video
from mm.decode.alarm import Alarm
from mm.decode.frames import FilmPlan, FrameRule, sample_indices
from mm.decode.magic import sniff
from mm.decode.video import FilmFile, num_threads
from mm.errors import MediaError
from mm.item import MediaOptions
from mm.limits import MediaLimits
from mm.transform.image import Scale
from tests.mm import corpus, made

torch = pytest.importorskip("torch")

LIMITS = MediaLimits()
QUIET = {"x265-params": "log-level=none"}
VARIANTS = [
    ("mp4", "libx264", {"g": "10", "bf": "3"}),
    ("mov", "libx264", {"g": "250"}),
    ("matroska", "libx264", {"bf": "0"}),
    ("mp4", "libx265", QUIET),
    ("webm", "libvpx", {}),
    ("webm", "libvpx-vp9", {"g": "12"}),
    ("mp4", "libsvtav1", {"preset": "12"}),
]


USUAL = FrameRule()


def planner(rule: FrameRule = USUAL, height: int = 64, width: int = 96):
    def plan(num_frames: int, fps: float, _height: int, _width: int) -> FilmPlan:
        return FilmPlan(sample_indices(num_frames, rule.count(num_frames, fps)), Scale(height, width), 0.5)

    return plan


def opened(data: bytes, limits: MediaLimits = LIMITS, plan=None) -> FilmFile:
    word = sniff(data)
    assert word is not None
    return FilmFile(data, word, limits, plan or planner(), Alarm())


def decoded(data: bytes) -> np.ndarray:
    return opened(data).decode(Alarm())


def refusal(data: bytes, limits: MediaLimits = LIMITS) -> MediaError:
    with pytest.raises(MediaError) as caught:
        opened(data, limits).decode(Alarm())
    return caught.value


def frame_numbers(frames: np.ndarray) -> list[int]:
    return [round((float(grey) - 20) / 2) for grey in frames.mean((1, 2, 3))]


@pytest.mark.parametrize(("container", "codec", "options"), VARIANTS)
def test_every_codec_yields_the_chosen_frames(container: str, codec: str, options: dict[str, str]) -> None:
    policy = os.sched_getscheduler(0)
    film = opened(made.film(made.ramp(90), 30, container, codec, options=options))
    assert os.sched_getscheduler(0) == policy, "an encoder leaves the test's process as it was"
    frames = film.decode(Alarm())
    assert frames.shape == (6, 64, 96, 3)
    assert frames.dtype == np.uint8
    assert np.abs(np.array(frame_numbers(frames)) - film.plan.indices).max() <= 1
    assert film.plan.indices.tolist() == [0, 15, 30, 45, 60, 75]


def test_only_groups_with_chosen_frames_are_decoded() -> None:
    data = made.film(made.ramp(100), 10, options={"g": "10", "bf": "0"})
    plan = planner(FrameRule(num_frames=2))
    film = opened(data, plan=plan)
    calls = 0
    packets = film._packets

    class Counting(list):
        def __getitem__(self, index):
            nonlocal calls
            calls += 1
            return super().__getitem__(index)

    film._packets = Counting(packets)
    assert frame_numbers(film.decode(Alarm())) == [0, 50]
    assert calls < 40  # of 100; the decoder's threads hold a few frames back


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_phone_films_stand_upright(turn: int) -> None:
    pixels = np.full((4, 64, 96, 3), 30, np.uint8)
    pixels[:, :32, :48] = 220  # bright top left as stored
    frames = opened(made.film(pixels, 4, "mov", rotation=turn)).decode(Alarm())
    expected = np.rot90(pixels[0], round(turn / 90))
    assert frames.shape[1:] == expected.shape
    assert np.abs(frames[0].astype(int) - expected).mean() < 6


def test_variable_rate_is_sampled_by_frame_and_measured_by_time() -> None:
    times = [0, 100, 200, 300, 1300, 2300, 3300, 4300]
    rates = []

    def plan(num_frames: int, fps: float, height: int, width: int) -> FilmPlan:
        rates.append((num_frames, fps))
        return FilmPlan(np.arange(num_frames), Scale(height, width), 1.0)

    frames = opened(made.film(made.ramp(8), 10, "matroska", times=times, options={"bf": "0"}), plan=plan).decode(
        Alarm()
    )
    assert np.abs(np.array(frame_numbers(frames)) - np.arange(8)).max() <= 1
    assert rates[0][0] == 8
    assert rates[0][1] == pytest.approx(7 / 4.3, rel=0.1)


@pytest.mark.parametrize("fps", [1, 5, 24, 25, 30, 60])
@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_constant_rates_are_recognised_exactly(fps: int, container: str) -> None:
    rates = []

    def plan(num_frames: int, rate: float, height: int, width: int) -> FilmPlan:
        rates.append(rate)
        return FilmPlan(np.arange(1), Scale(height, width), 1.0)

    opened(made.film(made.ramp(30), fps, container, "libx264" if container == "mp4" else "libvpx"), plan=plan)
    assert rates == [pytest.approx(fps, rel=1e-6)]


def test_one_frame_is_a_film() -> None:
    film = opened(made.film(made.ramp(1), 10))
    assert film.plan.indices.tolist() == [0]
    assert film.decode(Alarm()).shape == (1, 64, 96, 3)


def test_odd_sizes_and_deep_colours_are_read() -> None:
    frames = opened(made.film(made.ramp(6, 66, 98), 2, "mp4", "libx264", pix_fmt="yuv444p")).decode(Alarm())
    assert frames.shape[0] == 6
    deep = opened(made.film(made.ramp(6), 2, "mp4", "libx265", pix_fmt="yuv420p10le", options=QUIET)).decode(Alarm())
    assert np.abs(np.array(frame_numbers(deep)) - np.arange(6)).max() <= 1


def test_sound_track_comes_along() -> None:
    film = opened(made.film(made.ramp(20), 10, track=made.tone(2.0)))
    sound = film.sound(Alarm())
    assert sound is not None
    assert abs(len(sound) - 32000) < 3200
    assert opened(made.film(made.ramp(4), 10)).sound(Alarm()) is None


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (MediaLimits(video_max_seconds=1.5), "media_too_large"),
        (MediaLimits(video_max_decoded_frames=19), "media_too_large"),
        (MediaLimits(video_max_frame_pixels=64 * 96 - 1), "media_too_large"),
        (MediaLimits(video_max_total_pixels=1000), "media_too_large"),
        (MediaLimits(video_codecs=("vp9",)), "media_unsupported"),
        (MediaLimits(video_formats=("webm",)), "media_unsupported"),
        (MediaLimits(video_max_streams=1), "media_unsupported"),
    ],
)
def test_limits_are_counted(limits: MediaLimits, reason: str) -> None:
    data = made.film(made.ramp(20), 10, track=made.tone(2.0))
    error = refusal(data, limits)
    assert (error.status, error.reason) == (400, reason)


def test_codecs_off_the_list_are_refused() -> None:
    assert refusal(made.film(made.ramp(4), 10, "mp4", "mpeg4")).reason == "media_unsupported"


def test_a_sound_is_no_film() -> None:
    data = made.sound(made.tone(0.5), 16000, "mp4", "aac")
    assert refusal(data).reason == "media_invalid"


@pytest.mark.parametrize(("container", "codec", "options"), VARIANTS)
def test_truncated_films_are_refused(container: str, codec: str, options: dict[str, str]) -> None:
    data = made.film(made.ramp(30), 30, container, codec, options=options)
    for tenth in range(1, 10):
        error = refusal(data[: len(data) * tenth // 10])
        assert (error.status, error.reason) == (400, "media_invalid"), tenth


def test_index_before_the_data_does_not_hide_truncation(tmp_path) -> None:
    data = made.film(made.ramp(30), 30, "mp4", index_first=str(tmp_path / "film.mp4"))
    assert data.index(b"moov") < data.index(b"mdat")
    assert opened(data).decode(Alarm()).shape[0] == 4
    for tenth in range(1, 10):
        assert refusal(data[: len(data) * tenth // 10]).reason == "media_invalid"


def test_random_damage_never_escapes_as_another_error() -> None:
    rng = np.random.default_rng(11)
    for container, codec, options in VARIANTS[:6]:
        data = made.film(made.ramp(12), 6, container, codec, options=options)
        for _ in range(20):
            broken = bytearray(data)
            for position in rng.integers(0, len(data), 10):
                broken[position] = rng.integers(0, 256)
            if sniff(bytes(broken)) in LIMITS.video_formats:
                out = made.outcome(partial(decoded, bytes(broken)))
                if isinstance(out, MediaError):
                    assert out.reason in ("media_invalid", "media_too_large", "media_unsupported")


def test_a_tripped_alarm_ends_decoding() -> None:
    film = opened(made.film(made.ramp(30), 10))
    alarm = Alarm()
    alarm.trip()
    with pytest.raises(MediaError) as caught:
        film.decode(alarm)
    assert caught.value.reason == "media_too_complex"


def reference_indices(total: int, fps: float, rule: FrameRule) -> list[int]:
    """The published sampling rule, written as published: torch.arange over frames."""
    most = min(rule.max_frames, total) // 2 * 2
    count = min(max(total / fps * rule.fps, rule.min_frames), most, total)
    count = int(count) // 2 * 2
    return torch.arange(0, total, total / count).int().tolist()


def test_frames_are_chosen_as_the_reference_chooses() -> None:
    rng = np.random.default_rng(1)
    for _ in range(500):
        total, fps = int(rng.integers(2, 5000)), float(rng.choice([1, 5, 10, 23.976, 24, 25, 29.97, 30, 60]))
        rule = FrameRule(
            fps=float(rng.choice([0.5, 1, 2, 4])), min_frames=4, max_frames=int(rng.choice([32, 256, 768]))
        )
        count = rule.count(total, fps)
        expected = reference_indices(total, fps, rule)
        assert sample_indices(total, count).tolist() == expected[:count], (total, fps, rule)
        assert count % 2 == 0


def every(count: int) -> Callable[..., FilmPlan]:
    return lambda *_: FilmPlan(np.arange(count), Scale(64, 96), 0.1)


def test_frames_that_cannot_be_read_are_replaced_and_named() -> None:
    """Packets 25 to 27 of 40 are damaged; frames 0 and 20 are key frames. If every frame is sampled, frame 24 replaces
    them, because an interval is one frame. If every fifth is sampled, 28 replaces 25: 28 is readable, in 25's interval.
    """
    data = corpus.damaged(made.ramp(40), 25, 28, group=20)
    recovers = MediaOptions(frame_recovery=True)
    film = FilmFile(data, "mp4", LIMITS, every(40), Alarm(30), recovers)
    kept = film.decode(Alarm(30))
    assert film.replaced == [(25, 24), (26, 24), (27, 24)]
    assert all(np.array_equal(kept[at], kept[24]) for at in (25, 26, 27))
    some = FilmFile(
        data, "mp4", LIMITS, lambda *_: FilmPlan(np.arange(0, 40, 5), Scale(64, 96), 0.5), Alarm(30), recovers
    )
    shown = some.decode(Alarm(30))
    assert some.replaced == [(25, 28)]
    assert np.array_equal(shown[5], kept[28])


def test_a_sound_film_has_nothing_replaced() -> None:
    data = made.film(made.ramp(12))
    film = FilmFile(data, "mp4", LIMITS, every(12), Alarm(30), MediaOptions(frame_recovery=True))
    assert np.array_equal(film.decode(Alarm(30)), opened(data, plan=every(12)).decode(Alarm(30)))
    assert film.replaced == []


def test_key_frames_are_all_the_frames_that_count() -> None:
    data = made.film(made.ramp(40), options={"g": "10"})
    seen: list[int] = []

    def plan(count: int, *_: object) -> FilmPlan:
        seen.append(count)
        return FilmPlan(np.arange(count), Scale(64, 96), 1.0)

    film = FilmFile(data, "mp4", LIMITS, plan, Alarm(30), MediaOptions(key_frames=True))
    assert frame_numbers(film.decode(Alarm(30))) == [0, 10, 20, 30]
    assert seen == [4]


def test_a_gif_is_a_film_on_the_background() -> None:
    from PIL import Image

    clear = [Image.new("RGBA", (96, 64), (0, 0, 0, 0)) for _ in range(3)]
    for at, image in enumerate(clear):
        image.paste((250, 10, 10, 255), (at * 30, 0, at * 30 + 20, 64))
    data = corpus.saved(clear[0], "GIF", save_all=True, append_images=clear[1:], duration=100, disposal=2)
    film = FilmFile(data, "gif", LIMITS, every(3), Alarm(30), MediaOptions(background=(0, 0, 250)))
    frames = film.decode(Alarm(30))
    assert [np.flatnonzero(frame[0, :, 0] > 200)[0] for frame in frames] == [0, 30, 60]
    assert all((frame[:, 90] == (0, 0, 250)).all() for frame in frames)


def test_a_gif_is_fed_from_its_first_frame_on() -> None:
    data = corpus.gif(made.ramp(12))
    film = FilmFile(data, "gif", LIMITS, lambda *_: FilmPlan(np.array([9, 11]), Scale(64, 96), 0.1), Alarm(30))
    assert frame_numbers(film.decode(Alarm(30))) == [9, 11]


@pytest.mark.parametrize(
    "options", [{"bf": "3", "g": "10"}, {"bf": "5", "g": "40", "b-pyramid": "normal"}, {"bf": "0"}]
)
def test_frames_that_nothing_is_predicted_from_are_decoded_only_when_wanted(options, monkeypatch) -> None:
    data = made.film(made.ramp(40), codec="libx264", options=options)
    came = 0
    real = FilmFile._decoded

    def counted(film: FilmFile, context: object, packet: object) -> list:
        nonlocal came
        frames = real(film, context, packet)
        came += len(frames)
        return frames

    monkeypatch.setattr(FilmFile, "_decoded", counted)
    every = FilmFile(data, "mp4", LIMITS, lambda *_: FilmPlan(np.arange(40), Scale(64, 96), 0.1), Alarm(30))
    whole = every.decode(Alarm(30))
    assert came >= 40
    draw = np.random.default_rng(4)
    for count in (1, 3, 8):
        chosen = np.sort(draw.choice(40, count, replace=False))
        came = 0
        film = FilmFile(data, "mp4", LIMITS, lambda *_, of=chosen: FilmPlan(of, Scale(64, 96), 0.1), Alarm(30))
        np.testing.assert_array_equal(film.decode(Alarm(30)), whole[chosen])
        if options["bf"] != "0":
            assert came < 32, "at least a fifth of the frames were left out"


def frames_of(data: bytes, chosen: list[int]) -> np.ndarray:
    plan = FilmPlan(np.array(chosen), Scale(64, 96), 0.1)
    return FilmFile(data, "mp4", LIMITS, lambda *_: plan, Alarm(30)).decode(Alarm(30))


@pytest.mark.parametrize("bframes", [0, 3])
def test_few_packets_are_fed_behind_a_groups_last_chosen_frame(monkeypatch: pytest.MonkeyPatch, bframes: int) -> None:
    """A decoder of four threads returns a frame three packets late; before a jump, these packets are not fed."""
    monkeypatch.setattr(video, "num_threads", lambda *_: 4)
    options = {"g": "50", "keyint_min": "50", "sc_threshold": "0", "bf": str(bframes)}
    data = made.film(made.ramp(150), codec="libx264", options=options)
    whole = frames_of(data, list(range(150)))
    fed, lost, real = [], set[int](), FilmFile._decoded

    def counted(film: FilmFile, context: Any, packet: Any) -> list[Any]:
        fed.append(packet is not None)
        return [frame for frame in real(film, context, packet) if frame.pts not in lost]

    monkeypatch.setattr(FilmFile, "_decoded", counted)
    for chosen in ([10, 60, 110], [0, 5, 9, 120], [49, 50, 51, 149]):
        fed.clear()
        np.testing.assert_array_equal(frames_of(data, chosen), whole[chosen])
        groups = {number // 50: number % 50 + 1 for number in chosen}
        assert sum(fed) <= sum(groups.values()) + (bframes + 1) * len(groups), "and what B-frames are predicted from"
    if not bframes:  # with B-frames, no frame refers to the next frame, which was not decoded
        lost.add(FilmFile(data, "mp4", LIMITS, planner(), Alarm(30))._times[10])
        np.testing.assert_array_equal(frames_of(data, [5, 10, 60]), whole[[5, 11, 60]])


def test_threads_follow_cores_and_frames() -> None:
    full, small = 1920 * 1080, 320 * 240
    assert [num_threads(cores, full) for cores in (1, 2, 4, 8, 16, 64)] == [1, 2, 4, 4, 12, 12]
    assert [num_threads(cores, small) for cores in (1, 2, 4, 16)] == [1, 2, 4, 4]


@pytest.mark.parametrize(("container", "codec", "options"), VARIANTS)
def test_drained_decoders_go_on_behind_a_jump(container: str, codec: str, options: dict[str, str]) -> None:
    """Frames are right in every codec, with jumps over most of a group."""
    long = {"x265-params": "log-level=none:keyint=50:min-keyint=50"} if codec == "libx265" else {**options, "g": "50"}
    data = made.film(made.ramp(150), 10, container, codec, options=long)
    file_format = sniff(data)
    assert file_format is not None

    def frames(chosen: list[int]) -> np.ndarray:
        plan = FilmPlan(np.array(chosen), Scale(64, 96), 0.1)
        return FilmFile(data, file_format, LIMITS, lambda *_: plan, Alarm(30)).decode(Alarm(30))

    whole = frames(list(range(150)))
    for chosen in ([10, 60, 110], [0, 5, 9, 120], [49, 50, 51, 149]):
        np.testing.assert_array_equal(frames(chosen), whole[chosen])
