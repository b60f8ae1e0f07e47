"""The answer to a chat in one JSON body, and helpers that streams and bodies share.

Owner: loop; long answers are formatted in the pool. In: an Answer that has ended, and its ChatBody. Out: the body, with
the fields that the request asks for.
"""

from __future__ import annotations

from typing import Any

from server.answers import routed
from server.answers.answer import Answer
from server.answers.choice import Choice
from server.output.choices import chat_call, chat_choice, chat_message
from server.output.events import Said
from server.output.logprobs import TokenNames
from server.routes.chat_fields import names_function
from server.routes.chunks import chat_finish
from server.schema.chat import ChatBody
from server.state import AppState


def num_top(body: ChatBody) -> int:
    """How many likeliest tokens an entry lists: as requested, or all if ids were requested too."""
    return -1 if body.logprob_token_ids else body.top_logprobs or 0


def echo_of(state: AppState, body: ChatBody) -> str:
    """The text of the last message, if it has the role of the answer."""
    last = body.messages[-1]
    return text_of(last) if last.get("role") == state.config.chat.response_role else ""


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def whole(answer: Answer, body: ChatBody, name: str, model: str, names: TokenNames) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    job, asked = answer.jobs[0], answer.asked
    content: dict[str, Any] = {
        "id": name,
        "object": "chat.completion",
        "created": answer.created,
        "model": model,
        "choices": [whole_choice(answer, choice, body, names) for choice in answer.choices],
        "usage": answer.usage(),
        **answer.reported(),
        "system_fingerprint": None,
        "service_tier": None,
        "prompt_logprobs": None,
    }
    prompt_logprobs = answer.prompt_logprobs[0]
    if asked.params.prompt_logprobs is not None and prompt_logprobs is not None:
        content["prompt_logprobs"] = names.prompt(prompt_logprobs, asked.params.prompt_logprobs)
    if answer.exchange.replaced_frames:
        content["replaced_frames"] = [
            {"item": item, "frames": [{"frame": number, "shown": shown} for number, shown in pairs]}
            for item, pairs in answer.exchange.replaced_frames
        ]
    if body.return_token_ids:
        content["prompt_token_ids"] = job.request.prompt_token_ids.tolist()
    if body.return_prompt_text:
        content["prompt_text"] = job.prompt.text
    return content | routed.of_prompt(answer.choices[0])


def whole_choice(answer: Answer, choice: Choice, body: ChatBody, names: TokenNames) -> dict[str, Any]:
    events, token_ids, entries = choice.drain_events()
    with_logprobs, chat = answer.asked.params.logprobs is not None, answer.state.config.chat
    said = Said(events)
    text = (echo_of(answer.state, body) if body.echo else "") + said.content
    message = chat_message(
        text if text or not (said.reasoning or said.calls) else None,
        role=chat.response_role,
        reasoning=said.reasoning or None,
        reasoning_field=chat.reasoning_field,
        tool_calls=[chat_call(call) for call in said.calls],
    )
    made = chat_choice(
        choice.index,
        message,
        chat_finish(choice, named=names_function(body.tool_choice)),
        choice.stop_reason,
        logprobs=names.chat(entries, num_top(body)) if with_logprobs else None,
        token_ids=token_ids if body.return_token_ids else None,
    )
    return made | routed.of_answer(choice)
