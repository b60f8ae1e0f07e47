"""Voxtral Realtime (Mini 4B): a Mistral that writes one token for each 80 ms of audio; most tokens are padding.

Thread: device. Every position, also of the answer, has a tower row and a token. The rows are added to the embeddings
(Family.adds_media), and the answer has as many tokens as rows are left. Every layer depends on the delay, the number
of tokens by which the text follows the audio: a small network turns the delay into a gain, which multiplies the norm
before the MLP. A server has a fixed delay, so the gain is folded into the norm's weight. The computation follows
transformers' voxtral_realtime (VoxtralRealtimeTextAdaRmsNorm, VoxtralRealtimeTimeEmbedding).

    row      0      1    ...  n - 1     n       n + 1
    token   <s>   [PAD]  ...  [PAD]   answer   answer
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import gelu

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.encoders import voxtral_realtime as encoder
from engine.encoders.tower import by_modality
from engine.encoders.voxtral_realtime import CausalAudioConfig, CausalAudioTower
from engine.kernels.gemm.pack import Placement
from engine.layers.norm import RMSNorm
from engine.models.base.decoder import DecoderLayer
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama, LlamaLayer
from engine.weights.table import Row, Table, Wanted

INNER = 32  # inner width of the network that computes a layer's gain; no file names the width
THETA = 10_000.0  # base of the delay's sines and cosines
MOST_DELAY = 1000  # tokens: eighty seconds
NORM, GAIN = "layers.*.post_attention_layernorm", "layers.*.ada_rms_norm."


class DelayedNorm(RMSNorm):
    """x / rms(x) * weight * (1 + W2 gelu(W1 t)); t: the embedding of the delay, [size]."""

    __slots__ = ("delay",)

    def __init__(self, size: int, eps: float, delay: int) -> None:
        super().__init__(size, eps)
        self.delay = delay

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        size = self.size
        return {"weight": (Wanted((size,)), Wanted((INNER, size)), Wanted((size, INNER)))}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        weight, first, second = (
            piece.to(placement.device, torch.float32) for piece in pieces["weight"] if piece is not None
        )
        delay = sines(self.delay, self.size).to(placement.device)
        self.weight = weight * (1 + second @ gelu(first @ delay))


def sines(delay: int, size: int) -> Tensor:
    """The embedding of a delay: cosines in the first half, sines in the second half."""
    pairs = torch.arange(size // 2, dtype=torch.float32) / (size // 2)
    angles = delay * torch.exp(-math.log(THETA) * pairs)
    return torch.cat([angles.cos(), angles.sin()])


class VoxtralRealtime(Llama):
    """Audio in, text out."""

    takes_rows = False  # a client's rows would be added to the embeddings instead of replacing them
    WEIGHTS = Table(
        rows=(
            *(row for row in DECODER_ROWS if row.names != (NORM,)),
            Row((NORM, GAIN + "linear1", GAIN + "linear2"), "layers.*.mlp_norm"),
            *encoder.ROWS,
        ),
        ignore=DECODER_IGNORE,
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        tower = config.towers.get("audio")
        self.audio = CausalAudioTower(tower, dtype, device) if isinstance(tower, CausalAudioConfig) else None
        self.towers = by_modality(self.audio)

    def layer(self, number: int) -> DecoderLayer:
        text = self.config.text
        layer = LlamaLayer(text, text.layers[number])
        layer.mlp_norm = DelayedNorm(text.hidden_size, text.norm_eps, delay_of(self.config))
        return layer


def delay_of(config: ModelConfig) -> int:
    """Tokens by which the text follows the audio; the processor (mm/processors) writes as many padding tokens."""
    return Section(config.raw, "config.json").integer("default_num_delay_tokens", 6, least=1, most=MOST_DELAY)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    return read_text(body, outer, sliding="always", tied=True, rope=RopeDefaults(1_000_000.0))


FAMILY = Family(
    name="Voxtral Realtime",
    architectures=("VoxtralRealtimeForConditionalGeneration",),
    model=VoxtralRealtime,
    text=text,
    towers={"audio": encoder.read_audio},
    processor="voxtral_realtime:VoxtralRealtime",
    adds_media=True,
)
