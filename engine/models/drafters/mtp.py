"""MTP: a target's own layer for multi-token prediction, in the target's files (GLM-4.5 and Qwen3.5 forms).

    feature = norm(last stream), the target's final norm;  later the layer's own output, normed
    x = eh_proj(cat(enorm(embed), hnorm(feature)));  out = post_norm(layer(x));  logits = head(out);  next feature = out

Thread: device. The layer equals the target's last layer with attention; embedding and head are the target's. One layer
is read, and drafts beyond the first reuse it. Names of the GLM-4.5 form: `model.layers.N.{enorm, hnorm, eh_proj,
shared_head.norm, ...}`, where N counts the target's layers. Source: arXiv:2412.19437 and transformers' MtpModel, which
is the oracle of the tests. Names of the Qwen3.5 form, also of Qwen3-Next and 3.6: `mtp.{pre_fc_norm_embedding,
pre_fc_norm_hidden, fc, norm, layers.0.*}`. Source: vLLM's models qwen3_next_mtp and qwen3_5_mtp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta
from engine.base.drafts import FLAG
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.cache.spec import LayerCache
from engine.cache.tokens import GuestSpec
from engine.layers.batch import Batch
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rope import RopeTable
from engine.layers.stream import Stream
from engine.models.base.decoder import Decoder
from engine.models.drafters.base import Kind, guest_specs, places_before
from engine.models.drafters.small_head import LentHead
from engine.weights.table import Row, Table

COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # the target's own tensors, a second time


@dataclass(frozen=True, slots=True)
class Form:
    """Where a family's files have the layer."""

    names: tuple[str, str, str, str]  # of the norms of embedding and feature, their product, the last norm
    stem: str  # of these names; N: the number of the target's layers
    layer: str  # the stem of the layer's own tensors

    def behind(self, number: int) -> Form:
        """The form for a target of so many layers."""
        stem, layer = (each.replace("N", str(number)) for each in (self.stem, self.layer))
        return replace(self, stem=stem, layer=layer)


GLM = Form(("enorm", "hnorm", "eh_proj", "shared_head.norm"), "layers.N.", "layers.N.")
QWEN = Form(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "mtp.", "mtp.layers.0.")
FORMS = {  # by architecture
    "Glm4MoeForCausalLM": GLM,
    "Qwen3NextForCausalLM": QWEN,
    "Qwen3_5ForCausalLM": QWEN,
    "Qwen3_5ForConditionalGeneration": QWEN,
    "Qwen3_5MoeForCausalLM": QWEN,
    "Qwen3_5MoeForConditionalGeneration": QWEN,
}


@dataclass(frozen=True, slots=True)
class Further(Table):
    """The rows of one layer behind the target's; tensors of other layers belong to the target."""

    form: Form = GLM

    def ignored(self, name: str) -> bool:
        """Whether a canonical name may be left over."""
        stem, layer = self.form.stem, self.form.layer
        if not name.startswith(stem) or name.removeprefix(stem) in COPIES:
            return True
        return name.startswith(f"{stem}layers.") and not name.startswith(layer)  # a later layer


class Mtp:
    """The first layer for multi-token prediction of one target."""

    kind: Kind = "chain"
    warning = ""
    described = "the model's own MTP layer"

    def __init__(self, target: Decoder, small_head: bool = False) -> None:
        text = target.config.text
        width = text.hidden_size
        self.config, self.dtype, self.device, self._target = target.config, target.dtype, target.device, target
        self.number = len(text.layers)
        self.form = FORMS[target.config.architecture].behind(self.number)
        self._like = max(number for number, layer in enumerate(target.layers) if layer.attention is not None)
        self.enorm, self.hnorm, self.post_norm = (RMSNorm(width, text.norm_eps, text.norm_offset) for _ in range(3))
        self.eh_proj = Linear(2 * width, width)
        self.layer = target.layer(self._like)
        self.lent = LentHead(target, small_head)
        rope = text.layers[self._like].rope
        self._rope = RopeTable(rope, target.device, self.config.max_model_len or self.config.max_position)

    @property
    def text(self) -> TextConfig:
        """The sizes of the layer."""
        text = self.config.text
        return text.of_layer(text.layers[self._like])

    @property
    def streams(self) -> Sequence[int]:
        """The output of the target's last layer."""
        return (self.number,)

    def weight_table(self) -> Table:
        """The rows of the target's layers for the further layer, and those of its own parts."""
        form, table = self.form, self._target.weight_table()
        rows = [
            Row(
                tuple(name.replace("layers.*.", form.layer) for name in row.names),
                row.target.replace("layers.*.", "layer."),
            )
            for row in table.rows
            if row.target.startswith("layers.*.")
        ]
        parts = ("enorm", "hnorm", "eh_proj", "post_norm")
        rows += [Row((form.stem + name,), part) for name, part in zip(form.names, parts)]
        return Further(tuple(rows), table.prefixes, (), table.spelled, True, form)

    def cache_specs(self) -> list[GuestSpec]:
        """One cache of keys and values."""
        return guest_specs(self._target, self.text)

    def feature(self, streams: list[Tensor]) -> Tensor:
        """See ChainDrafter."""
        return self._target.norm(streams[0])

    def inputs(self, batch: Batch) -> Tensor:
        """See ChainDrafter."""
        return self._target.merged(batch)

    def store(
        self, embedded: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> None:
        """See ChainDrafter."""
        self.layer.store(self._stream(embedded, before), self._rope(self._places(positions)), (meta,), caches)

    def step(
        self, token_ids: Tensor, before: Tensor, positions: Tensor, meta: AttentionMeta, caches: list[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """See ChainDrafter."""
        x = self._stream(self._target.embed(token_ids), before)
        self.layer(x, self._rope(self._places(positions)), (meta,), caches, None)
        hidden = self.post_norm(x.rows())
        return self.lent.logits(hidden), hidden

    def _places(self, positions: Tensor) -> Tensor:
        """Positions of entries. Entries only read each other, and in texts all of them move by one; so M-RoPE takes the
        tokens' own positions, as transformers does, because places before a picture's parts are not known here."""
        return positions if positions.dim() == 2 else places_before(positions)

    def _stream(self, embedded: Tensor, before: Tensor) -> Stream:
        """The layer's input."""
        joined = torch.cat([self.enorm(embedded), self.hnorm(before)], 1)
        return Stream(self.eh_proj(joined))


def check_mtp(target: ModelConfig) -> None:
    """Raises ConfigError if the target has no MTP layer that is served."""
    if target.architecture not in FORMS:
        raise ConfigError(
            f"{FLAG}: method mtp: multi-token-prediction layers of {target.architecture} are not served, only those of "
            f"{', '.join(FORMS)}; name a drafter, or use method ngram"
        )
    number, body = target.text.num_nextn_predict_layers, target.raw.get("text_config") or target.raw
    if number != 1:
        raise ConfigError(
            f"{FLAG}: method mtp: {target.folder}: config.json names {number or 'no'} layer{'s' * (number > 1)} for "
            "multi-token prediction, and one is served; name a drafter, or use method ngram"
        )
    if body.get("mtp_use_dedicated_embeddings"):
        raise ConfigError(
            f"{FLAG}: method mtp: {target.folder}: mtp_use_dedicated_embeddings=true: a layer with an embedding of its "
            "own is not served; name a drafter, or use method ngram"
        )
