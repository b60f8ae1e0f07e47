"""The loads of gpu_serve: its cases, and the lengths of their prompts and answers, drawn from fixed seeds.

`streams` repeats the peer's measurement: equal lengths, or pictures for a vision model (JPEG, and PNG of noise like
those of the peer's client). `mixed`: 256 requests of 100 to 1,024 tokens in and out, sent together. `conversation`:
lengths like those of ShareGPT (below) at 1, 4, 32 and 256 streams. `prefix`: 2,048 tokens that all prompts share and
128 of their own; a second case has no shared tokens, so no prefix is found. `loop` measures the lateness of the
server's loop: without requests, with conversations at 32 and 256 streams, and with the longest possible prompt,
repeatedly. `rules`: equal lengths at 32 streams, where none, one or all of the streams have a penalty, a bias or
log-probabilities. `grammar`: equal lengths at 64 streams, where none, one or all of the streams follow a JSON Schema.
`pictures`, for a vision model: 32 streams with small pictures; 8 of texts; 8 of texts and 8 with large pictures.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tests.bench.shapes import SHAPES

Lengths = tuple[tuple[int, int], ...]  # tokens of prompt and answer of each request

# vLLM's benchmark takes the first two turns of each conversation of ShareGPT_V3_unfiltered_cleaned_split. It leaves out
# turns under 4 tokens, prompts over 1,024 and pairs over 2,048 (vllm/benchmarks/datasets.py). With Qwen2.5's tokenizer
# its 1,000 requests of seed 0 have 217,393 tokens in and 201,847 out, as many published runs print; a similar data set
# has 229,711 and 203,068 (https://github.com/vllm-project/vllm/pull/18566). No percentiles of the set were found
# published. Independent log-normal lengths and their widths are our assumption; the medians follow from the means. The
# lengths drawn here have means of 222 and 207 tokens, and medians of 128 and 113.
MEDIAN, WIDTH = (164, 111), (1.7, 1.2)  # before filtering
LEAST, MOST_PROMPT, MOST = 4, 1024, 2048
CHARACTERS = 4  # characters per token of a real conversation: the shapes served here have no real tokenizer
DRAWN = 4096
FRESH = " (none found)"
BACKGROUND = " with 8 of pictures"
LONG_ANSWER = 16
PLAIN = "streams without rules"
ORDERS = {  # an answer that random weights cannot end early
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["apples", "oranges", "pears"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 4},
        },
        "required": ["name", "count", "kind", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """One load. `picture` is (width, height); pictures differ, or with a prefix cache all requests share one."""

    name: str
    streams: int  # 0: no requests
    lengths: Lengths  # used cyclically
    picture: tuple[int, ...] = ()
    coding: Literal["jpeg", "noise"] = "jpeg"
    cached: bool = True  # the server has a prefix cache
    once: bool = False  # each request is sent once, and the case ends with the last answer
    prefix: int = 0  # tokens that begin all prompts, before each prompt's own
    seed: int = 0
    fields: tuple[tuple[str, Any], ...] = ()  # added to the bodies of the first `ruled` streams
    ruled: int = 0
    background: Case | None = None  # runs at the same time; its failures count, its answers do not


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a shape's loads."""

    equal: tuple[int, int] = (512, 128)  # tokens of prompt and answer, as in the peer's measurement
    mixed: tuple[int, int, int] = (256, 100, 1024)  # number of requests, and range of their lengths in tokens
    conversations: tuple[int, ...] = (1, 4, 32, 256)  # streams
    shorter: int = 1  # divides the lengths of conversations
    prefix: tuple[int, int, int] = (16, 2048, 128)  # streams, shared tokens, own tokens
    ruled: int = 32  # streams
    held: int = 64  # number of streams; some follow a schema


TINY = Sizes((32, 16), (16, 8, 32), (1, 4), 16, (4, 256, 16), 4, 4)  # for trying out a benchmark
SIZES = {"tiny": TINY, "tiny-vl": TINY, "vl-7b": Sizes(equal=(64, 64))}


