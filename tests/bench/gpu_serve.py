"""Serving speed of one model over sockets: closed loops of streams; the server and its clients are separate processes.

As the peer was measured: random weights of a real shape, 512 tokens in and 128 out (or a picture of 1024 x 1024 and a
question), greedy, all streaming, prompts all different, prefix cache off; one picture under many questions is asked of
a second server, which has it on as servers have by default. Prints what was seen beside aim, floor and peer, with the
lateness of the server's loop and its CPU time per token; writes gpu_serve.json into --out. Output per second is that of
whole answers, per connection from its first end to its last within the time measured, so that waves of equal requests
do not bend it.
Run: python -m tests.bench.gpu_serve [--shape 8b,0.6b,vl-7b] [--streams 1,4x230,16,64,256] [--seconds 15] [--out DIR]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import targets
from tests.bench.shapes import SHAPES, write_folder
from tests.bench.streams import Job

READY_S = 240.0
STREAMS_PER_PROCESS, PICTURES_PER_PROCESS = 32, 4  # a client draws and packs its pictures itself
LENGTHS = {"tiny": (32, 16), "tiny-vl": (32, 16), "vl-7b": (64, 128)}  # prompt and answer; the rest has the peer's
PEER_LENGTHS = (512, 128)
ONE = " of one prefix-cached picture"
TINY_FLAGS = ("--num-gpu-blocks-override", "1024", "--max-num-seqs", "32", "--num-threads", "1")


@dataclass(frozen=True, slots=True)
class Case:
    """One load; `picture` is width and height, another one each time or, where the server caches prefixes, one."""

    streams: int
    picture: tuple[int, ...] = ()
    cached: bool = False
    more: str = ""  # in its name
    prompt: int = 0  # tokens; 0: as many as the shape's others

    @property
    def name(self) -> str:
        return f"{self.streams} streams{self.more}"


def cases_of(shape: str, streams: str) -> list[Case]:
    """What is asked of a shape; a model that sees gets pictures instead of long prompts."""
    if shape == "tiny-vl":
        return [Case(1, (112, 84)), Case(1, (112, 84), True, ONE), Case(4, (112, 84))]
    if "vision_config" in SHAPES[shape]:
        large, one = Case(1, (1920, 1080), more=" of 1080p"), Case(1, (1024, 1024), True, ONE)
        return [Case(1, (1024, 1024)), large, Case(8, (1024, 1024)), Case(32, (1024, 1024)), one]
    return [case_of(word) for word in streams.split(",")]


def case_of(word: str) -> Case:
    """`16`: so many streams; `4x230`: with prompts of 230 tokens."""
    count, _, prompt = word.partition("x")
    return Case(int(count), more=f" of {prompt} tokens" if prompt else "", prompt=int(prompt or 0))


UNITS = {
    "output": "tok/s",
    "TTFT p50": "ms",
    "TTFT p99": "ms",
    "ITL p50": "ms",
    "ITL p99": "ms",
    "TPOT": "ms",
    "loop stall p99": "ms",
    "loop CPU per token": "us",
    "server CPU": "cores",
}


class Server:
    """`python -m server` under watch, and what its process has used."""

    def __init__(self, shape: str, device: str, folder: Path, beats: Path, flags: Sequence[str]) -> None:
        model = write_folder(folder / f"dummy-{shape}", SHAPES[shape])
        begun = time.perf_counter()
        command = [sys.executable, "-m", "tests.bench.watched", str(beats), "--model", str(model)]
        command += ["--load-format", "dummy", "--device", device, "--host", "127.0.0.1", "--port", "0"]
        command += ["--disable-access-log", "--log-level", "debug", *flags]
        self.beats = beats
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("Listening on "):
                break
            print(line, end="", flush=True)
        else:
            raise RuntimeError("the server did not start")
        self.port = int(line.rsplit(":", 1)[1])
        self.ready_s = time.perf_counter() - begun

    def cpu(self) -> tuple[float, float]:
        """Seconds computed by the loop's thread, and by all threads."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        spent = {tid: cpu_of(tasks / tid) for tid in os.listdir(tasks)}
        return spent[str(self.process.pid)], sum(spent.values())

    def stop(self) -> np.ndarray:
        """The beats: float64 [count, 2] of time and lateness."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
        found = self.beats.with_suffix(".npy")
        return np.load(found) if found.is_file() else np.zeros((0, 2))


def cpu_of(task: Path) -> float:
    """Seconds that a thread has computed; exact where the kernel tells, else in ticks."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        pass
    try:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(port: int, path: str, body: dict[str, Any]) -> str:
    """One request; its whole answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text[:600]}")
        return text
    finally:
        connection.close()


def check(port: int) -> None:
    """Chat and completion, whole and streamed, of text and of ids, answer as they should."""
    rules = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    messages = [{"role": "user", "content": "Say something."}]
    said = json.loads(ask(port, "/v1/chat/completions", {"messages": messages, **rules}))
    streamed = ask(port, "/v1/chat/completions", {"messages": messages, "stream": True, **rules})
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert streamed.rstrip().endswith("data: [DONE]")
    assert text == said["choices"][0]["message"]["content"], (text, said)
    for prompt in ("Once upon a time", [400, 500, 600]):
        whole = json.loads(ask(port, "/v1/completions", {"prompt": prompt, **rules}))
        assert whole["usage"]["completion_tokens"] == 8, whole


def load(
    port: int, shape: str, asked: Case, warm_s: float, measure_s: float, warm: Callable[[], None]
) -> tuple[float, dict[str, np.ndarray]]:
    """Runs the clients, calls `warm` when their warm-up is over; (when they began, arrays of streams.Tally, joined)."""
    prompt, answer = LENGTHS.get(shape, PEER_LENGTHS)
    prompt = asked.prompt or prompt
    fields = {"temperature": 0, "ignore_eos": True, "stream": True}
    each = PICTURES_PER_PROCESS if asked.picture else STREAMS_PER_PROCESS
    processes = min(8, -(-asked.streams // each))
    shares = [asked.streams // processes + (number < asked.streams % processes) for number in range(processes)]
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / f"{number}.npz" for number in range(processes)]
        clients = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.bench.streams", str(file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for file in files
        ]  # fmt: skip
        try:
            for number, (client, share) in enumerate(zip(clients, shares)):
                vocab = SHAPES[shape].get("vocab_size", 0)
                seed = asked.streams * 1000 + len(asked.more) * 10 + number
                times, picture = (warm_s, measure_s), list(asked.picture)
                job = Job(port, share, prompt, answer, vocab, seed, *times, fields, picture, not asked.cached)
                tell(client, json.dumps(asdict(job)))
            for client in clients:
                assert client.stdout is not None
                if client.stdout.readline() != "ready\n":
                    raise RuntimeError("a client did not connect")
            for client in clients:
                tell(client, "go")
            time.sleep(warm_s)
            warm()
            for client in clients:
                if client.wait(measure_s + 60):
                    raise RuntimeError("a client failed")
        finally:
            for client in clients:
                client.kill()
                client.wait()
        parts = [dict(np.load(file)) for file in files]
    for number, part in enumerate(parts):
        part["answers"][:, 0] += 1000 * number  # connections of different processes
    begun = max(float(part["begun"]) for part in parts)
    return begun, {key: np.concatenate([part[key] for part in parts]) for key in ("firsts", "gaps", "answers")}


def tell(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line + "\n")
    client.stdin.flush()


def summary(came: dict[str, np.ndarray], answer: int, since: float, until: float) -> dict[str, float]:
    """The numbers of one case; times in milliseconds."""
    firsts, gaps, answers = came["firsts"], came["gaps"], came["answers"]
    firsts = firsts[firsts[:, 0] >= since]
    if not len(firsts) or not len(answers):
        raise RuntimeError("no request began and ended within the time measured; measure for longer")
    per_event = answer * len(answers) / answers[:, 3].sum()  # tokens: an event may carry several
    gaps = gaps[gaps[:, 0] >= since]
    ended = answers[answers[:, 2] >= since]
    tpot = (ended[:, 2] - ended[:, 1]) / (answer - 1)
    rate, connections = 0.0, np.unique(ended[:, 0])
    for connection in connections:
        ends = np.sort(ended[ended[:, 0] == connection, 2])
        rate += (len(ends) - 1) * answer / (ends[-1] - ends[0]) if len(ends) > 1 else float("nan")
    events_in = len(gaps) + len(firsts[firsts[:, 1] <= until])
    by_event = events_in * per_event / (until - since)
    wait = (firsts[:, 1] - firsts[:, 0]) * 1e3
    return {
        "output": by_event if np.isnan(rate) else rate,
        "output by event": by_event,
        "TTFT p50": float(np.percentile(wait, 50)),
        "TTFT p99": float(np.percentile(wait, 99)),
        "ITL p50": float(np.percentile(gaps[:, 1], 50)) * 1e3,
        "ITL p99": float(np.percentile(gaps[:, 1], 99)) * 1e3,
        "TPOT": float(np.median(tpot)) * 1e3 if len(tpot) else 0.0,
        "answers": float(len(ended)),
        "tokens per event": float(per_event),
    }


def measure(server: Server, shape: str, asked: Case, seconds: float) -> dict[str, float]:
    """One case; the keys beginning with "_" are for reading the beats later."""
    warm_s = min(2.0 + asked.streams / 64, seconds)
    before: list[tuple[float, float, float]] = []  # clock, CPU of the loop, CPU of all threads
    begun, came = load(
        server.port, shape, asked, warm_s, seconds, lambda: before.append((time.perf_counter(), *server.cpu()))
    )
    after = (time.perf_counter(), *server.cpu())
    took, loop_cpu, cpu = (late - early for late, early in zip(after, before[0]))
    answer = LENGTHS.get(shape, PEER_LENGTHS)[1]
    since, until = begun + warm_s, begun + warm_s + seconds
    found = summary(came, answer, since, until)
    arrived = (came["gaps"][:, 0] >= before[0][0]).sum() + (came["firsts"][:, 1] >= before[0][0]).sum()
    found["loop CPU per token"] = loop_cpu / (arrived * found["tokens per event"]) * 1e6
    found["server CPU"] = cpu / took
    return {**found, "_since": since, "_until": until}


@dataclass(slots=True)
class Found:
    """What the cases of one server gave."""

    ready_s: float
    cases: dict[str, dict[str, float]]
    failed: list[str]


def run_server(shape: str, args: argparse.Namespace, asked_cases: list[Case], cached: bool) -> Found:
    """Cases against one server."""
    flags = TINY_FLAGS if shape.startswith("tiny") else ()
    flags += () if cached else ("--no-enable-prefix-caching",)
    cases: dict[str, dict[str, float]] = {}
    failed = []
    with tempfile.TemporaryDirectory() as name:
        server = Server(shape, args.device, Path(name), Path(name) / "beats", flags)
        try:
            print(f"{shape}: ready in {server.ready_s:.1f} s", flush=True)
            check(server.port)
            for asked in asked_cases:
                try:
                    cases[asked.name] = measure(server, shape, asked, args.seconds)
                except Exception:
                    failed.append(asked.name)
                    traceback.print_exc()
        finally:
            beats = server.stop()
    for found in cases.values():
        since, until = found.pop("_since"), found.pop("_until")
        late = beats[(beats[:, 0] >= since) & (beats[:, 0] <= until), 1]
        if len(late):
            found["loop stall p99"] = float(np.percentile(late, 99)) * 1e3
            found["loop stall longest"] = float(late.max()) * 1e3
    return Found(server.ready_s, cases, failed)


def run_shape(shape: str, args: argparse.Namespace) -> int:
    """All cases of a shape; how many failed."""
    asked = cases_of(shape, args.streams)
    ready_s, cases, failed = 0.0, {}, []
    for cached in sorted({case.cached for case in asked}):
        found = run_server(shape, args, [case for case in asked if case.cached is cached], cached)
        ready_s = ready_s or found.ready_s
        cases |= found.cases
        failed += found.failed
    seen = {f"{label}, {name}": found[name] for label, found in cases.items() for name in UNITS if name in found}
    units = {name: UNITS[name.split(", ")[1]] for name in seen}
    targets.show(f"{shape}, serving, ready in {ready_s:.1f} s", seen, targets.serve_targets(shape, seen), units)
    report = {"shape": shape, "ready_s": ready_s, "seen": seen, "units": units, "cases": cases, "failed": failed}
    targets.keep(args.out, "gpu_serve.json", shape, report)
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b,0.6b", help=", ".join(SHAPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", default="1,4x230,16,64,256", help="and tokens of a prompt, where not 512")
    parser.add_argument("--seconds", type=float, default=15.0, help="measured per case, after some to warm up")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    status = 0
    for shape in args.shape.split(","):
        try:
            status |= run_shape(shape, args)
        except Exception:
            status = 1
            traceback.print_exc()
    return min(status, 1)


if __name__ == "__main__":
    sys.exit(main())
