"""MTP: a target's own layer for multi-token prediction, behind its last layer in the files (GLM-4.5 form).

    feature = norm(last stream), the target's final norm;  later the layer's own output, normed
    x = eh_proj(cat(enorm(embed), hnorm(feature)));  out = post_norm(layer(x));  logits = head(out);  next feature = out

Thread: device. The layer equals the target's last layer; embedding and head are the target's. One layer is read, and
drafts beyond the first reuse it. Names: `model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm, ...}`, where N counts
the target's layers. Source: arXiv:2412.19437 and transformers' MtpModel, which is the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.drafts import FLAG
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.cache.spec import CacheSpec, LayerCache
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rope import RopeTable
from engine.layers.stream import Stream
from engine.models.base.decoder import Decoder
from engine.models.drafters.base import guest_spec, places_before
from engine.weights.table import Row, Table

FORMS = ("Glm4MoeForCausalLM",)  # architectures whose files have such layers
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # the target's own tensors, a second time


@dataclass(frozen=True, slots=True)
class Further(Table):
    """The rows of one layer behind the target's; tensors of other layers belong to the target."""

    stem: str = ""  # "layers.N."

    def ignored(self, name: str) -> bool:
        """Whether a canonical name may be left over."""
        return not name.startswith(self.stem) or name.removeprefix(self.stem) in COPIES


class Mtp:
    """The first layer for multi-token prediction of one target."""

    warning = ""
    described = "the model's own MTP layer"

    def __init__(self, target: Decoder) -> None:
        text = target.config.text
        width = text.hidden_size
        self.config, self.dtype, self.device, self._target = target.config, target.dtype, target.device, target
        self.number = len(text.layers)
        self.enorm, self.hnorm, self.post_norm = (RMSNorm(width, text.norm_eps, text.norm_offset) for _ in range(3))
        self.eh_proj = Linear(2 * width, width)
        self.layer = target.layer(self.number - 1)
        rope = text.layers[-1].rope
        self._rope = RopeTable(rope, target.device, self.config.max_model_len or self.config.max_position)

    @property
    def text(self) -> TextConfig:
        """The sizes of the layer."""
        text = self.config.text
        return text.of_layer(text.layers[-1])

    @property
    def streams(self) -> Sequence[int]:
        """The output of the target's last layer."""
        return (self.number,)

    def weight_table(self) -> Table:
        """The rows of the target's layers for the further layer, and those of its own parts."""
        stem, table = f"layers.{self.number}.", self._target.table
        rows = [
            Row(tuple(name.replace("layers.*.", stem) for name in row.names), row.target.replace("layers.*.", "layer."))
            for row in table.rows
            if row.target.startswith("layers.*.")
        ]
        own = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "post_norm"}
        rows += [Row((stem + name,), part) for name, part in own.items()]
        return Further(tuple(rows), table.prefixes, (), table.spelled, True, stem)

    def cache_specs(self) -> list[CacheSpec]:
        """One cache of keys and values."""
        return [guest_spec(self._target, self.text)]

    def feature(self, streams: list[Tensor]) -> Tensor:
        """See DraftModel."""
        return self._target.norm(streams[0])

    def store(
        self, token_ids: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> None:
        """See DraftModel."""
        self.layer.store(self._stream(token_ids, before), self._rope(places_before(positions)), (meta,), caches)

    def step(
        self, token_ids: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """See DraftModel."""
        x = self._stream(token_ids, before)
        self.layer(x, self._rope(places_before(positions)), (meta,), caches, None)
        hidden = self.post_norm(x.rows())
        return self._target.logits(hidden), hidden

    def _stream(self, token_ids: Tensor, before: Tensor) -> Stream:
        """The layer's input."""
        joined = torch.cat([self.enorm(self._target.embed(token_ids)), self.hnorm(before)], 1)
        return Stream(self.eh_proj(joined))


def check_mtp(target: ModelConfig) -> None:
    """Raises ConfigError if the target has no MTP layer that is served."""
    if target.architecture not in FORMS:
        raise ConfigError(
            f"{FLAG}: method mtp: multi-token-prediction layers of {target.architecture} are not served, only those of "
            f"{', '.join(FORMS)}; name a drafter, or use method ngram"
        )
    if target.raw.get("quantization_config") is not None:
        raise ConfigError(f"{FLAG}: method mtp: not for quantized checkpoints; name a drafter, or use method ngram")
