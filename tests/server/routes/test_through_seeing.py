"""Vision models that run through transformers, over HTTP: transformers' prompts and answers for the same messages."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from server.app import make_app
from tests import tiny
from tests.mm.made import data_url, noise, png
from tests.server.asgi import Client
from tests.server.conftest import config_of, quiet, ready

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOKENS = 10


@torch.inference_mode()
def wanted(name, messages, pictures):
    """(prompt, answer) computed by transformers alone."""
    folder = tiny.checkpoint(name)
    processor, model = AutoProcessor.from_pretrained(folder), tiny.reference(folder)
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = [Image.open(io.BytesIO(picture)) for picture in pictures]
    inputs = processor(images=images, text=[text], return_tensors="pt")
    model.generation_config.eos_token_id = None
    out = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0].tolist()
    length = inputs["input_ids"].shape[1]
    return out[:length], out[length:]


async def test_a_conversation_with_pictures_is_that_of_transformers():
    name, pictures = "paddleocr_vl", [png(noise(60, 90)), png(noise(90, 50, 1))]
    urls = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures]
    text = {"type": "text", "text": "the and then"}
    messages = [{"role": "user", "content": [urls[0], text, urls[1]]}]
    prompt, answer = wanted(name, [{"role": "user", "content": [{"type": "image"}, text, {"type": "image"}]}], pictures)
    model = {"model": str(tiny.checkpoint(name)), "num_threads": 1}
    async with ready(config_of(model=model)) as state:
        client = Client(make_app(state))
        asked = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for cached in (False, True):
            reply = await client.chat(messages=messages, **asked)
            assert reply.status == 200, reply.content
            said = reply.json()
            assert said["prompt_token_ids"] == prompt
            assert said["choices"][0]["token_ids"] == answer
            assert bool(said["usage"]["prompt_tokens_details"]["cached_tokens"]) is cached
        film = {"type": "video_url", "video_url": {"url": data_url(pictures[0])}}
        refused = await client.chat(messages=[{"role": "user", "content": [film, text]}])
        assert refused.status == 400
        assert "no video input; it takes: text, image" in refused.error["message"]
        await quiet(state)
