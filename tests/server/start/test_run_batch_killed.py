"""run-batch in a process of its own that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import orjson
import pytest

from tests.server.routes.test_batches import ASK, CHAT, lines
from tests.server.start.test_run_batch import read


@pytest.mark.full
def test_a_killed_run_goes_on_with_each_line_answered_once(tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    body = {"messages": ASK, "max_tokens": 60, "ignore_eos": True}
    source.write_bytes(lines(CHAT, [body | {"seed": number} for number in range(400)]))
    command = [sys.executable, "-m", "server", "run-batch", "-i", source, "-o", target, "--device", "cpu"]
    command += ["--num-threads", "1", "--max-num-seqs", "8", "--num-gpu-blocks-override", "1024"]
    first = subprocess.Popen(command)
    until = time.monotonic() + 120
    while not (target.exists() and target.stat().st_size):
        assert time.monotonic() < until
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = {name: line["id"] for name, line in read(target).items()}
    assert 0 < len(done) < 400
    assert subprocess.run(command, check=False, timeout=170).returncode == 0
    written = [orjson.loads(line) for line in target.read_bytes().splitlines()]
    assert len(written) == 400 == len({line["custom_id"] for line in written})
    assert done.items() <= {line["custom_id"]: line["id"] for line in written}.items()
