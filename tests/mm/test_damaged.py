"""A picture that cannot be decoded leaves nothing: its memory is free when its error has been told (S23, S44)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import mm.load as loading
from mm.errors import MediaError
from mm.item import MediaRef
from tests.mm import made
from tests.mm.test_load import foretelling

WHOLE = made.picture(made.noise(60, 80), "JPEG")


@pytest.fixture
def uncollected() -> Iterator[None]:
    """The garbage collector comes seldom where the server has frozen what it began with."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("at_once", [False, True])
async def test_memory_lent_comes_back_with_the_error(
    uncollected: None, monkeypatch: pytest.MonkeyPatch, at_once: bool, count: int
) -> None:
    lent: list[weakref.ref[np.ndarray]] = []

    def lend(size: int) -> np.ndarray:
        room = np.zeros(size, np.uint8)
        lent.append(weakref.ref(room))
        return room

    if not at_once:
        monkeypatch.setattr(loading, "AT_ONCE", 1000)
    cut = [WHOLE[: len(WHOLE) // 2 + more] for more in range(count)]
    refs = [MediaRef("image", made.data_url(data, "image/jpeg")) for data in cut]
    async with foretelling() as media:
        media._lend = lend
        read = asyncio.get_running_loop().create_future()
        with pytest.raises(MediaError, match="cut short") as caught:
            await media.load(refs, read=read)
        del caught, read
        await asyncio.sleep(0.05)  # for decoders whose neighbour's error came first
        assert lent
        assert [room() for room in lent if room() is not None] == []
