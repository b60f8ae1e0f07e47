"""Limits of media as flags: media beyond a limit get a 400 that says what was got and allowed (S18, S20, S21)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mm.item import MediaRef
from mm.load import MediaLoader
from server.cli import parse
from server.flags.command_line import UsageError, all_flags
from server.flags.config import Config
from server.flags.help import line
from tests.mm import made
from tests.mm.test_load import PROCESSOR, refusal


def film() -> bytes:
    return made.film(made.ramp(20), 10, track=made.tone(2.0))


def stereo() -> bytes:
    return made.sound(made.tone(0.5, rate=44100, channels=2), 44100)


def picture() -> bytes:
    return made.png(made.noise(40, 90))


@pytest.mark.parametrize(
    ("words", "modality", "source", "reason", "text"),
    [
        ("--image-formats jpeg,webp", "image", picture, "media_unsupported", "the image is png; send jpeg, webp"),
        ("--image-max-pixels 3599", "image", picture, "media_too_large", "is 90x40; at most 3599 pixels are read"),
        ("--image-min-side 41", "image", picture, "media_invalid", "is 90x40; both sides must be at least 41 pixels"),
        ("--image-max-aspect 2.25", "image", picture, "media_too_large", "is 90x40; its sides may differ by less than"),
        ("--audio-formats mp3,flac", "audio", stereo, "media_unsupported", "the audio is wav; send mp3, flac"),
        ("--audio-sample-rates 8000-16000", "audio", stereo, "media_unsupported", "is 44100 Hz; 8000 to 16000 Hz are"),
        ("--audio-max-channels 1", "audio", stereo, "media_unsupported", "has 2 channels; 1 to 1 are read"),
        ("--audio-min-seconds 0.6", "audio", stereo, "media_invalid", "shorter than 0.6 seconds"),
        ("--video-formats webm,mkv", "video", film, "media_unsupported", "the video is mp4; send webm, mkv"),
        ("--video-codecs vp8,vp9", "video", film, "media_unsupported", "codec is h264; send one of vp8, vp9"),
        ("--video-max-decoded-frames 19", "video", film, "media_too_large", "has more than 19 frames"),
        ("--video-max-frame-pixels 6143", "video", film, "media_too_large", "are 96x64; at most 6143 pixels each"),
        ("--video-max-total-pixels 1000", "video", film, "media_too_large", "pixels; at most 1000 are kept"),
        ("--video-max-streams 1", "video", film, "media_unsupported", "has 2 streams; at most 1 are read"),
    ],
)
async def test_a_flag_refuses_what_it_says(
    words: str, modality: str, source: Callable[[], bytes], reason: str, text: str
) -> None:
    limits = parse(words.split())[1].media
    assert limits != Config().media
    with ThreadPoolExecutor(2) as pool:
        media = MediaLoader(limits, PROCESSOR, pool)
        error = await refusal(media, MediaRef(modality, made.data_url(source())))
        assert (error.status, error.reason) == (400, reason)
        assert text in error.message
        await media.close()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--image-formats jpeg,eps", "--image-formats eps: must be some of jpeg, png, webp, gif, bmp, tiff, avif"),
        ("--video-codecs=", "--video-codecs is empty: must be some of h264, hevc"),
        ("--audio-sample-rates 8000", "--audio-sample-rates 8000: must be LOW-HIGH, such as 8000-48000"),
        ("--audio-sample-rates 48000-8000", "--audio-sample-rates 48000-8000: must be LOW-HIGH"),
        ("--audio-sample-rates 8000-loud", "--audio-sample-rates loud: must be a whole number"),
        ("--audio-max-channels 0", "--audio-max-channels 0: must be at least 1"),
        ("--media-isolation films", "--media-isolation films: must be one of none, video, all"),
        ("--helper-processes 0", "--helper-processes 0: must be at least 1"),
        ("--helper-memory-bytes 100M", "--helper-memory-bytes 104857600: must be at least 536870912"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(words: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words.split())
    assert text in str(caught.value)


def test_help_writes_a_span_as_it_is_read() -> None:
    assert "(8000-192000)" in line(all_flags()["audio-sample-rates"])
    assert parse(["--audio-sample-rates", "8000-192000"])[1] == Config()


def test_each_limit_on_media_has_its_flag() -> None:
    """Every limit has a flag: SECURITY S13 to S24 name all limits."""
    flags = {flag.field for flag in all_flags().values() if flag.group == "media"}
    assert flags == set(Config().media.__dataclass_fields__)
