"""Reads clients' messages into the form for chat templates, and collects their media.

Owner: any thread; a MessageReader lives for one request. In: dicts straight from JSON (API.md section 5), unchecked.
Out: new dicts with only the keys that templates know, and MediaRefs in the order of their parts. Content becomes parts
or one string, depending on the template.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from engine.base.request import Modality
from mm.item import GivenRows, MediaRef
from server.render.call_ids import CallIds, IdForm
from server.render.errors import RenderError, invalid, kind_of, quoted
from server.render.escape import Escapes
from server.render.media import MediaTokens
from server.render.template import ContentFormat
from server.render.template_facts import TemplateFacts

log = logging.getLogger("server.render")

ROLES = ("system", "developer", "user", "assistant", "tool")

# Type of a text part -> the key that holds its text.
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}

# Type of a media part -> (modality, key of its payload). `input_audio` and `file` are read separately.
MEDIA_KEYS: dict[str, tuple[Modality, str]] = {
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "image": ("image", "image"),
    "audio_url": ("audio", "audio_url"),
    "audio": ("audio", "audio"),
    "video_url": ("video", "video_url"),
    "input_video": ("video", "video_url"),
    "video": ("video", "video"),
}

# A part without `type` is recognised by its key.
BARE_KEYS = ("text", "image_url", "audio_url", "video_url", "input_audio", "file", "image", "audio", "video", "refusal")

LOOKED_AT = 256  # messages and parts that `embedded` examines at most: this takes a few hundredths of a millisecond

BASE64 = re.compile("[A-Za-z0-9+/]{64}")  # no URL begins like this, since a colon ends its scheme

PART_TYPES = "text, image_url, input_audio, audio_url, video_url, file"
SECONDS, MOST_SECONDS = "second_per_grid_ts", 3600
# Rows in place of media: the modality, and the fields that belong to the rows.
EMBEDS: dict[str, tuple[Modality, tuple[str, ...]]] = {
    "image_embeds": ("image", ("image_grid_thw",)),
    "audio_embeds": ("audio", ()),
    "video_embeds": ("video", ("video_grid_thw", SECONDS)),
}


@dataclass(frozen=True, slots=True)
class MessageRules:
    """Rules for all requests: the template's facts and the limits."""

    content_format: ContentFormat
    facts: TemplateFacts
    media: MediaTokens
    max_items: int = 64
    max_items_of: Mapping[str, int] | None = None  # --limit-mm-per-prompt
    max_messages: int = 2048
    max_parts: int = 1024
    takes_rows: bool = False  # parts of EMBEDS
    id_form: Callable[[], IdForm] = lambda: "any"  # form of the ids of calls


