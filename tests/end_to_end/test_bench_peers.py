"""bench serve reports the usage that the server counts: for omniloop and for `transformers serve`."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from server.bench import serve
from server.bench.options import ServeOptions
from server.bench.output import on_loop
from server.bench.share import Share
from tests import tiny
from tests.end_to_end.installed import PythonClient
from tests.end_to_end.process import ServerProcess

JSON = {"content-type": "application/json"}
QWEN3 = str(tiny.checkpoint("qwen3"))


def reported_as_counted(url: str, model: str) -> None:
    """The reported usage of each answer equals that of the same request without a stream."""
    asked = ServeOptions(
        url=url,
        model=model,
        num_prompts=4,
        max_concurrency=2,
        input_len=12,
        range_ratio=0.5,
        output_len=6,
        temperature=0.0,
    )
    found, outcome = on_loop(serve.measure(asked))
    assert (found["completed"], found["counted_by"]) == (4, "usage"), found["failures"]
    bodies = Share(dataclasses.replace(asked, stream=False), model, 0, 1).bodies
    for answer in outcome.answers:
        whole = httpx.post(f"{url}/v1/chat/completions", content=bodies[answer.number], headers=JSON, timeout=60)
        usage = whole.json()["usage"]
        told = answer.prompt_tokens, answer.completion_tokens
        assert told == (usage["prompt_tokens"], usage["completion_tokens"])


def test_of_this_server(embedded_process: ServerProcess):
    reported_as_counted(f"http://127.0.0.1:{embedded_process.port}", "omniloop")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_of_transformers_serve(tmp_path):
    client = PythonClient("transformers-serve", "fastapi>=0.110", "accelerate>=1")
    client.done()
    with transformers_serve(client.python, tmp_path) as url:
        reported_as_counted(url, QWEN3)


@contextmanager
def transformers_serve(python: str, folder: Path) -> Iterator[str]:
    """`transformers serve` with the tiny model, started with an empty cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "hub").mkdir()
    command = [python, "-m", "transformers.cli.transformers", "serve", QWEN3, "--port", str(port)]
    command += ["--device", "cpu", "--dtype", "float32"]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HOME": str(folder)})
        try:
            while True:
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                try:
                    httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=30)
                    break
                except httpx.TransportError:
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()
