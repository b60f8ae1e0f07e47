"""prompt_embeds: rows of tokens give the tokens' answer; all but fitting tensors are refused by name (S32)."""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors import safe_open
from safetensors.numpy import save
from safetensors.torch import save as save_torch

from mm.client_rows import MAX_HEADER, read_rows
from mm.errors import MediaError
from server.flags.config import EMBEDDED
from tests.server.conftest import config_of, maker, quiet, ready
from tests.server.live import picture

pytestmark = pytest.mark.asyncio(loop_scope="session")

LOOK = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + picture("blue")}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def rows_state() -> AsyncIterator:
    async with ready(config_of(rows={"enable_prompt_embeds": True})) as state:
        yield state


@pytest.fixture
def rows_client(rows_state):
    return maker(rows_state)(rows={"enable_prompt_embeds": True})


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    """The embedded model's table of embeddings, [vocab, hidden]."""
    with safe_open(EMBEDDED / "model.safetensors", "pt") as file:
        name = next(name for name in file.keys() if name.endswith("embed_tokens.weight"))  # noqa: SIM118
        return file.get_tensor(name)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def tensor(rows: torch.Tensor) -> str:
    return encoded(save_torch({"rows": rows.contiguous()}))


def handmade(header: dict | bytes, body: bytes = b"") -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return encoded(struct.pack("<Q", len(text)) + text + body)


async def tokens(client, **fields) -> list[list[int]]:
    reply = await client.complete(max_tokens=8, temperature=0, return_token_ids=True, **fields)
    assert reply.status == 200, reply.content
    return [choice["token_ids"] for choice in reply.json()["choices"]]


async def test_rows_do_what_their_tokens_do(rows_client, table):
    ids = np.random.default_rng(0).integers(0, 200, 300).tolist()  # more tokens than a step takes
    wanted = await tokens(rows_client, prompt=ids)
    rows = table[ids].float()
    forms = {"file": tensor(rows), "own type": tensor(table[ids]), "bare": encoded(rows.numpy().tobytes())}
    for form, text in forms.items():
        assert await tokens(rows_client, prompt=None, prompt_embeds=text) == wanted, form
    others = [tensor(table[[5, 6, 7]]), forms["file"]]
    both = await tokens(rows_client, prompt=ids[:4], prompt_embeds=others)  # answers to rows come first
    assert both[1] == wanted[0]
    assert both[0] == (await tokens(rows_client, prompt=[5, 6, 7]))[0]
    assert both[2] == (await tokens(rows_client, prompt=ids[:4]))[0]


async def test_rows_are_found_in_the_prefix_cache_by_their_numbers(rows_client, table):
    ids = np.random.default_rng(1).integers(0, 200, 100)
    for rows, cached in ((table[ids], 0), (table[ids], 96), (table[ids + 1], 0)):
        reply = await rows_client.complete(prompt=None, prompt_embeds=tensor(rows), max_tokens=1)
        usage = reply.json()["usage"]
        assert usage["prompt_tokens"] == 100
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


@pytest.mark.parametrize("pictures", [0, 1])
async def test_a_part_of_a_conversation_may_be_rows(rows_client, rows_state, table, pictures):
    text = "What colour is it?"
    rows = tensor(table[rows_state.tokenizer.encode(text)])
    given = []
    for part in ({"type": "text", "text": text}, {"type": "prompt_embeds", "data": rows}):
        content = [*[LOOK] * pictures, part]
        reply = await rows_client.chat(
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}],
            max_tokens=12, temperature=0, return_token_ids=True, ignore_eos=True,
        )  # fmt: skip
        assert reply.status == 200, reply.content
        body = reply.json()
        given.append((body["usage"]["prompt_tokens"], body["choices"][0]["token_ids"]))
    assert given[0] == given[1]


async def test_s32_rows_are_counted_before_they_are_decoded(monkeypatch):
    rows = torch.zeros(2000, 8)
    with pytest.raises(MediaError, match="2000 rows; 1 to 1999"):
        read_rows(tensor(rows), 8, 1999, "x")
    monkeypatch.setattr("mm.client_rows.decode_base64", None)
    with pytest.raises(MediaError, match="64080 bytes; at most 9600"):
        read_rows(tensor(rows), 8, 300, "x")


WIDE = 3  # number of rows of the malformed tensors


