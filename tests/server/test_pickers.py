"""The interfaces for programs in front of many servers: endpoint pickers, sidecars, cache-aware routers.

Pickers of the Gateway API's inference extension and of llm-d read five metrics; SGLang's and vLLM's routers read names
and health. A hostile or broken proxy gets a documented answer and does not harm other clients.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.app import make_app
from tests.server.asgi import LENGTH, Client
from tests.server.conftest import quiet
from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")

OF_PICKERS = {
    "x-gateway-destination-endpoint": "10.1.2.3:8000",
    "x-gateway-inference-objective": "batch",
    "x-gateway-inference-fairness-id": "tenant",
    "x-prefiller-host-port": "169.254.169.254:80",
    "x-session-id": "one",
    "x-session-token": "b25l",
    "x-data-parallel-host-port": "10.1.2.3:8000",
    "x-data-parallel-rank": "0",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "x-forwarded-for": "1.2.3.4, 5.6.7.8",
    "x-envoy-expected-rq-timeout-ms": "15000",
}


@pytest.fixture
def measured(tiny_state) -> Client:
    """A client of an app whose metrics come from the tiny model's engine."""
    return Client(make_app(tiny_state))


async def scraped(client) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """Family of metrics -> (kind, labels, value) of each sample."""
    text = (await client.get("/metrics")).content.decode()
    found: dict[str, list[tuple[str, dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        found[family.name] = [(family.type, sample.labels, sample.value) for sample in family.samples]
    return found


@pytest.mark.parametrize("name", ["num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"])
async def test_the_picker_s_gauges_are_one_series_each(measured, name):
    ((kind, labels, value),) = (await scraped(measured))[f"vllm:{name}"]
    assert kind == "gauge"
    assert labels.keys() == {"model_name", "engine"}
    assert value == 0.0


async def test_a_scrape_does_not_wait_for_a_step(measured, tiny_state, monkeypatch):
    begun, ends = threading.Event(), threading.Event()
    model = tiny_state.engine.inspect().runtime.model
    real = model.forward

    def held(*args: Any) -> Any:
        begun.set()
        assert ends.wait(60)
        return real(*args)

    monkeypatch.setattr(model, "forward", held)
    body = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True}
    answer = asyncio.ensure_future(measured.post("/v1/completions", body))
    try:
        await asyncio.to_thread(begun.wait, 60)
        assert "vllm:generation_tokens" in await scraped(measured)
        assert not answer.done(), "the step is still held"
    finally:
        ends.set()
    assert (await answer).status == 200


async def test_the_cache_s_geometry_stands_in_labels(measured):
    ((kind, labels, value),) = (await scraped(measured))["vllm:cache_config_info"]
    assert (kind, value) == ("gauge", 1.0)
    assert int(labels["block_size"]) == 16
    assert int(labels["num_gpu_blocks"]) == 1024


async def test_the_gauges_move_with_the_load(measured, tiny_state):
    """Running requests and cache usage, while a request runs and after its end."""
    call = measured.call(
        "POST", "/v1/completions", {"prompt": "hello", "stream": True, "max_tokens": 400, "ignore_eos": True}
    )
    call.start()
    await call.wrote.wait()
    busy = await scraped(measured)
    assert busy["vllm:num_requests_running"][0][2] == 1.0
    assert 0.0 < busy["vllm:kv_cache_usage_perc"][0][2] <= 1.0
    call.leave()
    await call.finish()
    await quiet(tiny_state)


async def test_headers_of_pickers_and_sidecars_change_nothing(client):
    """No address in a header is ever dialled; a fixed request gets the same answer with and without the headers."""
    plain = (await client.chat("What is 12 + 30?", temperature=0)).json()
    marked = await client.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0, **LENGTH},
        headers=OF_PICKERS,
    )
    assert marked.status == 200
    assert marked.json()["choices"] == plain["choices"]


@pytest.mark.parametrize("rank", ["1", "-1", "x", "", "0x0", "1e0", "٠", "9" * 5000])
async def test_a_rank_that_is_not_here_is_refused(client, rank):
    reply = await client.call(
        "GET", "/v1/models", headers={"X-Data-Parallel-Rank": rank.encode().decode("latin1")}
    ).finish()
    assert (reply.status, reply.error["reason"]) == (400, "invalid_parameter")
    assert "this server has one engine" in reply.error["message"]
    assert len(reply.content) < 1024


async def test_rank_zero_is_this_server(client):
    for rank in ("0", " 0 ", "00"):
        assert (await client.get("/v1/models", headers={"X-Data-Parallel-Rank": rank})).status == 200


@pytest.mark.parametrize(
    ("phase", "answers"),
    [
        ("starting", {"/health": 503, "/health/ready": 503, "/health/live": 200, "/metrics": 503, "/v1/models": 503}),
        ("ready", {"/health": 200, "/health/ready": 200, "/health/live": 200, "/metrics": 200, "/v1/models": 200}),
        ("leaving", {"/health": 503, "/health/ready": 503, "/health/live": 200, "/metrics": 200, "/v1/models": 200}),
        ("draining", {"/health": 503, "/health/ready": 503, "/health/live": 200, "/metrics": 200, "/v1/models": 503}),
        ("dead", {"/health": 503, "/health/ready": 503, "/health/live": 503, "/metrics": 503, "/v1/models": 503}),
    ],
)
async def test_probes_report_the_phase(serve, phase, answers):
    client = serve(phase=phase)
    for path, status in answers.items():
        reply = await client.get(path)
        assert reply.status == status, path
        assert status == 200 or reply.reply_headers.get("retry-after") or phase == "dead"


async def test_overload_is_429_and_not_unready(serve):
    client = serve()
    client.state.places.limit = 0
    reply = await client.chat("hello")
    assert (reply.status, reply.error["reason"]) == (429, "queue_full")
    assert 1 <= int(reply.reply_headers["retry-after"]) <= 60
    assert (await client.get("/health")).status == 200


async def test_routers_learn_the_name_and_no_path(client):
    for path in ("/model_info", "/get_server_info"):
        told = (await client.get(path)).json()
        assert told["model_path"] == told["served_model_name"] == client.state.names[0]
    assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == list(client.state.names)


async def test_requests_that_share_an_id_have_answers_of_their_own(tiny_client):
    """A proxy repeats ids: each stream is complete, and a disconnect from one does not end the others."""
    body = {"prompt": "hello", "stream": True, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    calls = [
        tiny_client.call("POST", "/v1/completions", body, headers={"x-request-id": "same"}).start() for _ in range(3)
    ]
    await calls[0].wrote.wait()
    calls[0].leave()
    for call in calls:
        await call.finish()
    texts = ["".join(event["choices"][0]["text"] for event in call.events()[:-1]) for call in calls[1:]]
    assert texts[0] == texts[1]
    assert all(call.reply_headers["x-request-id"] == "same" for call in calls[1:])
    assert tiny_client.state.places.taken == 0


async def test_a_header_of_ten_thousand_characters_is_taken_and_not_repeated(tiny_client):
    async with listening(tiny_client) as url:
        port = int(url.rpartition(":")[2])
        for name in ("X-Request-Id", "X-Session-Id", "Traceparent", "X-Gateway-Destination-Endpoint"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"GET /v1/models HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{name}: {'x' * 10_000}\r\n\r\n"
            writer.write(head.encode())
            reply = await reader.read()
            writer.close()
            assert reply.startswith(b"HTTP/1.1 200 "), name
            assert b"xxxx" not in reply
