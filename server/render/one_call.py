"""Calls one after the other, for chat templates that refuse an assistant with several (Llama 3's).

Owner: any thread, pure functions. In: a conversation as templates read it. Out: the same, in which each call of a
message is a message of its own, and its answer follows it.
"""

from __future__ import annotations

from typing import Any

Messages = list[dict[str, Any]]


def has_several(conversation: Messages) -> bool:
    return any(len(message.get("tool_calls") or ()) > 1 for message in conversation)


def one_by_one(conversation: Messages) -> Messages:
    """What the assistant said stands before the first of its calls."""
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
