"""Start and stop of the server from a user's view: time to ready, early answers, signals, sockets, wrong flags."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from server.dialects.table import FAMILIES as DIALECTS
from server.http.exchange import TEI_PATHS
from server.routes.table import FAMILIES
from tests import tiny
from tests.end_to_end.process import ROOT, SMALL, ServerProcess, serving
from tests.end_to_end.wire import Connection, Stream, ask, greedy, read_events, request_bytes

READY_S = 4.0  # from process start to ready: embedded model, warm disk cache, 2 cores
OMNI = ("--model", str(tiny.checkpoint("omni")), *SMALL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def bare_torch_import() -> float:
    """Seconds that this machine takes to import torch alone at this moment; the server cannot be faster."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, cwd=ROOT)
    return time.perf_counter() - begun


@pytest.mark.alone
def test_ready_within_four_seconds_with_the_embedded_model():
    times, logs = [], []
    for _ in range(3):
        with serving("--log-level", "debug") as process:
            times.append(process.ready_s)
            logs.append(process.log)
            assert asyncio.run(ask(process.port, "GET", "/health")).status == 200
    alone = bare_torch_import()
    took = statistics.median(times)
    print(f"ready in {took:.2f} s ({', '.join(f'{t:.2f}' for t in times)}); import torch alone {alone:.2f} s")
    assert took <= max(READY_S, 2.5 * alone), logs[times.index(took)]
    for phase in ("imports", "weights", "warmup", "tokenizer", "template"):
        assert re.search(rf"start: {phase}\s+\d+\.\d+ s", logs[0]), f"the log does not say how long {phase} took"


async def until_bound(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            await asyncio.sleep(0.01)
        else:
            return


async def test_every_route_answers_503_until_ready():
    lines = [line for family in (*FAMILIES, *DIALECTS) for line in family.ROUTES]
    asked = [(method, re.sub(r"\{.*?\}", "x", line.path)) for line in lines for method in line.methods]
    asked += [("GET", "/no/such/path"), ("DELETE", "/health")]
    for _ in range(5):  # the rest of the start takes 0.3 s: on a busy machine the requests may come too late
        process = ServerProcess(*OMNI, port=free_port()).spawn()
        try:
            await until_bound(process.port)
            replies = await asyncio.gather(
                *[ask(process.port, method, path, {} if method == "POST" else None) for method, path in asked]
            )
            if process.listening:
                continue
            process.wait_ready()
            assert (await ask(process.port, "GET", "/health")).status == 200
            process.stop()
            break
        finally:
            process.close()
    else:
        pytest.fail("it was always ready before the test had asked; nothing was shown")
    for (method, path), reply in zip(asked, replies):
        if path == "/health/live":
            assert reply.status == 200, "a server that loads is alive"
            continue
        assert reply.status == 503, (method, path, reply)
        assert int(reply.headers["retry-after"]) >= 1
        if path.startswith("/v1/messages"):
            assert reply.error["type"] == "overloaded_error", path
        elif path.startswith(("/api/", *TEI_PATHS)) and path not in ("/embedding", "/embeddings") and method != "HEAD":
            assert "still being loaded" in reply.error
        elif method != "HEAD":
            assert reply.error["reason"] == "starting", (method, path)
            assert reply.error["type"] == "ServiceUnavailableError"


async def until_answered(port: int) -> None:
    """Waits until the loop answers /health: the server is starting or ready."""
    await until_bound(port)
    assert (await ask(port, "GET", "/health")).status in (200, 503)


@pytest.mark.parametrize("after", [0.0, 0.05])
async def test_sigterm_while_starting_ends_it(after):
    """SIGTERM arrives before the server is ready. The time until ready varies, so one of several tries must succeed."""
    for _ in range(4):
        process = ServerProcess(*OMNI, port=free_port()).spawn()
        try:
            await until_answered(process.port)
            await asyncio.sleep(after)
            process.signal()
            assert await asyncio.to_thread(process.wait, 60) == 0, process.log
            process.check_log()
            if not process.listening:
                return
        finally:
            process.close()
    raise AssertionError("it went on as if nobody had asked, or was ready before the signal each time")


def until_held(process: ServerProcess) -> None:
    """Waits until our first line has set a handler of SIGTERM. Before, Python itself handles signals."""
    status, term = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGTERM - 1)
    while not int(re.search(r"SigCgt:\s*(\w+)", status.read_text()).group(1), 16) & term:
        assert process.alive, process.log
        time.sleep(0.002)


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_loop_runs_is_not_lost(number):
    """The signals arrive during imports, where Python's own exception for a signal could be swallowed."""
    processes = [ServerProcess(*OMNI).spawn() for _ in range(3)]
    try:
        for process in processes:
            until_held(process)
        begun = time.perf_counter()
        for at, process in enumerate(processes):
            time.sleep(max(0.0, begun + 0.1 * at - time.perf_counter()))
            process.signal(number)
        for process in processes:
            assert process.wait(60) == 0, process.log
            process.check_log()
            assert not process.listening, "it went on as if nobody had asked"
    finally:
        for process in processes:
            process.close()


