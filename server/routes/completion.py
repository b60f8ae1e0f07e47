"""/v1/completions (API.md section 10): texts or token ids, many prompts at once, echo, logprobs.

Owner: loop. In: CompletionBody. Out: choices in prompt-major order, index = prompt * n + k, whole or pushed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from server.answers import routed
from server.answers.answer import SLICE, Answer
from server.answers.choice import Choice
from server.answers.respond import answer_with, json_body
from server.errors import invalid, not_here
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.watch import preparing
from server.jobs.job import Job, prepare
from server.jobs.prompt_rows import prompt_of, refuse_others
from server.jobs.sampling import Asked, in_range, priority_of, resolve, salt_of, with_ends
from server.output.choices import completion_choice, echo_text
from server.output.logprobs import CompletionLogprobs, joined
from server.render.fim import NO_TOKENS
from server.render.prompt import PIECE, empty
from server.routes.chunks import CompletionChunks
from server.routes.endpoint import gateway_priority, generating_route, names_of, response_id, served_model, side_of
from server.schema.completion import CompletionBody
from server.state import AppState


@dataclass(frozen=True, slots=True)
class Rows:
    """A prompt of rows: base64 of a tensor."""

    text: str
    param: str


Prompts = list[str | list[int] | Rows]


async def create(request: Request) -> Response | None:
    exchange = exchange_of(request)
    state = exchange.state
    limits, rows = state.config.limits, state.config.rows.enable_prompt_embeds
    body = await read_json(request, CompletionBody, limits.max_request_bytes if rows else limits.max_text_request_bytes)
    model = await served_model(exchange, body.model)
    prompts = prompts_of(state, body)
    asked = check(state, body, len(prompts))
    name = response_id("cmpl-", body.request_id, exchange)
    num_prompts, header = len(prompts), gateway_priority(request)
    makers = logprob_makers(state, body, asked, num_prompts)

    async def jobs() -> list[Job]:
        async with preparing(exchange, "prompts"):
            prepared = await render(exchange, body, prompts, asked, header)
        await forget(state, body, prompts)
        return prepared

    def frames(answer: Answer) -> CompletionChunks:
        return CompletionChunks(answer, name, model, bool(body.return_token_ids), makers, bool(body.echo))

    async def response(answer: Answer) -> Response:
        return await json_body(answer, partial(whole, answer, body, name, model, makers))

    skip_special_tokens = body.skip_special_tokens is not False
    return await answer_with(
        request,
        asked,
        jobs,
        frames,
        response,
        name=name,
        num_prompts=num_prompts,
        skip_special_tokens=skip_special_tokens,
    )


def prompts_of(state: AppState, body: CompletionBody) -> Prompts:
    """The prompts as a list: rows, then a text, texts, token ids or lists of token ids."""
    prompt, most = body.prompt, state.config.limits.max_prompts
    given = rows_of(state, body)
    if given:
        texts = texts_of(body, most - len(given)) if prompt else []
        return checked_for_suffix(state, body, [*given, *texts])
    return checked_for_suffix(state, body, texts_of(body, most))


def checked_for_suffix(state: AppState, body: CompletionBody, prompts: Prompts) -> Prompts:
    """The prompts; refuses a suffix that cannot be used."""
    if not body.suffix:
        return prompts
    if state.renderer.fill_in is None:
        raise not_here("suffix", f"suffix: {NO_TOKENS}; leave the field out")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid("suffix", "suffix: needs texts in prompt, not token ids or embeddings")
    if body.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens: not together with suffix; shorten both texts")
    return prompts


def rows_of(state: AppState, body: CompletionBody) -> list[Rows]:
    if body.prompt_embeds is None:
        return []
    refuse_others(state, body)
    if isinstance(body.prompt_embeds, str):
        return [Rows(body.prompt_embeds, "prompt_embeds")]
    if not 0 < len(body.prompt_embeds) <= state.config.limits.max_prompts:
        most = state.config.limits.max_prompts
        raise invalid("prompt_embeds", f"prompt_embeds: got {len(body.prompt_embeds)}; 1 to {most} are allowed")
    return [Rows(text, f"prompt_embeds[{at}]") for at, text in enumerate(body.prompt_embeds)]


def texts_of(body: CompletionBody, most: int) -> Prompts:
    prompt = body.prompt
    if prompt is None:
        raise invalid("prompt", "prompt: is missing and required")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "prompt: is empty; send at least one prompt", "empty_prompt")
    kinds = set(map(type, prompt[:most]))  # further entries must be token ids, which the pool checks
    if len(kinds) > 1:
        raise invalid("prompt", "prompt: mixes texts and token ids; send one kind")
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if len(prompt) > most:
        raise invalid("prompt", f"prompt: got {len(prompt)} prompts; at most {most} are allowed")
    return cast(Prompts, prompt)


async def forget(state: AppState, body: CompletionBody, prompts: Prompts) -> None:
    """Free the lists as soon as they are read, so that the garbage collector does not traverse them while the
    answer runs.
    """
    body.prompt = body.prompt_embeds = None
    for prompt in prompts:
        if isinstance(prompt, list) and len(prompt) > PIECE:
            await asyncio.get_running_loop().run_in_executor(state.pool, empty, prompt)
    prompts.clear()


def check(state: AppState, body: CompletionBody, num_prompts: int) -> Asked:
    limits = state.config.limits
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    in_range("max_tokens", max_tokens, 0 if body.echo else 1, 2**31 - 1)
    asked = resolve(body, body.logprobs, max_tokens, state.defaults, state.config, state.vocabulary)
    if asked.n * num_prompts > limits.max_choices:
        most = limits.max_choices
        raise invalid("n", f"n: {num_prompts} prompts of {asked.n} choices are more than {most} in all")
    top, wanted = asked.params.logprobs, asked.params.prompt_logprobs
    if body.echo and top is not None:  # the echo has as many log-probabilities as requested for the answer
        most = top if wanted is None else -1 if -1 in (top, wanted) else max(top, wanted)
        asked = replace(asked, params=replace(asked.params, prompt_logprobs=most))
    fill_in = state.renderer.fill_in if body.suffix else None
    return asked if fill_in is None else with_ends(asked, fill_in.ends, state.vocabulary)


async def render(
    exchange: Exchange, body: CompletionBody, prompts: Prompts, asked: Asked, header: str = ""
) -> list[Job]:
    """Every prompt as a Job; `header` is X-Vllm-Priority."""
    state = exchange.state
    salt, priority = salt_of(body), priority_of(body, state.config, header)
    jobs = []
    for at, text in enumerate(prompts):
        if at % SLICE == SLICE - 1:  # let other tasks of the loop run
            await asyncio.sleep(0)
        if isinstance(text, Rows):
            prompt = await prompt_of(state, text.text, text.param)
            jobs.append(await prepare(exchange, prompt, asked, salt=salt, priority=priority, param=text.param))
            continue
        param = "prompt" if len(prompts) == 1 else f"prompt[{at}]"
        special = body.add_special_tokens is not False
        if body.suffix and isinstance(text, str):
            prompt = await state.renderer.filled(text, body.suffix, special)
        else:
            prompt = await state.renderer.completion(
                text,
                special,
                truncate_prompt_tokens=body.truncate_prompt_tokens,
                truncation_side=side_of(body.truncation_side),
                param=param,
            )
        jobs.append(await prepare(exchange, prompt, asked, salt=salt, priority=priority, param=param))
    return jobs


def logprob_makers(state: AppState, body: CompletionBody, asked: Asked, num_prompts: int) -> list[CompletionLogprobs]:
    """One per choice, since text offsets accumulate; empty without logprobs."""
    if asked.params.logprobs is None:
        return []
    top = -1 if body.logprob_token_ids else body.logprobs or 0
    names, show = names_of(state, body), body.skip_special_tokens is False
    return [CompletionLogprobs(names, top, show_special=show) for _ in range(asked.n * num_prompts)]


def whole(
    answer: Answer, body: CompletionBody, name: str, model: str, makers: list[CompletionLogprobs]
) -> dict[str, Any]:
    choices = [whole_choice(answer, choice, body, makers) for choice in answer.choices]
    return {
        "id": name,
        "object": "text_completion",
        "created": answer.created,
        "model": model,
        "choices": choices,
        "usage": answer.usage(),
        **answer.reported(),
        "system_fingerprint": None,
    }


def whole_choice(
    answer: Answer, choice: Choice, body: CompletionBody, makers: list[CompletionLogprobs]
) -> dict[str, Any]:
    text, token_ids, entries = choice.drain()
    prompt_ids = choice.job.request.prompt_token_ids.tolist()
    prompt_entries = answer.prompt_logprobs[choice.index // answer.asked.n]
    logprobs = None
    if makers:
        maker = makers[choice.index]
        told = body.echo and prompt_entries is not None
        first = maker.add_prompt(prompt_ids, prompt_entries) if told and prompt_entries else None
        logprobs = joined(first, maker.add(entries)) if first else maker.add(entries)
    prompt_logprobs = None
    if body.prompt_logprobs is not None and prompt_entries is not None:
        prompt_logprobs = names_of(answer.state, body).prompt(prompt_entries, body.prompt_logprobs)
    made = completion_choice(
        choice.index,
        echo_text(answer.state.tokenizer, choice.job.prompt) + text if body.echo else text,
        choice.finish_reason,
        choice.stop_reason,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_token_ids=prompt_ids if body.return_token_ids else None,
        token_ids=token_ids if body.return_token_ids else None,
    )
    return made | routed.of_both(choice, answer.asked.n)


ROUTES = [generating_route("/v1/completions", create)]
