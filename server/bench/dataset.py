"""Dataset: the content of each conversation of a benchmark, drawn from the seed or read from a file.

Owner: every client process draws all lengths, and the contents of its own share. A conversation is a list of turns;
each turn's answer becomes part of the next turn's messages.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from server.bench.options import ServeOptions
from server.bench.random_media import parts

CHARACTERS = 4  # characters of text per token; ShareGPT has only texts, so their token counts are estimates
LEAST, MOST_PROMPT, MOST = 4, 1024, 2048  # limits of ShareGPT's pairs, in tokens, as in vLLM's benchmark
FIRST_ID = 300  # random token ids begin here: after bytes and most special tokens
PREFIX_SEED = 2048
# Words that common tokenizers encode as one token each; the server's `usage` reports the real number of tokens.
WORDS = (  # noqa: SIM905
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out "
    "many then them these so some her would make like him into time has look two more write go see number no way "
    "could people my than first water been call who oil its now find long down day did get come made may part"
).split(" ")


@dataclass(slots=True)
class Turn:
    """One message of a user; for completions `content` is the prompt."""

    content: Any  # text, parts or token ids
    max_tokens: int


@dataclass(slots=True)
class Conversation:
    """The turns of one conversation. `before`: messages before the first turn."""

    number: int
    turns: list[Turn]
    before: list[dict[str, Any]] = field(default_factory=list)


def conversations(options: ServeOptions, first: int, step: int) -> Iterator[Conversation]:
    """The conversations with the numbers first, first + step, ... Raises ValueError and OSError."""
    numbers = range(first, options.num_prompts, step)
    if options.dataset == "random":
        yield from (drawn(options, number) for number in numbers)
        return
    found = read_file(options)
    yield from (Conversation(number, *found[number % len(found)]) for number in numbers)


def warm_up(options: ServeOptions, number: int) -> Conversation:
    """A random request with a number below 0, so its content differs from all others."""
    return drawn(options, -1 - number)


def drawn(options: ServeOptions, number: int) -> Conversation:
    draw = random.Random(f"{options.seed} {number}")
    shared = random.Random(PREFIX_SEED + draw.randrange(options.num_prefixes))
    before = said(shared, options.prefix_len, options.vocab_size)
    turns = []
    for turn in range(options.turns):
        own = said(draw, length(draw, options.input_len, options.range_ratio), options.vocab_size)
        content: Any = [*(before if turn == 0 else []), *own]
        if not options.vocab_size:
            content = " ".join(content)
        turns.append(Turn(content, length(draw, options.output_len, options.range_ratio)))
    which = number % options.num_media if options.num_media else number
    media = parts(np.random.default_rng([options.seed, which & 0xFFFFFFFF]), options)
    if media:
        turns[0].content = [*media, {"type": "text", "text": turns[0].content}]
    return Conversation(number, turns)


def said(draw: random.Random, count: int, vocab_size: int) -> list[Any]:
    """`count` words, or token ids."""
    if vocab_size:
        return [draw.randrange(min(FIRST_ID, vocab_size - 1), vocab_size) for _ in range(count)]
    return draw.choices(WORDS, k=count)


def length(draw: random.Random, mean: int, ratio: float) -> int:
    return max(1, round(mean * draw.uniform(1 - ratio, 1 + ratio))) if ratio else mean


Read = tuple[list[Turn], list[dict[str, Any]]]


def read_file(options: ServeOptions) -> list[Read]:
    """The file's conversations, shuffled by --seed."""
    if not options.dataset_path:
        raise ValueError(f"--dataset {options.dataset}: needs --dataset-path FILE")
    try:
        with open(options.dataset_path, encoding="utf-8") as file:
            found = list((sharegpt if options.dataset == "sharegpt" else lines)(file.read(), options))
    except OSError as error:
        raise ValueError(f"--dataset-path {options.dataset_path}: {error.strerror}") from None
    except (LookupError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        wanted = "ShareGPT's JSON" if options.dataset == "sharegpt" else "a JSON object per line"
        raise ValueError(f"--dataset-path {options.dataset_path}: is not {wanted}: {error}") from None
    if not found:
        raise ValueError(f"--dataset-path {options.dataset_path}: nothing in it can be asked")
    random.Random(options.seed).shuffle(found)
    return found


def sharegpt(text: str, options: ServeOptions) -> Iterator[Read]:
    """[{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}]: the first turns of each.

    Pairs that are too short or too long are left out as in vLLM's benchmark, but counted by characters instead of
    tokens.
    """
    for entry in json.loads(text):
        said = entry.get("conversations") or []
        at = next((number for number, turn in enumerate(said) if turn["from"] == "human"), len(said))
        pairs = [
            (asked["value"], math.ceil(len(asked["value"]) / CHARACTERS), math.ceil(len(got["value"]) / CHARACTERS))
            for asked, got in zip(said[at::2], said[at + 1 :: 2])
            if asked["from"] == "human" and got["from"] == "gpt"
        ][: options.turns]
        fits = pairs and all(
            min(asked, got) >= LEAST and asked <= MOST_PROMPT and asked + got <= MOST for _, asked, got in pairs
        )
        if fits and len(pairs) == options.turns:
            yield [Turn(value, got) for value, _, got in pairs], []


def lines(text: str, options: ServeOptions) -> Iterator[Read]:
    """One object per line: {"prompt": text or ids} or {"messages": [...]}, optionally with max_tokens."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        entry = json.loads(line)
        if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
            raise ValueError(f"--dataset-path, line {number}: must be an object with prompt or messages")
        max_tokens = int(entry.get("max_tokens") or options.output_len)
        if "prompt" in entry:
            yield [Turn(entry["prompt"], max_tokens)], []
        else:
            *before, last = entry["messages"]
            yield [Turn(last["content"], max_tokens)], before
