"""ColPali and ColQwen2: tokens, vectors and scores of queries and pages equal transformers'."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import engine.run.start
from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from server.app import make_app
from tests import pooling_kit as kit
from tests import tiny_pages
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_pooling_steps import answered
from tests.engine_kit import running
from tests.pooling_kit import close
from tests.server.asgi import Client
from tests.server.conftest import config_of, ready
from tests.server.pooling.test_two_towers import SIZES, TEXTS, URL, message, part, picture

pytestmark = pytest.mark.asyncio(loop_scope="session")
KINDS = list(tiny_pages.KINDS)
TWO = ["colqwen2", "colpali"]
QUERY = TEXTS[2]
OFF = 1e-4  # tolerance of a page's numbers: transformers' float32 differs from its float64 by 2e-5


@pytest.fixture
def asked(monkeypatch):
    """`asked(client)` returns a list of the requests that the client's engine gets from then on."""

    def watch(client):
        engine, requests = client.state.engine, []
        submit = engine.submit
        monkeypatch.setattr(engine, "submit", lambda request: requests.append(request) or submit(request))
        return requests

    return watch


def inputs_of(request) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(request.prompt_token_ids, request.pooling.starts[1:-1])]


async def pooled(client, **body):
    answer = await client.post("/pooling", body)
    assert answer.status == 200, answer.content
    return [np.array(entry["data"], np.float32) for entry in answer.json()["data"]]


async def scores(client, **body):
    answer = await client.post("/score", body)
    assert answer.status == 200, answer.content
    return [entry["score"] for entry in answer.json()["data"]]


def maxsim(kind: str, query: np.ndarray, documents: list[np.ndarray]) -> list[float]:
    """The processor's scores, with each document alone: in a batch it pads shorter documents with zero vectors."""
    score, queries = tiny_pages.processor(kind).score_retrieval, [torch.tensor(query)]
    return [score(queries, [torch.tensor(one)]).item() for one in documents]


@pytest.mark.parametrize("kind", KINDS)
async def test_queries_are_those_of_transformers_alone_and_in_a_batch(pooling, asked, kind):
    client = await pooling(tiny_pages.checkpoint(kind))
    requests, wanted = asked(client), [tiny_pages.of_query(kind, text) for text in TEXTS]
    for vectors, (_, expected) in zip(await pooled(client, input=TEXTS), wanted, strict=True):
        close(vectors, expected)
    assert inputs_of(requests[0]) == [ids for ids, _ in wanted]
    ids, expected = wanted[2]
    for body in (
        {"input": QUERY}, {"input": QUERY, "task": "token_embed", "input_type": "search_query"}, {"input": ids},
        {"messages": message({"type": "text", "text": QUERY})}, {"input": [{"text": QUERY}]},
    ):  # fmt: skip
        (found,) = await pooled(client, **body)
        close(found, expected)
        assert inputs_of(requests[-1]) == [ids]
    ids, expected = tiny_pages.of_text(kind, QUERY)
    (found,) = await pooled(client, input=QUERY, prompt_name="document")
    close(found, expected)
    assert inputs_of(requests[-1]) == [ids]


@pytest.mark.parametrize("kind", KINDS)
async def test_pages_are_those_of_transformers_alone_and_in_a_batch(pooling, asked, kind):
    client = await pooling(tiny_pages.checkpoint(kind))
    requests, wanted = asked(client), [tiny_pages.of_page(kind, picture(number)) for number in range(len(SIZES))]
    text = tiny_pages.of_query(kind, QUERY)
    urls = [part(number)["image_url"]["url"] for number in range(len(SIZES))]
    found = await pooled(client, input=[{"image": urls[0]}, QUERY, {"content": [part(1)]}, part(2)])
    for vectors, (_, expected) in zip(found, [wanted[0], text, *wanted[1:]], strict=True):
        close(vectors, expected, OFF)
    assert inputs_of(requests[0]) == [ids for ids, _ in (wanted[0], text, *wanted[1:])]
    for number in range(len(SIZES)):
        for _ in range(2):  # the second run uses the encoder cache
            (found,) = await pooled(client, messages=message(part(number)))
            close(found, wanted[number][1], OFF)
            assert inputs_of(requests[-1]) == [wanted[number][0]]


