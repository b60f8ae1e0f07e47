"""A scripted engine: the real server with answers that the test writes, emitted token by token.

`play(client, texts, ...)` gives the client's app a tokenizer with marker tokens, parsers, and an engine that answers
the n-th request with the n-th text. Prompts go through the real renderer; `requests` has the engine's requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from engine.base.request import Delta, FinishReason, Request
from engine.base.stream import TokenStream
from server.output.parser_choice import choose_parsers
from server.render.chat import Renderer
from server.render.hf_tokenizer import HfTokenizer
from server.render.load_tokenizer import load_tokenizer

EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = r"""
{%- if tools -%}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}{{ ' #' + m.tool_call_id if m.tool_call_id }}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>#{{ c.id }}
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif -%}
{%- if open_thinking is defined %}<think>
{% endif -%}
{%- endif -%}
"""  # noqa: E501


class Script:
    """A double of the engine that answers with texts; all other attributes are the real engine's."""

    def __init__(self, engine: Any, tokenizer: HfTokenizer, texts: list[str], piece: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._piece = piece  # number of tokens in a Delta
        self.requests: list[Request] = []
        self.dropped: list[int] = []
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> TokenStream:
        self.requests.append(request)
        stream = TokenStream(self, request, 1000 * len(self.requests))
        self.open += 1
        text = self._texts.pop(0)
        for index in range(request.n):
            asyncio.get_running_loop().call_soon(self._play, stream, index, self._tokenizer.encode(text), 0)
        return stream

    def _play(self, stream: TokenStream, index: int, ids: list[int], at: int) -> None:
        most = stream.request.sampling.max_tokens
        piece = ids[at : min(at + self._piece, most)]
        at += len(piece)
        reason = FinishReason.NONE
        if at >= most:
            reason = FinishReason.LENGTH
        elif at >= len(ids):
            piece, reason = [*piece, self._tokenizer.id_of("<|im_end|>")], FinishReason.STOP
        stream.feed(Delta(index, piece, reason, cached_tokens=0 if at <= self._piece else None))
        if not reason and not stream.done:
            asyncio.get_running_loop().call_soon(self._play, stream, index, ids, at)

    def drop(self, device_id: int) -> None:
        self.dropped.append(device_id)

    def forget(self, stream: TokenStream) -> None:
        self.open -= 1

    def prompt(self, at: int = -1) -> str:
        """The text of a request's prompt."""
        return self._tokenizer.decode(self.requests[at].prompt_token_ids)


_tokenizers: list[HfTokenizer] = []


def tokenizer() -> HfTokenizer:
    """The embedded model's tokenizer with marker tokens, made once."""
    if not _tokenizers:
        core = load_tokenizer(EMBEDDED).core
        core.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
        _tokenizers.append(HfTokenizer(core, {}, {}))
    return _tokenizers[0]


def play(
    client: Any, *texts: str, tools: str = "hermes", reasoning: str = "qwen3", piece: int = 1, template: str = TEMPLATE
) -> Script:
    state = client.state
    state.tokenizer = tokenizer()
    config = dataclasses.replace(state.renderer.config, chat_template=template, num_embeddings=0)
    state.renderer = Renderer(state.tokenizer, config, state.pool)
    state.parsers = choose_parsers(state.tokenizer, [], "", tools=tools, reasoning=reasoning)
    state.engine = Script(state.engine, state.tokenizer, list(texts), piece)
    return state.engine
