"""Rewrites calls of a history for chat templates that need it: one call per message (Llama 3's), arguments as JSON
text (DeepSeek's), content of messages with calls moved into the reasoning (gpt-oss').

Owner: any thread, pure functions. In: a conversation as templates read it. Out: the rewritten conversation.
"""

from __future__ import annotations

import json
from typing import Any

Messages = list[dict[str, Any]]
THOUGHTS = ("reasoning", "reasoning_content", "thinking")  # the names that templates use for reasoning


def has_calls(conversation: Messages) -> bool:
    return any(message.get("tool_calls") for message in conversation)


def with_texts(conversation: Messages) -> Messages:
    """The conversation with arguments as JSON text instead of objects."""
    return [
        {**message, "tool_calls": list(map(_with_text, message["tool_calls"]))}
        if message.get("tool_calls")
        else message
        for message in conversation
    ]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def says_both(conversation: Messages) -> bool:
    """Whether a message with calls has both reasoning and content."""
    return any(map(_says_both, conversation))


def _says_both(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls") and message.get(THOUGHTS[0]) and message.get("content"))


def as_thoughts(conversation: Messages) -> Messages:
    """Move the content to the end of the reasoning, in each message that has calls, reasoning and content."""
    found = []
    for message in conversation:
        if _says_both(message):
            content = message["content"]
            texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            thought = "\n".join([message[THOUGHTS[0]], *texts])
            message = {**message, "content": "", **dict.fromkeys(THOUGHTS, thought)}
        found.append(message)
    return found


def has_several(conversation: Messages) -> bool:
    return any(len(message.get("tool_calls") or ()) > 1 for message in conversation)


def one_by_one(conversation: Messages) -> Messages:
    """Each call becomes a message, followed by its result; the assistant's content stays with the first call."""
    found: Messages = []
    at = 0
    while at < len(conversation):
        message = conversation[at]
        calls = message.get("tool_calls") or []
        at += 1
        if len(calls) < 2:
            found.append(message)
            continue
        answers: Messages = []
        while at < len(conversation) and conversation[at]["role"] == "tool":
            answers.append(conversation[at])
            at += 1
        said = message
        for call in calls:
            found.append({**said, "tool_calls": [call]})
            own = [answer for answer in answers if answer.get("tool_call_id") == call.get("id")]
            found += own
            answers = [answer for answer in answers if answer not in own]
            said = {"role": "assistant", "content": None if message["content"] is None else ""}
        found += answers
    return found
