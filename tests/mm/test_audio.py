"""Sound of every container becomes mono at 16 kHz; its length is counted during decoding (SECURITY S20)."""

from __future__ import annotations

import os
import struct
from functools import partial

import numpy as np
import pytest

from mm.decode import audio
from mm.decode.alarm import Alarm
from mm.decode.audio import SAMPLE_RATE, SoundFile, downmix_weights, open_container
from mm.decode.magic import sniff
from mm.errors import MediaError
from mm.limits import MediaLimits
from tests.mm import made

LIMITS = MediaLimits()
FORMATS = [("wav", "pcm_s16le"), ("mp3", "libmp3lame"), ("flac", "flac"), ("ogg", "libopus"), ("ipod", "aac")]
FORMATS += [("webm", "libopus"), ("mp4", "aac"), ("ipod", "alac")]


def decode(data: bytes, limits: MediaLimits = LIMITS, seconds: float | None = None) -> np.ndarray:
    word = sniff(data)
    assert word is not None
    return SoundFile(data, word, limits, seconds).decode(Alarm())


def refusal(data: bytes, limits: MediaLimits = LIMITS, seconds: float | None = None) -> MediaError:
    with pytest.raises(MediaError) as caught:
        decode(data, limits, seconds)
    return caught.value


def loudest_hertz(samples: np.ndarray) -> float:
    middle = samples[len(samples) // 4 : len(samples) // 4 * 3]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    return float(spectrum.argmax() * SAMPLE_RATE / len(middle))


@pytest.mark.parametrize(("container", "codec"), FORMATS)
def test_every_format_keeps_its_length_and_pitch(container: str, codec: str) -> None:
    out = decode(made.sound(made.tone(1.0, 48000), 48000, container, codec))
    assert out.dtype == np.float32
    assert out.ndim == 1
    assert abs(len(out) - SAMPLE_RATE) <= 0.05 * SAMPLE_RATE
    assert abs(loudest_hertz(out) - 440) < 5
    assert 0.4 < np.abs(out[2000:-2000]).max() < 0.8


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000, 96000, 192000])
def test_rates_are_resampled_as_the_reference_does(rate: int) -> None:
    import soxr

    samples = made.tone(0.5, rate)
    out = decode(made.sound(samples, rate, "wav", "pcm_f32le"))
    expected = soxr.resample(samples[0], rate, SAMPLE_RATE, quality="HQ")
    assert abs(len(out) - len(expected)) <= 1
    size = min(len(out), len(expected))
    assert np.abs(out[:size] - expected[:size]).max() < 1e-5


@pytest.mark.parametrize("codec", ["pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le"])
def test_sample_formats_have_the_same_scale(codec: str) -> None:
    samples = made.tone(0.1)
    out = decode(made.sound(samples, 16000, "wav", codec))
    assert np.abs(out - samples[0]).max() < (0.01 if codec == "pcm_u8" else 5e-5)


def test_stereo_is_the_mean_of_both_sides() -> None:
    samples = made.tone(0.1, channels=2)
    out = decode(made.sound(samples, 16000, "wav", "pcm_f32le"))
    assert np.abs(out - samples.mean(0)).max() < 1e-6


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 6, 8])
def test_all_channel_counts_are_mixed(channels: int) -> None:
    out = decode(made.sound(made.tone(0.1, 48000, channels), 48000, "wav", "pcm_s16le"))
    assert 0.05 < np.abs(out).max() <= 0.51


@pytest.mark.parametrize(("container", "codec"), [("ogg", "libopus"), ("ipod", "aac"), ("matroska", "libopus")])
def test_eight_separate_channels_do_not_end_the_process(container: str, codec: str) -> None:
    out = decode(made.sound(made.tone(0.5, 48000, 8), 48000, container, codec))
    assert abs(len(out) - 8000) < 800
    assert 0.05 < np.abs(out).max() < 0.8


def test_surround_is_mixed_by_the_broadcast_weights_without_the_bass_channel() -> None:
    names = ["FL", "FR", "FC", "LFE", "BL", "BR"]
    weights = downmix_weights(names)
    total = 0.7071 * 2 + 1.0 + 0.5 * 2
    assert weights == pytest.approx(np.array([0.7071, 0.7071, 1.0, 0.0, 0.5, 0.5]) / total)
    samples = np.zeros((6, 4800), np.float32)
    samples[3] = 0.9
    assert np.abs(decode(made.sound(samples, 16000, "wav", "pcm_f32le", "5.1"))).max() == 0


