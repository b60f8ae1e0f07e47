"""Vectors and ranks by clients on a real socket: openai, langchain-openai, cohere, llama-index, and Jina's protocol."""

from __future__ import annotations

import asyncio
import base64
import sys
import time

import httpx
import numpy as np
import openai
import pytest

from tests import pooling_kit as kit
from tests.asked_vectors import DOCUMENTS, FEW, QUERY, scores, vectors
from tests.pace import slowness
from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_openai_waiting_and_not_and_with_dimensions(pooling):
    client = await pooling(kit.changed(kit.embedder("qwen3"), "matryoshka", is_matryoshka=True))
    wanted, name = await vectors(client, FEW), client.state.names[0]
    async with listening(client) as url, openai.AsyncOpenAI(api_key="none", base_url=f"{url}/v1") as speaker:
        coded = await speaker.embeddings.create(model=name, input=FEW)  # this call requests base64
        plain = await speaker.embeddings.create(model=name, input=FEW, encoding_format="float")
        short = await speaker.embeddings.create(model=name, input=FEW[0], dimensions=8)

        def waiting():
            with openai.OpenAI(api_key="none", base_url=f"{url}/v1") as blocking:
                return blocking.embeddings.create(model=name, input=FEW)

        again = await asyncio.to_thread(waiting)
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]"):
            await speaker.embeddings.create(model=name, input=["x", "a b c d " * 60])
    for made in (coded, plain, again):
        np.testing.assert_array_equal(np.array([one.embedding for one in made.data], np.float32), wanted)
    assert len(short.data[0].embedding) == 8
    assert coded.usage.prompt_tokens == coded.usage.total_tokens > 0


async def test_langchain_embeds_queries_and_documents(pooling):
    from langchain_openai import OpenAIEmbeddings

    client = await pooling(kit.embedder("qwen3"))
    async with listening(client) as url, httpx.AsyncClient() as http:
        embedder = OpenAIEmbeddings(
            base_url=f"{url}/v1", api_key="none", model=client.state.names[0], check_embedding_ctx_length=False,
            http_async_client=http,
        )  # fmt: skip
        documents, query = await embedder.aembed_documents(FEW), await embedder.aembed_query(FEW[0])
    wanted = await vectors(client, FEW)
    np.testing.assert_array_equal(np.array(documents, np.float32), wanted)
    np.testing.assert_array_equal(np.array(query, np.float32), wanted[0])


async def test_cohere_ranks_documents(pooling):
    import cohere

    client = await pooling(kit.embedder("qwen3"))
    async with listening(client) as url, httpx.AsyncClient() as http:
        speaker = cohere.AsyncClientV2("none", base_url=url, httpx_client=http)
        ranked = await speaker.rerank(model=client.state.names[0], query=QUERY, documents=DOCUMENTS, top_n=3)
    found = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
    order = sorted(range(5), key=lambda at: (-found[at], at))[:3]
    assert [(one.index, one.relevance_score) for one in ranked.results] == [(at, found[at]) for at in order]


@pytest.mark.full
async def test_llama_index_embeds_and_ranks_by_openais_and_by_jinas_clients(pooling):
    reason = "llama-index is not installed; `make test-full` installs it"
    like = pytest.importorskip("llama_index.embeddings.openai_like", reason=reason)
    jina = pytest.importorskip("llama_index.embeddings.jinaai", reason=reason)
    rerank = pytest.importorskip("llama_index.postprocessor.jinaai_rerank", reason=reason)
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

    client = await pooling(kit.embedder("qwen3"))
    name, wanted = client.state.names[0], await vectors(client, FEW)
    async with listening(client) as url:

        def asked():
            by_openai = like.OpenAILikeEmbedding(model_name=name, api_base=f"{url}/v1", api_key="none")
            by_jina = jina.JinaEmbedding(model=name, api_key="none")
            by_jina._api.api_url = f"{url}/v1/embeddings"  # the class has no parameter for an address
            made = [one.get_text_embedding_batch(FEW) for one in (by_openai, by_jina)]
            made += [[one.get_query_embedding(text) for text in FEW] for one in (by_openai, by_jina)]
            ranker = rerank.JinaRerank(model=name, base_url=f"{url}/v1", api_key="none", top_n=3)
            nodes = [NodeWithScore(node=TextNode(text=text)) for text in DOCUMENTS]
            return made, ranker.postprocess_nodes(nodes, QueryBundle(QUERY))

        made, ranked = await asyncio.to_thread(asked)
    for one in made:
        np.testing.assert_allclose(np.array(one, np.float32), wanted, atol=1e-6)
    found = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
    order = sorted(range(5), key=lambda at: (-found[at], at))[:3]
    assert [(one.node.text, one.score) for one in ranked] == [(DOCUMENTS[at], found[at]) for at in order]


