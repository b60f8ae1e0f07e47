"""Embedded media begin to load while the text is rendered; nothing is fetched early, and nothing is left running."""

import asyncio

import pytest

from mm.errors import MediaError, invalid
from mm.item import MediaRef
from server.media_ahead import MediaAhead

HERE = MediaRef("image", "data:image/jpeg;base64,AAAA")
SOUND = MediaRef("audio", "AAAA", format="wav")
AWAY = MediaRef("image", "https://example.org/a.jpg")
KNOWN = MediaRef("image", None, uuid="a")


class Loader:
    """Stands for MediaLoader: notes what it is asked, and answers when it may."""

    def __init__(self):
        self.asked, self.ended, self.error = [], 0, None
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def load(self, refs, *, options, scope):
        self.asked.append((list(refs), options, scope))
        self.begun.set()
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        if self.error is not None:
            raise self.error
        return [f"processed {ref.modality}" for ref in refs]


async def told(ahead, refs):
    await asyncio.to_thread(ahead.found, refs)
    await asyncio.sleep(0)


async def test_embedded_media_load_before_they_are_asked_for_and_once():
    loader = Loader()
    async with MediaAhead(loader, b"scope", None) as ahead:
        await told(ahead, [HERE, SOUND])
        assert loader.asked == [([HERE, SOUND], None, b"scope")]
        loader.go.set()
        assert await ahead.load([HERE, SOUND]) == ["processed image", "processed audio"]
    assert len(loader.asked) == loader.ended == 1


@pytest.mark.parametrize("refs", [[AWAY], [HERE, AWAY], [KNOWN], []])
async def test_what_is_not_here_waits_for_the_prompt(refs):
    loader = Loader()
    loader.go.set()
    async with MediaAhead(loader, b"", None) as ahead:
        await told(ahead, refs)
        assert not loader.asked
        assert len(await ahead.load(refs)) == len(refs)


async def test_a_text_that_is_refused_ends_the_loading():
    loader = Loader()
    ahead = MediaAhead(loader, b"", None)

    async def request():
        async with ahead:
            await told(ahead, [HERE])
            raise ValueError("the text")

    with pytest.raises(ValueError, match="the text"):
        await request()
    assert loader.ended == 1
    await told(ahead, [HERE])  # a template that ended too late
    assert len(loader.asked) == 1


async def test_an_error_of_the_media_is_told_where_they_are_awaited():
    loader = Loader()
    loader.error = invalid("damaged")
    loader.go.set()
    async with MediaAhead(loader, b"", None) as ahead:
        await told(ahead, [HERE])
        await asyncio.sleep(0.01)
        with pytest.raises(MediaError, match="damaged"):
            await ahead.load([HERE])


async def test_a_request_that_is_cancelled_takes_its_loading_along():
    loader = Loader()

    async def request():
        async with MediaAhead(loader, b"", None) as ahead:
            await told(ahead, [HERE])
            await ahead.load([HERE])

    task = asyncio.create_task(request())
    await loader.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert loader.ended == 1
