"""A picture that fails or is cancelled leaks no memory: its pixels are freed with its error (S12, S23, S44)."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
from PIL import Image

import mm.item_job as jobs
from mm.decode.image import ImageFile
from mm.errors import MediaError
from mm.item import MediaRef
from tests.mm import made
from tests.mm.test_load import scaling

Pictures = list[weakref.ref[Image.Image]]
WHOLE = made.picture(made.noise(60, 80), "JPEG")


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Turns garbage collection off: a server freezes the objects that exist at its start and collects rarely."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Pictures:
    """Weak references to Pillow's pictures of all files opened from now on; a picture holds the decoded pixels."""
    opened, real = [], ImageFile.__init__

    def init(picture: ImageFile, *args: object) -> None:
        real(picture, *args)
        opened.append(weakref.ref(picture._image))

    monkeypatch.setattr(ImageFile, "__init__", init)
    return opened


async def gone(pictures: Pictures) -> None:
    """Waits until the pool's threads have released their last work, without garbage collection."""
    async with asyncio.timeout(60):
        while any(picture() is not None for picture in pictures):  # noqa: ASYNC110 (no event to wait for)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("at_once", [False, True])
async def test_memory_is_free_with_the_error(
    uncollected: None,
    monkeypatch: pytest.MonkeyPatch,
    pictures: Pictures,
    at_once: bool,
    count: int,
) -> None:
    if not at_once:
        monkeypatch.setattr(jobs, "AT_ONCE", 1000)
    cut = [WHOLE[: len(WHOLE) // 2 + more] for more in range(count)]
    refs = [MediaRef("image", made.data_url(data, "image/jpeg")) for data in cut]
    async with scaling() as media:
        decoding = asyncio.get_running_loop().create_future()
        with pytest.raises(MediaError, match="cut short") as caught:
            await media.load(refs, decoding=decoding)
        del caught, decoding
        assert pictures
        await gone(pictures)  # after the first error the other decoders end a little later


@pytest.mark.parametrize("at_once", [False, True])
async def test_memory_is_free_after_a_decoder_whose_request_is_cancelled(
    uncollected: None, monkeypatch: pytest.MonkeyPatch, pictures: Pictures, at_once: bool
) -> None:
    begun, go, decode = threading.Event(), threading.Event(), ImageFile.decode
    monkeypatch.setattr(ImageFile, "decode", lambda *args: (begun.set(), go.wait(60), decode(*args))[2])
    if not at_once:
        monkeypatch.setattr(jobs, "AT_ONCE", 1000)
    async with scaling() as media:
        job = asyncio.create_task(media.load([MediaRef("image", made.data_url(WHOLE, "image/jpeg"))]))
        await asyncio.to_thread(begun.wait, 5)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        del job
        assert media.ledger()["media_stuck"] == 1
        go.set()
        while media.ledger()["media_stuck"]:  # noqa: ASYNC110 (no event to wait for)
            await asyncio.sleep(0.001)
        assert len(pictures) == 1
        await gone(pictures)
