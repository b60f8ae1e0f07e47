"""Pairs as conversations of the roles `query` and `document`: of rerankers that score by a language model's logits.

Owner: pool. In: a query, a document, maybe an instruction, which becomes the system's message. Out: the token ids of
the checkpoint's chat template around them. A document is cut where that was asked for, a query never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.model_config import PoolingConfig
from server.errors import ApiError
from server.pooling.tokens import Cut, too_long
from server.state import AppState

PROBES = ("omniloop asks", "omniloop answers")
Render = Callable[[str, str], str]


def ids_of_pair(
    state: AppState, render: Render, query: str, document: str, cut: Cut, per_document: int | None, name: str
) -> list[int]:
    """The conversation's ids. Raises ApiError naming the document."""
    encode, decode = state.tokenizer.encode, state.tokenizer.decode
    if per_document is not None and len(own := encode(document)) > per_document:
        document = decode(own[:per_document])
    ids = encode(render(query, document))
    if len(ids) > cut.most and cut.asked is None:
        raise too_long(cut.limit, len(ids), name)
    own = encode(document) if len(ids) > cut.most else []
    while len(ids) > cut.most:  # texts may join with what stands around them: what is cut is counted again
        if not own:
            raise too_long(cut.limit, len(ids), "query")
        own = own[: max(0, len(own) - (len(ids) - cut.most))]
        ids = encode(render(query, decode(own)))
    return ids


def renderer_of(state: AppState, config: PoolingConfig, instruction: str | None) -> Render:
    """The checkpoint's template, with contents as it reads them, texts or parts; 501 where it reads no pair."""
    template = state.renderer.template
    asked = instruction or config.prompts.get(config.default_prompt or "", "")

    def conversation(as_parts: bool, query: str, document: str) -> str:
        assert template is not None
        texts = (*((("system", asked),) if asked else ()), ("query", query), ("document", document))
        messages: list[dict[str, Any]] = [
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text} for role, text in texts
        ]
        return template.render(messages, add_generation_prompt=config.template_opens_answer)

    for as_parts in (False, True):
        if template is None:
            break
        try:
            shown = conversation(as_parts, *PROBES)
        except ApiError:
            continue
        if all(probe in shown for probe in PROBES):
            return lambda query, document: conversation(as_parts, query, document)
    raise ApiError(
        501, "not_implemented", "the checkpoint's chat template has no roles `query` and `document`; name another by "
        "--chat-template",
    )  # fmt: skip
