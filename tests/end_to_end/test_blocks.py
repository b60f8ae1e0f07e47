"""Every fenced `sh` and `python` block of README and of the pages runs unchanged, and prints what the page promises."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment

from tests.docs.blocks import ROOT, Block, blocks, of_page, text_of
from tests.docs.from_readme import WAYS
from tests.end_to_end.process import SMALL, ServerProcess, serving
from tests.end_to_end.wire import ask
from tests.pooling_kit import encoder

ADDRESS = "localhost:8000"
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# The first two blocks of README install; tests/docs/test_from_readme.py runs these blocks.
SHELL = [block for block in blocks("sh") if block.code not in WAYS]


@pytest.fixture(scope="module")
def embedder() -> Iterator[ServerProcess]:
    """A server with a model for the page `embeddings`."""
    with serving("--model", str(encoder("bert")), "--served-model-name", "embedder", *SMALL) as process:
        yield process


@pytest.fixture
def asked(request: pytest.FixtureRequest, block: Block) -> ServerProcess:
    """The server for a block's requests."""
    return request.getfixturevalue("embedder" if block.page == "embeddings" else "embedded_process")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with the command that an installation adds."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "omniloop"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m server "$@"\n')
    command.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def streamed(text: str) -> str:
    """The text of a streamed answer."""
    lines = [line for line in text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    assert len(lines) >= 3
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    if "choices" not in chunks[0]:
        return "".join(chunk.get("delta", "") for chunk in chunks if chunk["type"] == "transcript.text.delta")
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands are curl's")
@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_command_prints_what_the_page_promises(asked: ServerProcess, path: str, block: Block):
    here = block.code.replace(ADDRESS, f"localhost:{asked.port}").replace("curl ", "curl --fail-with-body ")
    environment = {**os.environ, **QUIET, "PATH": path}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", here],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    if block.streams:
        assert block.printed == [streamed(done.stdout)]
        return
    for text in block.printed:
        assert text in done.stdout
    if block.page == "README":
        (promised,) = of_page("README", "json")
        assert holds(json.loads(done.stdout), json.loads(promised))


def holds(answer: Any, part: Any) -> bool:
    """Whether an answer contains every field of a shortened example."""
    if isinstance(part, dict):
        return all(name in answer and holds(answer[name], each) for name, each in part.items())
    if isinstance(part, list):
        return len(answer) == len(part) and all(map(holds, answer, part))
    return answer == part


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_a_program_prints_what_the_page_promises(asked: ServerProcess, block: Block):
    printed = io.StringIO()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        exec(block.code.replace(ADDRESS, f"localhost:{asked.port}"), names)
    if hasattr(names.get("client"), "close"):
        names["client"].close()
    if block.page == "hosting":
        assert callable(names["app"])
        return
    assert printed.getvalue()
    if block.promise:
        assert printed.getvalue().splitlines() == block.printed


def addressed(text: str, process: ServerProcess) -> str:
    assert ADDRESS in text
    return text.replace(ADDRESS, f"localhost:{process.port}")


def question(embedded_process: ServerProcess, address: str, model: str) -> str:
    """The answer at an address, requested as an application would."""
    from openai import OpenAI

    with OpenAI(base_url=addressed(address, embedded_process), api_key="none") as client:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "What is 12 + 30?"}], temperature=0
        )
    return answer.choices[0].message.content or ""


def test_settings_of_editors_reach_the_server(embedded_process: ServerProcess):
    (found,) = [yaml.safe_load(code) for code in of_page("clients", "yaml") if "apiBase" in code]
    for model in found["models"]:
        assert question(embedded_process, model["apiBase"], model["model"]) == "42"
    (editor,) = [json.loads(code) for code in of_page("clients", "json") if "language_models" in code]
    for provider in editor["language_models"]["openai_compatible"].values():
        for offered in provider["available_models"]:
            assert question(embedded_process, provider["api_url"], offered["name"]) == "42"


def test_the_action_of_home_assistant_gets_an_answer(embedded_process: ServerProcess):
    (content,) = [yaml.safe_load(code) for code in of_page("clients", "yaml") if "rest_command" in code]
    action = content["rest_command"]["ask_omniloop"]
    body = Environment().from_string(action["payload"]).render(question='What is 12 + 30? "Please"')
    assert action["method"] == "POST"
    target = addressed(action["url"], embedded_process).partition(f":{embedded_process.port}")[2]
    reply = asyncio.run(ask(embedded_process.port, "POST", target, json.loads(body)))
    assert reply.status == 200
    assert reply.json()["choices"][0]["message"]["content"]


def test_files_that_a_block_reads_are_small():
    for block in SHELL:
        for name in re.findall(r"(?:< |@)(examples/\S+\.\w+)", block.code):
            assert (ROOT / name).stat().st_size < 100_000, f"{name} is not a few KB"


def test_there_is_a_command_for_text_image_audio_and_video():
    kinds = ("image_url", "input_audio", "video_url")
    found = {next((kind for kind in kinds if kind in block.code), "text") for block in SHELL}
    assert found == {"text", *kinds}


def test_examples_of_the_page_for_other_hosts_run_on_their_own(tmp_path: Path):
    """The page's second app answers its own route without the model: only the app's lifespan loads the model."""
    code = of_page("hosting", "python")[1]
    program = tmp_path / "program.py"
    program.write_text(code)
    run = (
        "import asyncio, httpx, program\n"
        "async def main():\n"
        "    async with httpx.AsyncClient(transport=httpx.ASGITransport(program.app), base_url='http://a') as client:\n"
        "        print((await client.get('/hello')).text)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, **QUIET, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "a route of the other app\n"
    assert "/hello" in text_of("hosting")