def test_length_is_counted_not_believed() -> None:
    data = made.sound(made.tone(1.0))
    assert len(decode(data, seconds=1.0)) == SAMPLE_RATE
    error = refusal(data, seconds=0.99)
    assert (error.status, error.reason) == (400, "media_too_large")
    lying = bytearray(data)
    at = data.index(b"data") + 4
    lying[at : at + 4] = struct.pack("<I", 3200)  # the header claims a tenth of a second
    assert len(decode(bytes(lying), seconds=1.0)) <= SAMPLE_RATE


def test_small_files_cannot_unfold_past_the_cap() -> None:
    silence = np.zeros((1, 16000 * 30), np.float32)
    data = made.sound(silence, 16000, "flac", "flac")
    assert len(data) < 16000
    assert refusal(data, seconds=20).reason == "media_too_large"


def test_rates_and_channels_have_bounds() -> None:
    assert refusal(made.sound(made.tone(0.1, 4000), 4000)).reason == "media_unsupported"
    assert refusal(made.sound(made.tone(0.1), 16000), MediaLimits(audio_sample_rates=(22050, 48000))).reason == (
        "media_unsupported"
    )
    stereo = made.sound(made.tone(0.1, channels=2))
    assert refusal(stereo, MediaLimits(audio_max_channels=1)).reason == "media_unsupported"


def test_too_short_and_empty_sounds_are_refused() -> None:
    assert refusal(made.sound(made.tone(0.01))).reason == "media_invalid"
    assert len(decode(made.sound(made.tone(0.02)))) == 320


def test_numbers_that_are_none_are_refused() -> None:
    samples = made.tone(0.1)
    samples[0, 100] = np.nan
    assert refusal(made.sound(samples, 16000, "wav", "pcm_f32le")).reason == "media_invalid"
    samples[0, 100] = np.inf
    assert refusal(made.sound(samples, 16000, "wav", "pcm_f32le")).reason == "media_invalid"


def test_a_film_without_sound_has_no_sound() -> None:
    assert refusal(made.film(made.ramp(4))).reason == "media_invalid"


def test_a_films_sound_can_be_decoded_alone() -> None:
    out = decode(made.film(made.ramp(10), track=made.tone(1.0)))
    assert abs(loudest_hertz(out) - 440) < 5


def test_playlists_and_raw_streams_are_not_recognised() -> None:
    for data in (
        b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"\xff\xf1\x50\x80\x00\x1f\xfc",  # raw AAC
        b"RIFF\x00\x00\x00\x00AVI LIST",
        b".snd\x00\x00\x00\x18",
    ):
        assert sniff(data) is None


def test_streamed_wav_with_open_size_is_read() -> None:
    data = bytearray(made.sound(made.tone(0.5)))
    at = bytes(data).index(b"data") + 4
    for field in (4, at):
        data[field : field + 4] = b"\xff\xff\xff\xff"
    assert abs(len(decode(bytes(data))) - 8000) <= 1


