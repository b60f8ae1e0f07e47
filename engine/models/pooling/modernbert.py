"""ModernBERT (gte-modernbert, modernbert-embed, rerankers): a pre-norm encoder with rotary positions and GeGLU.

Every third layer attends to the whole input, other layers to 64 tokens on each side. The embeddings pass a norm, and
the first layer has no norm before its attention. Classifiers have a layer with a norm before the label layer.
"""

from __future__ import annotations

from torch import Tensor

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, TextConfig
from engine.checkpoint.pooling import Form, labels_of
from engine.checkpoint.pooling_lexical import head_of_gaps
from engine.checkpoint.rope import FULL, SLIDING, RopeDefaults
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.checkpoint.text import read_text, refuse
from engine.kernels.activation import BY_NAME
from engine.layers.batch import Batch
from engine.layers.norm import stream_norm
from engine.models.base.decoder import DecoderLayer
from engine.models.base.family import Family
from engine.models.pooling.classes import ALL, classes
from engine.models.text.gemma import half
from engine.models.text.llama import Llama, LlamaLayer
from engine.pooling.heads import ACTIVATIONS
from engine.weights.table import Row, Table

ROWS = (
    Row(("embeddings.tok_embeddings",), "embed"),
    Row(("embeddings.norm",), "embed_norm"),
    Row(("layers.*.attn_norm",), "layers.*.attention_norm"),
    Row(("layers.*.attn.Wqkv",), "layers.*.attention.qkv", "rows"),
    Row(("layers.*.attn.Wo",), "layers.*.o", "columns"),
    Row(("layers.*.mlp_norm",), "layers.*.mlp_norm"),
    Row(("layers.*.mlp.Wi",), "layers.*.mlp.gate_up", "rows"),
    Row(("layers.*.mlp.Wo",), "layers.*.mlp.down", "columns"),
    Row(("final_norm",), "norm"),
)
IGNORED = ("head.*", "decoder.*")  # the masked language model's head
ROPE = RopeDefaults(160_000.0, sliding_key="local_rope_theta", sliding_theta=10_000.0)
KEYS = {"hidden_activation": "hidden_act", "norm_eps": "rms_norm_eps", "global_rope_theta": "rope_theta"}


class ModernBert(Llama):
    """Llama's layers, after a norm of the embeddings."""

    WEIGHTS = Table(ROWS, prefixes=("model.",), ignore=IGNORED)

    def layer(self, number: int) -> DecoderLayer:
        text = self.config.text
        layer = LlamaLayer(text, text.layers[number])
        if number == 0:
            self.embed_norm = stream_norm(text)
            layer.attention_norm = None
        return layer

    def embedded(self, batch: Batch) -> Tensor:
        return self.embed_norm(super().embedded(batch))


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder's config; windows are centred on the token."""
    count = body.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    period = body.size("global_attn_every_n_layers", 3)
    kinds = list(body.items("layer_types", ())) or [SLIDING if k % period else FULL for k in range(count)]
    said = {"layer_types": kinds, "sliding_window": half(body.size("local_attention", 128))}
    return read_text(
        Section({**body.values, **said}, body.path, body.outer),
        outer,
        sliding="layers",
        rope=ROPE,
        activation="gelu",
        eps=1e-5,
        qkv_layout="joined",
        joined_mlp=True,
        layer_norm=True,
        norm_bias=body.boolean("norm_bias", False),
    )


def head(body: Section, form: Form) -> tuple[HeadLayer, ...]:
    """The heads of ModernBert's ForSequenceClassification, ForTokenClassification and ForMaskedLM."""
    if form not in ("score", "tokens", "lexical"):
        return ()
    refuse(body, norm_bias=False)
    hidden, bias = body.size("hidden_size"), body.boolean("classifier_bias", False)
    activation = str(body.values.get("classifier_activation") or "gelu")
    if activation not in ACTIVATIONS or activation not in BY_NAME:
        raise ConfigError(f"{body.path}: classifier_activation={activation!r} is not supported; supported is gelu")
    eps = body.number("rms_norm_eps", 1e-5)
    if form == "lexical":
        refuse(body, decoder_bias=True)
        names = "head.dense", "head.norm", "decoder"
        return head_of_gaps(body, names, activation, bias=bias, norm_eps=eps, norm_bias=False)
    first = HeadLayer("head.dense", hidden, hidden, bias, activation, norm="head.norm", norm_eps=eps)
    return first, HeadLayer("classifier", hidden, len(labels_of(body)), bias=True)


FAMILY = Family(
    name="ModernBERT", architectures=classes("ModernBert", *ALL), model=ModernBert, text=text, head=head, keys=KEYS
)
