"""Media models without a native file: transformers' towers, projectors and decoder.

Thread: device. The decoder runs in our steps. In: the arrays that the checkpoint's own processor made of a picture, a
video or an audio (mm/processors/through, watching). The class's `get_image_features`, `get_video_features` or
`get_audio_features` turns the arrays into rows, and forward replaces the placeholders' embeddings by the rows. A class
that passes its decoder anything else is refused (showing.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.base.request import Modality
from engine.checkpoint.section import Section
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.lookup import inner_decoder
from engine.models.transformers_backend import skeleton
from engine.models.transformers_backend.class_tower import class_towers
from engine.models.transformers_backend.model import FAMILY as DECODER
from engine.models.transformers_backend.model import ModelWithRows, built, text_of
from engine.models.transformers_backend.showing import ITEMS, refuse_arguments, served_kinds, unused_children


@dataclass(frozen=True, slots=True)
class TowerOfClass:
    """The config of a class's tower."""

    row_parts: ClassVar[int] = 1
    row_width: int
    modalities: tuple[Modality, ...]


def with_towers(config: ModelConfig) -> Any:
    """The module on the meta device, without the submodules that serve only unused modalities."""
    module = skeleton.build(config.architecture, config.raw)
    base, decoder = getattr(module, module.base_model_prefix), skeleton.decoder_in(module)
    used = {kind for tower in config.towers.values() for kind in tower.modalities}
    for name in list(dict(base.named_children())) if not used else unused_children(base, used):
        if getattr(base, name) is not decoder:
            delattr(base, name)
    return module


class SeeingModel(ModelWithRows):
    """A model of a transformers class with a tower."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        base = getattr(self.module, self.module.base_model_prefix)
        kinds = [kind for tower in config.towers.values() for kind in tower.modalities]
        self.towers = by_modality(*class_towers(kinds, base, self._decoder, config, dtype, device))

    def built(self) -> Any:
        return with_towers(self.config)


def read_seeing(body: Section, outer: Section) -> TextConfig:
    """The decoder's config, for a class whose items are only rows in place of embeddings."""
    try:
        shape_of(outer)
        return _text(_named(outer), json.dumps(outer.values, sort_keys=True))
    except ConfigError as error:
        inside = inner_decoder(str(body.values.get("model_type"))) is not None
        raise ConfigError(f"{error}{'; with --language-model-only its decoder is served' if inside else ''}") from None


class Shape(NamedTuple):
    """Properties of a class, except its decoder's config."""

    kinds: tuple[Modality, ...]  # modalities that its towers take
    axes: int  # position axes per token
    stem: str  # the name of the module below the head


def shape_of(outer: Section) -> Shape:
    """The Shape of a class that passes its decoder only embeddings and rows. Raises ConfigError for other classes."""
    return _shape(_named(outer), json.dumps(outer.values, sort_keys=True))


@lru_cache(maxsize=8)
def _shape(architecture: str, written: str) -> Shape:
    values = json.loads(written)
    module = skeleton.build(architecture, values)
    refuse_arguments(module)
    if not any(isinstance(values.get(f"{name}_config"), dict) for name in TOWERS):
        raise ConfigError(f"describes its towers under none of {', '.join(f'{name}_config' for name in TOWERS)}")
    stem = module.base_model_prefix
    axes = skeleton.axes_of(getattr(module, stem))
    return Shape(served_kinds(module), axes, stem)


@lru_cache(maxsize=8)
def _text(architecture: str, written: str) -> TextConfig:
    values = json.loads(written)
    return text_of(built(architecture, values, Section(values, "config.json")))


def tower(reads: tuple[Modality, ...], section: Section) -> TowerOfClass:
    """The tower's config; transformers' projector makes rows of the decoder's width."""
    assert section.outer is not None, "a tower's section lies in another one"
    kinds = tuple(kind for kind in shape_of(section.outer).kinds if kind in reads)
    return TowerOfClass(config(section.outer).get_text_config(decoder=True).hidden_size, kinds)


def narrowed(tower: TowerOfClass, kinds: tuple[Modality, ...]) -> TowerOfClass:
    return replace(tower, modalities=kinds)


def processor(outer: Section, kinds: Collection[Modality]) -> str:
    """The checkpoint's own processor, with video if prompts may hold video."""
    return "watching:Watching" if "video" in kinds else "through:Through"


def media_token_ids(outer: Section) -> dict[str, int]:
    """The placeholder tokens; the class may have defaults for missing keys of config.json."""
    found = config(outer)
    given = {kind: getattr(found, f"{kind}_token_id", None) for kind in ITEMS}
    return {kind: int(token) for kind, token in given.items() if token is not None}


# The object of config.json that describes the tower -> its reader.
TOWERS: dict[str, Callable[[Section], TowerOfClass]] = {
    "vision": partial(tower, ("image", "video")),
    "audio": partial(tower, ("audio",)),
    "encoder": partial(tower, ("audio",)),
}


def _named(outer: Section) -> str:
    return next(name for name in outer.items("architectures", ()) if name in skeleton.seeing())


def config(outer: Section) -> Any:
    """config.json as transformers' configuration object."""
    return skeleton.config_of(_named(outer), outer.values)


FAMILY = Family(
    name="transformers",
    architectures=(),  # transformers lists them
    model=SeeingModel,
    text=read_seeing,
    towers=TOWERS,
    keys=DECODER.keys,
    processor=processor,
    narrowed=narrowed,
    media_token_ids=media_token_ids,
)