@pytest.mark.parametrize(("container", "codec"), FORMATS)
def test_truncated_sounds_are_refused_where_the_container_has_a_size(container: str, codec: str) -> None:
    data = made.sound(made.tone(1.0, 48000), 48000, container, codec)
    for tenth in range(1, 10):
        cut = data[: len(data) * tenth // 10]
        out = made.outcome(partial(decode, cut))
        if isinstance(out, MediaError):
            assert (out.status, out.reason) == (400, "media_invalid"), tenth
        else:
            # only formats without a total size may come out shorter
            assert container in ("mp3", "ogg"), tenth
            assert len(out) < SAMPLE_RATE


def test_random_damage_never_escapes_as_another_error() -> None:
    rng = np.random.default_rng(3)
    for container, codec in FORMATS:
        data = made.sound(made.tone(0.3, 48000), 48000, container, codec)
        for _ in range(25):
            broken = bytearray(data)
            for position in rng.integers(0, len(data), 8):
                broken[position] = rng.integers(0, 256)
            word = sniff(bytes(broken))
            if word in ("wav", "mp3", "flac", "ogg", "m4a", "webm", "mp4", "mkv"):
                out = made.outcome(partial(decode, bytes(broken)))
                if isinstance(out, MediaError):
                    assert out.reason in ("media_invalid", "media_too_large", "media_unsupported")


def test_a_tripped_alarm_ends_decoding() -> None:
    data = made.sound(made.tone(1.0))
    alarm = Alarm()
    alarm.trip()
    with pytest.raises(MediaError) as caught:
        SoundFile(data, "wav", LIMITS).decode(alarm)
    assert caught.value.reason == "media_too_complex"


def test_a_long_wav_is_read_in_large_packets() -> None:
    """Packets are few because demuxing each packet takes the GIL several times."""
    data = made.sound(made.tone(100.0))
    with open_container(data, "wav", LIMITS) as container:
        packets = list(container.demux(audio=0))
    assert len(packets) < 60
    assert sum(packet.size for packet in packets) == 2 * 100 * SAMPLE_RATE
    assert len(decode(data, seconds=101.0)) == 100 * SAMPLE_RATE


@pytest.mark.parametrize(
    ("rate", "channels", "codec"), [(16000, 1, "pcm_s16le"), (44100, 2, "pcm_f32le"), (8000, 1, "pcm_mulaw")]
)
def test_a_wav_says_how_long_it_is_without_being_opened(monkeypatch, rate: int, channels: int, codec: str) -> None:
    data = made.sound(made.tone(1.5, rate, channels), rate, codec=codec)
    streamed = bytearray(data)
    for field in (4, data.index(b"data") + 4):
        streamed[field : field + 4] = b"\xff\xff\xff\xff"
    opened = []
    monkeypatch.setattr(audio, "open_container", lambda *given: opened.append(given) or open_container(*given))
    for each in (data, bytes(streamed)):
        assert SoundFile(each, "wav", LIMITS).promised_seconds() == pytest.approx(1.5, abs=0.01)
    assert not opened
    without_rate = data.replace(b"fmt ", b"odd ")
    made.outcome(SoundFile(without_rate, "wav", LIMITS).promised_seconds)
    assert len(opened) == 1


def frame_by_frame(*given):
    raise audio.NotInBulk
    yield


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files in memory that have no name are Linux's")
@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp3", "libmp3lame"), ("flac", "flac"), ("ogg", "libopus"), ("ipod", "aac"), ("webm", "libopus")],
)
def test_frames_are_decoded_many_at_a_time(monkeypatch, container: str, codec: str) -> None:
    """Frames are few because each frame that Python handles takes the GIL several times."""
    data, seen, bulk = made.sound(made.tone(6.0, 48000, 2), 48000, container, codec), [], audio.in_bulk

    def counted(*given):
        for frame in bulk(*given):
            seen.append(frame.samples)
            yield frame

    monkeypatch.setattr(audio, "in_bulk", counted)
    before = len(os.listdir("/proc/self/fd"))
    together = decode(data)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(seen) == -(-sum(seen) // (1 << 16))
    monkeypatch.setattr(audio, "in_bulk", frame_by_frame)
    assert np.array_equal(together, decode(data))


@pytest.mark.parametrize(("container", "codec"), FORMATS)
def test_damage_has_the_same_outcome_in_bulk_and_frame_by_frame(monkeypatch, container: str, codec: str) -> None:
    """Both ways return the same sound, or both refuse it."""
    rng, data = np.random.default_rng(5), made.sound(made.tone(1.0, 48000, 2), 48000, container, codec)
    for _ in range(30):
        broken = bytearray(data)
        for position in rng.integers(0, len(data), 6):
            broken[position] = rng.integers(0, 256)
        if sniff(bytes(broken)) is None:
            continue
        with monkeypatch.context() as patch:
            got = made.outcome(partial(decode, bytes(broken)))
            patch.setattr(audio, "in_bulk", frame_by_frame)
            want = made.outcome(partial(decode, bytes(broken)))
        assert type(got) is type(want)
        assert isinstance(want, MediaError) or np.array_equal(got, want)
