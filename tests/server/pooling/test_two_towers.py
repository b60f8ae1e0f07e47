"""CLIP and SigLIP: vectors of texts and pictures, and scores between them, equal transformers'."""

from __future__ import annotations

import base64
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from engine.base.errors import ConfigError
from engine.models.registry import build_model, load_model_config
from engine.weights.load import load_weights
from server.app import make_app
from tests import tiny, tiny_towers
from tests.pooling_kit import close
from tests.server.asgi import Client
from tests.server.conftest import config_of, ready

pytestmark = pytest.mark.asyncio(loop_scope="session")
KINDS = ["clip", "siglip", "siglip2"]
TEXTS = ["the cat", "x", "a dog and the bird", "Grüße, 東京!"]
URL = "data:image/png;base64,AAAA"  # not a picture
SIZES = [(56, 56), (90, 61), (64, 130)]


def picture(number: int) -> Image.Image:
    width, height = SIZES[number]
    noise = np.random.default_rng(number).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height))


def part(number: int) -> dict:
    kept = io.BytesIO()
    picture(number).save(kept, "PNG")
    url = "data:image/png;base64," + base64.b64encode(kept.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def message(*parts: dict) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


async def vector(client, path="/v1/embeddings", **body):
    answer = await client.post(path, body)
    assert answer.status == 200, answer.content
    data = answer.json()["data"]
    return np.array([entry["embedding" if path == "/v1/embeddings" else "data"] for entry in data], np.float32)


def ids_of(client, kind: str, text: str) -> list[int]:
    ids = client.state.tokenizer.encode(text.lower() if kind != "clip" else text, True)
    return ids + [tiny.IDS["<|endoftext|>"]] * (64 - len(ids)) if kind != "clip" else ids


@pytest.mark.parametrize("kind", KINDS)
async def test_texts_are_those_of_transformers_alone_and_in_a_batch(pooling, kind):
    folder = tiny_towers.checkpoint(kind)
    client = await pooling(folder)
    wanted = [tiny_towers.of_text(folder, ids_of(client, kind, text)) for text in TEXTS]
    close(await vector(client, input=TEXTS), wanted)
    close(await vector(client, input=TEXTS[2]), wanted[2:3])
    close(await vector(client, input=client.state.tokenizer.encode(TEXTS[0], True)), wanted[:1])
    close(await vector(client, messages=message({"type": "text", "text": TEXTS[1]})), wanted[1:2])


async def test_a_text_ends_at_its_first_end(pooling):
    client = await pooling(tiny_towers.checkpoint("clip"))
    ids = ids_of(client, "clip", TEXTS[0])
    wanted = tiny_towers.of_text(tiny_towers.checkpoint("clip"), ids + ids[1:])
    close(await vector(client, input=[ids + ids[1:], ids]), [wanted, wanted])


@pytest.mark.parametrize("kind", KINDS)
async def test_pictures_are_those_of_transformers(pooling, kind):
    folder = tiny_towers.checkpoint(kind)
    client = await pooling(folder)
    seen = [tiny_towers.of_picture(folder, picture(number)) for number in range(2)]
    text = tiny_towers.of_text(folder, ids_of(client, kind, TEXTS[0]))
    urls = [part(number)["image_url"]["url"] for number in range(2)]
    as_jina_asks = [{"image": urls[0]}, {"text": TEXTS[0]}, part(1), TEXTS[0], {"image": urls[1].partition(",")[2]}]
    close(await vector(client, input=as_jina_asks), [seen[0], text, seen[1], text, seen[1]])
    for number in range(len(SIZES)):
        wanted = [tiny_towers.of_picture(folder, picture(number))]
        close(await vector(client, messages=message(part(number))), wanted)
        close(await vector(client, "/pooling", messages=message(part(number))), wanted)


@pytest.mark.parametrize("kind", KINDS)
async def test_scores_compare_texts_with_pictures(pooling, kind):
    folder = tiny_towers.checkpoint(kind)
    client = await pooling(folder)
    seen = [tiny_towers.of_picture(folder, picture(number)) for number in range(len(SIZES))]
    text = tiny_towers.of_text(folder, ids_of(client, kind, TEXTS[0]))
    body = {"queries": TEXTS[0], "documents": [[part(0)], [part(1)], TEXTS[0], {"content": [part(2)]}]}
    answer = await client.post("/score", body)
    assert answer.status == 200, answer.content
    wanted = [text @ seen[0], text @ seen[1], 1.0, text @ seen[2]]
    np.testing.assert_allclose([one["score"] for one in answer.json()["data"]], wanted, atol=1e-5)
    shapes = [{"image": part(0)["image_url"]["url"]}, [part(1)], {"content": [part(2)]}, part(0)]
    answer = await client.post("/rerank", {"query": TEXTS[0], "documents": shapes})
    ranked = [(one["index"], one["relevance_score"], one["document"]) for one in answer.json()["results"]]
    for at, score, document in ranked:
        np.testing.assert_allclose(score, [wanted[0], wanted[1], wanted[3], wanted[0]][at], atol=1e-5)
        assert document == {"text": ""}
    assert [score for _, score, _ in ranked] == sorted((score for _, score, _ in ranked), reverse=True)
    answer = await client.post("/score", {"queries": [part(1)], "documents": TEXTS[0]})
    np.testing.assert_allclose(answer.json()["data"][0]["score"], wanted[1], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
async def test_bad_inputs_are_refused_by_name(pooling, kind):
    client = await pooling(tiny_towers.checkpoint(kind))
    words = "the bird " * 80
    broken = {"type": "image_url", "image_url": {"url": URL}}
    film = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    for path, body, text in (
        ("/v1/embeddings", {"input": [TEXTS[0], words]}, "input[1]"),
        ("/v1/embeddings", {"messages": message({"type": "text", "text": words})}, "maximum context length"),
        ("/v1/embeddings", {"messages": message({"type": "text", "text": "x"}, part(0))}, "1 texts and 1 images"),
        ("/v1/embeddings", {"messages": message(part(0), part(1))}, "0 texts and 2 images"),
        ("/v1/embeddings", {"messages": message(part(0)) * 2}, "one message"),
        ("/v1/embeddings", {"input": ["x", {"text": "x", "image": URL}]}, "input[1]: got 2 parts"),
        ("/v1/embeddings", {"input": ["x", {"image": URL}]}, "input[1]"),
        ("/v1/embeddings", {"input": ["x", {"idea": "x"}]}, "input[1]"),
        ("/v1/embeddings", {"messages": message(film)}, "takes no video"),
        ("/v1/embeddings", {"messages": message(part(0)), "dimensions": 8}, "dimensions"),
        ("/pooling", {"input": TEXTS[0], "task": "token_embed"}, "this model has embed"),
        ("/score", {"queries": TEXTS[0], "documents": [[part(0), {"type": "text", "text": "x"}]]}, "documents"),
        ("/score", {"queries": TEXTS[0], "documents": [[film]]}, "takes no video"),
        ("/score", {"queries": TEXTS[0], "documents": [[part(0)], [broken]]}, "documents[1]"),
        ("/v1/embeddings", {"messages": message(broken)}, "messages[0].content[0]"),
        (
            "/rerank",
            {"query": TEXTS[0], "documents": [[part(0)], {"image": URL}]},
            "documents[1]",
        ),
    ):
        answer = await client.post(path, body)
        assert answer.status == 400, (body, answer.content)
        error = answer.json()["error"]
        assert text in f"{error['param']}: {error['message']}", answer.content
    cut = await vector(client, input=words, truncate_prompt_tokens=-1)
    assert cut.shape == (1, 64)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_without_pictures_reads_texts_alone(kind):
    folder = tiny_towers.checkpoint(kind)
    model = {"model": str(folder), "num_threads": 1}
    config = config_of(model=model, media={"limit_mm_per_prompt": {"image": 0, "audio": 0, "video": 0}})
    async with ready(config) as state:
        client = Client(make_app(state))
        client.state = state
        close(await vector(client, input=TEXTS[0]), [tiny_towers.of_text(folder, ids_of(client, kind, TEXTS[0]))])
        answer = await client.post("/v1/embeddings", {"messages": message(part(0))})
        assert answer.status == 400
        assert "takes no image" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", KINDS)
async def test_recorded_steps_put_pictures_where_others_do(kind):
    """A graph reads rows and marks of all tokens, the CPU the rows of each media item: the vectors are equal."""
    config = load_model_config(tiny_towers.checkpoint(kind))
    model = build_model(config, torch.float32)
    load_weights(model, str(tiny_towers.checkpoint(kind)), "auto", seed=0)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    rows, ends = torch.ones(2, 64), torch.tensor([1, 2, 5])
    shown, places = torch.zeros(6, 1, dtype=torch.bool), torch.zeros(6, 64)
    shown[[2, 5]], places[[2, 5]] = True, rows
    attention = SimpleNamespace(query_start=torch.tensor([0, 2, 3, 6], dtype=torch.int32))
    given = {"token_ids": torch.zeros(6), "sample_index": ends, "attention": [attention]}
    made = [
        model.pooler.lines(SimpleNamespace(**given, overlay=overlay, media=media), 3, lambda batch: hidden)
        for overlay, media in ((None, [(2, 1, rows[:1]), (5, 1, rows[1:])]), ((shown, places), []))
    ]
    assert torch.equal(*made)
    assert torch.equal(made[0][1:], rows)
    assert not torch.equal(made[0][:1], rows[:1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.9999), ("bfloat16", 0.999)])
async def test_an_accelerator_makes_the_same_vectors(kind, eager, dtype, least):
    folder = tiny_towers.checkpoint(kind)
    model = {"model": str(folder), "device": "cuda", "dtype": dtype}
    cache, rows = {"num_gpu_blocks_override": 0}, {"enforce_eager": eager}
    async with ready(config_of(model=model, cache=cache, scheduler=rows)) as state:
        client = Client(make_app(state))
        client.state = state
        for number in range(len(SIZES)):
            (found,) = await vector(client, messages=message(part(number)))
            assert found @ tiny_towers.of_picture(folder, picture(number)) >= least
        wanted = [tiny_towers.of_text(folder, ids_of(client, kind, text)) for text in TEXTS]
        assert ((await vector(client, input=TEXTS)) * wanted).sum(-1).min() >= least


async def test_learned_positions_that_make_no_square_are_refused(tmp_path):
    config = json.loads((tiny_towers.checkpoint("siglip2") / "config.json").read_text())
    config["vision_config"]["num_patches"] = 24
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"vision_config: num_patches=24 is no square$"):
        load_model_config(tmp_path)
