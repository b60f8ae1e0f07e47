"""/v1/systemone and /v1/decisions: probabilities of the options of typed questions about one state.

Owner: loop, the handler's task. In: SystemOneBody or DecisionsBody. Out: one JSON body. Each question is a prompt of
its own, answered by one step; all prompts begin with the state, which is computed once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mm.item import MediaOptions, MediaRef, Processed
from mm.load import MediaLoader
from mm.report import MediaReport
from server.dialects.decisions import scores
from server.dialects.decisions.ask import (
    ONE_STEP,
    Labelled,
    Measure,
    is_shared,
    measured,
    own_probability,
    softmax,
)
from server.dialects.decisions.prompts import Posed, posed, probe_of, shared_length
from server.dialects.decisions.questions import Question, json_part, json_text, of_decisions, of_systemone
from server.dialects.decisions.schema import DecidingBody, DecisionsBody, SystemOneBody
from server.errors import invalid
from server.http.body import read_json
from server.http.exchange import Exchange, exchange_of
from server.http.watch import client_present, preparing
from server.jobs.job import prepare, scope_of
from server.jobs.media_preload import MediaPreload
from server.jobs.sampling import priority_of, salt_of
from server.render.conversation import Conversation, text_part
from server.render.items import read_items
from server.routes.endpoint import gateway_priority, generating_route, json_response
from server.schema.common import SamplingFields
from server.state import AppState

TOGETHER = 8  # questions rendered at a time
Answered = tuple[Posed, Measure]


async def systemone(request: Request) -> Response:
    """Answer an object of questions with an object of answers."""
    state = exchange_of(request).state
    body = await read_json(request, SystemOneBody, state.config.limits.max_request_bytes, any_type=True)
    questions = of_systemone(body.questions)
    if not body.state:
        raise invalid("state", "state: is empty; send the text that the questions are about")
    conversation = Conversation()
    conversation.root = "state"
    conversation.user([text_part(json_text(body.state), "state", "state")], "state")
    found = await decided(request, body, conversation, questions)
    answers = {each.question.name: systemone_answer(each.question, shares_of(each, one)) for each, one in found}
    usage = {"input_tokens": tokens_of(found), "output_tokens": 0}
    names = [question.name or "" for question in questions]
    return json_response(
        {**about(state, body), "answers": answers, "usage": usage, **diagnosed(state, body, names, found)}
    )


async def decisions(request: Request) -> Response:
    """Answer a list of questions with a list of answers."""
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, DecisionsBody, state.config.limits.max_request_bytes, any_type=True)
    questions = of_decisions(body.questions)
    given = body.input if isinstance(body.input, str) else [with_json(item, at) for at, item in enumerate(body.input)]
    conversation = await asyncio.get_running_loop().run_in_executor(state.pool, read_items, None, [], given)
    conversation.root = "input"
    found = await decided(request, body, conversation, questions)
    answers = [decision_answer(each.question, shares_of(each, one)) for each, one in found]
    tokens, cached = tokens_of(found), sum(one.cached_tokens for _, one in found)
    usage = {
        "input_tokens": tokens,
        "output_tokens": 0,
        "total_tokens": tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": tokens - cached},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    names = [str(at) for at in range(len(questions))]
    return json_response(
        {**about(state, body), "answers": answers, "usage": usage, **diagnosed(state, body, names, found)}
    )


def with_json(item: dict[str, Any], at: int) -> dict[str, Any]:
    """An item whose parts of JSON are texts."""
    for key in ("content", "output"):
        if isinstance(item.get(key), list):
            parts = [json_part(part, f"input[{at}].{key}[{k}]") for k, part in enumerate(item[key])]
            item = {**item, key: parts}
    return item


async def decided(
    request: Request, body: DecidingBody, conversation: Conversation, questions: Sequence[Question]
) -> list[Answered]:
    """The questions with their measures."""
    exchange = exchange_of(request)
    state, asker = exchange.state, Asker(exchange, body, conversation, gateway_priority(request))
    async with client_present(request):
        with exchange.hold(len(questions)):
            async with SharedMedia(state.media, scope_of(exchange, asker.salt), None) as preload:
                async with preparing(exchange, "questions"):
                    await conversation.settle(state.renderer)
                    await preload.begin(state.renderer.embedded(conversation.messages()))
                    first, *others = questions
                    jobs, rest = await asker.begin(preload, first, others)

                async def later() -> list[Labelled]:
                    async with preparing(exchange, "questions"):
                        return await asker.labelled(preload, rest)

                found = await measured(exchange, jobs, later, f"decision-{exchange.request_id}")
    return list(zip(asker.posed, found))


class SharedMedia(MediaPreload):
    """The media of prompts that hold the same items: loaded and reported once."""

    def __init__(self, loader: MediaLoader | None, scope: bytes, options: MediaOptions | None) -> None:
        super().__init__(loader, scope, options)
        self._refs: tuple[MediaRef, ...] = ()
        self._items: list[Processed] = []

    async def load(self, refs: Sequence[MediaRef]) -> list[Processed]:
        """The prompt's items."""
        if self._refs == tuple(refs):
            self.report = MediaReport()  # the prompt before this one has reported them
            return self._items
        self._items, self._refs = await super().load(refs), tuple(refs)
        return self._items


