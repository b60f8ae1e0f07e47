"""/props, /slots and /apply-template: the served model in llama.cpp's words, without prompts and paths.

Owner: loop. Out: one JSON body.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server import __version__
from server.answers.answer import Answer
from server.dialects.llama_cpp.answering import settings_of
from server.dialects.llama_cpp.schema import LlamaFields, LlamaTemplateBody
from server.errors import not_here
from server.http.body import read_json
from server.http.exchange import exchange_of, state_of
from server.http.watch import client_present, preparing
from server.jobs.sampling import resolve
from server.routes import chat, embeddings, health, models, rerank
from server.routes.chat_fields import check_function
from server.routes.endpoint import check_model, generating_route, json_response, pooling_route, route
from server.schema.common import SamplingFields
from server.state import AppState


async def props(request: Request) -> Response:
    """The model, its defaults and its template."""
    state = state_of(request)
    model, template, special = state.engine.model, state.renderer.template, state.tokenizer.special_tokens
    return json_response(
        {
            "default_generation_settings": {"n_ctx": state.engine.max_model_len, "params": defaults(state)},
            "total_slots": state.engine.limits.max_rows,
            "model_path": state.names[0],
            "chat_template": "" if template is None else template.source,
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "modalities": {"vision": "image" in model.modalities, "audio": "audio" in model.modalities},
            "build_info": f"omniloop {__version__}",
            "is_sleeping": False,
        }
    )


def defaults(state: AppState) -> dict[str, Any]:
    """The sampling options of a request without any; {} for models that make vectors or scores."""
    if state.engine.limits.pools:
        return {}
    asked = resolve(SamplingFields(), None, None, state.defaults, state.config, state.vocabulary)
    return settings_of(asked, LlamaFields())


async def slots(request: Request) -> Response:
    """The rows of a step: running answers with their numbers of tokens, then free rows."""
    state = state_of(request)
    answers = [exchange.answer_open for exchange in state.open_exchanges]
    running = [choice for each in answers if isinstance(each, Answer) for choice in each.choices]
    counts = [choice.num_tokens for choice in running if choice.finish_reason is None]
    total = state.engine.limits.max_rows
    counts = (counts + [-1] * total)[:total]
    rows = [
        {
            "id": at,
            "n_ctx": state.engine.max_model_len,
            "is_processing": count >= 0,
            "next_token": {"n_decoded": max(count, 0)},
        }
        for at, count in enumerate(counts)
    ]
    return json_response(rows)


async def apply_template(request: Request) -> Response:
    """The prompt of a conversation, as text."""
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, LlamaTemplateBody, state.config.limits.max_request_bytes, any_type=True)
    check_model(state, body.model)
    for at, tool in enumerate(body.tools or ()):
        check_function(tool, f"tools[{at}]")
    async with client_present(request):
        with exchange.hold(1, "texts"):
            async with preparing(exchange):
                prompt = await state.renderer.counting().chat(
                    body.messages,
                    tools=body.tools,
                    add_generation_prompt=body.add_generation_prompt is not False,
                    template_kwargs=body.chat_template_kwargs,
                )
    if prompt.text is None:
        raise not_here(None, "this model's chat format makes token ids, not text; send the conversation to /tokenize")
    return json_response({"prompt": prompt.text})


ROUTES = [
    route("/props", props, "GET"),
    route("/slots", slots, "GET"),
    route("/apply-template", apply_template, "POST"),
    # Our own routes by the paths of llama.cpp.
    route("/v1/health", health.ready, "GET"),
    route("/models", models.listing, "GET"),
    generating_route("/chat/completions", chat.create),
    pooling_route("/embeddings", embeddings.embeddings),
    pooling_route("/reranking", rerank.rerank),
    pooling_route("/v1/reranking", rerank.rerank),
]