async def test_the_shape_of_jina(pooling):
    client = await pooling(kit.embedder("qwen3"))
    body = {"model": client.state.names[0], "query": QUERY, "documents": [{"text": text} for text in DOCUMENTS]}
    async with listening(client) as url, httpx.AsyncClient(base_url=url) as http:
        ranked = (await http.post("/v1/rerank", json={**body, "top_n": 2, "return_documents": True})).json()
        made = (await http.post("/v1/embeddings", json={"model": body["model"], "input": FEW})).json()
    assert [one["document"]["text"] for one in ranked["results"]] == [
        DOCUMENTS[one["index"]] for one in ranked["results"]
    ]
    assert ranked["usage"]["total_tokens"] > 0
    assert [one["index"] for one in made["data"]] == list(range(len(FEW)))


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(900)
async def test_a_hundred_batches_of_2048_short_inputs_keep_their_order_and_the_loop_goes_on(pooling):
    client = await pooling(kit.embedder("qwen3"))
    lines = (await vectors(client, [[k] for k in range(256)])).round(5)
    held, over = [], False  # CPU seconds of the loop's thread between beats, whatever else runs on its core

    async def beat():
        while not over:
            begun = time.thread_time()
            await asyncio.sleep(0.002)
            held.append(time.thread_time() - begun)

    loop = asyncio.get_running_loop()
    loop.set_debug(False)
    async with listening(client) as url:
        beating = asyncio.create_task(beat())
        code = "import sys, tests.server.pooling.test_embedding_clients as t; t.send_batches(sys.argv[1])"
        sender = await asyncio.create_subprocess_exec(sys.executable, "-c", code, url, stdout=asyncio.subprocess.PIPE)
        written, _ = await sender.communicate()
        over = True
        await beating
    loop.set_debug(True)
    assert sender.returncode == 0
    found = np.frombuffer(base64.b64decode(written), "<f4").reshape(100, 2048, -1)
    for seed, made in enumerate(found):
        np.testing.assert_allclose(made, lines[drawn(seed)], atol=2e-5)
    assert np.quantile(held, 0.99) <= 3 * 0.005 * slowness()


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, 2048)


def send_batches(url: str) -> None:
    """Sends all batches concurrently and repeats refused ones; writes all vectors to stdout, in base64."""

    async def all_of_them() -> list[np.ndarray]:
        async with httpx.AsyncClient(base_url=url, timeout=None) as http:
            return await asyncio.gather(*[one(http, drawn(seed)) for seed in range(100)])

    async def one(http: httpx.AsyncClient, draw: np.ndarray) -> np.ndarray:
        body = {"input": draw[:, None].tolist(), "encoding_format": "base64"}
        while (answer := await http.post("/v1/embeddings", json=body)).status_code == 429:  # noqa: ASYNC110
            await asyncio.sleep(float(answer.headers["retry-after"]))
        data = answer.json()["data"]
        assert [entry["index"] for entry in data] == list(range(len(draw)))
        return np.array([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data])

    made = np.array(asyncio.run(all_of_them()))
    sys.stdout.write(base64.b64encode(made.tobytes()).decode())
