"""What other servers' protocols cost: decisions, Python without HTTP, the table of foreign fields, gaps of editors.

Random weights of real shapes, greedy. `decisions`: 16 questions about a state of 8,192 tokens against one question; the
states all differ. `offline`: LLM.generate against `bench throughput`, each in a process of its own.
`fields`: 16 streams of plain chat on a server against one whose bodies pass by the table (tests/bench/untranslated.py),
or against another checkout with --before; both servers live, and rounds alternate. `decode`: microseconds to decode a
body of 2 kB with and without the table. `infill`: the first token of /infill whose prefix grew by a character, and
without a cache. Prints each number with its aim; writes gpu_dialects.json into --out.
Run: python -m tests.bench.gpu_dialects [--only decisions,offline,fields,decode,infill] [--out DIR] [--before FOLDER]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from server.bench.dataset import WORDS
from server.bench.output import on_loop
from server.bench.serve import first_model
from tests.bench.asked import WORD, load, parts_of, summary
from tests.bench.loads import Case
from tests.bench.served import Server, ask, check
from tests.bench.shapes import SHAPES, write_folder

EMBEDDED = Path(__file__).parents[2] / "server/embedded"
TOKENIZER, TEMPLATE = EMBEDDED / "tokenizer.json", EMBEDDED / "chat_template.jinja"
VOCAB = 4096  # of that tokenizer
AIMS = {  # of ratios, as in the requirements
    "16 questions, time over one question": ("at most", 1.25),
    "LLM.generate, rate over bench throughput": ("at least", 0.97),
    "plain chat, output over no table": ("at least", 0.99),
}
CASES = ("decode", "decisions", "offline", "fields", "infill")
GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
NOT_MARKERS = ("<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>")


class Sizes:
    """Shapes and lengths: of an accelerator, or of a CPU for trying the benchmark out."""

    def __init__(self, tiny: bool) -> None:
        self.large, self.small = ("tiny", "tiny") if tiny else ("8b", "0.6b")
        self.state = 400 if tiny else 8192  # tokens
        self.questions = 2 if tiny else 16
        self.prefixes = (100, 400) if tiny else (1024, 8192)  # tokens of an editor's text
        self.batch = (8, 16, 8) if tiny else (256, 512, 128)  # prompts, tokens in, tokens out
        self.chat = (2, 16, 8) if tiny else (16, 512, 128)  # streams, tokens in, tokens out
        self.seconds = 0.5 if tiny else 4.0  # of a round
        self.rounds = 2 if tiny else 6
        self.repeats = 2 if tiny else 7
        self.flags = ("--num-gpu-blocks-override", "512", "--num-threads", "1") if tiny else ()


def add_shapes(sizes: Sizes) -> None:
    """Adds the shapes with a tokenizer of whole words, and with tokens for filling in the middle."""
    words = TOKENIZER.read_text()
    gaps = words
    for name, other in zip(GAP, NOT_MARKERS):
        gaps = gaps.replace(other, name)
    for name, shape, text in (("words", sizes.large, words), ("gaps", sizes.small, gaps)):
        config = SHAPES[shape]
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE.read_text()}
        files = {"tokenizer.json": json.loads(text), "tokenizer_config.json": settings}
        SHAPES[name] = {**config, "vocab_size": max(config["vocab_size"], VOCAB), "files": files}


@contextmanager
def served(shape: str, args: argparse.Namespace, *flags: str, **more: Any) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as name:
        server = Server(shape, args.device, Path(name), (*args.sizes.flags, *flags), 0.005, **more)
        try:
            yield server
        finally:
            server.stop()


def text_of(port: int, draw: random.Random, tokens: int) -> str:
    """Random words of about so many tokens."""
    words = draw.choices(WORDS, k=tokens)
    ratio = len(json.loads(ask(port, "/tokenize", {"prompt": " ".join(words)}))["tokens"]) / tokens
    return " ".join(words[: round(tokens / ratio)])


def decisions(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one question and of many about the same kind of state, and their tokens."""
    sizes, draw = args.sizes, random.Random(0)
    times: dict[int, list[float]] = {1: [], sizes.questions: []}
    tokens: dict[int, int] = {}
    with served("words", args) as server:
        for _ in range(1 + sizes.repeats):
            for count, seconds in times.items():
                state = text_of(server.port, draw, sizes.state)
                asked = {
                    f"q{at}": {
                        "type": "choice",
                        "instructions": " ".join(draw.choices(WORDS, k=8)),
                        "criteria": {"left": None, "right": None},
                    }
                    for at in range(count)
                }
                begun = time.perf_counter()
                answer = json.loads(ask(server.port, "/v1/systemone", {"state": state, "questions": asked}))
                seconds.append(time.perf_counter() - begun)
                assert len(answer["answers"]) == count
                tokens[count] = answer["usage"]["input_tokens"]
                behind = len(json.loads(ask(server.port, "/tokenize", {"prompt": state}))["tokens"])
    one, many = (statistics.median(seconds[1:]) for seconds in times.values())
    each = (tokens[sizes.questions] - tokens[1]) / (sizes.questions - 1)  # the state counts again
    return {
        "16 questions, time over one question": many / one,
        "one question, ms": one * 1e3,
        f"{sizes.questions} questions, ms": many * 1e3,
        "input tokens of one question": tokens[1],
        "tokens of a further question without the state": each - behind,
        "times, s": {str(count): seconds[1:] for count, seconds in times.items()},
    }


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """Output tokens per second of LLM.generate and of `bench throughput`, each in a process of its own."""
    rates: dict[str, list[float]] = {"throughput": [], "generate": []}
    with tempfile.TemporaryDirectory() as name:
        folder = str(write_folder(Path(name) / "model", SHAPES[args.sizes.large]))
        for kind in ("throughput", "generate"):
            rates[kind] = in_process(kind, folder, args)
    engine, python = (statistics.median(each) for each in rates.values())
    return {
        "LLM.generate, rate over bench throughput": python / engine,
        "bench throughput, tok/s": engine,
        "LLM.generate, tok/s": python,
        "rates, tok/s": rates,
    }