@pytest.mark.parametrize("kind", KINDS)
async def test_scores_are_those_of_the_processor(pooling, kind):
    client = await pooling(tiny_pages.checkpoint(kind))
    query = tiny_pages.of_query(kind, QUERY)[1]
    pages = [tiny_pages.of_page(kind, picture(number))[1] for number in range(len(SIZES))]
    wanted = maxsim(kind, query, [*pages, tiny_pages.of_text(kind, TEXTS[0])[1]])
    documents = [[part(0)], {"image": part(1)["image_url"]["url"]}, {"content": [part(2)]}, TEXTS[0]]
    found = await scores(client, queries=QUERY, documents=documents)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    alone = [(await scores(client, queries=QUERY, documents=[one]))[0] for one in documents]
    np.testing.assert_allclose(alone, found, atol=1e-5)
    answer = (await client.post("/v1/rerank", {"query": QUERY, "documents": documents, "top_n": 3})).json()
    best = sorted(range(4), key=lambda at: -wanted[at])[:3]
    assert [entry["index"] for entry in answer["results"]] == best
    np.testing.assert_allclose(
        [entry["relevance_score"] for entry in answer["results"]], np.sort(wanted)[:0:-1], atol=1e-4
    )
    pairs = await scores(client, queries=[QUERY, TEXTS[1]], documents=documents[:2])
    other = tiny_pages.of_query(kind, TEXTS[1])[1]
    np.testing.assert_allclose(pairs, [wanted[0], *maxsim(kind, other, pages[1:2])], atol=1e-4)


@pytest.mark.parametrize("kind", TWO)
async def test_more_pages_than_one_step_holds_are_ranked(pooling, kind):
    """Together the pages have more tokens than a prompt may have and than a step takes."""
    client = await pooling(tiny_pages.checkpoint(kind))
    pages = [tiny_pages.of_page(kind, picture(number))[1] for number in range(len(SIZES))]
    wanted = maxsim(kind, tiny_pages.of_query(kind, QUERY)[1], pages)
    found = await scores(client, queries=QUERY, documents=[[part(at % 3)] for at in range(60)])
    np.testing.assert_allclose(found, wanted * 20, atol=1e-4)


@pytest.mark.parametrize("kind", TWO)
async def test_what_no_retriever_of_pages_reads_is_refused_by_name(pooling, kind):
    client = await pooling(tiny_pages.checkpoint(kind))
    words = {"type": "text", "text": "x"}
    film = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    broken = {"type": "image_url", "image_url": {"url": URL}}
    for path, body, text in (
        ("/score", {"queries": [part(0)], "documents": [QUERY]}, "queries: is an image; this model finds pages by"),
        ("/score", {"queries": [QUERY, [part(0)]], "documents": [QUERY, QUERY]}, "queries[1]: is an image"),
        ("/rerank", {"query": [part(0)], "documents": [[part(1)]]}, "query: is an image"),
        ("/pooling", {"input": [{"image": URL}], "input_type": "query"}, "input: is an image"),
        ("/pooling", {"messages": message(part(0)), "prompt_name": "query"}, "messages[0].content: is an image"),
        ("/pooling", {"messages": message(words, part(0))}, "1 texts and 1 images"),
        ("/pooling", {"messages": message(part(0)) * 2}, "one message"),
        ("/pooling", {"input": ["x", {"text": "x", "image": URL}]}, "input[1]: got 2 parts"),
        ("/pooling", {"messages": message(film)}, "takes no video"),
        ("/pooling", {"input": "x", "prompt_name": "passage"}, "this model has query, document"),
        ("/pooling", {"input": "x", "task": "embed"}, "token_embed"),
        ("/pooling", {"input": "the bird " * 3000}, "maximum context length"),
        ("/score", {"queries": QUERY, "documents": [[words, part(0)]]}, "documents: got 2 parts"),
        ("/score", {"queries": QUERY, "documents": [[part(0)], [broken]]}, "documents[1]"),
        ("/score", {"queries": QUERY, "documents": [QUERY], "instruction": "x"}, "instruction"),
    ):
        answer = await client.post(path, body)
        assert answer.status == 400, (body, answer.content)
        error = answer.json()["error"]
        assert text in f"{error['param']}: {error['message']}", answer.content
    refused = await client.post("/v1/embeddings", {"input": "x"})
    assert (refused.status, "ask /pooling, /score or /rerank" in refused.error["message"]) == (501, True)
    cut = await pooled(client, input=["the bird " * 3000, "x"], truncate_prompt_tokens=30)
    assert [len(one) for one in cut] == [30, len(tiny_pages.of_query(kind, "x")[0])]


