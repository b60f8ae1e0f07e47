"""The prompts of a /generate body: texts or token ids, their media, and the options of each.

Owner: loop, pure functions. In: SglangBody. Out: a Given for each prompt. A prompt with media has a placeholder of the
model for each item, as the model's own chat template writes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from engine.base.request import Modality
from server.dialects.sglang.schema import SglangBody
from server.errors import invalid, quoted
from server.flags.config import LimitsConfig
from server.render.media import MediaTokens

DATA: dict[Modality, str] = {"image": "image_data", "audio": "audio_data", "video": "video_data"}
ANSWER_ID = re.compile(r"[ -~]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class Given:
    """One prompt of a body."""

    prompt: str | list[int]
    param: str  # the field that holds it
    media: dict[Modality, list[Any]]  # items as the client sent them

    @property
    def has_media(self) -> bool:
        return any(self.media.values())


def prompts_of(body: SglangBody, limits: LimitsConfig) -> tuple[list[Given], bool]:
    """The prompts, and whether the client sent a list of them."""
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text", "text: send either text or input_ids")
    given: Any = body.input_ids if body.text is None else body.text
    name = "input_ids" if body.text is None else "text"
    is_list = isinstance(given, list) and (name == "text" or any(isinstance(entry, list) for entry in given))
    most = min(limits.max_prompts, limits.max_choices)
    if is_list and not 0 < len(given) <= most:
        raise invalid(name, f"{name}: got {len(given)} prompts; 1 to {most} are allowed")
    prompts: list[Any] = given if is_list else [given]
    media = {modality: items_of(getattr(body, data), data, len(prompts), is_list) for modality, data in DATA.items()}
    found = []
    for at, prompt in enumerate(prompts):
        param = f"{name}[{at}]" if is_list else name
        if not isinstance(prompt, str | list):
            raise invalid(param, f"{param}: got {quoted(prompt)}; must be a list of token ids")
        found.append(Given(prompt, param, {modality: lists[at] for modality, lists in media.items()}))
    return found, is_list


def items_of(given: Any, name: str, count: int, is_list: bool) -> list[list[Any]]:
    """The media items of each prompt, of one modality."""
    if not given:
        return [[] for _ in range(count)]
    if not is_list:
        listed = given if isinstance(given, list) else [given]
        return [listed[0] if len(listed) == 1 and isinstance(listed[0], list) else listed]
    if not isinstance(given, list) or len(given) != count:
        got = f"{len(given)} entries" if isinstance(given, list) else "one item"
        raise invalid(name, f"{name}: got {got} for {count} prompts; send a list with an entry for each prompt")
    return [each if isinstance(each, list) else [] if each is None else [each] for each in given]


def each(given: Any, name: str, count: int) -> list[Any]:
    """The value for each prompt of a field that may be a list."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise invalid(name, f"{name}: got {len(given)} entries for {count} prompts; send one for each, or one value")
    return given


def ids_of(rid: str | list[str] | None, count: int) -> list[str] | None:
    """The ids that the client chose for its answers; one id of several prompts gets their numbers."""
    if rid is None:
        return None
    listed = [rid] if isinstance(rid, str) else rid
    for at, text in enumerate(listed):
        if not ANSWER_ID.match(text):
            path = "rid" if isinstance(rid, str) else f"rid[{at}]"
            raise invalid(path, f"{path}: must be 1 to 128 printable ASCII characters")
    if isinstance(rid, str) and count > 1:
        return [f"{rid}-{at}" for at in range(count)]
    return each(listed, "rid", count)


def token_lists(given: list[Any] | None, count: int) -> list[list[int]]:
    """`token_ids_logprob` of each prompt."""
    if not given or all(isinstance(entry, int) for entry in given):
        return [list(given or ())] * count
    found = each(given, "token_ids_logprob", count)
    if any(isinstance(entry, int) for entry in found):
        raise invalid(
            "token_ids_logprob", "token_ids_logprob: mixes ids and lists; send ids, or a list for each prompt"
        )
    return [entry or [] for entry in found]


def parts_of(given: Given, tokens: MediaTokens) -> tuple[list[dict[str, Any]], list[str]]:
    """The media of a prompt as parts of a message, in the order of their placeholders, and the path of each."""
    for modality, listed in given.media.items():
        if listed:
            tokens.require(modality, DATA[modality])
    left = {modality: list(enumerate(listed)) for modality, listed in given.media.items()}
    parts, paths = [], []
    for modality in places_in(given.prompt, tokens):
        if not left[modality]:
            raise mismatch(given, modality, tokens)
        number, item = left[modality].pop(0)
        paths.append(f"{DATA[modality]}[{number}]")
        parts.append(part_of(modality, item, paths[-1]))
    for modality, rest in left.items():
        if rest:
            raise mismatch(given, modality, tokens)
    return parts, paths


def places_in(prompt: str | list[int], tokens: MediaTokens) -> list[Modality]:
    """The modality of each placeholder of a prompt."""
    if isinstance(prompt, list):
        by_id = {token: modality for modality, token in tokens.ids.items()}
        return [by_id[token] for token in prompt if type(token) is int and token in by_id]
    by_text = {text: modality for modality, text in tokens.spelled.items() if text}
    return [by_text[found] for found in re.findall("|".join(map(re.escape, by_text)), prompt)] if by_text else []


def mismatch(given: Given, modality: Modality, tokens: MediaTokens) -> Exception:
    """The error for a number of items that is not the number of their placeholders."""
    name, places = DATA[modality], places_in(given.prompt, tokens).count(modality)
    text = f"{name}: got {len(given.media[modality])} items, and {given.param} has {places} times "
    spelled = tokens.spelled.get(modality, "")
    return invalid(name, f"{text}{spelled}, which marks the place of an item; send as many of each")


def part_of(modality: Modality, item: Any, path: str) -> dict[str, Any]:
    """An item as a part of a message: a URL, or base64."""
    url = item.get("url") if isinstance(item, dict) and item.keys() <= {"url", "detail"} else item
    if not isinstance(url, str):
        raise invalid(path, f"{path}: must be a URL or base64; features of a processor are not taken")
    kind = f"{modality}_url"
    # The bytes decide about the format, whatever the type says.
    address = url if "://" in url[:16] or url.startswith("data:") else f"data:{modality}/any;base64,{url}"
    return {"type": kind, kind: {"url": address}}
