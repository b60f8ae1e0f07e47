"""Odd files through the loader: the right tensor or the documented refusal, within bytes and time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import mm.item_job as jobs
from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions, MediaRef, Processed
from mm.permits import DecodePermit
from tests.mm import corpus, made
from tests.mm.test_load import loader

LIMITS = {"audio_max_seconds": 5.0, "video_max_seconds": 6.0, "image_max_pixels": 1 << 24}
EVERY_FRAME = MediaOptions(num_frames=12)


@pytest.fixture(scope="module")
def odd() -> list[corpus.Odd]:
    return corpus.odd_files()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[MediaItem]:
    """Items that decoders return, before a processor scales and cuts them; the newest is last."""
    found: list[MediaItem] = []
    real = jobs.ItemJob._finish

    def finish(job: jobs.ItemJob, opened: jobs.Opened, *args: object) -> Processed:
        def remaining(alarm: object) -> MediaItem:
            found.append(opened.decode(alarm))
            return found[-1]

        return real(job, jobs.replace(opened, decode=remaining), *args)

    monkeypatch.setattr(jobs.ItemJob, "_finish", finish)
    return found


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of bytes that were reserved before a file was decoded."""
    found: list[int] = []
    later, now = DecodePermit.reserve, DecodePermit.reserve_now

    async def reserve(permit: DecodePermit, size: int, timeout: float) -> None:
        found.append(size)
        await later(permit, size, timeout)

    monkeypatch.setattr(DecodePermit, "reserve", reserve)
    monkeypatch.setattr(DecodePermit, "reserve_now", lambda permit, size: (found.append(size), now(permit, size))[1])
    return found


async def test_every_odd_file_is_read_right_or_refused_by_its_reason(
    odd: list[corpus.Odd], decoded: list[MediaItem], reserved: list[int]
) -> None:
    assert len(odd) >= 80
    assert len({file.name for file in odd}) == len(odd)
    wrong = []
    async with loader(**LIMITS) as media:
        for file in odd:
            decoded.clear()
            reserved.clear()
            try:
                async with asyncio.timeout(60):
                    (processed,) = await media.load([MediaRef(file.modality, file.data)], options=EVERY_FRAME)
            except MediaError as error:
                if error.reason not in file.refused:
                    wrong.append((file.name, error.status, error.reason, error.message))
                continue
            if file.refused or not fits(file, decoded[-1]):
                wrong.append((file.name, decoded[-1].data.shape, decoded[-1].data.mean()))
            assert decoded[-1].data.nbytes + processed.nbytes <= sum(reserved), file.name
    assert not wrong


def fits(file: corpus.Odd, item: MediaItem) -> bool:
    if file.modality == "audio":
        return abs(len(item.data) - file.size[0]) <= 0.07 * 16000  # codecs add up to 0.07 s before and after the sound
    if file.modality == "video":
        greys = item.data.mean(axis=(1, 2, 3))
        shown = "damaged" in file.name or np.abs(greys - made.ramp(len(greys)).mean(axis=(1, 2, 3))).max() <= 4
        return len(item.data) == file.size[0] and shown and turned(file, item)
    mean = item.data.reshape(-1, 3).mean(axis=0)
    return turned(file, item) and (file.mean is None or bool(np.abs(mean - file.mean).max() <= 6))


def turned(file: corpus.Odd, item: MediaItem) -> bool:
    """Whether the item is upright or lying as the file is; the processor decides its size."""
    height, width = item.data.shape[-3:-1]
    return (height > width) == (file.size[-2] > file.size[-1])
