"""Conversations with media and their known answers: the engine's own tokens for an independently made prompt.

jinja2 and tokenizers render the prompt straight from the checkpoint's files, mm prepares the media, and the engine
answers each conversation alone, without a prefix cache. The server must send the same tokens over sockets.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import Request, SamplingParams
from engine.base.request import Modality
from mm.item import MediaRef
from mm.limits import MediaLimits
from mm.load import MediaLoader
from mm.processors.registry import processor_for
from mm.splice import splice
from tests import tiny
from tests.engine_kit import answer, running
from tests.mm.made import data_url, film, noise, picture, ramp, sound, tone

TOKENS = 24


@functools.cache
def data_of(name: str) -> tuple[Modality, bytes]:
    """The encoded bytes of an item; equal in every process."""
    return {
        "png": lambda: ("image", picture(noise(90, 120, 1), "PNG")),
        "jpeg": lambda: ("image", picture(noise(200, 130, 2), "JPEG")),
        "wav": lambda: ("audio", sound(tone(0.7, hertz=220), 16000, "wav")),
        "mp3": lambda: ("audio", sound(tone(1.9, hertz=880), 16000, "mp3", "libmp3lame")),
        "mp4": lambda: ("video", film(ramp(20))),
        "webm": lambda: ("video", film(ramp(12), container="webm", codec="libvpx-vp9")),
    }[name]()


MIME = {"png": "image/png", "jpeg": "image/jpeg", "wav": "audio/wav", "mp3": "audio/mpeg"}
MIME |= {"mp4": "video/mp4", "webm": "video/webm"}


def part(name: str) -> dict[str, Any]:
    """The item as a content part of the OpenAI API."""
    modality, data = data_of(name)
    if modality == "audio":
        encoded = base64.b64encode(data).decode()
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": name}}
    kind = f"{modality}_url"
    return {"type": kind, kind: {"url": data_url(data, MIME[name])}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@functools.cache
def conversations() -> dict[str, list[dict[str, Any]]]:
    return {
        "text": [{"role": "user", "content": "the cat and the hat"}],
        "several turns": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is in the bag?"},
            {"role": "assistant", "content": "An orange, and a näïve 猫."},
            {"role": "user", "content": "And in the other?"},
        ],
        "image": [user(part("png"), words("What is in the picture?"))],
        "audio": [user(part("wav"), words("Which digits do you hear?"))],
        "video": [user(part("mp4"), words("Which way does it move?"))],
        "two images": [user(words("first"), part("png"), words("then"), part("jpeg"), words("Which is larger?"))],
        "all three": [user(part("webm"), part("mp3"), words("and"), part("jpeg"), words("What do they share?"))],
        "media in two turns": [
            user(part("png"), words("What is this?")),
            {"role": "assistant", "content": "Noise."},
            user(part("mp3"), words("And this?")),
        ],
    }


@dataclass(frozen=True)
class Known:
    """The prompt and the answer that the server must send for a conversation."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    media_tokens: dict[str, int]


@functools.cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny.checkpoint("omni") / "tokenizer.json"))


def rendered(messages: list[dict[str, Any]]) -> list[int]:
    import jinja2

    text = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(tiny.CHAT_TEMPLATE)
    return tokenizer().encode(text.render(messages=messages, add_generation_prompt=True)).ids


def refs(messages: list[dict[str, Any]]) -> list[MediaRef]:
    parts = [item for message in messages if isinstance(message["content"], list) for item in message["content"]]
    names = {json.dumps(part(name)): name for name in MIME}
    named = [names[json.dumps(item)] for item in parts if item["type"] != "text"]
    return [MediaRef(data_of(name)[0], data_url(data_of(name)[1], MIME[name])) for name in named]


async def request_of(messages: list[dict[str, Any]], loader: MediaLoader) -> tuple[Request, dict[str, int]]:
    ids = rendered(messages)
    marks = [tiny.IDS[mark] for mark in ("<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>")]
    slots = np.flatnonzero(np.isin(ids, marks)).tolist()
    made = splice(ids, slots, await loader.load(refs(messages)), loader.processor)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    request = Request(
        made.prompt_token_ids,
        sampling,
        media=made.media,
        positions=made.positions,
        position_delta=made.position_delta,
    )
    return request, dict(made.counts)


@functools.cache
def answers() -> dict[str, Known]:
    """Name of a conversation -> its known answer."""

    async def run() -> dict[str, Known]:
        folder = tiny.checkpoint("omni")
        raw = json.loads((folder / "config.json").read_text())
        found = {}
        with ThreadPoolExecutor(2) as pool:
            async with running(folder, enable_prefix_caching=False) as engine:
                for name, messages in conversations().items():
                    loader = MediaLoader(MediaLimits(), processor_for("qwen_omni:QwenOmni", folder, raw), pool)
                    request, counts = await request_of(messages, loader)
                    tokens = (await answer(engine, request))[0]
                    text = tokenizer().decode(tokens, skip_special_tokens=True)
                    found[name] = Known(request.prompt_token_ids.tolist(), tokens, text, counts)
        return found

    return asyncio.run(run())
