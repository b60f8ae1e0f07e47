"""Media options: what the operator, and a request that the operator trusts, say about pictures and films.

Owner: loop, pure functions. In: `mm_processor_kwargs` (names of MediaOptions) and `media_io_kwargs` (how many frames
are kept of a film), as flags or as fields of a chat body. Out: MediaOptions, or ValueError with the reason. Whatever
they say, the ceilings of mm/limits.py stand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mm.item import MediaOptions
from server.errors import ApiError, invalid

if TYPE_CHECKING:
    from server.schema.chat import ChatBody
    from server.state import AppState

OF_FILMS = ("num_frames", "fps")
FIELDS = ("mm_processor_kwargs", "media_io_kwargs")


def merged(processor: Mapping[str, Any], reading: Mapping[str, Any], **otherwise: Any) -> MediaOptions:
    """`otherwise` stands where neither says anything."""
    for modality, given in reading.items():
        if modality != "video" or not isinstance(given, Mapping) or not set(given) <= set(OF_FILMS):
            raise ValueError('only {"video": {"num_frames": N, "fps": X}} is known')
    return MediaOptions.of({**processor, **reading.get("video", {})}, **otherwise)


def of_request(state: AppState, body: ChatBody) -> MediaOptions | None:
    """None: as the operator said. Raises ApiError."""
    asked = [name for name in FIELDS if getattr(body, name)]
    if not asked:
        return None
    if not state.config.chat.trust_request_mm_kwargs:
        name = asked[0]
        raise ApiError(403, "override_not_trusted", f"{name}: this server takes none from requests", name)
    standing = state.media.options if state.media is not None else MediaOptions()
    try:
        return merged(body.mm_processor_kwargs or {}, body.media_io_kwargs or {}, **dataclasses.asdict(standing))
    except ValueError as error:
        raise invalid(asked[0], f"{asked[0]}: {error}") from None