def in_process(kind: str, folder: str, args: argparse.Namespace) -> list[float]:
    command = [sys.executable, "-m", "tests.bench.gpu_dialects", "--inside", kind, "--folder", folder]
    done = subprocess.run(
        [*command, "--device", args.device], stdout=subprocess.PIPE, text=True, check=True, timeout=240
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def inside(kind: str, folder: str, device: str, sizes: Sizes) -> list[float]:
    """Rates of the runs after the first, which warms up."""
    count, length, answer = sizes.batch
    runs = 1 if sizes.large == "tiny" else 3
    if kind == "throughput":
        return alone(folder, device, sizes, runs)
    from server.offline import LLM, SamplingParams

    draw, rates = np.random.default_rng(0), list[float]()
    words = dict(zip((flag[2:].replace("-", "_") for flag in sizes.flags[::2]), map(int, sizes.flags[1::2])))
    with LLM(folder, load_format="dummy", device=device, **words) as model:
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        most = SHAPES[sizes.large]["vocab_size"]
        for _ in range(1 + runs):
            prompts = [{"prompt_token_ids": draw.integers(2, most, length).tolist()} for _ in range(count)]
            begun = time.perf_counter()
            outputs = model.generate(prompts, params)
            took = time.perf_counter() - begun
            assert all(len(each.outputs[0].token_ids) == answer for each in outputs)
            rates.append(count * answer / took)
    return rates[1:]


def alone(folder: str, device: str, sizes: Sizes, runs: int) -> list[float]:
    """The median and the range of `bench throughput`."""
    count, length, answer = sizes.batch
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "throughput.json"
        words = ["--num-prompts", count, "--input-len", length, "--output-len", answer, "--runs", runs, "--json", file]
        words += ["--model", folder, "--load-format", "dummy", "--device", device, *sizes.flags]
        subprocess.run(
            [sys.executable, "-m", "server", "bench", "throughput", *map(str, words)], check=True, stdout=sys.stderr
        )
        found = json.loads(file.read_text())
    return [found[name] for name in ("output_tokens_per_s_least", "output_tokens_per_s", "output_tokens_per_s_most")]


def fields(args: argparse.Namespace) -> dict[str, Any]:
    """Output of plain chat of a server, over that of a server without the table or of another checkout."""
    sizes = args.sizes
    streams, length, answer = sizes.chat
    half = () if args.device == "cpu" else ("--kv-cache-memory-bytes", str(16 << 30))
    other = {"module": "tests.bench.untranslated"} if args.before is None else {"checkout": args.before}
    rates: dict[str, list[float]] = {"with": [], "without": []}
    with served(sizes.small, args, *half) as ours, served(sizes.small, args, *half, **other) as theirs:
        for server in (ours, theirs):
            check(server.port)
        for at in range(1 + sizes.rounds):
            pair = [("with", ours), ("without", theirs)]
            for name, server in pair[:: 1 if at % 2 else -1]:
                case = Case("chat", streams, ((length, answer),), cached=False, seed=at)
                rates[name].append(chat(server, sizes.small, case, sizes.seconds, round(length / WORD)))
    with_table, without = (statistics.median(each[1:]) for each in rates.values())
    return {
        "plain chat, output over no table": with_table / without,
        "plain chat, tok/s": with_table,
        "plain chat without the table, tok/s": without,
        "other server": "another checkout" if args.before else "no table",
        "rates, tok/s": {name: each[1:] for name, each in rates.items()},
    }


def chat(server: Server, shape: str, case: Case, seconds: float, words: int) -> float:
    """Output tokens per second of a round."""
    with tempfile.TemporaryDirectory() as name:
        warm_s = seconds / 5
        parts = parts_of(f"http://127.0.0.1:{server.port}", shape, case, warm_s + seconds, 0, Path(name))
        parts = [replace(part, endpoint="chat", input_len=words, vocab_size=0) for part in parts]
        came = load(parts, on_loop(first_model(parts[0])), 0, warm_s, seconds)
    since = came.begun + warm_s
    assert not came.failures, came.failures[:1]
    return summary(came, since, min(since + seconds, came.until))["output"]


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds to decode a chat body of 2 kB: as it is, past the table, and with a foreign field."""
    from server.flags.limits_flags import LimitsConfig
    from server.http import body
    from server.http.foreign_body import known_names
    from server.schema.chat import ChatBody
    from tests.bench.untranslated import Every

    limits = LimitsConfig()
    messages = [{"role": "user", "content": "word " * 90} for _ in range(4)]
    plain = {"model": "m", "messages": messages, "max_tokens": 64, "temperature": 0.5, "stream": True, "top_p": 0.9}
    kinds = {"plain": plain, "with a foreign field": {**plain, "n_probs": 0, "repeat_penalty": 1.1}}
    found: dict[str, Any] = {"body, bytes": len(json.dumps(plain))}
    for name, fields in kinds.items():
        data = json.dumps(fields).encode()
        found[f"decode {name}, us"] = least_us(lambda data=data: body.decode(data, ChatBody, limits))
    every, data = Every(), json.dumps(plain).encode()
    body.known_names = lambda kind: every  # type: ignore[assignment]
    try:
        found["decode past the table, us"] = least_us(lambda: body.decode(data, ChatBody, limits))
    finally:
        body.known_names = known_names
    found["table, us a request"] = found["decode plain, us"] - found["decode past the table, us"]
    return found


def least_us(work: Any, calls: int = 2000, rounds: int = 15) -> float:
    """Microseconds of a call: the least of the rounds' means."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - begun) / calls * 1e6)
    return min(times)


def infill(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the one token of /infill, by tokens of the prefix: warm and cold, medians."""
    sizes, draw = args.sizes, random.Random(1)
    found: dict[str, Any] = {}
    with served("gaps", args) as server:
        for length in sizes.prefixes:
            cold, warm = [], []
            for at in range(1 + sizes.repeats):
                body = {"input_prefix": text_of(server.port, draw, length), "input_suffix": "\n", "n_predict": 1}
                cold.append(asked_ms(server.port, body)[0])
                for key in " = x + y":
                    body["input_prefix"] += key
                    ms, answer = asked_ms(server.port, body)
                    warm.append(ms)
                    assert answer["timings"]["cache_n"] > length // 2, answer["timings"]
                if not at:
                    cold, warm = [], []
            found[f"first token, {length} tokens, warm, ms"] = statistics.median(warm)
            found[f"first token, {length} tokens, cold, ms"] = statistics.median(cold)
    return found


def asked_ms(port: int, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    begun = time.perf_counter()
    answer = ask(port, "/infill", body)
    return (time.perf_counter() - begun) * 1e3, json.loads(answer)


RUNS = {"decode": decode, "decisions": decisions, "offline": offline, "fields": fields, "infill": infill}


def main(words: list[str] | None = None) -> int:
    """Runs the cases; the number of cases that failed or missed an aim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--before", type=Path, help="a folder with an earlier commit, built")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.sizes = Sizes(args.device == "cpu")
    if args.inside:
        print(json.dumps(inside(args.inside, args.folder, args.device, args.sizes)))
        return 0
    add_shapes(args.sizes)
    seen: dict[str, Any] = {}
    failed = 0
    for name in args.only.split(","):
        begun = time.perf_counter()
        try:
            seen[name] = RUNS[name](args)
        except Exception as error:
            failed += 1
            print(f"{name}: failed: {error!r}", flush=True)
            continue
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
        failed += sum(missed(case, value) for case, value in seen[name].items())
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "gpu_dialects.json").write_text(json.dumps(seen, indent=1))
    return failed


def missed(case: str, value: Any) -> bool:
    """Prints a number with its aim; whether it misses the aim."""
    if not isinstance(value, float | int):
        return False
    word, aim = AIMS.get(case, ("", 0.0))
    misses = value > aim if word == "at most" else value < aim
    print(f"  {case}: {value:.3f}" + (f" ({word} {aim}{', MISSED' if misses else ''})" if word else ""), flush=True)
    return bool(word) and misses


if __name__ == "__main__":
    sys.exit(main())
