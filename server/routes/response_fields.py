"""Checks the fields of a response before items are read.

Owner: loop. In: ResponsesBody, or InputBody if the prompt is only counted. Out: the sampling that the request asks for.
"""

from __future__ import annotations

from dataclasses import replace

from server.errors import invalid, not_here, quoted
from server.flags.config import SAMPLERS
from server.jobs.sampling import Asked, in_range, resolve
from server.routes.chat_fields import EFFORTS
from server.routes.endpoint import one_of, refuse_experts
from server.schema.common import SamplingFields
from server.schema.responses import InputBody, ResponsesBody
from server.state import AppState
from server.structure.structure import format_structure

LOGPROBS = "message.output_text.logprobs"


INCLUDE = (
    LOGPROBS, "reasoning.encrypted_content", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip


SAMPLED = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    *SAMPLERS,
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logit_bias", "structured_outputs",
)  # fmt: skip


def check(state: AppState, body: ResponsesBody) -> Asked:
    """Check everything that can be checked before the template runs; returns the sampling."""
    check_input(body)
    check_background(state, body)
    refuse_experts(body.return_routed_experts)
    check_objects(body)
    if body.max_output_tokens is not None:
        in_range("max_output_tokens", body.max_output_tokens, 1, 2**31 - 1)
    for at, value in enumerate(body.include or ()):
        if value not in INCLUDE:
            known = ", ".join(INCLUDE)
            raise invalid(f"include[{at}]", f"include[{at}]: got {quoted(value)}; must be one of {known}")
    wanted = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wanted:
        raise invalid("top_logprobs", f"top_logprobs: needs {LOGPROBS} in include")
    if body.top_logprobs is not None and state.config.limits.max_logprobs != -1:
        in_range("top_logprobs", body.top_logprobs, 0, state.config.limits.max_logprobs)
    watched = body.stream or body.background  # a background response may be streamed later
    fields = SamplingFields(**{name: getattr(body, name) for name in SAMPLED}, stream=watched)
    fields.return_progress = body.return_progress
    logprobs = (body.top_logprobs or 0) if wanted else None
    asked = resolve(fields, logprobs, body.max_output_tokens, state.defaults, state.config, state.vocabulary)
    structure = format_structure(body.text.format if body.text else None, "text.format", state.config.limits)
    if structure is not None and asked.structure is not None:
        raise invalid("structured_outputs", "structured_outputs: not together with text.format; send one of them")
    return replace(asked, structure=structure or asked.structure)


def check_background(state: AppState, body: ResponsesBody) -> None:
    if not body.background:
        return
    if body.store is False or not state.responses.most:
        text = "background: needs store: true" if body.store is False else "background: this server stores nothing"
        raise invalid("background", text)
    if body.return_progress:
        raise invalid("return_progress", "return_progress: not with background; leave one of them out")


def check_input(body: InputBody) -> None:
    """Check the fields that both routes take."""
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise not_here(name, f"{name}: this server does not have objects of OpenAI's servers; send the items")
    text = body.text
    one_of("text.verbosity", text.verbosity if text else None, ("low", "medium", "high"))
    reasoning = body.reasoning
    one_of("reasoning.effort", reasoning.effort if reasoning else None, EFFORTS)
    one_of("reasoning.summary", reasoning.summary if reasoning else None, ("auto", "concise", "detailed"))
    one_of("truncation", body.truncation, ("auto", "disabled"))


def check_objects(body: ResponsesBody) -> None:
    """Check metadata and names."""
    pairs = body.metadata or {}
    if len(pairs) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in pairs.items()):
        raise invalid("metadata", "metadata: at most 16 pairs, keys of 64 and values of 512 characters")
    for name in ("user", "prompt_cache_key"):
        if len(getattr(body, name) or "") > 512:
            raise invalid(name, f"{name}: at most 512 characters")