def cases_of(shape: str, loads: Sequence[str], streams: str, sharegpt: Path | None) -> list[Case]:
    """The cases of these loads, without duplicates."""
    sizes = SIZES.get(shape, Sizes())
    said = conversations(sizes.shorter) if sharegpt is None else read_conversations(sharegpt, sizes.shorter)
    talks = {count: Case(f"{count} streams of conversations", count, said) for count in sizes.conversations}
    found: list[Case] = []
    for load in loads:
        if load == "streams":
            found += equal(shape, sizes.equal, streams)
        elif load == "mixed":
            count, least, most = sizes.mixed
            lengths = mixed(count, least, most)
            found.append(Case(f"{count} requests of {least} to {most} tokens", count, lengths, once=True))
        elif load == "conversation":
            found += talks.values()
        elif load == "prefix":
            found += prefixed(sizes)
        elif load == "loop":
            found.append(Case("0 streams", 0, ()))
            found += [talks[count] for count in sizes.conversations[-2:]]
            found.append(longest(shape))
        elif load == "rules":
            found += with_rules(sizes)
        elif load == "grammar":
            found += with_grammars(sizes)
        elif load == "pictures":
            found += with_pictures(shape, sizes)
        else:
            raise ValueError(
                f"--load {load}: there are streams, mixed, conversation, prefix, loop, rules, grammar and pictures"
            )
    return list({case.name: case for case in found}.values())


def equal(shape: str, lengths: tuple[int, int], streams: str) -> list[Case]:
    """The peer's measurement; a vision model gets pictures instead of long prompts."""
    if "vision_config" not in SHAPES[shape]:
        return [equal_case(word, lengths) for word in streams.split(",")]
    tiny = shape.startswith("tiny")
    first = Case("1 streams", 1, (lengths,), (112, 84) if tiny else (1024, 1024), cached=False, seed=1000)
    counts = (4,) if tiny else (8, 32)
    found = [replace(first, name=f"{count} streams", streams=count, seed=count * 1000) for count in counts]
    noise = [replace(case, name=f"{case.name} of PNG", coding="noise", seed=case.seed + 50) for case in (first, *found)]
    if not tiny:
        found.append(replace(first, name="1 streams of 1080p", picture=(1920, 1080), seed=1090))
    return [
        first,
        *found,
        *noise,
        replace(first, name="1 streams of one prefix-cached picture", cached=True, seed=1290),
    ]


def equal_case(word: str, lengths: tuple[int, int]) -> Case:
    """The case of a word: `16` means 16 streams; `4x230` means 4 streams with prompts of 230 tokens."""
    count, _, prompt = word.partition("x")
    name = f"{count} streams of {prompt} tokens" if prompt else f"{count} streams"
    return Case(name, int(count), ((int(prompt or lengths[0]), lengths[1]),), cached=False, seed=int(count) * 1000)


def mixed(count: int, least: int, most: int) -> Lengths:
    """Lengths of `count` requests, uniform between `least` and `most`."""
    draw = random.Random(0)
    return tuple((draw.randint(least, most), draw.randint(least, most)) for _ in range(count))


def prefixed(sizes: Sizes) -> list[Case]:
    """One case with a shared prefix, and one of equal lengths without."""
    streams, shared, fresh = sizes.prefix
    name = f"{streams} streams of {shared} shared tokens and {fresh}"
    found = Case(name, streams, ((fresh, sizes.equal[1]),), prefix=shared, seed=7000)
    return [found, replace(found, name=name + FRESH, lengths=((shared + fresh, sizes.equal[1]),), prefix=0, seed=8000)]


def with_rules(sizes: Sizes) -> list[Case]:
    """The same streams without rules, for comparison, and with rules on one or on all streams."""
    count = sizes.ruled
    plain = replace(equal_case(str(count), sizes.equal), name=PLAIN)
    penalty, bias = ("repetition_penalty", 1.1), ("logit_bias", {str(number): 1.5 for number in range(300, 310)})
    return [plain] + [
        replace(plain, name=f"{name} on {ruled} of {count}", fields=(field,), ruled=ruled)
        for name, field, ruled in (
            ("repetition_penalty", penalty, 1),
            ("repetition_penalty", penalty, count),
            ("frequency_penalty", ("frequency_penalty", 0.5), count),
            ("logit_bias", bias, 1),
            ("logit_bias", bias, count),
            ("min_tokens", ("min_tokens", sizes.equal[1]), count),
            ("logprobs 5", ("logprobs", 5), 1),
            ("logprobs 5", ("logprobs", 5), count),
        )
    ]