def wrong() -> dict[str, str]:
    width = json.loads((EMBEDDED / "config.json").read_text())["text_config"]["hidden_size"]
    good = np.zeros((WIDE, width), np.float32)
    entry = {"dtype": "F32", "shape": [WIDE, width], "data_offsets": [0, good.nbytes]}
    pickled = io.BytesIO()
    torch.save(torch.from_numpy(good), pickled)
    return {
        "no base64": "%%%%",
        "nothing": "",
        "half a line": encoded(good.tobytes()[:-4]),
        "a pickle": encoded(pickled.getvalue()),
        "a wrong width": encoded(save({"rows": np.zeros((WIDE, width + 1), np.float32)})),
        "one line of numbers": encoded(save({"rows": good[0]})),
        "three dimensions": encoded(save({"rows": good[None]})),
        "no rows": encoded(save({"rows": good[:0]})),
        "whole numbers": encoded(save({"rows": good.astype(np.int32)})),
        "doubles": encoded(save({"rows": good.astype(np.float64)})),
        "two tensors": encoded(save({"rows": good, "more": good})),
        "no numbers": encoded(save({"rows": good * np.nan})),
        "numbers whose squares have no end": encoded(save({"rows": good + np.float32(1e30)})),
        "endless numbers": tensor(torch.from_numpy(good + 1e38).bfloat16() * 100),
        "a body that is short": handmade({"rows": entry}, good.tobytes()[:-8]),
        "a body that is long": handmade({"rows": entry}, good.tobytes() + bytes(8)),
        "offsets elsewhere": handmade({"rows": {**entry, "data_offsets": [8, good.nbytes + 8]}}, good.tobytes()),
        "a shape below zero": handmade({"rows": {**entry, "shape": [-1, -width]}}, good.tobytes()),
        "a shape without end": handmade({"rows": {**entry, "shape": [1 << 60, width]}}, good.tobytes()),
        "no shape": handmade({"rows": {"dtype": "F32"}}, good.tobytes()),
        "a list": handmade(b"[1]", good.tobytes()),
        "deep JSON": handmade(b'{"a":' * 600, good.tobytes()),
        "a header without end": encoded(struct.pack("<Q", 1 << 62) + b"{" + good.tobytes()),
        "a header that is long": handmade({"rows": entry, "__metadata__": {"a": "b" * MAX_HEADER}}, good.tobytes()),
    }


async def test_s32_what_is_no_such_tensor_is_refused(rows_client):
    for name, text in wrong().items():
        for reply in (
            await rows_client.complete(prompt=None, prompt_embeds=[text]),
            await rows_client.chat(messages=[{"role": "user", "content": [{"type": "prompt_embeds", "data": text}]}]),
        ):
            assert (reply.status, reply.error["reason"] in ("embedding_invalid", "data_url_invalid")) == (400, True), (
                name, reply.content,
            )  # fmt: skip
        assert reply.error["param"] == "messages[0].content[0].data"
    assert (await quiet(rows_client.state))["live_rows"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("echo", True), ("prompt_logprobs", 1), ("truncate_prompt_tokens", 2), ("repetition_penalty", 1.2)],
)
async def test_fields_that_need_the_prompts_tokens_are_refused(rows_client, table, field, value):
    reply = await rows_client.complete(prompt=None, prompt_embeds=tensor(table[[1, 2]]), **{field: value})
    assert (reply.status, reply.error["param"]) == (400, field)


async def test_parts_that_are_no_rows_are_refused_by_their_path(rows_client, table):
    part = {"type": "prompt_embeds", "data": tensor(table[[1, 2]])}
    turn = {"role": "user", "content": "a"}
    for messages, param in (
        ([{"role": "user", "content": [{"type": "prompt_embeds"}]}], "messages[0].content[0].data"),
        ([turn, {"role": "assistant", "content": [part]}, turn], "messages[1].content[0]"),
    ):
        reply = await rows_client.chat(messages=messages)
        assert (reply.status, reply.error["param"]) == (400, param)
    responses = await rows_client.post("/v1/responses", {"input": [{"role": "user", "content": [part]}]})
    assert responses.status == 400


async def test_a_server_that_does_not_allow_them_says_so(client, table):
    text = tensor(table[[1, 2]])
    for reply in (
        await client.complete(prompt=None, prompt_embeds=text),
        await client.chat(messages=[{"role": "user", "content": [{"type": "prompt_embeds", "data": text}]}]),
    ):
        assert (reply.status, reply.error["reason"]) == (403, "override_not_trusted")
        assert "--enable-prompt-embeds" in reply.error["message"]
