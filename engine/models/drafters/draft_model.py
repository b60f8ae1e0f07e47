"""SmallDecoder: a model of any served family of decoders that guesses a larger model's next tokens.

Thread: device. The two models share tokens, and nothing else: the small model has its own embedding, layers and head,
and computes every token of every text. The two embeddings may have different padding behind the tokenizer's tokens.
Its layers' keys and values lie in the target's blocks, at the same places, so they follow from the tokens that name a
block, and cached prefixes and preempted rows need nothing more.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from engine.base.drafts import FLAG
from engine.base.errors import ConfigError
from engine.cache.spec import KeyValueSpec
from engine.cache.tokens import GuestSpec
from engine.layers.batch import Batch
from engine.models.base.decoder import Decoder
from engine.models.base.model import Model
from engine.models.drafters.base import hosted

UNLIKELY = -1e30  # logit of the target's padding; finite, as the samplers want it


class Geometry(NamedTuple):
    """What a work list of attention depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class SmallDecoder:
    """The model, the caches of its layers, and how far it reads."""

    def __init__(self, model: Decoder, target: Model, longest: int) -> None:
        """`longest`: tokens of a row that it computes in their places; later tokens all have the last place."""
        self.model, self.longest = model, longest
        self._vocab = target.config.text.vocab_size
        self.specs = guest_specs(model, target)
        self.geometries = [
            Geometry(model.config.text.num_heads, spec.num_kv_heads, spec.head_dim) for spec in self.specs
        ]

    @property
    def described(self) -> str:
        """A few words about it for the log."""
        text = self.model.config.text
        return (
            f"{self.model.config.architecture} with {len(text.layers)} layers of {text.hidden_size}, up to "
            f"{self.longest:,} tokens"
        )

    def places(self, positions: Tensor) -> Tensor:
        """Positions of a target's tokens, [T] or [axes, T] of which the first counts -> of its own, [T] or [axes, T].

        All axes are equal, because it computes text.
        """
        found = (positions[0] if positions.dim() == 2 else positions).clamp(max=self.longest - 1)
        axes = self.model.config.axes
        return found if axes == 1 else found.repeat(axes, 1)

    def token_ids(self, token_ids: Tensor) -> Tensor:
        """The target's tokens as its own; the target's padding has no embedding here."""
        own = self.model.config.text.vocab_size
        return token_ids if own >= self._vocab else token_ids.clamp(max=own - 1)

    def logits(self, batch: Batch) -> Tensor:
        """Logits [B, vocabulary of the target] float32 of the tokens after a batch's B tokens, whose keys and values
        are written."""
        logits = self.model.logits(self.model.forward(batch))
        padding = self._vocab - logits.shape[1]
        return functional.pad(logits, (0, padding), value=UNLIKELY).contiguous() if padding else logits

    def store(self, batch: Batch) -> None:
        """Writes the keys and values of a batch's tokens."""
        batch.sample_index = batch.token_ids[:0]
        self.model.forward(batch)


def guest_specs(model: Decoder, target: Model) -> tuple[GuestSpec, ...]:
    """The caches of a small model's layers, with the target's blocks; a window saves no blocks."""
    own = model.cache_specs()
    other = next((spec for spec in own if not isinstance(spec, KeyValueSpec)), None)
    if other is not None or not own:
        raise ConfigError(
            f"{FLAG}: {model.config.folder}: {model.config.architecture} cannot draft: it has recurrent layers; name a "
            "model whose layers all have keys and values"
        )
    found = [GuestSpec(spec.num_kv_heads, spec.head_dim, spec.dtype) for spec in own if isinstance(spec, KeyValueSpec)]
    return hosted(found, target)
