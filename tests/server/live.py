"""Shared by tests of other protocols: an app on a real socket, a template that prints every field, pictures, events."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from PIL import Image
from tokenizers import Tokenizer

from server.http.listen import bind, make_listener
from server.render.chat import Renderer
from server.render.hf_tokenizer import HfTokenizer

TEMPLATE = r"""
{%- if tools -%}<tools>{{ tools | tojson }}</tools>
{% endif -%}
{%- for m in messages -%}
[{{ m.role }}{{ ' ' + m.name if m.name }}{{ ' #' + m.tool_call_id if m.tool_call_id }}]
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<call {{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}>
{%- endfor -%}{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]
{%- if enable_thinking is defined %} thinking={{ enable_thinking }}{% endif -%}
{%- if reasoning_effort is defined %} effort={{ reasoning_effort }}{% endif -%}
{%- if mood is defined %} mood={{ mood }}{% endif -%}
{%- endif -%}
"""

LEADING_ONLY = """\
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('system must come first') }}{%- endif -%}
[{{ m.role }}]{{ m.content }}
{% endfor -%}
"""


@asynccontextmanager
async def listening(client: Any) -> AsyncIterator[str]:
    """Serves the client's app on a socket of its own; yields the URL."""
    config = dataclasses.replace(client.state.config)
    config = dataclasses.replace(config, server=dataclasses.replace(config.server, host="127.0.0.1", port=0))
    socket = bind(config)
    listener = make_listener(config, client.app)
    serving = asyncio.get_running_loop().create_task(listener.serve([socket]))
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        listener.stop_now()
        await serving


def use_template(client: Any, template: str = TEMPLATE, **fields: Any) -> None:
    """Sets another chat template for this client's app only."""
    state = client.state
    config = dataclasses.replace(state.renderer.config, chat_template=template, **fields)
    state.renderer = Renderer(state.tokenizer, config, state.pool)


def without_end(client: Any) -> None:
    """Removes the end tokens, so that answers have the allowed length with any weights."""
    client.state.vocabulary = dataclasses.replace(client.state.vocabulary, eos=())


def picture(colour: str = "red") -> str:
    """A small PNG as base64."""
    data = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def named_events(content: bytes) -> list[tuple[str, Any]]:
    """(event, data) of each event, without comments."""
    found = []
    for block in content.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        first, second = block.split("\n")
        assert first.startswith("event: ")
        assert second.startswith("data: ")
        found.append((first[7:], orjson.loads(second[6:])))
    return found


GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def use_gaps(client: Any) -> None:
    """Gives this client's app a tokenizer with tokens for filling in the middle, in place of those around images."""
    state = client.state
    text = state.tokenizer.core.to_str()
    for name, other in zip(GAP, ("<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>")):
        text = text.replace(other, name)
    state.tokenizer = HfTokenizer(Tokenizer.from_str(text), {}, state.tokenizer.chat_templates)
    state.renderer = Renderer(state.tokenizer, state.renderer.config, state.pool)
