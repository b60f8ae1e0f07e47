"""Embedded media begin to load before the text is rendered; nothing is fetched early, and no task is left running."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from mm.errors import MediaError, invalid
from mm.item import MediaRef
from mm.item_job import ItemJob
from server.jobs.media_preload import MediaPreload
from server.render.chat import Renderer
from server.render.messages import LOOKED_AT
from tests.server.live import picture

pytestmark = pytest.mark.asyncio(loop_scope="session")

HERE = MediaRef("image", "data:image/jpeg;base64,AAAA")
SOUND = MediaRef("audio", "AAAA", format="wav")
AWAY = MediaRef("image", "https://example.org/a.jpg")
KNOWN = MediaRef("image", None, uuid="a")


class Loader:
    """A double of MediaLoader: notes its calls, and returns when the event `go` is set."""

    def __init__(self):
        self.asked, self.ended, self.error = [], 0, None
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def load(self, refs, *, options, scope, decoding=None, report=None):
        self.asked.append((list(refs), options, scope))
        self.begun.set()
        if decoding is not None:
            decoding.set_result(None)
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        if self.error is not None:
            raise self.error
        return [f"processed {ref.modality}" for ref in refs]


async def test_embedded_media_load_before_they_are_asked_for_and_once():
    loader = Loader()
    async with MediaPreload(loader, b"scope", None) as preload:
        await preload.begin([HERE, SOUND])
        assert loader.asked == [([HERE, SOUND], None, b"scope")]
        loader.go.set()
        assert await preload.load([HERE, SOUND]) == ["processed image", "processed audio"]
    assert len(loader.asked) == loader.ended == 1


@pytest.mark.parametrize("refs", [[AWAY], [HERE, AWAY], [KNOWN], []])
async def test_what_is_not_here_waits_for_the_prompt(refs):
    loader = Loader()
    loader.go.set()
    async with MediaPreload(loader, b"", None) as preload:
        await preload.begin(refs)
        assert not loader.asked
        assert len(await preload.load(refs)) == len(refs)


async def test_what_was_not_seen_as_the_prompt_has_it_is_loaded_as_the_prompt_has_it():
    loader = Loader()
    loader.go.set()
    async with MediaPreload(loader, b"", None) as preload:
        await preload.begin([HERE])
        assert await preload.load([HERE, SOUND]) == ["processed image", "processed audio"]
    assert [asked[0] for asked in loader.asked] == [[HERE], [HERE, SOUND]]


async def test_a_text_that_is_refused_ends_the_loading():
    loader = Loader()
    preload = MediaPreload(loader, b"", None)

    async def request():
        async with preload:
            await preload.begin([HERE])
            raise ValueError("the text")

    with pytest.raises(ValueError, match="the text"):
        await request()
    assert loader.ended == len(loader.asked) == 1


async def test_an_error_of_the_media_is_raised_where_they_are_awaited():
    loader = Loader()
    loader.error = invalid("damaged")
    loader.go.set()
    async with MediaPreload(loader, b"", None) as preload:
        await preload.begin([HERE])
        await asyncio.sleep(0.01)
        with pytest.raises(MediaError, match="damaged"):
            await preload.load([HERE])


async def test_a_request_that_is_cancelled_takes_its_loading_along():
    loader = Loader()

    async def request():
        async with MediaPreload(loader, b"", None) as preload:
            await preload.begin([HERE])
            await preload.load([HERE])

    task = asyncio.create_task(request())
    await loader.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert loader.ended == 1


def user(*parts):
    return {"role": "user", "content": list(parts)}


SEEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
HEARD = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
FAR = {"image_url": {"url": "https://example.org/a.jpg"}}
TEXT = {"type": "text", "text": "what is this?"}
SPOKEN = {"role": "system", "content": "Say little."}


@pytest.mark.parametrize(
    ("messages", "count"),
    [
        ([SPOKEN, user(TEXT, SEEN, "and this?"), user(HEARD)], 2),
        ([SPOKEN, user({"image_url": SEEN["image_url"]}, {"text": "bare"})], 1),
        ([user(SEEN, FAR)], 0),
        ([user({"type": "image_url", "image_url": None}, SEEN)], 0),
        ([user({"type": ["image_url"]}, SEEN)], 0),
        ([user(SEEN, *[TEXT] * LOOKED_AT)], 0),
        ([SPOKEN, {"role": "user", "content": None}, {"role": "user"}], 0),
    ],
)
async def test_a_glance_finds_what_reading_finds_or_nothing(client, messages, count):
    renderer = client.state.renderer
    found = renderer.embedded(messages)
    assert len(found) == count
    if count:
        prompt = await renderer.chat(messages)
        assert tuple(found) == prompt.media


def visible_to_chat(data):
    seen = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return {"messages": [user(TEXT, seen)], "max_tokens": 1}


def visible_to_messages(data):
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"model": "omniloop", "messages": [user({"type": "image", "source": source}, TEXT)], "max_tokens": 1}


def visible_to_responses(data):
    seen = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    return {"input": [user(seen, {"type": "input_text", "text": "what is this?"})], "max_output_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "colour"),
    [
        ("/v1/chat/completions", visible_to_chat, "teal"),
        ("/v1/messages", visible_to_messages, "navy"),
        ("/v1/responses", visible_to_responses, "olive"),
    ],
)
async def test_a_picture_is_in_the_pool_before_the_template(client, monkeypatch, path, body, colour):
    """The pool has one thread, so the work that is submitted first runs first."""
    order = []

    def noted(owner, name):
        real = getattr(owner, name)

        def run(*args, **kwargs):
            order.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    noted(ItemJob, "_unpack")
    noted(Renderer, "_render")
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(client.state.renderer, "_pool", pool)
        monkeypatch.setattr(client.state.media, "_pool", pool)
        reply = await client.post(path, body(picture(colour)))
    assert reply.status == 200, reply.body
    assert order == ["_unpack", "_render"]