def with_grammars(sizes: Sizes) -> list[Case]:
    """The same streams without grammars, then with a schema for one or for all streams."""
    count = sizes.held
    plain = replace(equal_case(str(count), sizes.equal), name=PLAIN)
    field = ("response_format", {"type": "json_schema", "json_schema": {"name": "orders", "schema": ORDERS}})
    return [plain] + [
        replace(plain, name=f"a schema on {ruled} of {count}", fields=(field,), ruled=ruled) for ruled in (1, count)
    ]


def with_pictures(shape: str, sizes: Sizes) -> list[Case]:
    """Streams of small pictures, several per tower run; texts alone; and texts while large pictures run."""
    if "vision_config" not in SHAPES[shape]:
        raise ValueError(f"--load pictures: {shape} sees no pictures; name a shape that does")
    tiny = shape.startswith("tiny")
    small = Case("32 streams of small pictures", 4 if tiny else 32, (sizes.equal,), (56, 56) if tiny else (336, 336))
    small = replace(small, cached=False, seed=1300)
    large = replace(small, streams=2 if tiny else 8, picture=(112, 84) if tiny else (1024, 1024), seed=1400)
    lengths = sizes.equal if tiny else Sizes().equal
    texts = Case("8 streams of texts", 2 if tiny else 8, (lengths,), cached=False, seed=1500)
    return [small, texts, replace(texts, name=texts.name + BACKGROUND, background=large)]


def longest(shape: str) -> Case:
    """The longest prompt: 100,000 tokens, or as many as the model has positions for."""
    config: dict[str, Any] = SHAPES[shape]
    positions = config.get("text_config", config)["max_position_embeddings"]
    prompt = min(100_000, positions - LONG_ANSWER)
    return Case(f"a prompt of {prompt} tokens", 1, ((prompt, LONG_ANSWER),), seed=9000)


def is_asked(prompt: int, answer: int) -> bool:
    """Whether vLLM's benchmark would include this pair."""
    return min(prompt, answer) >= LEAST and prompt <= MOST_PROMPT and prompt + answer <= MOST


def conversations(shorter: int = 1) -> Lengths:
    """Lengths with the distribution of ShareGPT's."""
    draw, found = random.Random(0), []
    while len(found) < DRAWN:
        prompt, answer = (round(draw.lognormvariate(math.log(m), w)) for m, w in zip(MEDIAN, WIDTH))
        if is_asked(prompt, answer):
            found.append((prompt, answer))
    return cut(found, shorter)


def read_conversations(file: Path, shorter: int = 1) -> Lengths:
    """Lengths from a file in ShareGPT's form: a list of {"conversations": [{"from": "human", "value": ...}, ...]}.

    Takes the first human turn and its answer, CHARACTERS characters per token, and filters pairs as vLLM does.
    """
    found = []
    for entry in json.loads(file.read_text()):
        turns = entry.get("conversations") or []
        at = next((number for number, turn in enumerate(turns) if turn["from"] == "human"), len(turns))
        if at + 1 < len(turns) and turns[at + 1]["from"] == "gpt":
            pair = [math.ceil(len(turn["value"]) / CHARACTERS) for turn in turns[at : at + 2]]
            if is_asked(pair[0], pair[1]):
                found.append((pair[0], pair[1]))
    if not found:
        raise ValueError(f"{file}: no conversation in it has a question and an answer of {LEAST} to {MOST} tokens")
    random.Random(0).shuffle(found)
    return cut(found[:DRAWN], shorter)


def cut(found: list[tuple[int, int]], shorter: int) -> Lengths:
    """Divides the lengths; answers keep at least two tokens, as an answer of one has no time between tokens."""
    return tuple((max(2, prompt // shorter), max(2, answer // shorter)) for prompt, answer in found)
