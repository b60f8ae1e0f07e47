"""A folder as Mistral releases it (params.json, consolidated.safetensors, tekken.json), served over HTTP."""

import json

import pytest

from tests import tiny
from tests.mm.made import data_url, noise, picture
from tests.models.test_consolidated import params_of, seeing_folder, tensors_of, write
from tests.server.conftest import config_of, maker, ready
from tests.server.render import tekken

VOCAB = 1024  # rows of the embedding; more than the tokenizer's tokens


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A folder in Mistral's layout with a picture tower; params.json has the tokenizer's ids."""
    root = seeing_folder("mistral3", tmp_path_factory.mktemp("pixtral"))
    params = json.loads((root / "params.json").read_text())
    params["vision_encoder"]["image_token_id"] = tekken.SPECIAL.index("[IMG]")
    write(root, params)
    return tekken.write_tekken(root, "v13")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("mistral")
    source = tiny.save(tiny.mistral(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2), root / "transformers")
    params = params_of(source)
    (root / "released").mkdir()
    write(root / "released", params, tensors_of(source, params["head_dim"]))
    return tekken.write_tekken(root / "released", "v13", image=False)


async def test_it_is_served_as_any_other(folder):
    async with ready(config_of(model={"model": str(folder), "num_threads": 1})) as state:
        client = maker(state)(model={"model": str(folder)})
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "the [INST] é"}]
        body = {"model": client.state.names[0], "messages": messages, "max_tokens": 8, "temperature": 0}
        call = await client.post("/v1/chat/completions", {**body, "return_token_ids": True})
        assert call.status == 200, call.content
        prompt = call.json()["prompt_token_ids"]
        assert state.tokenizer.decode(prompt) == "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]the [INST] é[/INST]"
        assert [token for token in prompt if state.tokenizer.is_special(token)] == [1, 17, 18, 3, 4]
        ids = call.json()["choices"][0]["token_ids"]
        assert call.json()["choices"][0]["message"]["content"] == state.tokenizer.decode(ids, True)
        stream = await client.post("/v1/chat/completions", {**body, "stream": True})
        deltas = [event for event in stream.events() if isinstance(event, dict)]
        told = "".join(delta["choices"][0]["delta"].get("content") or "" for delta in deltas if delta["choices"])
        assert told == call.json()["choices"][0]["message"]["content"]
        tokenized = await client.post("/tokenize", {"messages": messages, "return_token_strs": True})
        assert tokenized.json()["tokens"] == prompt
        assert tokenized.json()["token_strs"][:2] == ["<s>", "[SYSTEM_PROMPT]"]
        plain = await client.post("/tokenize", {"prompt": "the é"})
        back = await client.post("/detokenize", {"tokens": plain.json()["tokens"][1:]})
        assert (plain.json()["tokens"][0], back.json()["prompt"]) == (1, "the é")
        wrong = await client.post("/v1/chat/completions", {**body, "messages": [{"role": "tool", "content": "x"}]})
        assert wrong.status == 400
        assert "must start with a user message" in wrong.json()["error"]["message"]


async def test_rows_of_a_picture_end_with_the_tokenizers_own_marks(seeing):
    async with ready(config_of(model={"model": str(seeing), "num_threads": 1})) as state:
        client = maker(state)(model={"model": str(seeing)})
        url = data_url(picture(noise(60, 90, 1), "PNG"), "image/png")
        parts = [{"type": "text", "text": "the"}, {"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "return_token_ids": True}
        call = await client.post("/v1/chat/completions", body)
        assert call.status == 200, call.content
        row, last = [10] * 4 + [12], [10] * 4 + [13]
        assert [token for token in call.json()["prompt_token_ids"] if 10 <= token <= 13] == [*row, *row, *last]
