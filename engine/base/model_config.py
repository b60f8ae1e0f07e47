"""ModelConfig and its parts: one checkpoint's numbers as the engine computes with them.

Made by models/registry.py from config.json; frozen; read everywhere. Nothing is optional that a model computes with, so
no model asks whether a key was there. The numbers of a tower stand in the tower's file (engine/encoders).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from engine.base.bidirectional import Bidirectional
from engine.base.request import Modality

if TYPE_CHECKING:
    import torch

# What normalises queries and keys: nothing; an RMSNorm on every head, before or after rotation; an RMSNorm over the
# whole projection; a LayerNorm on every head, each head with weights of its own.
QKNorm = Literal["none", "head", "head after rotation", "projection", "head layer norm"]
# How a checkpoint holds queries, keys and values: three matrices; one below the other in one matrix; one matrix in
# which each key-value head has the rows of its queries, of its key and of its value.
QKVLayout = Literal["apart", "joined", "by head"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Frequencies of one kind of layer; fields that a kind does not use keep their neutral value."""

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
    short_factors: tuple[float, ...] = ()  # longrope: stretches each frequency in contexts up to the original one
    long_factors: tuple[float, ...] = ()  # longrope: in longer ones
    turning: int = 0  # proportional: leading pairs that turn; the frequencies are those of all pairs
    # Queries are multiplied by 1 + this * log(1 + (position + query_offset) // original_max_position).
    query_scaling: float = 0.0
    query_offset: int = 0
    mrope_section: tuple[int, ...] = ()  # frequencies of each axis of positions; () = one axis
    mrope_interleaved: bool = False  # the axes take turns, frequency by frequency

    @property
    def axes(self) -> int:
        """Rows of positions that a token has."""
        return len(self.mrope_section) or 1


