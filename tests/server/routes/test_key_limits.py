"""Every route that makes the engine or the pool work counts towards the limits of the request's key (SECURITY S42)."""

from __future__ import annotations

import pytest

from server.dialects.table import routes_of
from server.ops.limits import digest_name
from tests.server.speech.test_audio import HEADERS, form

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK = [{"role": "user", "content": "hi"}]
FORM = form()
DEGREE = {"type": "score", "instructions": "How?"}
SCORED = {"query": "hi", "items": ["a"], "label_token_ids": [5, 6]}
# A valid body for each route; bytes are a form. A new POST route must be in COUNTED or in UNCOUNTED.
COUNTED = {
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 1},
    "/v1/chat/completions/render": {"messages": ASK, "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/completions/render": {"prompt": "hi", "max_tokens": 1},
    "/v1/messages": {"messages": ASK, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": ASK},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/audio/transcriptions": FORM,
    "/v1/audio/translations": FORM,
    "/v1/systemone": {"state": "hi", "questions": {"a": DEGREE | {"criteria": ["low", "high"]}}},
    "/v1/decisions": {"input": "hi", "questions": [DEGREE | {"levels": [{"label": "low"}, {"label": "high"}]}]},
    "/score": SCORED,
    "/v1/score": SCORED,
    "/invocations": {"prompt": "hi", "max_tokens": 1},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}},
    "/chat/completions": {"messages": ASK, "max_tokens": 1},
    "/apply-template": {"messages": ASK},
    "/completion": {"prompt": "hi", "n_predict": 1},
    "/completions": {"prompt": "hi", "n_predict": 1},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 1}},
    "/api/chat": {"messages": ASK, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 1}},
}
UNCOUNTED = {
    "/v1/responses/{id}/cancel", "/abort_requests", "/ping", "/v1/files", "/v1/batches",
    "/v1/batches/{id}/cancel",
    "/abort_request", "/flush_cache", "/embedding",
    "/embed", "/embed_all", "/embed_sparse", "/predict", "/v2/embed",
    "/v1/embeddings", "/pooling", "/classify", "/rerank", "/v1/rerank", "/v2/rerank",
    "/sleep", "/wake_up", "/start_profile", "/stop_profile",
    "/api/embed", "/api/embeddings", "/api/show", "/api/pull", "/api/push", "/api/create", "/api/copy",
    "/api/blobs/{digest}", "/infill", "/embeddings", "/reranking", "/v1/reranking",
    "/pause", "/resume", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter",
}  # fmt: skip
WAYS = [
    *((path, body) for path, body in COUNTED.items()),
    ("/v1/responses", {**COUNTED["/v1/responses"], "background": True}),
    ("/v1/responses", {**COUNTED["/v1/responses"], "stream": True}),
]


async def test_s42_every_posting_route_is_known_here(serve):
    flags = {"enable_runtime_lora": True}
    config = serve(server={"enable_dev_endpoints": True, "admin_api_key": "boss"}, lora=flags).state.config
    posted = {line.path for line in routes_of(config) if "POST" in (line.methods or ())}
    assert posted - UNCOUNTED == COUNTED.keys()
    assert not UNCOUNTED - posted


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_s42_a_busy_key_is_refused_on_every_generating_route(serve, path, body):
    client = serve(server={"api_key": ("one", "two")}, limits={"max_inflight_per_key": 1})

    async def post(key):
        sent = {"body": body, "headers": HEADERS} if isinstance(body, bytes) else {"json": body, "headers": {}}
        return await client.post(path, **{**sent, "headers": {**sent["headers"], "x-api-key": key}})

    with client.state.places.hold(1, digest_name("one")):
        refused = await post("one")
        error = refused.json()["error"]
        reason = "key_busy" if isinstance(error, str) else error.get("reason", "key_busy")
        assert (refused.status, reason) == (429, "key_busy")
        assert (await post("two")).status == 200
    assert (await post("one")).status == 200


async def test_s42_a_response_in_the_background_keeps_its_keys_place(serve):
    client = serve(server={"api_key": ("one", "two")}, limits={"max_inflight_per_key": 1})
    long = {"input": "count", "max_output_tokens": 300, "background": True, "ignore_eos": True}
    begun = await client.post("/v1/responses", long, headers={"x-api-key": "one"})
    assert begun.status == 200
    short = COUNTED["/v1/chat/completions"]
    refused = await client.post("/v1/chat/completions", short, headers={"x-api-key": "one"})
    assert refused.error["reason"] == "key_busy"
    assert (await client.post("/v1/chat/completions", short, headers={"x-api-key": "two"})).status == 200
    name = begun.json()["id"]
    await client.post(f"/v1/responses/{name}/cancel", headers={"x-api-key": "one"})
    assert (await client.post("/v1/chat/completions", short, headers={"x-api-key": "one"})).status == 200
