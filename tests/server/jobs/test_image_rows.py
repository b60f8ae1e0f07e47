"""image_embeds: rows of a picture give the picture's answer; rows that do not fit are refused by name (S32)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from mm.item import MediaRef
from server.start.makers import make_renderer
from tests.server.jobs.test_prompt_rows import encoded
from tests.server.live import picture

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
    other = await asked(rows_client, {"type": "video_embeds", "video_embeds": "AAAA"})
    assert (other.status, other.error["reason"]) == (400, "media_unsupported")
    assert rows_client.state.media.ledger()["media_reserved_bytes"] == 0


async def test_a_server_that_does_not_allow_them_says_so(client, made):
    reply = await asked(client, part(*await made()))
    assert (reply.status, reply.error["reason"]) == (403, "override_not_trusted")
    assert "--enable-mm-embeds" in reply.error["message"]
