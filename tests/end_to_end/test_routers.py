"""Cache-aware routers work unmodified in front of replicas: `pip install sglang-router vllm-router`."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from pathlib import Path

import httpx
import pytest

from tests.bench.replicas import hits, replicas, routed, talk

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
ROUTERS = {
    "sglang-router": [sys.executable, "-m", "sglang_router.launch_router"],
    "vllm-router": [str(Path(sys.executable).with_name("vllm-router"))],
}


def is_installed(name: str) -> bool:
    return bool(list(importlib.metadata.distributions(name=name)))


@pytest.mark.parametrize("name", [name for name in ROUTERS if is_installed(name)] or [
    pytest.param("", marks=pytest.mark.skip(reason="no router is installed: pip install sglang-router vllm-router"))
])  # fmt: skip
def test_a_router_keeps_conversations_where_their_prefix_is(name):
    command = shlex.join([*ROUTERS[name], "--policy", "cache_aware"])
    with replicas(2) as ports, routed(command, ports) as port:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["omniloop"]
            asked = {"model": "omniloop", "messages": [{"role": "user", "content": "What is 12 + 30?"}], "stream": True}
            streamed = client.post("/v1/chat/completions", json=asked).text
            assert streamed.endswith("data: [DONE]\n\n")
            refused = client.post("/v1/chat/completions", json={**asked, "max_tokens": -1})
            assert refused.status_code in (400, 422), "of the replica, or of a router that looks itself"
        before = sum(hits(ports))
        tokens = talk(f"http://127.0.0.1:{port}", 6, 4)
        assert (sum(hits(ports)) - before) / tokens > 0.5
