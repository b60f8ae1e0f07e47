"""Two towers (CLIP, SigLIP): a text tower and a vision tower make vectors in the same space.

Thread: device. An input is a text or a picture. Texts pass a pre-norm body with learned positions, and a projection of
the last token. A picture is a prompt of one placeholder: the vision tower makes one row, which replaces the body's
result for the placeholder. So texts and pictures share steps, and the scheduler need not distinguish them.

    text      tokens -> body -> last token -> projection ─┐
    picture   patches -> vision tower -> one row ─────────┴-> a result row of the step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, ModelConfig, PoolingConfig, TextConfig
from engine.checkpoint.files import read_json
from engine.checkpoint.rope import no_rope
from engine.checkpoint.section import Section
from engine.checkpoint.text import every_layer, read_text
from engine.encoders.tower import by_modality
from engine.encoders.vit.config import ProjectorConfig, VitConfig, read_vit
from engine.encoders.vit.names import with_tower
from engine.encoders.vit.parts import Ending
from engine.encoders.vit.single import SingleRowTower
from engine.layers.batch import Batch
from engine.models.text.gpt2 import BIASED, LearnedPositions
from engine.pooling.heads import Pooler
from engine.weights.table import Row, Table

AT = "vision_model."
LAYER = "text_model.encoder.layers.*."
SELF = LAYER + "self_attn."
ROWS = (
    Row(("text_model.embeddings.token_embedding",), "embed"),
    Row(("text_model.embeddings.position_embedding",), "positions"),
    Row((LAYER + "layer_norm1",), "layers.*.attention_norm"),
    Row((SELF + "q_proj", SELF + "k_proj", SELF + "v_proj"), "layers.*.attention.qkv", "rows"),
    Row((SELF + "out_proj",), "layers.*.o", "columns"),
    Row((LAYER + "layer_norm2",), "layers.*.mlp_norm"),
    Row((LAYER + "mlp.fc1",), "layers.*.mlp.up", "rows"),
    Row((LAYER + "mlp.fc2",), "layers.*.mlp.down", "columns"),
    Row(("text_model.final_layer_norm",), "norm"),
)
IGNORED = ("logit_scale", "logit_bias", "*.position_ids")
KEYS = {"layer_norm_eps": "rms_norm_eps"}
GIVEN = ("use_activation", "normalize")  # allowed keys of --pooler-config


class TwoTowers(LearnedPositions):
    """The text body, and the vision tower unless pictures are switched off."""

    ENDING: Callable[[VitConfig], Ending]
    ENDING_ROWS: tuple[Row, ...]  # weight rows of the tower's ending

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        assert config.pooling is not None, "two towers make vectors"
        self.pooler = TowersPooler(config.pooling, self.embed, config.text.vocab_size, tied=False)
        vision = config.towers.get("vision")
        rows: tuple[Row, ...] = ROWS
        ignored: tuple[str, ...] = IGNORED
        if isinstance(vision, VitConfig):
            self.vision = SingleRowTower(vision, dtype, device, type(self).ENDING(vision))
            self.towers = by_modality(self.vision)
            own = [row for row in with_tower(Table(()), vision).rows if not row.target.startswith(NOT_OURS)]
            rows += tuple(Row(tuple(AT + name for name in row.names), row.target, row.split) for row in own)
            rows += self.ENDING_ROWS
        else:
            ignored += (AT + "*", "visual_projection.*")
        self.table = Table(rows, prefixes=(), ignore=ignored)


NOT_OURS = ("vision.projector", "vision.newline", "vision.post_norm")


class TowersPooler(Pooler):
    """Results of texts from the body, of pictures from the tower."""

    def lines(self, batch: Batch, rows: int, forward: Callable[[Batch], Tensor]) -> Tensor:
        ends = batch.sample_index
        assert ends is not None
        ends = ends[:rows]
        lines = super().lines(batch, rows, forward)
        if batch.overlay is not None:
            visible, pictures = batch.overlay
            lines = torch.where(visible[ends], pictures[ends][:, : lines.shape[1]].float(), lines)
        for start, _, pictures in batch.media:
            lines = torch.where((ends == start)[:, None], pictures[:1].float(), lines)
        return lines


def text_of(causal: bool, activation: str, eps: float) -> Callable[[Section, Section], TextConfig]:
    """Returns Family.text for a text body; `activation` and `eps`: defaults."""

    def text(body: Section, outer: Section) -> TextConfig:
        untied = Section({**outer.values, "tie_word_embeddings": False}, outer.path)
        read = read_text(body, untied, activation=activation, eps=eps, **BIASED)
        return every_layer(read, rope=no_rope(read.head_dim), causal=causal)

    return text


def vision(section: Section, row_width: int) -> VitConfig:
    """The tower's config; all patches of a picture make one row."""
    side = read_vit(section, ProjectorConfig(row_width)).side
    return read_vit(section, ProjectorConfig(row_width, pool=side or 1))


def vectors(given: Mapping[str, Any], layer: HeadLayer, max_tokens: int, **family: Any) -> PoolingConfig:
    """The pooling config: `layer` on a text's last token, L2-normalised; `given`: --pooler-config."""
    for key, value in given.items():
        if key not in GIVEN or not isinstance(value, bool):
            raise ConfigError(
                f"--pooler-config: {key}={value!r} is not supported for a model of two towers; supported are "
                f"{' and '.join(GIVEN)}, true or false"
            )
    normalize = given.get("use_activation", given.get("normalize", True))
    return PoolingConfig(
        task="embed",
        kind="last",
        activation="normalize" if normalize else "identity",
        layers=(layer,),
        max_tokens=max_tokens,
        dimensions=None,
        two_towers=True,
        **family,
    )


def token_of(folder: Path, key: str, otherwise: int) -> int:
    """The id of the token that tokenizer_config.json names under `key`; `otherwise`: the default."""
    named = read_json(folder / "tokenizer_config.json", required=False).get(key)
    content = named.get("content") if isinstance(named, dict) else named
    tokenizer = read_json(folder / "tokenizer.json", required=False)
    for token in tokenizer.get("added_tokens") or ():
        if isinstance(token, dict) and token.get("content") == content and isinstance(token.get("id"), int):
            return int(token["id"])
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict) and isinstance(vocabulary.get(content), int):
        return int(vocabulary[content])
    return otherwise