async def until_draining(port: int) -> None:
    """Waits until the server has received the signal: /health reports draining."""
    async with asyncio.timeout(20):
        while (reply := await ask(port, "GET", "/health")).status == 200:  # noqa: ASYNC110 (no event to await)
            await asyncio.sleep(0.005)
    assert (reply.status, reply.error["reason"]) == (503, "draining")


async def test_sigterm_lets_running_streams_finish_and_refuses_new_ones():
    with serving(*OMNI) as process:
        async with Connection(process.port) as running, Connection(process.port) as late:
            await running.send(request_bytes("POST", "/v1/completions", greedy(max_tokens=1800, stream=True)))
            part = await read_events(running, Stream(), until=3)
            process.signal()
            await until_draining(process.port)
            await late.send(request_bytes("POST", "/v1/completions", greedy()))
            refused = await late.reply()
            assert refused.status == 503
            assert refused.error["reason"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
            assert not part.done
            whole = await read_events(running, part)
        assert whole.done
        assert whole.error is None
        assert len(whole.token_ids) == 1800
        assert await asyncio.to_thread(process.wait) == 0
        process.check_log()


async def test_a_second_sigterm_ends_running_streams_with_an_error_at_once():
    with serving(*OMNI) as process:
        async with Connection(process.port) as running, Connection(process.port) as whole:
            body = greedy(max_tokens=1900, n=8, stream=True)
            await running.send(request_bytes("POST", "/v1/completions", body))
            await whole.send(request_bytes("POST", "/v1/completions", {**body, "stream": False}))
            part = await read_events(running, Stream(), until=3)
            process.signal()
            await until_draining(process.port)  # signals in quick succession would count as one
            begun = time.perf_counter()
            process.signal()
            cut = await read_events(running, part)
            reply = await whole.reply()
        assert cut.error is not None
        assert cut.error["reason"] == "draining"
        assert cut.done
        assert reply.status == 503
        assert reply.error["reason"] == "draining"
        assert await asyncio.to_thread(process.wait) == 0
        took = time.perf_counter() - begun
        assert took < 5 or took < 2.5 * bare_torch_import()
        process.check_log()


async def test_requests_that_do_not_fit_the_shutdown_timeout_end_with_an_error():
    with serving(*OMNI, "--shutdown-timeout", "0.1") as process:
        async with Connection(process.port) as running:
            await running.send(request_bytes("POST", "/v1/completions", greedy(max_tokens=1900, n=8, stream=True)))
            part = await read_events(running, Stream(), until=3)
            process.signal()
            cut = await read_events(running, part)
        assert cut.error is not None
        assert cut.error["reason"] == "draining"
        assert cut.done
        assert await asyncio.to_thread(process.wait) == 0


async def test_a_unix_socket_serves_and_is_gone_afterwards(tmp_path):
    path = tmp_path / "server.sock"
    with serving(*OMNI, "--uds", str(path)) as process:
        assert process.listening == f"unix:{path}"
        reply = await ask(str(path), "POST", "/v1/completions", greedy(max_tokens=4))
        assert reply.status == 200
        assert len(reply.json()["choices"][0]["token_ids"]) == 4
    assert not path.exists()


async def test_sighup_reads_the_keys_again(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\n")
    with serving(*OMNI, "--api-key-file", str(keys)) as process:

        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await ask(process.port, "GET", "/v1/models", headers=headers)).status

        async def statuses() -> list[int]:
            return [await status("first"), await status("second"), await status("")]

        async def after_hangup(until: Callable[[], Awaitable[bool]]) -> None:
            process.signal(signal.SIGHUP)
            for _ in range(200):
                if await until():
                    return
                await asyncio.sleep(0.1)
            raise AssertionError(process.log)

        async def second_is_known() -> bool:
            return await status("second") == 200

        async def refusal_is_logged() -> bool:
            return "the keys stay as they were" in process.log

        assert await statuses() == [200, 401, 401]
        keys.write_text("second\n")
        await after_hangup(second_is_known)
        assert await statuses() == [401, 200, 401]
        keys.write_text("")
        await after_hangup(refusal_is_logged)
        assert await statuses() == [401, 200, 401]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", *flags], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_an_unknown_flag_names_the_nearest():
    done = run("--max-model-length", "32")
    assert done.returncode == 2
    assert one_line(done) == "omniloop: unknown flag --max-model-length; did you mean --max-model-len?\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--port", "eighty"), "--port eighty: must be a whole number"),
        (("--port", "70000"), "--port 70000: must be 0 to 65535"),
        (("--dtype", "float8"), "--dtype float8: must be one of auto, float32, bfloat16"),
        (("--limit-mm-per-prompt", "{"), "--limit-mm-per-prompt {: must be a JSON object"),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(flags, words):
    done = run(*flags)
    assert done.returncode == 2
    assert words in one_line(done)


