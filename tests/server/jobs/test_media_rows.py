"""Rows of a picture, a film or a sound give the item's answer; rows that do not fit are refused by name (S32)."""

from __future__ import annotations

import base64
import io
import wave

import numpy as np
import openai
import pytest
import torch
from PIL import Image
from safetensors.numpy import save

from engine.models.registry import load_model_config
from mm.client_rows import ClientRows
from mm.errors import MediaError
from mm.item import MediaRef
from mm.processors.given import given as item_of_rows
from mm.processors.registry import processor_for
from server.start.makers import make_renderer
from tests import tiny
from tests.server.jobs.test_prompt_rows import encoded
from tests.server.live import listening, picture
from tests.tiny_sounds import SOUNDS

pytestmark = pytest.mark.asyncio(loop_scope="session")

URL = "data:image/png;base64," + picture("blue")
LOOK = {"type": "image_url", "image_url": {"url": URL}}


@pytest.fixture
def rows_client(serve):
    """A client of a server that accepts rows, on the shared engine."""
    client = serve(rows={"enable_mm_embeds": True})
    client.state.renderer = make_renderer(client.state)
    return client


@pytest.fixture
def made(state):
    """A function that returns (rows, grid) of the picture, computed by the served model's tower."""

    async def of_tower() -> tuple[np.ndarray, np.ndarray]:
        (processed,) = await state.media.load([MediaRef("image", URL)])
        (part,) = processed.parts
        tower = state.engine.inspect().runtime.model.towers["image"]
        with torch.inference_mode():
            rows = tower.encode({name: torch.from_numpy(array) for name, array in part.features.items()})
        return rows.float().numpy(), part.features["grid_thw"]

    return of_tower


async def asked(client, *parts, **fields):
    content = [*parts, {"type": "text", "text": "What colour is it?"}]
    messages = [{"role": "user", "content": content}]
    return await client.chat(messages=messages, max_tokens=12, temperature=0, ignore_eos=True, **fields)


def part(rows: np.ndarray, grid: np.ndarray | None) -> dict:
    given = encoded(save({"rows": rows}))
    if grid is None:
        return {"type": "image_embeds", "image_embeds": given}
    held = {"image_embeds": given, "image_grid_thw": encoded(save({"grid": grid}))}
    return {"type": "image_embeds", "image_embeds": held}


