"""Media options: the settings for pictures and films from the operator, and from a request that the operator trusts.

Owner: loop, pure functions. In: `mm_processor_kwargs` (names of MediaOptions) and `media_io_kwargs` (frames of a film,
the colour behind a picture), as flags or as fields of a chat body. Out: MediaOptions, or ValueError with the reason.
The limits of mm/limits.py hold for all settings.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mm.item import WHITE, Colour, MediaOptions
from server.errors import ApiError, invalid

if TYPE_CHECKING:
    from server.schema.chat import ChatBody
    from server.state import AppState

# modality -> name in media_io_kwargs -> name in MediaOptions
READING: dict[str, dict[str, str]] = {
    "image": {"rgba_background_color": "background"},
    "video": {name: name for name in ("num_frames", "fps", "frame_recovery", "key_frames")},
}
COLOURS = {"white": WHITE, "black": (0, 0, 0), "grey": (128, 128, 128)}
FIELDS = ("mm_processor_kwargs", "media_io_kwargs")


def merged(processor: Mapping[str, Any], reading: Mapping[str, Any], **otherwise: Any) -> MediaOptions:
    """MediaOptions from both; `otherwise` has the values of options that neither sets."""
    named: dict[str, Any] = {}
    for modality, given in reading.items():
        names = READING.get(modality, {})
        if not names or not isinstance(given, Mapping) or not given.keys() <= names.keys():
            known = "; ".join(f"{name}: {', '.join(of_name)}" for name, of_name in READING.items())
            raise ValueError(f"{modality[:64]}: got {str(given)[:128]}; an object of these names is known: {known}")
        named.update({names[name]: value for name, value in given.items()})
    return MediaOptions.of({**processor, **named}, **otherwise)


def colour(text: str) -> Colour:
    """Parse white, black, grey or #rrggbb."""
    if text in COLOURS:
        return COLOURS[text]
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise ValueError(f"got {text!r}; must be #rrggbb, or one of {', '.join(COLOURS)}")
    red, green, blue = bytes.fromhex(text[1:])
    return red, green, blue


def of_request(state: AppState, body: ChatBody) -> MediaOptions | None:
    """The request's options; None: the operator's. Raises ApiError."""
    asked = [name for name in FIELDS if getattr(body, name)]
    if not asked:
        return None
    if not state.config.chat.trust_request_mm_kwargs:
        name = asked[0]
        text = (
            f"{name}: this server accepts it only if it is started with --trust-request-mm-kwargs; leave the field out"
        )
        raise ApiError(403, "override_not_trusted", text, name)
    standing = state.media.options if state.media is not None else MediaOptions()
    try:
        made = merged(body.mm_processor_kwargs or {}, body.media_io_kwargs or {}, **dataclasses.asdict(standing))
    except ValueError as error:
        raise invalid(asked[0], f"{asked[0]}: {error}") from None
    return lowered(made, standing)


def lowered(asked: MediaOptions, standing: MediaOptions) -> MediaOptions:
    """The request's options; numbers that the operator has set are upper bounds (SECURITY S22)."""
    both = {name: (getattr(asked, name), getattr(standing, name)) for name in ("num_frames", "fps", "max_pixels")}
    return dataclasses.replace(asked, **{name: min(pair) for name, pair in both.items() if None not in pair})
