"""Trains the exported model on tools and measures the result: pieces for an accelerator, then a model card.

    python -m examples.embedded_model.teach_tools train --minutes 9 --total-minutes 8.3 --compile       on one accelerator
    python -m examples.embedded_model.teach_tools card                                            weights, server, numbers

`train` continues from the shipped weights or from --init, and later from its own state; tools are added to the old
mixture. `card` writes the folder, serves it, and sends the held-out items of the card and of tools over HTTP. Tools are
also sent in a client's form, both free and with `tool_choice` required. card.md in the folder gets the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.embedded_model import train
from examples.embedded_model.blueprint import MODEL_DIR
from examples.embedded_model.encode import ROWS
from examples.embedded_model.export import LIMIT, between_of, export
from examples.embedded_model.sample import Sample

KEPT = ("tokenizer.json", "tokenizer_config.json")
PEAK = 1.2e-3  # less than half of the rate for random weights, so that the old skills remain
WEIGHTS = (
    "reading=2.4,text_letters=2,text_sorting=1.6,text_counting=1.3,digits=1.8,one_object=0.6,small_talk=0.5,"
    "outside=0.6,calendar=0.5,tones=0.5,tool_call=1.2,tools=1.9"
)
NAME = "omniloop"
START_S = 120.0  # time in which the server must be ready


def learn(args: argparse.Namespace) -> None:
    """Trains one piece, without reading or writing media files."""
    given = ["--minutes", str(args.minutes), "--total-minutes", str(args.total_minutes), "--state", str(args.state),
             "--rate", str(args.rate), "--weights", args.weights, "--tokens", str(args.tokens), "--resume",
             "--init", str(args.init), "--early", str(args.early), "--seed", str(args.seed)]  # fmt: skip
    if args.light:
        given.append("--light")
    if args.workers is not None:
        given += ["--workers", str(args.workers)]
    if args.compile:
        given.append("--compile")
    train.train(train.command_line().parse_args(given))


def write_card(args: argparse.Namespace) -> None:
    """Writes the folder and measures it."""
    from examples.embedded_model import evaluate
    from examples.embedded_model.heldout import items

    size = export(args.state, args.out, between_of(args.between))
    for name in KEPT:
        shutil.copy(MODEL_DIR / name, args.out / name)
        size += (args.out / name).stat().st_size
    if size > LIMIT:
        raise SystemExit(f"{args.out}: {size} bytes; at most {LIMIT} are allowed")
    score: evaluate.Score = defaultdict(list)
    misses: list[tuple[str, str, str, str]] = []
    asked = argparse.Namespace(items=args.items, parallel=args.parallel, api_key="none")
    with served(args.out) as asked.base_url:
        asyncio.run(evaluate.over_http(asked, items(args.items, 11, args.live, ROWS), score, misses))
        lines = [evaluate.table(score), ""]
        for choice in ("auto", "required"):
            right, count = asyncio.run(called(asked, args.calls, choice))
            low, high = evaluate.wilson(right, count)
            lines.append(f"`tools`, {choice}: {right} of {count} calls right ({100 * low:.1f}-{100 * high:.1f} %)")
    text = "\n".join([*lines, f"{size / 1e6:.2f} MB", ""])
    (args.out / "card.md").write_text(text)
    (args.out / "card.json").write_text(json.dumps({name: [sum(a), len(a)] for name, a in score.items()}, indent=1))
    print(text)
    for task, question, expected, got in misses[:20]:
        print(f"  {task}: {question!r} expected {expected!r}, got {got!r}")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Starts a server of the folder; yields its base URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "server", "--model", str(folder), "--host", "127.0.0.1", "--port", str(port),
               "--served-model-name", NAME]  # fmt: skip
    process = subprocess.Popen(command, env=dict(os.environ))
    try:
        until = time.monotonic() + START_S
        while not answers(f"http://127.0.0.1:{port}/health/ready"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit("the server did not start; its log says why")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def as_sent(sample: Sample) -> dict[str, Any]:
    """Messages and tools in the form that clients send."""
    head, _, rest = sample.system.partition("# Tools")
    lines = rest.partition("<tools>\n")[2].partition("</tools>")[0].splitlines()
    messages = [{"role": "system", "content": head.strip()}] if head.strip() else []
    for turn in sample.turns[:-1]:
        messages += [{"role": "user", "content": str(turn.parts[0])}, {"role": "assistant", "content": turn.answer}]
    messages.append({"role": "user", "content": str(sample.turns[-1].parts[0])})
    return {"messages": messages, "tools": [{"type": "function", "function": json.loads(line)} for line in lines]}


async def called(args: argparse.Namespace, count: int, choice: str) -> tuple[int, int]:
    """(right, all) counts of the calls that the server parses, with this `tool_choice`."""
    from openai import AsyncOpenAI

    from examples.embedded_model.heldout import samples

    right = asked = 0
    async with AsyncOpenAI(base_url=args.base_url, api_key="none", timeout=120) as client:
        for _, sample, _ in samples(count, 12, tasks=("tool_call",)):
            turn = sample.turns[-1]
            if turn.check != "call":
                continue
            fields: Any = as_sent(sample) | {"tool_choice": choice}
            reply = await client.chat.completions.create(model=NAME, temperature=0, max_tokens=120, **fields)
            wanted = json.loads(turn.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            found = [
                {"name": call.function.name, "arguments": read(call.function.arguments)}
                for call in reply.choices[0].message.tool_calls or ()
                if call.type == "function"
            ]
            right, asked = right + (found == [wanted]), asked + 1
    return right, asked


def read(arguments: str) -> Any:
    """The arguments as JSON, or the text if it is not JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def main() -> None:
    """Parses the command line and runs a stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("build/embedded_tools"))
    stages = parser.add_subparsers(required=True)
    piece = stages.add_parser("train", help="one piece of training")
    piece.add_argument("--minutes", type=float, default=9.0)
    piece.add_argument("--total-minutes", type=float, default=18.0)
    piece.add_argument("--tokens", type=int, default=32768)
    piece.add_argument("--workers", type=int)
    piece.add_argument("--init", type=Path, default=MODEL_DIR / "model.safetensors", help="weights to start from")
    piece.add_argument("--rate", type=float, default=PEAK, help="the highest learning rate")
    piece.add_argument("--weights", default=WEIGHTS)
    piece.add_argument("--seed", type=int, default=0, help="another one throws other samples")
    piece.add_argument("--light", action="store_true", help="leave bf16 weights and no momenta, 23 MB")
    piece.add_argument(
        "--early", type=float, default=0.0, help="leave light weights in STATE/early after these minutes too"
    )
    piece.add_argument("--compile", action="store_true", help="layers through torch.compile, which takes 20 s at first")
    piece.set_defaults(run=learn)
    card = stages.add_parser("card", help="weights, and what they can do")
    card.add_argument("--out", type=Path, default=Path("build/embedded_tools_model"))
    card.add_argument("--between", nargs=3, metavar=("OLDER", "TEXT", "TOWERS"), help="see export.py")
    card.add_argument("--items", type=int, default=4200)
    card.add_argument("--calls", type=int, default=1000)
    card.add_argument("--parallel", type=int, default=16)
    card.add_argument("--live", action="store_true", help="also the fonts and espeak-ng voices of this machine")
    card.set_defaults(run=write_card)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