async def test_rows_do_what_the_picture_does(rows_client, made):
    rows, grid = await made()
    for more in ([], [LOOK]):  # alone, and with another picture
        wanted = (await asked(rows_client, LOOK, *more, return_token_ids=True)).json()
        reply = await asked(rows_client, part(rows, grid), *more, return_token_ids=True)
        assert reply.status == 200, reply.content
        got = reply.json()
        assert got["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
        assert got["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
    assert rows_client.state.media.ledger()["media_reserved_bytes"] == 0


async def test_what_does_not_fit_is_refused_by_its_path(rows_client, made):
    rows, grid = await made()
    wrong = [
        part(rows, None),
        part(rows[:-1], grid),
        part(rows[:, :-1], grid),
        part(rows * np.nan, grid),
        part(rows, grid * 2),
        part(rows, grid[:, :2]),
        part(rows, grid.astype(np.float32)),
        part(rows, -grid),
        {"type": "image_embeds", "image_embeds": "%%%%"},
        {"type": "image_embeds"},
        {"type": "image_embeds", "image_embeds": {"more": 1}},
    ]
    for given in wrong:
        reply = await asked(rows_client, given)
        assert (reply.status, reply.error["param"]) == (400, "messages[0].content[0].image_embeds"), reply.content
    assert rows_client.state.media.ledger()["media_reserved_bytes"] == 0


async def test_a_server_that_does_not_allow_them_says_so(client, made):
    reply = await asked(client, part(*await made()))
    assert (reply.status, reply.error["reason"]) == (403, "override_not_trusted")
    assert "--enable-mm-embeds" in reply.error["message"]


def film() -> str:
    """A data URL of two seconds of colours: an animated picture."""
    frames = [Image.new("RGB", (56, 56), (30 * step, 0, 200 - 20 * step)) for step in range(8)]
    data = io.BytesIO()
    frames[0].save(data, "GIF", save_all=True, append_images=frames[1:], duration=250, loop=0)
    return "data:image/gif;base64," + base64.b64encode(data.getvalue()).decode()


def sound() -> str:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((8000 * np.sin(np.arange(24000) / 9)).astype("<i2").tobytes())
    return "data:audio/wav;base64," + base64.b64encode(data.getvalue()).decode()


async def of_tower(state, modality: str, url: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The rows of the item and its features, computed by the served model's tower."""
    (processed,) = await state.media.load([MediaRef(modality, url)])
    (part,) = processed.parts
    tower = state.engine.inspect().runtime.model.towers[modality]
    with torch.inference_mode():
        rows = tower.encode({name: torch.from_numpy(array) for name, array in part.features.items()})
    return rows.float().numpy(), part.features


async def test_rows_do_what_the_film_does(rows_client, state):
    url = film()
    rows, features = await of_tower(state, "video", url)
    grid, seconds = features["grid_thw"], float(features["second_per_grid"][0])
    assert grid[0][0] > 1
    held = {"video_embeds": encoded(save({"rows": rows})), "video_grid_thw": encoded(save({"grid": grid}))}
    given = {"type": "video_embeds", "video_embeds": {**held, "second_per_grid_ts": seconds}}
    wanted = (await asked(rows_client, {"type": "video_url", "video_url": {"url": url}}, return_token_ids=True)).json()
    reply = await asked(rows_client, given, return_token_ids=True)
    assert reply.status == 200, reply.content
    got = reply.json()
    assert got["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
    assert got["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
    wrong = [
        held["video_embeds"],
        {**held, "second_per_grid_ts": 0},
        {**held, "second_per_grid_ts": True},
        {**held, "second_per_grid_ts": 1e9},
        {**held, "image_grid_thw": held["video_grid_thw"]},
        {**held, "video_grid_thw": encoded(save({"grid": grid * [[2, 1, 1]]}))},
    ]
    for value in wrong:
        reply = await asked(rows_client, {"type": "video_embeds", "video_embeds": value})
        assert (reply.status, reply.error["param"]) == (400, "messages[0].content[0].video_embeds"), reply.content


async def test_rows_do_what_the_sound_does(rows_client, state):
    url = sound()
    rows, _ = await of_tower(state, "audio", url)
    wanted = (await asked(rows_client, {"type": "audio_url", "audio_url": {"url": url}}, return_token_ids=True)).json()
    for value in (encoded(save({"rows": rows})), {"audio_embeds": encoded(rows.tobytes())}):
        reply = await asked(rows_client, {"type": "audio_embeds", "audio_embeds": value}, return_token_ids=True)
        assert reply.status == 200, reply.content
        got = reply.json()
        assert got["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
        assert got["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
    refused = await asked(
        rows_client, {"type": "audio_embeds", "audio_embeds": {"audio_grid_thw": "", "audio_embeds": ""}}
    )
    assert (refused.status, refused.error["param"]) == (400, "messages[0].content[0].audio_embeds")


@pytest.mark.parametrize(("model", "modality"), [("qwen2_5_vl", "audio"), ("qwen3_vl", "video"), ("llava", "video")])
async def test_families_that_need_more_than_rows_refuse_them(model, modality):
    processor = load_model_config(tiny.checkpoint(model))
    made = processor_for(processor.processor, processor.folder, processor.raw)
    rows = ClientRows(np.zeros((4, 8), np.float32), bytes(16))
    with pytest.raises(MediaError, match=f"takes no {modality}_embeds; send the {modality}"):
        item_of_rows(made, modality, rows, None)


async def test_rows_of_a_sound_come_over_a_socket(rows_client, state):
    rows, _ = await of_tower(state, "audio", sound())
    async with listening(rows_client) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        given = {"type": "audio_embeds", "audio_embeds": encoded(save({"rows": rows}))}
        messages: list = [{"role": "user", "content": [given, {"type": "text", "text": "?"}]}]
        answer = await api.chat.completions.create(model="omniloop", messages=messages, max_tokens=1)
        assert answer.usage.prompt_tokens > len(rows)
        given["audio_embeds"] = encoded(save({"rows": rows[:, 1:]}))
        with pytest.raises(openai.BadRequestError, match=rf"\[n, {rows.shape[1]}\] is needed"):
            await api.chat.completions.create(model="omniloop", messages=messages)


@pytest.mark.parametrize("name", ["qwen3-asr", "ultravox", "fun-audio", "granite-speech"])
async def test_sounds_are_rows_and_nothing_else(name):
    config = load_model_config(next(family for family in SOUNDS if family.name == name).folder)
    processor = processor_for(config.processor, config.folder, config.raw)
    rows = ClientRows(np.zeros((7, 8), np.float32), bytes(16))
    made = item_of_rows(processor, "audio", rows, None)
    filling = processor.fill(made)
    assert (len(filling.token_ids), filling.runs) == (7, (((0, 7),),))
    with pytest.raises(MediaError, match="audio_grid_thw"):
        item_of_rows(processor, "audio", rows, np.ones((1, 3), np.int64))
