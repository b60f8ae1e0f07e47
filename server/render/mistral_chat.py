"""MistralChat: a conversation to token ids, in Mistral's own format for the tokenizer's version (mistral-common).

Owner: the pool; nothing in it changes after construction. In: messages from render/messages.py. Out: token ids, or
RenderError with the library's error. Media are never loaded here: the library's encoders are replaced by ones that
write a single placeholder, which mm/splice.py expands later. Messages are adapted to the version: ids of calls (nine
letters or digits before version 13), reasoning (from version 13), text next to calls (from version 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from server.render.call_ids import shortened
from server.render.errors import RenderError, invalid, quoted

# In place of the payload, which the placeholder's encoder ignores.
NOTHING = "data:,"
MEDIA_PARTS = {
    "image": {"type": "image_url", "image_url": {"url": NOTHING}},
    "audio": {"type": "audio_url", "audio_url": {"url": NOTHING}},
}
SAID = ("content", "tool_calls", "reasoning")


class MistralChat:
    """The chat format of one tokenizer."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.version: int = library.version.version_num
        instruct = library.instruct_tokenizer
        text = instruct.tokenizer
        instruct.decode = _no_text
        self._thinks = self.version >= 13 and text.is_special("[THINK]")
        if self.version >= 3 and text.is_special("[IMG]"):
            image = _Placeholder([text.get_special_token("[IMG]")], image=np.empty(0))
            instruct.image_encoder = image
        if self.version >= 7 and text.is_special("[AUDIO]"):
            marks = [mark for mark in ("[BEGIN_AUDIO]", "[AUDIO]") if text.is_special(mark)]
            instruct.audio_encoder = _Placeholder([text.get_special_token(mark) for mark in marks], audio=None)

    def encode(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        continue_final_message: bool,
        kwargs: Mapping[str, Any],
    ) -> list[int]:
        """Ids of the whole conversation, including the tokens that begin it."""
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        if documents:
            raise invalid(
                "documents are not part of this model's chat format; put their text in a message.", "documents"
            )
        if continue_final_message and messages[-1]["role"] != "assistant":
            raise invalid("continue_final_message needs an assistant message at the end.", "continue_final_message")
        adapted = self._adapted(messages)
        # Other kwargs are for templates, which ignore unknown names.
        effort = {"reasoning_effort": kwargs.get("reasoning_effort")} if self.version >= 15 else {}
        try:
            request = ChatCompletionRequest.from_openai(
                adapted,
                tools,
                continue_final_message and adapted[-1]["role"] == "assistant",
                **effort,
            )
            return self._library.encode_chat_completion(request).tokens
        except (MistralCommonException, ValueError) as error:
            raise _refused(f": {quoted(_first_line(error), 300)}") from error
        except Exception as error:  # assertions of the library, whose text may contain anything
            raise _refused(f" ({type(error).__name__}).") from error

    def _adapted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        ids = _CallIds(short=self.version < 13)
        adapted = [self._message(message, ids) for message in messages]
        # The library refuses an empty assistant message, which adds nothing to the prompt, so it is left out.
        return [message for message in adapted if message["role"] != "assistant" or any(map(message.get, SAID))]

    def _message(self, message: dict[str, Any], ids: _CallIds) -> dict[str, Any]:
        role, content = message["role"], message["content"]
        if isinstance(content, list):
            content = [MEDIA_PARTS.get(part["type"], part) for part in content]
        out: dict[str, Any] = {"role": role, "content": content}
        if role == "tool":
            out.update(content=content if content is not None else "", tool_call_id=ids.answered(message))
            if message.get("name"):
                out["name"] = message["name"]
        elif role == "assistant":
            calls = message.get("tool_calls")
            if calls:
                out["tool_calls"] = [{**call, "id": ids.asked(call)} for call in calls]
                if self.version < 7 or not content:
                    out["content"] = None
            if self._thinks and message.get("reasoning"):
                out["reasoning"] = message["reasoning"]
        return out


class _Placeholder:
    """Replaces the library's encoder of pictures or sounds."""

    def __init__(self, tokens: list[int], **payload: Any) -> None:
        self._encoding = SimpleNamespace(tokens=tokens, **payload)
        self.audio_config = SimpleNamespace(is_streaming=False)

    def __call__(self, chunk: Any) -> Any:
        return self._encoding


class _CallIds:
    """Ids of calls and of their results in the version's form; equal ids give equal results."""

    def __init__(self, short: bool) -> None:
        self._short = short
        self._waiting: list[str] = []
        self._count = 0

    def asked(self, call: dict[str, Any]) -> str:
        given = call.get("id")
        self._count += 1
        made = self._fitting(given) if isinstance(given, str) and given else f"call{self._count:05d}"
        self._waiting.append(made)
        return made

    def answered(self, message: dict[str, Any]) -> str:
        """The id for a result; a result without an id belongs to the oldest call without a result."""
        given = message.get("tool_call_id")
        made = self._fitting(given) if given else (self._waiting[0] if self._waiting else "call00000")
        if made in self._waiting:
            self._waiting.remove(made)
        return made

    def _fitting(self, given: str) -> str:
        return shortened(given) if self._short else given


def _no_text(tokens: list[int], special_token_policy: object = None) -> str:
    """Replaces the library's decoding of each prompt, which is unused but takes two thirds of its time, with
    the GIL.
    """
    return ""


def _first_line(error: Exception) -> str:
    """The error's first line; for a validation error, without the library's URLs."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        first = errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        return f"{where}: {first['msg']}" if where else str(first["msg"])
    return str(error).partition("\n")[0]


def _refused(why: str) -> RenderError:
    return RenderError(400, "template_error", f"The model's chat format refused the conversation{why}", "messages")
