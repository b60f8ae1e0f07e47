"""/score and /rerank: classifiers of pairs, rerankers of two tokens, and embedding models."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest
import torch

from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from server.pooling.pairs import INSTRUCTION, QWEN3_AFTER, QWEN3_BEFORE
from tests import pooling_kit as kit
from tests import tiny
from tests.asked_vectors import DOCUMENTS, QUERY, scores, vectors

pytestmark = pytest.mark.asyncio(loop_scope="session")
PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


def two_tokens(**more):
    """Qwen3-Reranker as in vLLM's hf_overrides; the tiny tokenizer has no words, so letters replace them."""
    values = {"architectures": ("Qwen3ForSequenceClassification",), "classifier_from_token": kit.Words(["n", "y"])}
    return kit.changed(tiny.checkpoint("qwen3"), f"two-tokens-{len(more)}", **values, **more)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


async def test_a_reranker_of_two_tokens_has_its_models_own_template(pooling):
    folder = two_tokens(is_original_qwen3_reranker=True)
    client = await pooling(folder)
    model, encode = tiny.reference(tiny.checkpoint("qwen3")), client.state.tokenizer.encode
    yes, no = encode("y")[0], encode("n")[0]

    def wanted(instruction):
        for document in DOCUMENTS:
            text = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
            ids = [*encode(QWEN3_BEFORE), *encode(text), *encode(QWEN3_AFTER)]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            yield float(sigmoid((logits[yes] - logits[no]).numpy()))

    assert 'only be "yes" or "no"' in QWEN3_BEFORE
    found = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
    np.testing.assert_allclose(found, list(wanted(INSTRUCTION)), atol=1e-4)
    asked = await scores(client, queries=QUERY, documents=DOCUMENTS, instruction="find birds")
    np.testing.assert_allclose(asked, list(wanted("find birds")), atol=1e-4)
    ranked = await client.post("/rerank", {"query": QUERY, "documents": DOCUMENTS, "instruction": "find birds"})
    # Of two equal documents, one may share a cached prefix; its score then differs in the last bit between requests.
    results = [(-entry["relevance_score"], entry["index"]) for entry in ranked.json()["results"]]
    assert results == sorted(results)
    np.testing.assert_allclose([-score for score, _ in results], [asked[at] for _, at in results], atol=1e-6)
    assert sorted(at for _, at in results) == list(range(len(DOCUMENTS)))


async def test_pairs_of_a_decoder_are_its_tokenizers_pairs(pooling):
    from transformers import AutoModelForSequenceClassification

    folder = kit.ended(kit.classifier("llama", "LlamaForSequenceClassification", 1))
    client = await pooling(folder)
    with tiny.quiet(), torch.no_grad():
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        pairs = [client.state.tokenizer.encode_pair(QUERY, document)[0] for document in DOCUMENTS]
        # Not model(ids).logits, which treats the last token of these texts as padding.
        logits = [float(model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1])) for ids in pairs]
    found = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
    raw = await scores(client, text_1=QUERY, text_2=DOCUMENTS, use_activation=False)
    np.testing.assert_allclose(raw, logits, atol=1e-4)
    np.testing.assert_allclose(found, sigmoid(np.array(logits)), atol=1e-4)


async def test_the_checkpoints_prompt_begins_the_query_of_a_pair(pooling, tmp_path):
    plain = kit.encoder("bert", 1)
    folder = kit.shutil.copytree(plain, tmp_path / "prompted")
    kit.write(
        folder / "config_sentence_transformers.json", {"prompts": {"web": "Find it: "}, "default_prompt_name": "web"}
    )
    found = await scores(await pooling(folder), text_1=QUERY, text_2=DOCUMENTS)
    wanted = await scores(await pooling(plain), text_1=f"Find it: {QUERY}", text_2=DOCUMENTS)
    np.testing.assert_array_equal(found, wanted)


async def test_vectors_are_compared_by_cosine(pooling):
    client = await pooling(kit.embedder("qwen3", prompts=True))
    found = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
    query = await vectors(client, QUERY, prompt_name="query")
    documents = await vectors(client, DOCUMENTS, prompt_name="document")
    np.testing.assert_allclose(found, documents @ query[0], atol=1e-6)
    assert found[2] == found[4]


@pytest.mark.parametrize("path", PATHS)
async def test_documents_are_sorted_and_cut(pooling, path):
    client = await pooling(kit.embedder("qwen3"))
    found = await scores(client, queries=QUERY, documents=DOCUMENTS)
    order = sorted(range(5), key=lambda at: (-found[at], at))

    async def ranked(**more):
        answer = await client.post(path, {"query": QUERY, "documents": DOCUMENTS, **more})
        assert answer.status == 200, answer.content
        return answer.json()["results"]

    whole = await ranked(documents=[DOCUMENTS[0], *({"text": text} for text in DOCUMENTS[1:])])
    assert [entry["index"] for entry in whole] == order
    assert [entry["document"]["text"] for entry in whole] == [DOCUMENTS[at] for at in order]
    assert await ranked(top_n=2) == whole[:2]
    assert await ranked(top_n=0) == await ranked(top_n=99) == whole
    assert "document" not in (await ranked(return_documents=False))[0]
    short = client.state.tokenizer.decode(client.state.tokenizer.encode(DOCUMENTS[3])[:3])
    cut = {entry["index"]: entry["relevance_score"] for entry in await ranked(max_tokens_per_doc=3)}
    assert cut[3] == (await scores(client, queries=QUERY, documents=[short]))[0]


