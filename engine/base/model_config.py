"""ModelConfig and its parts: one checkpoint's numbers as the engine computes with them.

Made by models/registry.py from config.json; frozen; read everywhere. Every value that a model computes with is set, so
no model checks for a missing key. A tower's configuration is in the tower's file (engine/encoders).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from engine.base.bidirectional import Bidirectional
from engine.base.mixers import MixerConfig
from engine.base.request import Modality

if TYPE_CHECKING:
    import torch

# The norm of queries and keys: none; an RMSNorm on every head, before or after rotation; an RMSNorm over the
# whole projection; a LayerNorm on every head, with separate weights for each head.
QKNorm = Literal["none", "head", "head after rotation", "projection", "head layer norm"]
# How a checkpoint holds queries, keys and values: three matrices; one below the other in one matrix; one matrix in
# which each key-value head has the rows of its queries, of its key and of its value. "gated": three matrices, the first
# with the rows of each head's query and of its gate, by whose sigmoid what the head attended is multiplied.
QKVLayout = Literal["apart", "joined", "by head", "gated"]


# "all": time, height and width. "sides": height and width; mrope_section is then of height, width and time.
MropeTurns = Literal["", "all", "sides"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies of one layer type; fields that a `kind` does not use have a neutral value."""

    kind: str  # default, linear, dynamic, llama3, yarn, longrope, proportional, none
    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated; even
    interleaved: bool = False  # a pair's dimensions are neighbours in the checkpoint, not rotary_dim / 2 apart
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int = 0  # llama3, yarn, longrope: context before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions bound the ramp
    attention_factor: float = 1.0  # yarn, longrope: scales cos and sin
    short_factors: tuple[float, ...] = ()  # longrope: frequency divisors in contexts up to original_max_position
    long_factors: tuple[float, ...] = ()  # longrope: frequency divisors in longer contexts
    turning: int = 0  # proportional: leading pairs that are rotated; frequencies are computed as if all pairs were
    # Queries are multiplied by 1 + query_scaling * log(1 + (position + query_offset) // original_max_position).
    query_scaling: float = 0.0
    query_offset: int = 0
    mrope_section: tuple[int, ...] = ()  # frequencies of each axis of positions; () = one axis
    mrope_turns: MropeTurns = ""  # the axes that are interleaved, frequency by frequency

    @property
    def axes(self) -> int:
        """Position axes per token."""
        return len(self.mrope_section) or 1


