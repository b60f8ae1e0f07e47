"""Measures the model on held-out items and prints the accuracy table with 95 % intervals (Wilson).

Through HTTP (the official client, base64 media, streaming, greedy), or offline with transformers:

    python -m examples.embedded_model.evaluate --base-url http://localhost:8000/v1 --items 1000
    python -m examples.embedded_model.evaluate --offline --items 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

from examples.embedded_model import blueprint as bp
from examples.embedded_model.encode import TABLE, Encoder
from examples.embedded_model.heldout import Item, items, judge, samples
from examples.embedded_model.sample import Media

# line of the card: rows of the table that it joins, the accuracy in percent that is required
LINES = (
    ("shape and colour of one object", ("image_object",), 97),
    ("count, spatial relation, comparison of pictures", ("image_scene",), 92),
    ("printed word or number", ("image_print",), 85),
    ("spoken digit strings, exact", ("audio_digits",), 92),
    ("command words", ("audio_commands",), 95),
    ("tone patterns", ("audio_tones",), 95),
    ("video: direction, what moves, changes, appears", ("video",), 93),
    ("video with sound", ("video_sound",), 0),
    ("text tasks", tuple(name for name in TABLE if name.startswith("text_")), 95),
    ("JSON when asked for it: valid", ("json_valid",), 98),
    ("JSON when asked for it: right", ("json",), 0),
    ("a call of a tool never seen", ("tool_call",), 90),
    ("an answer from a tool's result", ("tool_answer",), 90),
    ("JSON by a schema in the question", ("schema",), 90),
    ("which of two sides", ("image_sided",), 92),
)
Score = dict[str, list[bool]]


def wilson(right: int, asked: int) -> tuple[float, float]:
    """The 95 % interval (Wilson) of a share."""
    if not asked:
        return 0.0, 1.0
    z, share = 1.96, right / asked
    middle = share + z * z / (2 * asked)
    reach = z * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    return (middle - reach) / (1 + z * z / asked), (middle + reach) / (1 + z * z / asked)


def count(score: Score, task: str, got: str, expected: str, check: str) -> bool:
    """Judges one answer and adds it to the score; returns whether it is right."""
    right = judge(got, expected, check)
    score[task].append(right)
    if check == "json":
        try:
            json.loads(got)
            score["json_valid"].append(True)
        except ValueError:
            score["json_valid"].append(False)
    return right


def table(score: Score) -> str:
    """Markdown: line, accuracy, interval, items, required accuracy."""
    out = ["| task | right | 95 % interval | items | asked for |", "| --- | ---: | :---: | ---: | ---: |"]
    for name, rows, wanted in LINES:
        answers = [a for row in rows for a in score.get(row, [])]
        if not answers:
            continue
        low, high = wilson(sum(answers), len(answers))
        goal = f"{wanted} %" if wanted else "–"
        out.append(
            f"| {name} | {100 * sum(answers) / len(answers):.1f} % | {100 * low:.1f}–{100 * high:.1f} | {len(answers)} | {goal} |"
        )
        if len(rows) > 1:
            for row in rows:
                part = score.get(row, [])
                if part:
                    low, high = wilson(sum(part), len(part))
                    out.append(
                        f"| – {row.removeprefix('text_')} | {100 * sum(part) / len(part):.1f} % | {100 * low:.1f}–{100 * high:.1f} | {len(part)} | |"
                    )
    return "\n".join(out)


async def ask(client, model: str, messages: list[dict]) -> str:
    """Sends messages and returns one streamed greedy answer."""
    from openai import APIStatusError

    try:
        stream = await client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=96, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    except APIStatusError as error:  # the error text becomes the answer, which counts as wrong
        return f"(error {error.status_code}: {error.message})"


async def over_http(args: argparse.Namespace, source: Iterator[Item], score: Score, misses: list) -> None:
    """Asks all items, a few at a time."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=args.base_url, api_key=args.api_key, timeout=120, max_retries=2) as client:
        model = (await client.models.list()).data[0].id
        done = 0

        async def worker() -> None:
            nonlocal done
            for task, messages, expected, check in source:
                got = await ask(client, model, messages)
                if not count(score, task, got, expected, check):
                    misses.append((task, _last_text(messages), expected, got))
                done += 1
                if sys.stderr.isatty() or done % 100 == 0:
                    print(f"\r{done}/{args.items}", end="", file=sys.stderr, flush=True)

        await asyncio.gather(*(worker() for _ in range(args.parallel)))


def _last_text(messages: list[dict]) -> str:
    content = messages[-1]["content"]
    return content if isinstance(content, str) else " ".join(p.get("text", f"<{p['type']}>") for p in content)


def offline(args: argparse.Namespace, score: Score, misses: list) -> None:
    """Answers the same samples with transformers, without encoding them as media files."""
    import torch
    from transformers import AutoFeatureExtractor, Qwen2_5OmniThinkerForConditionalGeneration

    from examples.embedded_model.reference import arguments, prompt

    model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(bp.MODEL_DIR, dtype=torch.float32).eval()
    extractor, encoder = AutoFeatureExtractor.from_pretrained(bp.MODEL_DIR), Encoder()
    for task, sample, _ in samples(args.items, args.seed, args.live):
        one_track = any(isinstance(p, Media) and p.sound for t in sample.turns for p in t.parts)
        inputs = arguments(prompt(encoder, sample), extractor, one_track)
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=96, do_sample=False)
        got = encoder.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :].tolist(), skip_special_tokens=True)
        turn = sample.turns[-1]
        if not count(score, task, got, turn.answer, turn.check):
            misses.append((task, str(turn.parts[-1])[:60], turn.answer, got))


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--live", action="store_true", help="also the fonts and espeak-ng voices of this machine")
    parser.add_argument("--tasks", default="", help="only these rows: image_print,audio_digits")
    parser.add_argument("--show", type=int, default=10, help="wrong answers to print")
    parser.add_argument("--json", default="", help="write the counts here")
    args = parser.parse_args()
    score: Score = defaultdict(list)
    misses: list[tuple[str, str, str, str]] = []
    began = time.time()
    if args.offline:
        offline(args, score, misses)
    else:
        tasks = tuple(args.tasks.split(",")) if args.tasks else TABLE
        asyncio.run(over_http(args, items(args.items, args.seed, args.live, tasks), score, misses))
    print(table(score))
    for task, question, expected, got in misses[: args.show]:
        print(f"  {task}: {question!r} expected {expected!r}, got {got!r}")
    print(f"{args.items} items in {time.time() - began:.0f} s")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({name: [sum(a), len(a)] for name, a in score.items()}, file, indent=1)


if __name__ == "__main__":
    main()