def test_a_wrong_model_folder_is_one_line(tmp_path):
    missing = run("--host", "127.0.0.1", "--port", "0", "--model", str(tmp_path / "none"))
    assert missing.returncode == 1
    assert "there is no such folder" in one_line(missing)
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    other = run("--host", "127.0.0.1", "--port", "0", "--model", str(tmp_path))
    assert other.returncode == 1
    assert "MambaForCausalLM" in one_line(other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_an_accelerator_that_is_not_there_is_one_line():
    done = run("--host", "127.0.0.1", "--port", "0", "--device", "cuda")
    assert done.returncode == 1
    assert re.fullmatch(
        r"omniloop: --device cuda: torch \S+ sees no accelerator .+; use --device cpu\n", one_line(done)
    )


def test_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert re.search(
        r"cannot listen on 127\.0\.0\.1:\d+: Address already in use; .* set another --port", one_line(done)
    )


def test_help_names_every_flag_and_is_quick():
    done = run("--help=all")
    assert done.returncode == 0
    for name in ("--model", "--port", "--uds", "--max-num-seqs", "--allowed-media-domains", "--config"):
        assert name in done.stdout
    code = "from server.cli import parse\n"
    code += "try: parse(['--help'])\nexcept SystemExit: import sys; sys.exit('torch' in sys.modules)"
    bare = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert bare.returncode == 0, f"help must not import torch: {bare.stderr}"


def test_the_socket_is_bound_before_torch_is_imported():
    code = "import sys, server.start.process; sys.exit('torch' in sys.modules)"
    bare = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert bare.returncode == 0, f"a probe would wait for torch: {bare.stderr}"


def test_libraries_that_few_requests_need_are_not_imported_by_a_start():
    code = "import sys, server.app, server.start.lifespan, engine.engine\n"
    code += "sys.exit(','.join({'transformers', 'greenlet', 'librosa'} & set(sys.modules)) or 0)"
    bare = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert bare.returncode == 0, bare.stderr


@pytest.mark.parametrize("words", ["--help", "info"])
def test_a_reader_that_leaves_early_is_no_error(words):
    shell = f"set -o pipefail; {sys.executable} -m server {words} | head -n 0"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout == done.stderr == ""


async def test_an_idle_server_takes_next_to_no_cpu(server_process):
    reply = await ask(server_process.port, "POST", "/v1/completions", greedy(max_tokens=8))
    assert reply.status == 200
    await asyncio.sleep(0.3)
    before = server_process.cpu_seconds()
    await asyncio.sleep(1)
    assert server_process.cpu_seconds() - before < 0.3, "a loop that never rests takes 1"
