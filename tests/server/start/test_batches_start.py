"""Batches over starts: the folder belongs to one server; a killed server's batch goes on in the next server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable

import pytest

from engine.base.errors import ConfigError
from server.batches.folder import Folder
from server.start.lifespan import Lifespan
from server.state import AppState
from tests.server.conftest import config_of
from tests.server.routes.test_batches import ASK, CHAT, lines
from tests.server.routes.test_files import HEADERS, form


@pytest.mark.asyncio(loop_scope="session")
async def test_a_second_server_on_a_folder_does_not_start(tmp_path):
    first = Folder(str(tmp_path))
    first.open()
    lifespan = Lifespan(AppState(config_of(batches={"files_dir": str(tmp_path)})))
    with pytest.raises(ConfigError, match="another server uses this folder"):
        await lifespan.start()
    await lifespan.close()
    first.close()


def ask(port: int, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    headers = {"content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body or None, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()


def until(port: int, name: str, done: Callable[[dict], bool]) -> dict:
    ends = time.monotonic() + 120
    while not done(batch := json.loads(ask(port, f"/v1/batches/{name}"))):
        assert time.monotonic() < ends
        time.sleep(0.05)
    return batch


def started(folder) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "server", "--host", "127.0.0.1", "--port", "0", "--files-dir", str(folder)]
    command += ["--device", "cpu", "--num-threads", "1", "--max-num-seqs", "8", "--num-gpu-blocks-override", "1024"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = next(line for line in process.stdout if line.startswith("Listening on "))
    return process, int(line.rsplit(":", 1)[1])


@pytest.mark.full
def test_a_killed_servers_batch_goes_on_with_each_line_answered_once(tmp_path):
    bodies = [{"messages": ASK, "max_tokens": 60, "ignore_eos": True, "seed": number} for number in range(300)]
    process, port = started(tmp_path)
    file = json.loads(ask(port, "/v1/files", form(lines(CHAT, bodies)), HEADERS))["id"]
    made = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    name = json.loads(ask(port, "/v1/batches", json.dumps(made).encode()))["id"]
    until(port, name, lambda batch: batch["request_counts"]["completed"] > 20)
    time.sleep(1.5)  # some answers are on the disk
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process, port = started(tmp_path)
    batch = until(port, name, lambda batch: batch["status"] == "completed")
    found = [json.loads(line) for line in ask(port, f"/v1/files/{batch['output_file_id']}/content").splitlines()]
    assert batch["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
    assert len(found) == 300 == len({line["custom_id"] for line in found})
    process.send_signal(signal.SIGTERM)
    with process:
        assert process.wait(40) == 0
