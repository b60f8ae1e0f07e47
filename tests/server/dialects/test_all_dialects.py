"""Routes of other protocols have the keys, limits, deadlines, isolation, accounting and metrics of the /v1 routes."""

from __future__ import annotations

import pytest

from server.dialects.table import routes_of
from tests.server.conftest import quiet, until
from tests.server.live import use_gaps, without_end
from tests.server.routes.test_key_limits import COUNTED

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK = [{"role": "user", "content": "hi"}]
SHORT = {"num_predict": 2}
GAP = {"input_prefix": "a", "input_suffix": "b"}
# A short request of each generating route; a long one has more tokens to generate.
WALK = {
    "/api/chat": ({"messages": ASK, "options": SHORT}, {"messages": ASK}),
    "/api/generate": ({"prompt": "hi", "options": SHORT}, {"prompt": "hi"}),
    "/chat/completions": ({"messages": ASK, "max_tokens": 2}, {"messages": ASK, "stream": True}),
    "/completion": ({"prompt": "hi", "n_predict": 2}, {"prompt": "hi", "stream": True}),
    "/completions": ({"prompt": "hi", "n_predict": 2}, {"prompt": "hi", "stream": True}),
    "/infill": ({**GAP, "n_predict": 2}, {**GAP, "stream": True}),
    "/generate": (
        {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
        {"text": "hi", "sampling_params": {"max_new_tokens": 4000}, "stream": True},
    ),
}
ROUTES = [(path, *bodies) for path, bodies in WALK.items()]


async def test_every_generating_route_of_a_dialect_is_walked(client):
    ours = {
        path
        for path in COUNTED
        if path.startswith(
            ("/v1/", "/inference/", "/tokenize", "/detokenize", "/apply-template", "/score", "/invocations")
        )
    }
    assert COUNTED.keys() - ours <= WALK.keys()
    assert WALK.keys() <= {line.path for line in routes_of(client.state.config)}


@pytest.fixture
def walked(serve):
    """Makes clients, as `serve`, with a tokenizer that has tokens for filling in the middle."""

    def make(**groups):
        client = serve(**groups)
        use_gaps(client)
        return client

    return make


@pytest.mark.parametrize(("path", "short", "long"), ROUTES)
async def test_keys_are_isolated_and_have_their_flow(walked, submitted, path, short, long):
    client = walked(server={"api_key": ("one", "two")})
    for key in ("one", "two"):
        assert (await client.post(path, short, headers={"x-api-key": key})).status == 200
    first, second = submitted[-2:]
    assert first.cache_salt != second.cache_salt
    assert first.cache_salt
    assert first.flow != second.flow
    assert (await client.post(path, short)).status == 401


@pytest.mark.parametrize(("path", "short", "long"), ROUTES)
async def test_a_gateways_priority_counts(walked, submitted, path, short, long):
    client = walked(scheduler={"scheduling_policy": "priority"})
    assert (await client.post(path, short, headers={"X-Vllm-Priority": "6"})).status == 200
    assert submitted[-1].priority == 6


@pytest.mark.parametrize(("path", "short", "long"), ROUTES)
async def test_choices_and_tokens_are_counted_and_given_back(walked, path, short, long):
    client = walked()
    metrics = client.state.metrics
    before = sum(metrics.finished.values())
    assert (await client.post(path, short)).status == 200
    assert sum(metrics.finished.values()) == before + 1
    assert metrics.http_count["POST", "2xx", path] == 1
    assert (client.state.places.taken, client.state.places.tokens) == (0, 0)


@pytest.mark.parametrize(("path", "short", "long"), ROUTES)
async def test_a_deadline_ends_an_answer_with_504(walked, path, short, long):
    client = walked(limits={"queue_timeout": 0.05})
    client.state.engine.pause()
    try:
        reply = await client.post(path, short)
    finally:
        client.state.engine.resume()
    assert reply.status == 504
    assert "--queue-timeout" in reply.content.decode()
    assert client.state.places.taken == 0


@pytest.mark.parametrize(("path", "short", "long"), ROUTES)
async def test_a_client_that_leaves_ends_its_answer(walked, path, short, long):
    client = walked()
    without_end(client)
    call = client.call("POST", path, long).start()
    await until(lambda: call.writes or client.state.live)
    call.leave()
    await call.finish()
    held = await quiet(client.state)
    assert held["routes"] == held["used"] == client.state.places.taken == 0


@pytest.mark.parametrize(("path", "short", "long"), ROUTES)
async def test_a_long_body_is_refused(walked, path, short, long):
    client = walked(limits={"max_request_bytes": 256, "max_text_request_bytes": 256})
    reply = await client.post(path, {**short, "padding": "x" * 300})
    assert reply.status == 413
