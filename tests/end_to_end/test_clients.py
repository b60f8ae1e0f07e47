"""Clients with environments of their own, against `python -m server`: litellm, the Vercel AI SDK, guidellm.

Each client runs as a separate program and prints its results; the test compares them with plain requests.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.flags.config import EMBEDDED
from tests.end_to_end.installed import Installing, NodeClient, PythonClient, run
from tests.end_to_end.process import ServerProcess
from tests.end_to_end.wire import ask
from tests.server.live import picture

HERE = Path(__file__).parent / "clients"
PICTURE = "data:image/png;base64," + picture()
SHORT = {"max_tokens": 6, "temperature": 0}
HAS_NODE = bool(shutil.which("node") and shutil.which("npm"))


CLIENTS: dict[str, Callable[[], Installing]] = {
    "litellm": lambda: PythonClient("litellm", "litellm>=1.80,<2"),
    "guidellm": lambda: PythonClient("guidellm", "guidellm>=0.8,<0.9"),
    "ai-sdk": lambda: NodeClient("ai-sdk", "ai@6", "@ai-sdk/openai-compatible@2", "zod@4"),
}


@pytest.fixture(scope="module")
def installing(request: pytest.FixtureRequest) -> Iterator[dict[str, Installing]]:
    """Installs the clients of the selected tests, all at the same time."""
    tests = {item.originalname for item in request.session.items if item.path == Path(__file__)}
    asked = {"litellm": "test_litellm", "guidellm": "test_guidellm", "ai-sdk": "test_vercel_ai_sdk"}
    clients = {
        name: CLIENTS[name]() for name, test in asked.items() if test in tests and (HAS_NODE or name != "ai-sdk")
    }
    yield clients
    for client in clients.values():
        client.close()


def seen(printed: str) -> dict[str, Any]:
    """The JSON of a program's last line; libraries may print other lines before."""
    (line,) = [line for line in printed.splitlines() if line.startswith("SEEN ")]
    return json.loads(line[5:])


def url_of(process: ServerProcess) -> str:
    return f"http://127.0.0.1:{process.port}"


async def chat(port: int, *messages: Any, **fields: Any) -> dict[str, Any]:
    """The answer to a plain request: text, finish reason and usage in one dict."""
    reply = await ask(port, "POST", "/v1/chat/completions", {"messages": messages, **SHORT, **fields})
    assert reply.status == 200, reply.content
    body = reply.json()
    usage = [body["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    choice = body["choices"][0]
    return {"text": choice["message"]["content"], "end": choice["finish_reason"], "usage": usage}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


PARTS = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]


@pytest.mark.full  # 30 s of imports
@pytest.mark.slow
async def test_litellm(embedded_process, installing):
    folder, port = installing["litellm"].done(), embedded_process.port
    python = str(folder / "bin" / "python")
    printed = run(
        [python, str(HERE / "talk_litellm.py"), url_of(embedded_process), PICTURE],
        folder,
        LITELLM_LOCAL_MODEL_COST_MAP="True",  # litellm would load its price list from a web page
    )
    found = seen(printed)
    wanted = await chat(port, user("hi"))
    for name in ("whole", "vllm", "anthropic", "streamed", "vllm_streamed", "anthropic_streamed"):
        assert found[name] == wanted, name
    assert "".join(token for token, _ in found["logprobs"]) == wanted["text"]
    assert {count for _, count in found["logprobs"]} == {2}
    assert found["picture"] == (await chat(port, user(PARTS)))["usage"]
    assert found["too_long"] == ["ContextWindowExceededError", 400]
    assert found["bad_value"] == ["BadRequestError", 400]
    assert found["no_model"] == ["NotFoundError", 404]
    assert found["parallel"] == [wanted["text"]] * 8
    body = {"prompt": ["one two", "three"], **SHORT, "ignore_eos": True}
    texts = (await ask(port, "POST", "/v1/completions", body)).json()
    assert found["text"]["texts"] == [choice["text"] for choice in texts["choices"]]
    assert found["text"]["usage"][1] == 12


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NODE, reason="node or npm is not on this machine")
async def test_vercel_ai_sdk(embedded_process, installing):
    folder, port = installing["ai-sdk"].done(), embedded_process.port
    script = shutil.copy(HERE / "talk_ai_sdk.mjs", folder)
    found = seen(run(["node", script, url_of(embedded_process), PICTURE], folder))
    model = found["whole"].pop("model")
    assert model == "omniloop"
    wanted = await chat(port, {"role": "system", "content": "be brief"}, user("hi"))
    assert found["whole"] == found["streamed"] == wanted
    turns = await chat(port, user("hi"), {"role": "assistant", "content": "hello"}, user("again"))
    assert found["turns"] == {**turns, "model": model}
    stopped = await chat(port, {"role": "system", "content": "be brief"}, user("hi"), stop=["l"], seed=3)
    assert found["stopped"] == {**stopped, "model": model}
    shown = await chat(port, user(PARTS))
    assert found["picture"] == {**shown, "model": model}
    assert found["picture_streamed"] == shown
    # The server renders conversations in this form.
    prompt = {"prompt": "user:\none two\n\nassistant:\n", "stop": ["\nuser:"]}
    reply = (await ask(port, "POST", "/v1/completions", {**prompt, **SHORT})).json()
    assert found["text"]["text"] == reply["choices"][0]["text"]
    assert found["text"]["usage"][1] == reply["usage"]["completion_tokens"]
    assert found["no_model"] == ["AI_APICallError", 404, "model nothing does not exist; this server has omniloop"]
    assert found["left"] is True


@pytest.mark.full  # 30 s of imports
@pytest.mark.slow
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(embedded_process, installing, tmp_path, route):
    """guidellm finds the model, the usage and the streamed tokens; its counts equal the requested numbers."""
    folder = installing["guidellm"].done()
    report = tmp_path / "report.json"
    command = [
        *(str(folder / "bin" / "python"), "-m", "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url_of(embedded_process)},request_format={route}"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=8"),
        *("--tokenizer", f"kind=huggingface_auto,model={EMBEDDED}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--output", f"kind=json,path={report}"),
    ]
    run(command, folder, HF_HUB_OFFLINE="1", GUIDELLM__MAX_WORKER_PROCESSES="1")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    state, metrics = benchmark["scheduler_state"], benchmark["metrics"]
    assert (state["successful_requests"], state["errored_requests"]) == (8, 0)
    assert benchmark["config"]["requests"], "the report has lost its shape"
    generated = metrics["output_token_count"]["successful"]
    assert (generated["mean"], generated["min"], generated["max"]) == (8, 8, 8)
    assert metrics["prompt_token_count"]["successful"]["min"] >= 32
    for name in ("time_to_first_token_ms", "inter_token_latency_ms", "time_per_output_token_ms"):
        assert metrics[name]["successful"]["mean"] > 0, name
