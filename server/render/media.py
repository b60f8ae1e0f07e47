"""Media in prompts: the placeholder token of an item, its text for string templates, and the spellings refused in
texts.

Owner: none, frozen values and pure functions. A slot is the place where the renderer or the template wrote a
placeholder for a media part. A client's text may not contain a placeholder's spelling, so clients cannot make slots.
After tokenizing, the placeholders must match the items in number and order of modalities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.item import MediaRef
from server.render.errors import RenderError, quoted
from server.render.tokenizer import Tokenizer

MODALITIES: tuple[Modality, ...] = ("image", "audio", "video")

# Texts around a placeholder, by its spelling, if the template does not write them itself.
AROUND = {
    "<|IMAGE|>": ("<|vision_bos|>", "<|vision_eos|>"),
    "<|VIDEO|>": ("<|vision_bos|>", "<|vision_eos|>"),
    "<|AUDIO|>": ("<|audio_bos|>", "<|audio_eos|>"),
    "<|image_pad|>": ("<|vision_start|>", "<|vision_end|>"),
    "<|video_pad|>": ("<|vision_start|>", "<|vision_end|>"),
    "<|audio_pad|>": ("<|audio_start|>", "<|audio_end|>"),
}
# Texts that a family's own processor writes around each placeholder of a conversation, whether the template or the
# renderer wrote the placeholder. They are tokenized together with the adjacent text.
ALWAYS_AROUND = {"<start_of_image>": ("\n\n", "\n\n")}
# Placeholders that precede the text of their message, without a separator, at any place of the picture in the message:
# build_single_message of tokenization_chatglm.py in https://huggingface.co/THUDM/glm-4v-9b.
BEFORE_TEXT = ("<|begin_of_image|>",)


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The placeholders of one model; empty for a text model."""

    ids: Mapping[Modality, int]  # placeholder token of each modality that the model takes
    spelled: Mapping[Modality, str]  # the spelling of this token
    placeholders: Mapping[Modality, str]  # text for a string template: the token and the texts around it
    has_templates: bool = True  # whether conversations use templates; False: the tokenizer's own chat format

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, ids: Mapping[str, int], placeholders: Mapping[str, str] | None = None
    ) -> MediaTokens:
        """Make it from the model's placeholder ids (other keys are ignored) and a processor's own placeholder texts."""
        known = {modality: ids[modality] for modality in MODALITIES if modality in ids}
        spelled = {modality: tokenizer.token_of(token_id) or "" for modality, token_id in known.items()}
        texts = {modality: text.join(AROUND.get(text, ("", ""))) for modality, text in spelled.items()}
        texts.update(
            {modality: placeholders[modality] for modality in known if placeholders and modality in placeholders}
        )
        return cls(known, spelled, texts, tokenizer.chat_format is None)

    def require(self, modality: Modality, param: str) -> None:
        """Refuse an item of a kind that the model does not take."""
        if modality not in self.ids:
            takes = ", ".join(["text", *self.ids])
            raise RenderError(
                400, "media_unsupported", f"This model takes no {modality} input; it takes: {takes}.", param
            )

    def refuse_in_text(self, text: str, param: str) -> None:
        """Refuse a client's text that contains a placeholder's spelling."""
        for spelled in self.spelled.values():
            if spelled and spelled in text:
                raise RenderError(
                    400,
                    "placeholder_mismatch",
                    f"{param} contains {quoted(spelled)}, which marks the place of a media item; "
                    "send the item as a content part, and leave the marker out of the text.",
                    param,
                )

    def refuse_in_value(self, value: Any, param: str) -> None:
        """Refuse plain data (tool schemas, arguments, documents) with a placeholder's spelling in any string."""
        if not self.spelled:
            return
        waiting: list[Any] = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                self.refuse_in_text(item, param)
            elif isinstance(item, dict):
                waiting.extend(item.keys())
                waiting.extend(item.values())
            elif isinstance(item, list | tuple):
                waiting.extend(item)

    def as_text(self, parts: Sequence[Mapping[str, Any]]) -> str:
        """A message's parts as one text for a string template."""
        written = [(part["type"], part.get("text") or self.placeholders.get(part["type"], "")) for part in parts]
        if self.spelled.get("image") not in BEFORE_TEXT:
            return "\n".join(text for _, text in written)
        media = "".join(text for kind, text in written if kind != "text")
        return media + "\n".join(text for kind, text in written if kind == "text")

    def spaced(self, text: str) -> str:
        """A rendered conversation with the family's texts around each placeholder; only media parts have placeholders
        there.
        """
        for spelled in self.spelled.values():
            if spelled in ALWAYS_AROUND:
                text = text.replace(spelled, spelled.join(ALWAYS_AROUND[spelled]))
        return text

    def slots(self, token_ids: np.ndarray, media: Sequence[MediaRef], param: str) -> tuple[int, ...]:
        """The places of the placeholders; they must match the items one to one, in order."""
        # Special tokens mostly have the highest ids: without media one comparison is enough.
        if not self.ids or (not media and token_ids.max(initial=0) < min(self.ids.values())):
            return ()
        found = np.flatnonzero(np.isin(token_ids, list(self.ids.values())))
        expected = [self.ids[ref.modality] for ref in media]
        if len(found) != len(expected) or token_ids[found].tolist() != expected:
            raise self._mismatch(token_ids[found].tolist(), media, param)
        return tuple(found.tolist())

    def _mismatch(self, found: list[int], media: Sequence[MediaRef], param: str) -> RenderError:
        names = {token_id: modality for modality, token_id in self.ids.items()}
        got = _listed(names[token_id] for token_id in found)
        sent = _listed(ref.modality for ref in media)
        text = f"The prompt has media placeholders for {got}, and the request has {sent}; "
        if found:
            text += "each item needs exactly one, in order, made by the server from a content part."
        else:
            takes_audio = any(ref.modality == "audio" for ref in media)
            ways = ["send recordings to /v1/audio/transcriptions"] * takes_audio
            ways += ["start the server with a --chat-template that writes media parts"] * self.has_templates
            text += f"the chat {'template' if self.has_templates else 'format'} leaves media out"
            text += f": {', or '.join(ways)}." if ways else "."
        return RenderError(400, "placeholder_mismatch", text, param)


def _listed(modalities: Iterable[str]) -> str:
    names = list(modalities)
    listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"{len(names)} ({listed})" if names else "none"
