"""jina-reranker-m0: tokens and scores of pairs of texts and pictures equal those of its makers' published code.

The reference is our own version of compute_score and forward in https://huggingface.co/jinaai/jina-reranker-m0
(modeling.py).
"""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from tests import pooling_kit as kit
from tests import tiny
from tests.server.pooling.test_pages import asked, inputs_of, scores  # noqa: F401 - a fixture
from tests.server.pooling.test_two_towers import TEXTS, part, picture

pytestmark = pytest.mark.asyncio(loop_scope="session")
SHOWN = "<|vision_bos|><|IMAGE|><|vision_eos|>"
QUERY = TEXTS[2]


@functools.cache
def checkpoint() -> Path:
    """Qwen2-VL with two layers instead of its head; its processor file scales pictures down to a few patches."""
    folder = kit.changed(tiny.checkpoint("qwen2_vl"), "jina-m0", architectures=("JinaVLForRanking",))
    tensors = {name: one for name, one in kit.load_file(folder / "model.safetensors").items() if "lm_head" not in name}
    random = torch.Generator().manual_seed(3)
    for name, shape in {"score.0.weight": (96, 96), "score.0.bias": (96,), "score.2.weight": (1, 96)}.items():
        tensors[name] = torch.randn(*shape, generator=random) / 96**0.5
    tensors["score.2.bias"] = torch.tensor([2.0])
    kit.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    pictures = kit.read(folder / "preprocessor_config.json")
    few = {"shortest_edge": 56**2, "longest_edge": 84**2}
    kit.write(folder / "preprocessor_config.json", {**pictures, "size": few})
    (folder / "chat_template.jinja").unlink()
    return folder


@functools.cache
def parts_of_processor():
    """transformers' picture scaling with the sizes of the makers' code, and the tokenizer."""
    name = "Qwen2VLImageProcessor"
    made = getattr(transformers, name + "Pil", None) or getattr(transformers, name)
    with tiny.quiet():
        size = {"shortest_edge": 3136, "longest_edge": 602112}
        return made.from_pretrained(checkpoint(), size=size), transformers.AutoTokenizer.from_pretrained(checkpoint())


def of_pair(query: str | Image.Image, document: str | Image.Image) -> tuple[list[int], float]:
    """A pair's tokens and score."""
    texts = [SHOWN if isinstance(one, Image.Image) else one for one in (document, query)]
    pictures = [one.convert("RGB") for one in (document, query) if isinstance(one, Image.Image)]
    scale, tokenizer = parts_of_processor()
    text, pixels = f"**Document**:\n{texts[0]}\n**Query**:\n{texts[1]}", {}
    if pictures:
        pixels = dict(scale(images=pictures, return_tensors="pt"))
        for grid in pixels["image_grid_thw"]:
            text = text.replace("<|IMAGE|>", "placeholder" * (int(grid.prod()) // 4), 1)
        text = text.replace("placeholder", "<|IMAGE|>")
    ids = torch.tensor([[*tokenizer(text).input_ids, 100]])
    marks = (ids == tiny.IDS["<|IMAGE|>"]).int()
    model = tiny.reference(tiny.checkpoint("qwen2_vl")).model
    layers = kit.load_file(checkpoint() / "model.safetensors")
    with torch.no_grad():
        last = model(input_ids=ids, mm_token_type_ids=marks, **pixels).last_hidden_state[0, -1]
        inner = torch.relu(layers["score.0.weight"] @ last + layers["score.0.bias"])
        logit = layers["score.2.weight"] @ inner + layers["score.2.bias"]
    return ids[0].tolist(), float(torch.sigmoid(logit - 2.65))


async def test_pairs_are_those_of_its_own_code(pooling, asked):  # noqa: F811
    client = await pooling(checkpoint())
    requests = asked(client)
    documents = [TEXTS[0], picture(1), large(), TEXTS[3]]
    sent = [TEXTS[0], [part(1)], {"image": url_of(large())}, TEXTS[3]]
    for query, shown in ((QUERY, QUERY), (picture(0), [[part(0)]])):
        wanted = [of_pair(query, document) for document in documents]
        found = await scores(client, queries=shown, documents=sent)
        np.testing.assert_allclose(found, [score for _, score in wanted], atol=1e-5)
        assert np.ptp(found) > 1e-2
        assert inputs_of(requests[-1]) == [ids for ids, _ in wanted]
        alone = await scores(client, queries=shown, documents=sent[1:2])
        np.testing.assert_allclose(alone, found[1:2], atol=1e-6)
    answer = (await client.post("/v1/rerank", {"query": QUERY, "documents": sent})).json()
    wanted = [of_pair(QUERY, document)[1] for document in documents]
    assert [one["index"] for one in answer["results"]] == sorted(range(4), key=lambda at: -wanted[at])
    raw = await scores(client, queries=QUERY, documents=sent[:1], use_activation=False)
    np.testing.assert_allclose(1 / (1 + np.exp(-raw[0])), wanted[0], atol=1e-5)


async def test_documents_are_cut_where_that_is_asked_for_and_queries_never(pooling, asked):  # noqa: F811
    client = await pooling(checkpoint())
    requests, long = asked(client), "x" * 3000
    refused = await client.post("/score", {"queries": QUERY, "documents": ["x", long]})
    assert (refused.status, refused.error["param"]) == (400, "documents[1]")
    (found,) = await scores(client, queries=QUERY, documents=[long], truncate_prompt_tokens=90)
    (ids,) = inputs_of(requests[-1])
    kept = 90 - len(of_pair(QUERY, "")[0])
    assert (ids, len(ids)) == (of_pair(QUERY, "x" * kept)[0], 90)
    np.testing.assert_allclose(found, of_pair(QUERY, "x" * kept)[1], atol=1e-5)


async def test_what_its_pairs_do_not_hold_is_refused(pooling):
    client = await pooling(checkpoint())
    film = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    for body, told in (
        ({"queries": QUERY, "documents": ["x"], "instruction": "y"}, "this model takes none"),
        ({"queries": QUERY, "documents": [[part(0)]], "instruction": "y"}, "this model takes none"),
        ({"queries": QUERY, "documents": [[film]]}, "does not read video"),
        ({"queries": QUERY, "documents": ["<|IMAGE|>"]}, "marks the place of a media item"),
        ({"queries": "<|IMAGE|>", "documents": [[part(0)]]}, "placeholder"),
    ):
        answer = await client.post("/score", body)
        assert (answer.status, told in answer.error["message"]) == (400, True), answer.content
    with pytest.raises(ConfigError, match="leave the flag out"):
        load_model_config(checkpoint(), pooler={"pooling_type": "CLS"})


def large() -> Image.Image:
    """A picture above the limit of the checkpoint's file and below the limit of the makers' code."""
    return picture(0).resize((300, 250))


def url_of(shown: Image.Image) -> str:
    kept = io.BytesIO()
    shown.save(kept, "PNG")
    return "data:image/png;base64," + base64.b64encode(kept.getvalue()).decode()