async def test_a_page_that_is_longer_than_the_context_is_refused(pooling):
    client = await pooling(tiny_pages.checkpoint("colqwen2"), max_model_len=32)
    answer = await client.post("/pooling", {"messages": message(part(2))})
    assert (answer.status, "maximum context length is 32 tokens" in answer.error["message"]) == (400, True)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_device_path_sees_the_same(pooling, asked, monkeypatch, kind):
    """The server's request, sent to an engine with an accelerator's steps."""
    client = await pooling(tiny_pages.checkpoint(kind))
    requests = asked(client)
    await scores(client, queries=QUERY, documents=[[part(0)], TEXTS[0], [part(1)]])
    wanted = await answered(client.state.engine, requests[0])
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    few = {"max_num_seqs": 4, "max_num_queued_reqs": 4, "max_num_batched_tokens": 64, "encoder_cache_tokens": 64}
    async with running(tiny_pages.checkpoint(kind), **few) as served:
        for one, other in zip(await answered(served, requests[0]), wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", TWO)
async def test_published_files_are_read(pooling, tmp_path, kind):
    """The tensors' names are those of transformers' converters in vidore/colpali-v1.2-hf and vidore/colqwen2-v1.0-hf
    (models/colpali and models/colqwen2, convert_*_weights_to_hf.py), with the head that both files still contain."""
    folder = kit.shutil.copytree(tiny_pages.checkpoint(kind), tmp_path / "hf")
    tensors = kit.load_file(folder / "model.safetensors")
    if kind == "colqwen2":
        decoder, head = "vlm.model.language_model.", "vlm.lm_head.weight"
        moved = {"vlm.language_model.": decoder, "vlm.visual.": "vlm.model.visual."}
    else:
        decoder, head = "vlm.language_model.model.", "vlm.language_model.lm_head.weight"
        moved = {"vlm.vision_tower.": "vlm.vision_tower.vision_model."}
    named = {}
    for name, tensor in tensors.items():
        old = next((old for old in moved if name.startswith(old)), "")
        named[moved.get(old, "") + name.removeprefix(old)] = tensor
    assert named.keys() != tensors.keys()
    named[head] = named[decoder + "embed_tokens.weight"].clone()
    kit.save_file(named, folder / "model.safetensors", {"format": "pt"})
    config = kit.read(folder / "config.json")
    partly = {"model_type": config["vlm_config"]["text_config"]["model_type"], "hidden_size": 1}
    kit.write(folder / "config.json", {**config, "is_composition": False, "text_config": partly})
    client = await pooling(folder)
    close((await pooled(client, messages=message(part(0))))[0], tiny_pages.of_page(kind, picture(0))[1], OFF)


@pytest.mark.parametrize(
    ("kind", "file", "changes", "told"),
    [
        ("colqwen2", "processor_config.json", {"visual_prompt_prefix": "no page"}, "must hold <|IMAGE|> once"),
        ("colpali", "processor_config.json", {"query_prefix": 7}, "query_prefix=7 must be a text"),
        ("colpali", "tokenizer_config.json", {"bos_token": None}, "bos_token=None must be a token"),
        ("colqwen2", "tokenizer_config.json", {"pad_token": "<pad>"}, "pad_token='<pad>' must be a token"),
        ("colqwen2", "config.json", {"embedding_dim": 0}, "embedding_dim=0"),
        ("colqwen2", "config.json", {"vlm_config": {"model_type": "glm4v"}}, "supported are qwen2_vl, qwen2_5_vl"),
    ],
)
async def test_files_that_contradict_each_other_do_not_start(tmp_path, kind, file, changes, told):
    folder = kit.shutil.copytree(tiny_pages.checkpoint(kind), tmp_path / kind)
    kept = kit.read(folder / file)
    for key, value in changes.items():
        kept[key] = {**kept[key], **value} if isinstance(value, dict) else value
    kit.write(folder / file, kept)
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_model_config(folder)


async def test_a_retriever_of_pages_has_nothing_to_choose():
    for refused in ({"pooler": {"pooling_type": "CLS"}}, {"runner": "generate"}):
        with pytest.raises(ConfigError, match="leave the flag out"):
            load_model_config(tiny_pages.checkpoint("colqwen2"), **refused)


async def test_a_server_without_pictures_reads_texts_alone():
    model = {"model": str(tiny_pages.checkpoint("colpali")), "num_threads": 1}
    config = config_of(model=model, media={"limit_mm_per_prompt": {"image": 0, "audio": 0, "video": 0}})
    async with ready(config) as state:
        client = Client(make_app(state))
        close((await pooled(client, input=QUERY))[0], tiny_pages.of_query("colpali", QUERY)[1])
        answer = await client.post("/pooling", {"messages": message(part(0))})
        assert (answer.status, "takes no image" in answer.error["message"]) == (400, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.9999), ("bfloat16", 0.98)])
async def test_an_accelerator_makes_the_same_vectors(kind, eager, dtype, least):
    model = {"model": str(tiny_pages.checkpoint(kind)), "device": "cuda", "dtype": dtype}
    cache, rows = {"num_gpu_blocks_override": 0}, {"enforce_eager": eager}
    async with ready(config_of(model=model, cache=cache, scheduler=rows)) as state:
        client = Client(make_app(state))
        urls = [part(number)["image_url"]["url"] for number in range(len(SIZES))]
        found = await pooled(client, input=[QUERY, *({"image": url} for url in urls)])
        wanted = [tiny_pages.of_query(kind, QUERY), *(tiny_pages.of_page(kind, picture(at)) for at in range(3))]
        for vectors, (_, expected) in zip(found, wanted, strict=True):
            assert (vectors * expected).sum(-1).mean() >= least  # one token has 0.9 in transformers' bfloat16