class MessageReader:
    """Reads one conversation."""

    def __init__(self, rules: MessageRules, escapes: Escapes | None = None) -> None:
        self.rules = rules
        self.escapes = escapes
        self.media: list[MediaRef] = []
        self.ids = CallIds(rules.id_form)

    def read(self, messages: list[dict[str, Any]], param: str = "messages") -> list[dict[str, Any]]:
        """Read all messages; raises RenderError with the path of the first error."""
        if not isinstance(messages, list) or not messages:
            raise invalid(f"{param} must be a list with at least one message.", param)
        if len(messages) > self.rules.max_messages:
            raise invalid(f"{param} has {len(messages)} messages; at most {self.rules.max_messages}.", param)
        return [self._message(message, f"{param}[{index}]") for index, message in enumerate(messages)]

    def embedded(self, messages: list[dict[str, Any]], param: str = "messages") -> list[MediaRef]:
        """The media of a short conversation if all of them are embedded in it, otherwise none; faster than `read`.

        Errors are ignored here: `read` reports the first one.
        """
        contents = [message.get("content") for message in messages[:LOOKED_AT] if isinstance(message, dict)]
        lists = [content for content in contents if isinstance(content, list)]
        if len(messages) > LOOKED_AT or sum(map(len, lists)) > LOOKED_AT:
            return []
        try:
            for index, message in enumerate(messages):
                content = message.get("content")
                for at, part in enumerate(content if isinstance(content, list) else ()):
                    if isinstance(part, dict) and str(_kind(part)) not in TEXT_KEYS:
                        self._part(part, f"{param}[{index}].content[{at}]")
        except RenderError:
            return []
        return self.media if all(ref.embedded for ref in self.media) else []

    def _message(self, message: Any, path: str) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise invalid(f"{path} is {kind_of(message)}; it must be an object with role and content.", path)
        role = message.get("role")
        if role not in ROLES:
            got = quoted(role) if isinstance(role, str) else "missing" if role is None else "no string"
            raise invalid(f"{path}.role is {got}; it must be one of {', '.join(ROLES)}.", f"{path}.role")
        if role == "developer" and not self.rules.facts.knows_developer:
            role = "system"
        out: dict[str, Any] = {"role": role}
        out["content"] = self._content(message, f"{path}.content")
        for key in ("name", "tool_call_id"):
            value = message.get(key)
            if value is not None:
                known = self.ids.answered(value) if key == "tool_call_id" and isinstance(value, str) else value
                out[key] = self._text(known, f"{path}.{key}")
        if role == "assistant":
            self._assistant(message, out, path)
        return out

    def _assistant(self, message: dict[str, Any], out: dict[str, Any], path: str) -> None:
        reasoning = message.get("reasoning_content")
        if reasoning is None:
            reasoning = message.get("reasoning")
        if reasoning is not None:
            text = self._text(reasoning, f"{path}.reasoning")
            out["reasoning"] = out["reasoning_content"] = out["thinking"] = text
        calls = message.get("tool_calls")
        if calls is None:
            return
        if not isinstance(calls, list):
            raise invalid(f"{path}.tool_calls is {kind_of(calls)}; it must be a list.", f"{path}.tool_calls")
        if calls:
            out["tool_calls"] = [self._call(call, f"{path}.tool_calls[{k}]") for k, call in enumerate(calls)]

    def _call(self, call: Any, path: str) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{path} needs a function with a name and arguments.", path)
        self.rules.media.refuse_in_value(call, path)
        known = self.ids.asked(call.get("id"), function["name"])
        called = {**function, "arguments": self._arguments(function, path)}
        call = {**call, "type": "function", "function": called} | ({} if known is None else {"id": known})
        return call if self.escapes is None else self.escapes.value(call)

    def _arguments(self, function: dict[str, Any], path: str) -> dict[str, Any]:
        # Many templates iterate over the arguments, so text is parsed into an object for them.
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments) if arguments.strip() else {}
            except orjson.JSONDecodeError:
                arguments = None
            self.rules.media.refuse_in_value(arguments, path)
        if isinstance(arguments, dict):
            return arguments
        if function.get("arguments") is not None:
            log.warning("arguments of a tool call in the history are not a JSON object; the template gets {}")
        return {}

    # -- content

    def parts(self, parts: list[Any], path: str) -> list[dict[str, Any]]:
        """Read content that is not in a message."""
        if len(parts) > self.rules.max_parts:
            raise invalid(f"{path} has {len(parts)} parts; at most {self.rules.max_parts}.", path)
        return [self._part(part, f"{path}[{index}]") for index, part in enumerate(parts)]

    def _content(self, message: dict[str, Any], path: str) -> Any:
        content = message.get("content")
        if content is None and message["role"] == "assistant":  # a refusal is the assistant's text
            content = message.get("refusal")
        if content is None:
            if message["role"] not in ("assistant", "tool"):
                raise invalid(f"{path} is missing; send a string or a list of parts.", path)
            return None if self.rules.facts.asks_for_none else ""
        if isinstance(content, str):
            text = self._text(content, path)
            if self.rules.content_format == "openai" and not self.rules.facts.asks_for_string:
                return [{"type": "text", "text": text}]
            return text
        return self._parts(message["role"], content, path)

    def _parts(self, role: str, content: Any, path: str) -> Any:
        """Content that is a list: parts, or one string made of them."""
        if not isinstance(content, list):
            raise invalid(f"{path} is {kind_of(content)}; it must be a string or a list of parts.", path)
        parts = self.parts(content, path)
        if self.rules.content_format == "openai" and not self._reads_better_as_string(role, parts):
            return parts
        return self.rules.media.as_text(parts)

    def _reads_better_as_string(self, role: str, parts: list[dict[str, Any]]) -> bool:
        # Templates that accept both often print a system or tool message without checking for parts.
        if not self.rules.facts.asks_for_string or any(part["type"] != "text" for part in parts):
            return False
        return len(parts) == 1 or role not in ("user", "assistant")

    def _part(self, part: Any, path: str) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": self._text(part, path)}
        if not isinstance(part, dict):
            raise invalid(f"{path} is {kind_of(part)}; it must be an object with a type.", path)
        kind = _kind(part)
        if not isinstance(kind, str):
            raise invalid(f"{path}.type is missing; it must be one of {PART_TYPES}.", f"{path}.type")
        if kind in TEXT_KEYS:
            key = TEXT_KEYS[kind]
            return {"type": "text", "text": self._text(part.get(key), f"{path}.{key}")}
        if kind == "input_audio":
            return self._item(self._input_audio(part, path))
        if kind == "file":
            return self._item(self._file(part, path))
        if kind in MEDIA_KEYS:
            modality, key = MEDIA_KEYS[kind]
            return self._item(self._url_item(part, modality, key, path))
        if kind == "prompt_embeds":  # if enabled, such parts have been replaced by marks before
            raise RenderError(
                400, "media_unsupported", "prompt_embeds are read in /v1/chat/completions and /v1/completions.", path
            )
        if kind in EMBEDS:
            return self._item(self._rows(part, kind, path))
        raise invalid(f"{path}.type is {quoted(kind)}; it must be one of {PART_TYPES}.", f"{path}.type")

    def _text(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise invalid(f"{path} is {kind_of(value)}; it must be a string.", path)
        self.rules.media.refuse_in_text(value, path)
        return value if self.escapes is None else self.escapes.text(value)

    # -- media

    def _item(self, ref: MediaRef) -> dict[str, Any]:
        param = ref.param or "messages"
        self.rules.media.require(ref.modality, param)
        self.media.append(ref)
        of_kind = sum(item.modality == ref.modality for item in self.media)
        limit = (self.rules.max_items_of or {}).get(ref.modality, self.rules.max_items)
        if of_kind > limit or len(self.media) > self.rules.max_items:
            what, most = (ref.modality, limit) if of_kind > limit else ("media", self.rules.max_items)
            raise RenderError(
                400, "too_many_media", f"The conversation has more than {most} {what} items, which is the limit.", param
            )
        return {"type": ref.modality}

    def _url_item(self, part: dict[str, Any], modality: Modality, key: str, path: str) -> MediaRef:
        payload = part.get(key)
        uuid = _uuid(part, payload, path)
        url = payload.get("url") if isinstance(payload, dict) else payload
        if url is None and uuid is None:
            raise invalid(f"{path}.{key} needs a url (http, https or data).", f"{path}.{key}")
        if url is not None and (not isinstance(url, str) or not url):
            raise invalid(f"{path}.{key}.url must be a non-empty string.", f"{path}.{key}")
        if url is not None and BASE64.match(url):
            raise invalid(f"{path}.{key} is bare base64; send it as data:<type>;base64,<data>.", f"{path}.{key}")
        return MediaRef(modality, url, None, uuid, f"{path}.{key}")

    def _rows(self, part: dict[str, Any], kind: str, path: str) -> MediaRef:
        if not self.rules.takes_rows:
            raise RenderError(403, "override_not_trusted", f"{kind} needs --enable-mm-embeds, which is off.", path)
        payload, where = part.get(kind), f"{path}.{kind}"
        named = payload if isinstance(payload, dict) else {kind: payload}
        modality, more = EMBEDS[kind]
        rows, grid, seconds = named.get(kind), named.get(f"{modality}_grid_thw"), named.get(SECONDS)
        fits = isinstance(grid, str | None) and not named.keys() - {kind, *more}
        in_time = seconds is None or (type(seconds) in (int, float) and 0 < seconds <= MOST_SECONDS)
        if not isinstance(rows, str) or not fits or not in_time:
            got = f"an object of {quoted(', '.join(payload))}" if isinstance(payload, dict) else kind_of(payload)
            allowed = "base64 of a tensor" if not more else f"base64 of a tensor, or an object of {kind} and {more[0]}"
            allowed += ", both base64" if more else ""
            allowed += f", and of {SECONDS}, a number up to {MOST_SECONDS}" if SECONDS in more else ""
            raise invalid(f"{where} is {got}; it must be {allowed}.", where)
        return MediaRef(modality, GivenRows(rows, grid, seconds), None, None, where)

    def _input_audio(self, part: dict[str, Any], path: str) -> MediaRef:
        payload = part.get("input_audio")
        where = f"{path}.input_audio"
        uuid = _uuid(part, payload, path)
        if payload is None and uuid is not None:
            return MediaRef("audio", None, None, uuid, where)
        if not isinstance(payload, dict) or not isinstance(payload.get("data"), str) or not payload["data"]:
            raise invalid(f"{where} needs data (base64) and format.", where)
        form = payload.get("format")
        if form is not None and not isinstance(form, str):
            raise invalid(f"{where}.format must be a string such as wav or mp3.", where)
        data = payload["data"]
        # Some clients send a whole data: URL here, which has its own type.
        return MediaRef("audio", data, None if data.startswith("data:") else form or "wav", uuid, where)

    def _file(self, part: dict[str, Any], path: str) -> MediaRef:
        payload = part.get("file")
        where = f"{path}.file"
        data = payload.get("file_data") if isinstance(payload, dict) else None
        if not isinstance(data, str) or not data.startswith("data:"):
            raise RenderError(
                422, "invalid_parameter", f"{where}: file_data must be a data: URL with its media type.", where
            )
        kind = data[5:261].partition("/")[0].lower()
        if kind not in ("image", "audio", "video"):
            raise RenderError(
                400,
                "media_unsupported",
                f"{where} is {quoted(data[5:37].split(';')[0])}; send image, audio or video.",
                where,
            )
        modality: Modality = kind  # type: ignore[assignment]
        return MediaRef(modality, data, None, _uuid(part, payload, path), where)


def _kind(part: dict[str, Any]) -> Any:
    kind = part.get("type")
    return next((key for key in BARE_KEYS if key in part), None) if kind is None else kind


def _uuid(part: dict[str, Any], payload: Any, path: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is None and isinstance(payload, dict):
        uuid = payload.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not 0 < len(uuid) <= 256):
        raise invalid(f"{path}.uuid must be a string of 1 to 256 characters.", f"{path}.uuid")
    return uuid
