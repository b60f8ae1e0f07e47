"""Models that see or hear and have no file here: transformers' towers and projectors before its decoder.

Thread: device. The decoder runs in our steps. In: of a picture or a sound, the arrays that the checkpoint's own
processor made of it (mm/processors/through). The class's `get_image_features` or `get_audio_features` turns them into
rows, and forward puts rows in the place of the placeholders' embeddings. A class that does more than that with an item
is refused (showing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.batch import Batch
from engine.checkpoint.section import Section
from engine.encoders.tower import by_modality
from engine.errors import ConfigError
from engine.model_config import ModelConfig, TextConfig
from engine.models.decoders import DECODERS
from engine.models.family import Family
from engine.models.transformers_backend import skeleton
from engine.models.transformers_backend.class_tower import ClassTower
from engine.models.transformers_backend.model import FAMILY as DECODER
from engine.models.transformers_backend.model import TransformersModel, built, text_of
from engine.models.transformers_backend.showing import ITEMS, refuse_arguments, refuse_uses
from engine.request import Modality


@dataclass(frozen=True, slots=True)
class TowerOfClass:
    """The tower, before it is built."""

    row_parts: ClassVar[int] = 1
    row_width: int
    modalities: tuple[Modality, ...]


class SeeingModel(TransformersModel):
    """One checkpoint of a class with a tower."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        self._embed = self._decoder.get_input_embeddings()
        outside = any(token >= self._embed.num_embeddings for token in config.media_token_ids.values())
        self._last_token = self._embed.num_embeddings - 1 if outside else None
        base = getattr(self.module, self.module.base_model_prefix)
        kinds = [kind for tower in config.towers.values() for kind in tower.modalities]
        self.towers = by_modality(*(ClassTower(kind, base, config, dtype, device) for kind in kinds))

    def built(self) -> Any:
        """The module on the meta device; without towers where no prompt will hold an item."""
        module = skeleton.build(self.config.architecture, self.config.raw)
        base, decoder = getattr(module, module.base_model_prefix), skeleton.decoder_in(module)
        for name, child in list(base.named_children()):
            if child is not decoder and not self.config.towers:
                delattr(base, name)
        return module

    def tokens_of(self, batch: Batch) -> dict[str, Tensor]:
        """Embeddings, and rows of items in the place of their placeholders."""
        token_ids = batch.token_ids if self._last_token is None else batch.token_ids.clamp(max=self._last_token)
        embedded = self._embed(token_ids)
        if batch.overlay is not None:
            shown, rows = batch.overlay
            embedded = torch.where(shown, rows.to(embedded.dtype), embedded)
        for start, length, rows in batch.media:
            embedded[start : start + length] = rows
        return {"inputs_embeds": embedded[None]}


def read_seeing(body: Section, outer: Section) -> TextConfig:
    """The decoder, of a class whose pictures and sounds are no more than rows of embeddings."""
    named = [name for name in outer.items("architectures", ()) if name in skeleton.seeing()]
    try:
        module = built(named[0], outer.values, outer)
        refuse_arguments(module)
        if not any(isinstance(outer.values.get(f"{name}_config"), dict) for name in TOWERS):
            raise ConfigError(f"describes its towers under none of {', '.join(f'{name}_config' for name in TOWERS)}")
        text = text_of(module)
        refuse_uses(module)
    except ConfigError as error:
        alone = "; with --language-model-only its decoder is served"
        raise ConfigError(f"{error}{alone if body.values.get('model_type') in DECODERS else ''}") from None
    return text


def tower(kind: Modality, section: Section) -> TowerOfClass:
    """The tower's rows are as wide as the decoder: transformers' projector sees to it."""
    assert section.outer is not None, "a tower's section lies in another one"
    return TowerOfClass(_config(section.outer).get_text_config(decoder=True).hidden_size, (kind,))


def media_token_ids(outer: Section) -> dict[str, int]:
    """The tokens that stand for rows, which the class may know where config.json is silent."""
    config = _config(outer)
    given = {kind: getattr(config, f"{kind}_token_id", None) for kind in ITEMS}
    return {kind: int(token) for kind, token in given.items() if token is not None}


# By the object of config.json that describes the tower.
TOWERS: dict[str, Callable[[Section], TowerOfClass]] = {
    "vision": partial(tower, "image"), "audio": partial(tower, "audio"), "encoder": partial(tower, "audio"),
}  # fmt: skip


def _config(outer: Section) -> Any:
    named = [name for name in outer.items("architectures", ()) if name in skeleton.seeing()]
    return skeleton.config_of(named[0], outer.values)


FAMILY = Family(
    name="transformers",
    model=SeeingModel,
    text=read_seeing,
    towers=TOWERS,
    keys=DECODER.keys,
    processor="through:Through",
    media_token_ids=media_token_ids,
)