# How a checkpoint stores the experts of a layer.
# "apart": one matrix for each of gate, up and down of every expert.
# "joined": gate and up are one [E, 2I, H] with gate's rows first, down is [E, H, I]; tensors are weights of modules.
# "upright": as "joined", but bare tensors. "turned": as "upright", but transposed.
# The fifth value: as "turned", with biases, gate's and up's columns interleaved.
# The sixth value: as the fifth, but not transposed, as MXFP4 codes and scales.
# "one below the other": bare matrices of gate, up and transposed down, with the experts stacked along the rows.
ExpertLayout = Literal["apart", "joined", "upright", "turned", "by turns", "codes by turns", "one below the other"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How the router's logits become a token's experts and their weights."""

    num_experts: int
    top_k: int  # experts of a token, the highest score first; at equal scores the lower number first
    # From logits to scores, in float32. "near": experts are chosen one after the other, each by a softmax over the
    # remaining logits that lie near the highest logit, as in PhiMoE's sparse mixer (arXiv:2409.12136).
    score: Literal["softmax", "sigmoid", "near"] = "softmax"
    nearness: float = 0.0  # for "near": the largest distance to the highest logit, as a share of the larger of the two
    correction: bool = False  # a learned number per expert is added to the scores that select, not to the weights
    n_group: int = 1  # the experts form n_group groups of equal size
    topk_group: int = 1  # a token chooses among the experts of its topk_group best groups
    group_rank: Literal["maximum", "best two"] = "maximum"  # a group's rank: its best score, or the sum of its best two
    norm_topk_prob: bool = False  # the weights of a token are divided by their sum
    eps: float = 0.0  # added to that sum
    least_sum: float = 0.0  # the divisor is at least least_sum
    scale: float = 1.0  # multiplies the weights
    expert_scale: bool = False  # a learned number per expert multiplies its weight
    weigh_input: bool = False  # an expert's weight multiplies the input of gate and up; else the expert's result
    first: int = 0  # the expert that has number 0 in results; the numbers of experts before it follow the last


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a layer."""

    routing: Routing
    width: int  # the intermediate size of each expert
    shared_width: int = 0  # the intermediate size of the shared expert, an MLP for every token; 0: none
    shared_gate: bool = False  # the shared expert's result is multiplied by the sigmoid of a linear gate of the token
    latent_size: int = 0  # the experts read the token projected to this width; 0: the token itself
    layout: ExpertLayout = "apart"
    clamped: bool = False  # gate and up are clamped, and the activation is gpt-oss's
    router_bias: bool = False
    router_norm: bool = False  # the router reads the residual stream through its own norm
    correction_line: bool = False  # the checkpoint's correction is a matrix of one row
    first: int = 0  # the number of the first of these experts in the checkpoint
    held: int = 0  # a rank's experts, from routing.first on, if ranks have whole experts; 0: all
    media_width: int = 0  # the intermediate size of a second group of experts, for the tokens of media; 0: none


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Settings that may differ between decoder layers."""

    window: int  # tokens that attention sees, including the own; if not causal, also as many later tokens; 0 = all
    rope: RopeConfig
    scale: float  # multiplies attention's scores
    softcap: float = 0.0  # attention's scores become cap * tanh(score / cap); 0 = no cap
    sinks: bool = False  # a learned logit per head joins the softmax
    pre_norms: bool = True  # attention and MLP read the residual stream through a norm
    post_norms: bool = False  # the outputs of attention and MLP pass a norm before they are added to the stream
    experts: ExpertsConfig | None = None  # replaces the MLP
    mixer: MixerConfig | None = None  # replaces attention; None: attention
    causal: bool = True  # a token sees no later tokens; else one step computes the whole input, without a KV cache
    head_dim: int = 0  # head_dim, num_kv_heads, intermediate_size: 0: TextConfig's value holds
    num_kv_heads: int = 0
    intermediate_size: int = 0
    kv_shared_with: int | None = None  # the layer whose keys and values this layer reads; None: its own
    values_are_keys: bool = False  # the key projection also makes the values
    chunked: bool = False  # a token sees the tokens of its own chunk of `window` tokens, up to itself
    unit_norms: bool = False  # rotated queries and keys are normalised without weights


@dataclass(frozen=True, slots=True)
class TextConfig:
    """A decoder with a plain KV cache."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # may differ from hidden_size / num_heads
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    qk_norm: QKNorm
    mlp_bias: bool
    tie_embeddings: bool
    layers: tuple[LayerConfig, ...]
    activation: str = "silu"  # the MLP's activation, a name in engine/kernels/activation
    gated_mlp: bool = True  # activation(gate) * up; else activation(up)
    parallel: bool = False  # attention and MLP read the same residual stream in parallel
    shared_norm: bool = False  # parallel: attention and MLP share one input norm
    qkv_layout: QKVLayout = "apart"
    qkv_clip: float = 0.0  # queries, keys and values are clipped to +-qkv_clip; 0: no clipping
    split_head_norms: bool = False  # "head layer norm": each head's weights are a module of the checkpoint
    joined_mlp: bool = False  # gate and up are one matrix of the checkpoint
    layer_norm: bool = False  # the norms of the stream are LayerNorms, not RMSNorms
    norm_bias: bool = False  # LayerNorms have biases
    norm_offset: float = 0.0  # added to the weights of every norm
    head_bias: bool = False  # the language model's head has a bias
    embedding_scale: float = 1.0
    media_scale: float = 1.0  # multiplies media rows that replace embeddings
    residual_scale: float = 1.0  # multiplies the outputs of attention and MLP before they are added to the stream
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # cap * tanh(logit / cap); 0 = none
    hidden_size_per_layer_input: int = 0  # width of each token's per-layer inputs; 0: none
    module_routings: tuple[Routing, ...] = ()  # routings of expert layers that are modules of transformers
    num_nextn_predict_layers: int = 0  # multi-token-prediction layers after the last layer; their weights are not read

    @property
    def causal(self) -> bool:
        """Whether no token sees a later token; else one step computes the whole input, without a KV cache."""
        return self.layers[0].causal

    @property
    def routings(self) -> tuple[Routing, ...]:
        """The routings of the layers with experts, in the order of the layers."""
        return self.module_routings or tuple(
            layer.experts.routing for layer in self.layers if layer.experts is not None
        )

    def of_layer(self, layer: LayerConfig) -> TextConfig:
        """The same decoder with the sizes of this layer."""
        own = {name: getattr(layer, name) for name in ("head_dim", "num_kv_heads", "intermediate_size")}
        own = {name: size for name, size in own.items() if size}
        return replace(self, **own) if own else self


# How an input's hidden states become its result: the last token's, the first token's, or a reduction over all tokens.
PoolingKind = Literal["last", "cls", "mean", "max", "mean_sqrt_len", "weighted_mean"]


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """One layer after pooling: norm(activation(W x + b)), in float32."""

    module: str  # the prefix of its tensors: "score", or "linear" for a layer with its own folder
    in_features: int
    out_features: int
    bias: bool = False
    activation: str = "identity"  # a name in engine/pooling/heads
    folder: str = ""  # subfolder or file of a layer with its own weights file; "": the checkpoint's files
    norm: str = ""  # the prefix of a LayerNorm's tensors; "": no norm
    norm_eps: float = 0.0
    offset: float = 0.0  # added to the bias
    norm_bias: bool = False
    tied: bool = False  # W is the embedding table; the module has only the bias
    token_ids: tuple[int, ...] = ()  # W is these rows of the language model's head; one output: row [0] minus row [1]


# The activation of a result; the server applies it.
Activation = Literal["normalize", "identity", "sigmoid", "softmax", "relu", "log1p", "log1p_twice"]


@dataclass(frozen=True, slots=True)
class TokenHead:
    """The layers that make a result for each token, for tasks with results per token."""

    task: Literal["token_embed", "token_classify"]
    layers: tuple[HeadLayer, ...]
    activation: Activation
    dropped: tuple[int, int] = (0, 0)  # number of tokens without a result at the beginning and at the end of an input


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The computation after the body of a checkpoint that makes vectors or scores."""

    task: Literal["embed", "classify"]
    kind: PoolingKind
    activation: Activation
    layers: tuple[HeadLayer, ...] = ()
    labels: tuple[str, ...] = ()  # classify: names of the classes, by number
    bidirectional: bool = False  # each token attends to all tokens: one step computes the prompt, nothing is cached
    max_tokens: int = 0  # tokens of an input, from sentence_bert_config.json; 0: the body's limit
    lower_case: bool = False  # texts are made lower case before they are tokenized
    dimensions: tuple[int, ...] | None = ()  # lengths to which vectors may be cut; (): any length; None: no cut
    usual_dimensions: int | None = None  # length to which vectors are cut if a request sets none; None: no cut
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts before an input, by name
    default_prompt: str | None = None
    adapters: tuple[str, ...] = ()  # names of prompts or tasks that have an adapter, in the model's order
    pools_prompt: bool = True  # False: pooling leaves out the tokens of an input's prompt
    template: str = ""  # template of pairs, a name in server/pooling/pairs; "": the tokenizer's own pairs
    messages: bool = False  # a text is a user message of the chat template, a prompt is a system message
    template_opens_answer: bool = False  # for template "chat" and for `messages`: add_generation_prompt
    token_heads: tuple[TokenHead, ...] = ()  # heads for results per token; (): `layers`
    tokens_only: bool = False  # only tokens have results, inputs have none
    step_tag: int | None = None  # answers hold only the results of tokens with this id
    markers: Mapping[str, int] = field(default_factory=dict)  # "query" and "document" -> token put before the text
    skipped: tuple[int, ...] = ()  # token ids of documents whose vectors are left out of the comparison
    page: str = ""  # a picture's whole input text with its placeholder; a picture is a document and a separate input
    endings: Mapping[str, str] = field(default_factory=dict)  # with `page`: suffix of a text, by the prompt's name
    layers_first: bool = False  # `layers` are applied to every token, then max-pooled with 0 as the least value
    compares_products: bool = False  # texts are compared by the dot product of their vectors, else by cosine
    two_towers: bool = False  # an input is a text or a picture, and tokens have no results
    text_len: int = 0  # texts are padded to text_len tokens with `pad_token`; 0: no padding
    pad_token: int = 0
    end_token: int | None = None  # ends a text wherever it stands

    def adapter_of(self, prompt: str | None) -> int:
        """The number, from 1, of the adapter for inputs with this prompt; 0: no adapter."""
        return self.adapters.index(prompt) + 1 if prompt in self.adapters else 0

    @property
    def one_each(self) -> bool:
        """Whether an input is one text or one picture, never a conversation."""
        return self.two_towers or bool(self.page)

    @property
    def whole(self) -> bool:
        """Whether one step must compute all tokens of an input, because hidden states are not carried between steps."""
        return self.bidirectional or self.kind != "last"

    @property
    def heads_of_tokens(self) -> dict[str, TokenHead]:
        """The heads by task; a token's row concatenates their outputs."""
        if self.two_towers or self.layers_first:
            return {}
        own: Any = f"token_{self.task}"
        return {head.task: head for head in self.token_heads or (TokenHead(own, self.layers, self.activation),)}

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that requests may name."""
        return (*(() if self.tokens_only else (self.task,)), *self.heads_of_tokens)


class TowerConfig(Protocol):
    """Properties that every tower's configuration has."""

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """The modalities that the tower encodes."""

    @property
    def row_width(self) -> int:
        """The width of one part of a row that the tower makes."""

    @property
    def row_parts(self) -> int:
        """Parts of a row: one for the embedding, others for the residual stream after each of the first layers."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint as the engine sees it."""

    architecture: str
    # "native": our own model file; "transformers": its module runs in our steps; "mixed": its towers with our decoder.
    implementation: str
    folder: str
    text: TextConfig
    towers: Mapping[str, TowerConfig]  # keyed by the family's names: "vision", "audio"
    processor: str  # the media processor, a name in mm/processors/registry; "" for text only
    media_token_ids: dict[str, int]  # "image", "video", "audio" and the tokens around them: "vision_start" ...
    eos_token_ids: tuple[int, ...]
    max_position: int  # tokens of context that the checkpoint was made for
    torch_dtype: torch.dtype  # dtype of the saved weights
    generation: dict[str, Any] = field(default_factory=dict)  # sampling defaults of generation_config.json
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    left_out: bool = False  # some towers of the checkpoint are not built, and their weights are not read
    encoder_prefix: int = 0  # number of audio tokens that every prompt begins with
    bidirectional: Bidirectional = ""  # which tokens of a prompt see later tokens
    adds_media: bool = False  # media rows are added to embeddings, also to those of the answer's tokens
    max_model_len: int = 0  # tokens of context that are served; 0: max_position
    pooling: PoolingConfig | None = None  # None: the model generates
    is_encoder: bool = False  # the family is a text encoder and never generates

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities that the model takes, "text" first."""
        return ("text", *(modality for tower in self.towers.values() for modality in tower.modalities))

    @property
    def row_parts(self) -> int:
        """Parts of a tower's row."""
        return max((tower.row_parts for tower in self.towers.values()), default=1)

    @property
    def axes(self) -> int:
        """Rows of positions that a token has: 1, or M-RoPE's."""
        return self.text.layers[0].rope.axes