# How a checkpoint holds the experts of a layer: a matrix for each of gate, up and down of every expert; one matrix
# [E, 2I, H] of gate and up, gate's rows first, and one [E, H, I] of down, weights of modules ("joined") or bare tensors
# ("upright"); bare and transposed; transposed with biases, gate's and up's columns interleaved; the latter upright, as
# MXFP4 codes and scales; bare matrices of gate, of up and of down's transposed, experts one below the other in each.
ExpertLayout = Literal["apart", "joined", "upright", "turned", "by turns", "codes by turns", "one below the other"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses experts from its router's logits, and what weighs each expert's result."""

    num_experts: int
    top_k: int  # experts of a token, the highest score first; of equal scores the lower number first
    # Of the logits, in float32. "near": one expert after the other, each by the softmax of the logits that are left and
    # lie near the highest, as PhiMoE's sparse mixer has it (arXiv:2409.12136).
    score: Literal["softmax", "sigmoid", "near"] = "softmax"
    nearness: float = 0.0  # of "near": the distance that counts, as a share of the larger of both logits
    correction: bool = False  # a learned number per expert is added to the scores for the choice alone
    n_group: int = 1  # experts form so many groups of equal size
    topk_group: int = 1  # a token chooses among the experts of so many groups, its best
    group_rank: Literal["maximum", "best two"] = "maximum"  # a group's rank: its best score, or the sum of its best two
    norm_topk_prob: bool = False  # the weights of a token are divided by their sum
    eps: float = 0.0  # added to that sum
    least_sum: float = 0.0  # the divisor is at least this
    scale: float = 1.0  # of the weights
    expert_scale: bool = False  # a learned number per expert multiplies its weight
    weigh_input: bool = False  # an expert's weight multiplies the input of gate and up; else the expert's result


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a layer."""

    routing: Routing
    width: int  # the intermediate size of each expert
    shared_width: int = 0  # the intermediate size of the shared expert, an MLP for every token; 0: none
    shared_gate: bool = False  # the shared MLP's result is multiplied by the sigmoid of a product with the token
    layout: ExpertLayout = "apart"
    clamped: bool = False  # gate and up are bounded, and the activation is gpt-oss's
    router_bias: bool = False
    router_norm: bool = False  # the router reads the stream through a norm of its own
    correction_line: bool = False  # the checkpoint's correction is a matrix of one line


@dataclass(frozen=True, slots=True)
class ConvolutionConfig:
    """A short convolution along the sequence."""

    conv_l_cache: int  # tokens that it reads, the newest included
    bias: bool = False  # of the convolution and of the products before and behind it


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs from decoder layer to decoder layer."""

    window: int  # tokens that attention sees, its own included, and as many to the other side unless causal; 0 = all
    rope: RopeConfig
    scale: float  # of attention's scores
    softcap: float = 0.0  # of attention's scores: cap * tanh(score / cap); 0 = none
    sinks: bool = False  # a learned logit per head joins the softmax
    pre_norms: bool = True  # attention and MLP read the stream through a norm; else as it is
    post_norms: bool = False  # what attention and MLP add to the stream passes a norm of its own
    experts: ExpertsConfig | None = None  # in the place of the MLP
    convolution: ConvolutionConfig | None = None  # in the place of attention
    causal: bool = True  # a token sees no later ones; else one step computes the input, without a KV cache
    head_dim: int = 0  # these three where they are not TextConfig's; 0: they are
    num_kv_heads: int = 0
    intermediate_size: int = 0
    kv_shared_with: int | None = None  # the layer whose keys and values it reads; None: it makes its own
    values_are_keys: bool = False  # the product that makes the keys makes the values too
    chunked: bool = False  # the tokens seen are those of the token's chunk of `window`, up to itself
    unit_norms: bool = False  # queries and keys that were rotated are normalised, without weights


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
    activation: str = "silu"  # of the MLP, a name in engine/kernels/activation
    gated_mlp: bool = True  # activation(gate) * up; else activation(up)
    parallel: bool = False  # attention and MLP read the stream side by side
    shared_norm: bool = False  # parallel: both read it through one norm
    qkv_layout: QKVLayout = "apart"
    qkv_clip: float = 0.0  # queries, keys and values are clipped to this distance from 0; 0: they are not
    split_head_norms: bool = False  # "head layer norm": each head's weights are a module of the checkpoint
    joined_mlp: bool = False  # gate and up are one matrix of the checkpoint
    layer_norm: bool = False  # the stream passes LayerNorms, not RMSNorms
    norm_bias: bool = False  # of LayerNorms
    norm_offset: float = 0.0  # of the weights of every norm
    head_bias: bool = False  # of the language model's head
    embedding_scale: float = 1.0
    media_scale: float = 1.0  # of the rows of media in the place of embeddings
    residual_scale: float = 1.0  # of what attention and MLP add to the stream
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # cap * tanh(logit / cap); 0 = none
    hidden_size_per_layer_input: int = 0  # width of each token's per-layer inputs; 0: none
    module_routings: tuple[Routing, ...] = ()  # of layers with experts that are modules of transformers
    num_nextn_predict_layers: int = 0  # behind the last layer in the files: they predict later tokens and are not read

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one; else one step computes the whole input, without a KV cache."""
        return self.layers[0].causal

    @property
    def routings(self) -> tuple[Routing, ...]:
        """Of the layers with experts, in their order."""
        return self.module_routings or tuple(
            layer.experts.routing for layer in self.layers if layer.experts is not None
        )

    def of_layer(self, layer: LayerConfig) -> TextConfig:
        """The same decoder with the sizes that this layer has."""
        own = {name: getattr(layer, name) for name in ("head_dim", "num_kv_heads", "intermediate_size")}
        own = {name: size for name, size in own.items() if size}
        return replace(self, **own) if own else self


# Which hidden states of an input become its result: the last token's, the first token's, or a sum over all tokens.
PoolingKind = Literal["last", "cls", "mean", "max", "mean_sqrt_len", "weighted_mean"]


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """One layer behind pooling: norm(activation(W x + b)), in float32."""

    module: str  # the name of its tensors: "score", or "linear" in a folder of its own
    in_features: int
    out_features: int
    bias: bool = False
    activation: str = "identity"  # a name in engine/pooling/heads
    folder: str = ""  # or file, below the checkpoint's, of a layer with a file of its own; "": the checkpoint's files
    norm: str = ""  # the name of a LayerNorm's tensors; "": none
    norm_eps: float = 0.0
    offset: float = 0.0  # is added to the bias
    norm_bias: bool = False
    tied: bool = False  # W is the table of embeddings; the module has the bias alone
    token_ids: tuple[int, ...] = ()  # W is these rows of the language model's head; of one output, row [0] minus [1]


# Of a result, applied by the server.
Activation = Literal["normalize", "identity", "sigmoid", "softmax", "relu", "log1p", "log1p_twice"]


@dataclass(frozen=True, slots=True)
class TokenHead:
    """What is computed of every token where a client wants tokens one by one."""

    task: Literal["token_embed", "token_classify"]
    layers: tuple[HeadLayer, ...]
    activation: Activation
    dropped: tuple[int, int] = (0, 0)  # tokens at the beginning and at the end of an input that have no result


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """What a checkpoint that makes vectors or scores computes behind its body."""

    task: Literal["embed", "classify"]
    kind: PoolingKind
    activation: Activation
    layers: tuple[HeadLayer, ...] = ()
    labels: tuple[str, ...] = ()  # classify: by number
    bidirectional: bool = False  # each token attends to all: a prompt is computed in one step and leaves no cache
    max_tokens: int = 0  # of an input, as sentence_bert_config.json says; 0: what the body holds
    lower_case: bool = False  # texts are made lower case before they are tokenized
    dimensions: tuple[int, ...] | None = ()  # to which vectors may be cut; (): any, None: no cut is allowed
    usual_dimensions: int | None = None  # to which they are cut where a request says nothing; None: they are not
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts before an input, by name
    default_prompt: str | None = None
    adapters: tuple[str, ...] = ()  # prompts, or tasks, whose inputs are computed with an adapter, in the model's order
    pools_prompt: bool = True  # False: the tokens of such a prompt are left out of an input's pooled row
    template: str = ""  # of pairs, a name in server/pooling/pairs; "": the tokenizer's own pairs
    messages: bool = False  # a text is a user's message of the chat template, and a prompt the system's
    template_opens_answer: bool = False  # "chat" and `messages`: add_generation_prompt
    token_heads: tuple[TokenHead, ...] = ()  # of tokens; (): `layers`
    tokens_only: bool = False  # inputs have no result of their own
    step_tag: int | None = None  # of tokens, the results of these alone are answered
    markers: Mapping[str, int] = field(default_factory=dict)  # by "query" and "document": a token before such a text
    skipped: tuple[int, ...] = ()  # tokens of documents whose vectors take no part
    page: str = ""  # a picture's whole input with its placeholder: pictures are documents, alone in their inputs
    endings: Mapping[str, str] = field(default_factory=dict)  # with `page`: texts behind a text, by the prompt's name
    layers_first: bool = False  # `layers` are computed for every token, then max-pooled with 0 as the least value
    compares_products: bool = False  # texts are compared by the product of their vectors as they are, else by cosine
    two_towers: bool = False  # an input is a text or a picture, and tokens have no results
    text_len: int = 0  # tokens to which texts are filled up with `pad_token`; 0: they are as long as they are
    pad_token: int = 0
    end_token: int | None = None  # ends a text wherever it stands

    def adapter_of(self, prompt: str | None) -> int:
        """The number of the adapter of inputs with this prompt, from 1; 0: none."""
        return self.adapters.index(prompt) + 1 if prompt in self.adapters else 0

    @property
    def one_each(self) -> bool:
        """Whether an input is one text or one picture, and no conversation."""
        return self.two_towers or bool(self.page)

    @property
    def whole(self) -> bool:
        """Whether an input's tokens are computed in one step: later ones would not find the states of earlier ones."""
        return self.bidirectional or self.kind != "last"

    @property
    def heads_of_tokens(self) -> dict[str, TokenHead]:
        """By task; their numbers lie side by side in the line of a token."""
        if self.two_towers or self.layers_first:
            return {}
        own: Any = f"token_{self.task}"
        return {head.task: head for head in self.token_heads or (TokenHead(own, self.layers, self.activation),)}

    @property
    def tasks(self) -> tuple[str, ...]:
        """What may be asked of the model."""
        return (*(() if self.tokens_only else (self.task,)), *self.heads_of_tokens)


class TowerConfig(Protocol):
    """What is known of every tower before it is built."""

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What the tower encodes."""

    @property
    def row_width(self) -> int:
        """Numbers in a part of a row that the tower makes."""

    @property
    def row_parts(self) -> int:
        """Parts of a row: for the embedding, and for the stream behind each of the decoder's first layers."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint as the engine sees it."""

    architecture: str
    # "native": a file of ours; "transformers": its module in our steps; "mixed": its towers before a decoder of ours.
    implementation: str
    folder: str
    text: TextConfig
    towers: Mapping[str, TowerConfig]  # by the family's names: "vision", "audio"
    processor: str  # of media, as mm/processors/registry names it; "" for text only
    media_token_ids: dict[str, int]  # "image", "video", "audio" and the tokens around them: "vision_start" ...
    eos_token_ids: tuple[int, ...]
    max_position: int  # tokens of context that the checkpoint was made for
    torch_dtype: torch.dtype  # of the weights as saved
    generation: dict[str, Any] = field(default_factory=dict)  # sampling defaults of generation_config.json
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    left_out: bool = False  # towers that the checkpoint has are not built: their weights are not read
    encoder_prefix: int = 0  # tokens of sound that every prompt begins with
    bidirectional: Bidirectional = ""  # which tokens of a prompt see later ones
    adds_media: bool = False  # rows of media are added to embeddings, and may be given for tokens of the answer
    max_model_len: int = 0  # tokens of context that are served; 0: max_position
    pooling: PoolingConfig | None = None  # None: the model generates
    is_encoder: bool = False  # of a family of texts that never generates

    @property
    def modalities(self) -> tuple[str, ...]:
        """What the model reads, "text" first."""
        return ("text", *(modality for tower in self.towers.values() for modality in tower.modalities))

    @property
    def row_parts(self) -> int:
        """Parts of a tower's row."""
        return max((tower.row_parts for tower in self.towers.values()), default=1)

    @property
    def axes(self) -> int:
        """Rows of positions that a token has: 1, or M-RoPE's."""
        return self.text.layers[0].rope.axes
