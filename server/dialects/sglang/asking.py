"""The options of each prompt of a /generate body, in our names and checked.

Owner: loop, pure functions. In: SglangBody. Out: a One for each prompt, and the Asked of the whole answer. Nested
`sampling_params` are read by the table of server/foreign_fields.py. Defaults are the model's and the operator's, except
for max_new_tokens, which is 128 as in SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from server.dialects.names import client_names
from server.dialects.sglang.prompts import each, token_lists
from server.dialects.sglang.schema import SglangBody
from server.errors import from_validation, invalid
from server.http.exchange import Exchange
from server.http.foreign_body import fields_of, report, translated
from server.jobs.sampling import Asked, in_range, resolve, top_count
from server.output.choices import ChoiceStream
from server.output.text import StopStrings
from server.render.tokenizer import Tokenizer
from server.schema.common import SamplingFields

PARAMS = "sampling_params"
USUAL_TOKENS = 128  # max_new_tokens where it is absent
# Fields of SamplingFields that the body has outside of sampling_params.
OUTSIDE = frozenset((
    "model", "prompt_logprobs", "stream", "stream_options", "add_special_tokens", "truncate_prompt_tokens",
    "truncation_side", "priority", "cache_salt", "request_id", "return_token_ids", "return_routed_experts",
    "return_tokens_as_token_ids", "use_beam_search", "length_penalty", "logprob_token_ids", "return_progress",
))  # fmt: skip
FIELDS = fields_of(SamplingFields) - OUTSIDE
# Our field -> the client's, in errors.
THEIRS = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
NAMES = {ours: f"{PARAMS}.{THEIRS.get(ours, ours)}" for ours in FIELDS} | {
    "logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
}


@dataclass(frozen=True, slots=True)
class One:
    """What the client wants for one prompt."""

    asked: Asked
    has_logprobs: bool
    start: int  # first token of the prompt with log-probabilities; -1: none
    top: int  # likeliest tokens at each place
    token_ids: tuple[int, ...]  # ids whose log-probabilities are reported
    skips_special: bool
    is_silent: bool  # the client wants no token, only the prompt to be computed
    names: dict[str, str]  # our field -> the client's, in errors


def ones_of(exchange: Exchange, body: SglangBody, count: int) -> list[One]:
    """The options of every prompt. Raises ApiError with the client's names."""
    params = each(body.sampling_params, PARAMS, count)
    logprobs = each(body.return_logprob, "return_logprob", count)
    starts = each(body.logprob_start_len, "logprob_start_len", count)
    tops = each(body.top_logprobs_num, "top_logprobs_num", count)
    tokens = token_lists(body.token_ids_logprob, count)
    is_list = isinstance(body.sampling_params, list)
    made: dict[str, One] = {}  # equal options are read once
    found = []
    for at in range(count):
        path = f"{PARAMS}[{at}]" if is_list else PARAMS
        own = (params[at] or {}, logprobs[at], starts[at], tops[at], tokens[at])
        key = repr(own) if count > 1 else ""
        if key not in made:
            made[key] = one_of(exchange, body, path, *own)
        found.append(made[key])
    numbers = {one.asked.n for one in found}
    if len(numbers) > 1:
        raise invalid(f"{PARAMS}.n", f"{PARAMS}.n: differs among prompts; send prompts with other n as other requests")
    most = exchange.state.config.limits.max_choices
    if count * found[0].asked.n > most:
        text = f"{PARAMS}.n: {count} prompts of {found[0].asked.n} answers are more than {most} in all"
        raise invalid(f"{PARAMS}.n", text)
    return found


def one_of(
    exchange: Exchange,
    body: SglangBody,
    path: str,
    params: dict[str, Any],
    has_logprobs: bool | None,
    start: int | None,
    top: int | None,
    token_ids: list[int],
) -> One:
    """The options of one prompt; `path`: the path of `params` in the body."""
    state = exchange.state
    fields, renamed = read_params(exchange, params, path)
    names = {name: theirs.replace(PARAMS, path, 1) for name, theirs in NAMES.items()} | renamed
    fields.stream, fields.return_progress = body.stream, body.return_progress
    fields.return_routed_experts = body.return_routed_experts
    most = fields.max_tokens if params.get("max_new_tokens") is None else params["max_new_tokens"]
    most = USUAL_TOKENS if most is None else most
    start = -1 if start is None else int(in_range("logprob_start_len", start, -1, 2**31 - 1))
    has_logprobs, top = bool(has_logprobs), top or 0
    with client_names(names):
        in_range("max_tokens", most, 0, 2**31 - 1)
        if has_logprobs and token_ids:
            fields.logprob_token_ids = token_ids
        wanted = top if has_logprobs else None
        asked = resolve(fields, wanted, max(most, 1), state.defaults, state.config, state.vocabulary)
    if has_logprobs and start >= 0:
        asked = replace(
            asked, params=replace(asked.params, prompt_logprobs=top_count("top_logprobs_num", top, state.config.limits))
        )
    skips_special = fields.skip_special_tokens is not False
    return One(
        asked, has_logprobs, start if has_logprobs else -1, top, tuple(token_ids), skips_special, most == 0, names
    )


def read_params(exchange: Exchange, params: dict[str, Any], path: str) -> tuple[SamplingFields, dict[str, str]]:
    """One object of `sampling_params` in our names, and its own names; ignored fields are named to the client."""
    made = translated(params, FIELDS, f"{path}.")
    if made.ignored:
        report(exchange, made.ignored, FIELDS)
    given = {name: value for name, value in params.items() if name in FIELDS} | made.settings
    try:
        return msgspec.convert(given, SamplingFields), made.renamed
    except msgspec.ValidationError as error:
        refusal = from_validation(error)
        name = refusal.param or ""
        raise refusal.as_sent({name: made.renamed.get(name, f"{path}.{name}")}) from None


def whole_asked(ones: Sequence[One]) -> Asked:
    """The Asked of the answer to all prompts, whose choices have the text rules of their own prompts."""
    first = next((one.asked for one in ones if one.has_logprobs), ones[0].asked)
    if len({id(one) for one in ones}) == 1:
        return first
    n = first.n

    def choice(tokenizer: Tokenizer, index: int, stops: StopStrings, **fields: Any) -> ChoiceStream:
        one = ones[index // n]
        fields |= {
            "include_stop": one.asked.include_stop,
            "skip_special_tokens": one.skips_special,
            "min_tokens": one.asked.params.min_tokens,
            "repetition": one.asked.repetition,
        }
        return ChoiceStream(tokenizer, index, StopStrings(one.asked.stop), **fields)

    # Grammars differ by prompt: generate.py adds them to the jobs.
    return replace(first, choice=choice, structure=None)