class Asker:
    """Makes the jobs of one request's questions. Owner: the handler's task."""

    def __init__(self, exchange: Exchange, body: DecidingBody, conversation: Conversation, header: str) -> None:
        common = SamplingFields(priority=body.priority, cache_salt=body.cache_salt)
        self.exchange = exchange
        self.conversation = conversation
        self.salt = salt_of(common)
        self.priority = priority_of(common, exchange.state.config, header)
        self.posed: list[Posed] = []  # in the order of the jobs

    async def begin(
        self, preload: MediaPreload, first: Question, others: Sequence[Question]
    ) -> tuple[list[Labelled], Sequence[Question]]:
        """The jobs to submit at once, and the questions that wait for the state."""
        if not others:
            return await self.labelled(preload, [first]), []
        probing = probe_of(self.exchange.state, self.conversation)
        labelled, probe = await asyncio.gather(self.labelled(preload, [first]), probing)
        prompt = self.posed[0].prompt
        shared = shared_length(prompt, probe)
        if all(slot < shared for slot in prompt.slots):  # each placeholder stands for several tokens of the job
            shared += labelled[0][0].num_tokens - len(prompt)
        if is_shared(self.exchange.state, shared):
            return labelled, others
        return [*labelled, *await self.labelled(preload, others)], []

    async def labelled(self, preload: MediaPreload, questions: Sequence[Question]) -> list[Labelled]:
        """The jobs of questions, with the tokens of their labels."""
        found: list[Labelled] = []
        for start in range(0, len(questions), TOGETHER):
            part = questions[start : start + TOGETHER]
            made = await asyncio.gather(*(posed(self.exchange.state, self.conversation, each) for each in part))
            for each in made:
                with self.conversation.client_paths():
                    job = await prepare(
                        self.exchange,
                        each.prompt,
                        ONE_STEP,
                        salt=self.salt,
                        priority=self.priority,
                        param=self.conversation.root,
                        preload=preload,
                    )
                found.append((job, [token for ids in each.label_ids for token in ids]))
            self.posed += made
        return found


def shares_of(each: Posed, found: Measure) -> list[float]:
    """The probability of each option; those of an option's spellings are added."""
    spellings = [(at, token) for at, ids in enumerate(each.label_ids) for token in ids]
    shares = softmax([found.logprobs[token] for _, token in spellings])
    return [
        float(sum(share for (at, _), share in zip(spellings, shares) if at == k)) for k in range(len(each.label_ids))
    ]


def tokens_of(found: Sequence[Answered]) -> int:
    return sum(one.job.num_tokens for _, one in found)


def about(state: AppState, body: DecidingBody) -> dict[str, Any]:
    return {"model": body.model if body.model in state.names else state.names[0]}


def confidence_of(shares: Sequence[float]) -> float:
    """0 for equal shares, 1 for a single possible option."""
    return max(0.0, (len(shares) * max(shares) - 1) / (len(shares) - 1))


def systemone_answer(question: Question, shares: list[float]) -> dict[str, Any]:
    """An answer in the words of /v1/systemone."""
    if question.kind == "truth":
        return {"type": "noul", "noul": shares[0]}
    if question.kind == "choice":
        probabilities = dict(zip((option.value for option in question.options), shares))
        likeliest = question.options[int(np.argmax(shares))].value
        return {
            "type": "choice",
            "choice": likeliest,
            "probabilities": probabilities,
            "confidence": confidence_of(shares),
        }
    return {
        "type": "score",
        "score": mean_of(shares),
        "legend": {str(at): option.value for at, option in enumerate(question.options)},
        "probabilities": {str(at): share for at, share in enumerate(shares)},
        "confidence": confidence_of(shares),
    }


def decision_answer(question: Question, shares: list[float]) -> dict[str, Any]:
    """An answer in the words of /v1/decisions."""
    if question.kind == "truth":
        return {"type": "predicate", "name": question.name, "probability": shares[0]}
    listed: list[dict[str, Any]]
    if question.kind == "choice":
        listed = [{"value": each.value, "probability": share} for each, share in zip(question.options, shares)]
        made: dict[str, Any] = {"choice": question.options[int(np.argmax(shares))].value}
    else:
        rows = enumerate(zip(question.options, shares))
        listed = [{"value": at, "label": each.value, "probability": share} for at, (each, share) in rows]
        made = {"score": mean_of(shares)}
    confidence = confidence_of(shares)
    return {"type": question.kind, "name": question.name, **made, "probabilities": listed, "confidence": confidence}


def mean_of(shares: Sequence[float]) -> float:
    """The mean of the levels' numbers."""
    return float(sum(at * share for at, share in enumerate(shares)))


def diagnosed(state: AppState, body: DecidingBody, names: Sequence[str], found: Sequence[Answered]) -> dict[str, Any]:
    """`diagnostics`, if they are wanted."""
    if not body.return_token_ids:
        return {}
    made = {}
    for name, (each, one) in zip(names, found):
        flat = [token for ids in each.label_ids for token in ids]
        made[name] = {
            "prompt_token_ids": one.job.request.prompt_token_ids.tolist(),
            "label_token_ids": each.label_ids,
            "label_mass": own_probability(state, [one.logprobs[token] for token in flat]),
            "argmax_is_label": one.likeliest in flat,
        }
    return {"diagnostics": made}


ROUTES = [
    generating_route("/v1/systemone", systemone),
    generating_route("/v1/decisions", decisions),
    *scores.ROUTES,
]