async def test_documents_behind_a_prompt_are_cut_to_tokens_of_their_own(pooling):
    client = await pooling(kit.embedder("bert", "mean_tokens", prompts=True))
    document = "xyz" * 5
    short = client.state.tokenizer.decode(client.state.tokenizer.encode(document)[:4])
    (wanted,) = await scores(client, text_1=QUERY, text_2=short)
    answer = await client.post("/rerank", {"query": QUERY, "documents": [document], "max_tokens_per_doc": 4})
    assert answer.json()["results"][0]["relevance_score"] == pytest.approx(wanted, abs=1e-6)


async def test_both_sides_go_by_four_names(pooling):
    client = await pooling(kit.embedder("qwen3"))
    wanted = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
    for one, other in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        assert await scores(client, "/v1/score", **{one: QUERY, other: DOCUMENTS}) == wanted
    parts = [{"type": "text", "text": "a bird "}, {"type": "text", "text": "in the land"}]
    assert await scores(client, text_1=QUERY, text_2=[DOCUMENTS[0], parts]) == wanted[:2]
    many = await scores(client, text_1=[QUERY] * 5, text_2=DOCUMENTS)
    np.testing.assert_array_equal(many, wanted)


BAD = [
    ({"text_1": ["x", "x"], "text_2": ["x"] * 3}, "text_2"),
    ({"text_1": "x"}, "text_2"),
    ({"items": "x"}, "queries"),
    ({}, "queries"),
    ({"text_1": ["x", "a b c d " * 60], "text_2": ["x", "x"]}, "text_1[1]"),
    ({"text_1": "x", "text_2": "x", "documents": "x"}, "queries"),
    ({"text_1": "x", "text_2": []}, "text_2"),
    ({"text_1": "x", "text_2": ["x", {}]}, "text_2[1]"),
    ({"text_1": "x", "text_2": [{"type": "image_url", "image_url": {"url": "x"}}]}, "text_2"),
    ({"text_1": "x", "text_2": ["x"] * 1025}, "text_2"),
    ({"text_1": "x", "text_2": ["x", "a b c d " * 60]}, "text_2[1]"),
    ({"text_1": "x", "text_2": "x", "normalize": True}, "normalize"),
    ({"text_1": "x", "text_2": "x", "instruction": "y"}, "instruction"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_bad_pairs_are_400_and_say_where(pooling, body, param):
    client = await pooling(kit.embedder("qwen3"))
    refused = await client.post("/score", body)
    assert (refused.status, refused.error["param"]) == (400, param)


async def test_bad_ranks(pooling):
    client = await pooling(kit.embedder("qwen3"))
    for body in ({"top_n": -1}, {"max_tokens_per_doc": -1}, {"documents": [{}]}, {"documents": []}, {"query": 5}):
        refused = await client.post("/rerank", {"query": "x", "documents": ["x"], **body})
        assert refused.status == 400
    three = await pooling(kit.classifier("llama", "LlamaForSequenceClassification", 3))
    assert (await three.post("/rerank", {"query": "x", "documents": ["x"]})).status == 501


async def test_a_score_head_that_is_missing_or_of_another_size_stops_the_start():
    folder = kit.changed(tiny.checkpoint("llama"), "no-score", architectures=("LlamaForSequenceClassification",))
    from engine import Engine, EngineConfig

    with pytest.raises(ConfigError, match=r"missing: score.weight"):
        await Engine(EngineConfig(model=str(folder), num_threads=1)).start()
    with pytest.raises(ConfigError, match="no such"):
        load_model_config(two_tokens(), {"classifier_from_token": ["no such", "y"]})
    with pytest.raises(ConfigError, match="runner generate"):
        load_model_config(folder, runner="generate")
    await asyncio.sleep(0)


AS_PARTS = kit.PAIR_TEMPLATE.replace("m.content", "m.content[0].text")


@pytest.mark.parametrize(("template", "opens"), [(kit.PAIR_TEMPLATE, True), (AS_PARTS, False)])
async def test_logit_score_reads_pairs_by_the_roles_of_its_template(pooling, template, opens):
    client = await pooling(kit.logit_score(template, opens))
    encode, model = client.state.tokenizer.encode, tiny.reference(tiny.checkpoint("qwen3"))

    def wanted(document, instruction="Find it"):
        said = (instruction, f"query: {QUERY}", f"document: {document}")
        text = "".join(f"<|im_start|>{part}<|im_end|>" for part in said) + "<|im_start|>" * opens
        with torch.no_grad():
            logits = model(torch.tensor([encode(text)])).logits[0, -1]
        return float(logits[11] - logits[12])

    found = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
    np.testing.assert_allclose(found, [sigmoid(wanted(document)) for document in DOCUMENTS], atol=1e-4)
    told = await scores(client, text_1=QUERY, text_2="x", instruction="Judge", use_activation=False)
    np.testing.assert_allclose(told, [wanted("x", "Judge")], atol=1e-3)
    long = "a b c d " * 60
    refused = await client.post("/score", {"text_1": QUERY, "text_2": ["x", long]})
    assert (refused.status, refused.error["param"]) == (400, "text_2[1]")
    assert len(await scores(client, text_1=QUERY, text_2=["x", long], truncate_prompt_tokens=-1)) == 2
    cut = await client.post("/rerank", {"query": QUERY, "documents": [long], "max_tokens_per_doc": 3})
    short = client.state.tokenizer.decode(encode(long)[:3])
    np.testing.assert_allclose(cut.json()["results"][0]["relevance_score"], sigmoid(wanted(short)), atol=1e-4)
    refused = await client.post("/score", {"text_1": long, "text_2": "x", "truncate_prompt_tokens": -1})
    assert (refused.status, refused.error["param"]) == (400, "text_1")


async def test_a_template_without_the_roles_of_a_pair_is_501(pooling):
    client = await pooling(kit.logit_score("{{ messages[0].role }}"))
    refused = await client.post("/score", {"text_1": "x", "text_2": "y"})
    assert (refused.status, "query" in refused.content.decode()) == (501, True)


@functools.cache
def classifier_of_messages():
    """A classifier with a chat template, as sentence-transformers 6 saves it."""
    folder = kit.home() / "classifier-of-messages"
    kit.shutil.copytree(kit.classifier("qwen3", "Qwen3ForSequenceClassification", 1), folder)
    kit.write(folder / "config.json", {**kit.read(folder / "config.json"), "pad_token_id": tiny.IDS["<|endoftext|>"]})
    scorer = kit.logit_score(kit.PAIR_TEMPLATE, True)
    for name in ("sentence_bert_config.json", "config_sentence_transformers.json", "chat_template.jinja"):
        kit.shutil.copy(scorer / name, folder)
    about = {"transformer_task": "sequence-classification", "module_output_name": "scores"}
    kit.write(folder / "sentence_bert_config.json", {**kit.read(scorer / "sentence_bert_config.json"), **about})
    kit.write(folder / "modules.json", kit.read(scorer / "modules.json")[:1])
    return folder


async def test_a_classifier_reads_pairs_by_its_template_where_its_files_say_so(pooling):
    client = await pooling(classifier_of_messages())
    said = [("Find it", f"query: {QUERY}", f"document: {document}") for document in DOCUMENTS]
    texts = ["".join(f"<|im_start|>{part}<|im_end|>" for part in parts) + "<|im_start|>" for parts in said]
    ids = [client.state.tokenizer.encode(text) for text in texts]
    answer = await client.post("/classify", {"input": ids})
    wanted = [entry["probs"][0] for entry in answer.json()["data"]]
    np.testing.assert_allclose(await scores(client, text_1=QUERY, text_2=DOCUMENTS), wanted, atol=1e-5)


async def test_a_cross_encoder_of_pooling_and_dense_scores_pairs(pooling, tmp_path):
    embedder = kit.embedder("bert", "mean_tokens", dense=1, normalize=False)
    folder = kit.shutil.copytree(embedder, tmp_path / "pairs")
    said = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid"}
    kit.write(folder / "config_sentence_transformers.json", said)
    client = await pooling(folder)
    hidden = kit.body_of(embedder)
    linear = kit.load_file(folder / "2_Dense" / "model.safetensors")
    weight, bias = linear["linear.weight"].numpy()[0], linear["linear.bias"].numpy()[0]
    wanted = []
    for document in DOCUMENTS:
        ids, types = client.state.tokenizer.encode_pair(QUERY, document)
        mean = hidden(ids, token_type_ids=torch.tensor([types])).mean(0)
        wanted.append(sigmoid(np.tanh(mean @ weight + bias)))
    np.testing.assert_allclose(await scores(client, text_1=QUERY, text_2=DOCUMENTS), wanted, atol=1e-5)
    assert (await client.post("/v1/embeddings", {"input": "x"})).status == 501


@pytest.mark.full
@pytest.mark.parametrize("kind", ["logit score", "classifier"])
async def test_pairs_of_a_template_are_those_of_sentence_transformers(pooling, kind):
    from sentence_transformers import CrossEncoder

    folder = classifier_of_messages() if kind == "classifier" else kit.logit_score(kit.PAIR_TEMPLATE, True)
    client = await pooling(folder)
    with tiny.quiet():
        model = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    wanted = model.predict([(QUERY, document) for document in DOCUMENTS])
    np.testing.assert_allclose(await scores(client, text_1=QUERY, text_2=DOCUMENTS), wanted, atol=1e-4)
