"""BLIP-2's querying transformer and an output projection: learned queries become rows that summarise a window.

Thread: device. In: windows [count, length, input_dim]. Out: rows [count * queries, output_dim]. Norms follow the
residual additions (post-norm). Queries of a window attend to each other, and in every `every`-th layer to the window.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.kernels.activation import BY_NAME, Activation, pointwise
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.weights.table import Row


@dataclass(frozen=True, slots=True)
class QueriesConfig:
    """The transformer's numbers."""

    count: int  # queries per window
    input_dim: int  # width of the windows
    output_dim: int  # width of the decoder
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    every: int
    eps: float
    activation: Activation

    @classmethod
    def read(cls, section: Section, count: int, text: Section) -> QueriesConfig:
        """Reads a blip_2_qformer section; `text`: the decoder's section."""
        act = str(section.values.get("hidden_act") or "gelu")
        kind = section.values.get("model_type", "blip_2_qformer")
        if act not in BY_NAME or kind != "blip_2_qformer" or section.boolean("use_qformer_text_input", False):
            raise ConfigError(
                f"{section.path}: model_type={kind!r} with hidden_act={act!r}; supported is 'blip_2_qformer' without "
                f"texts and with one of {', '.join(BY_NAME)}"
            )
        config = cls(
            count=count,
            input_dim=section.size("encoder_hidden_size", 1408),
            output_dim=text.size("hidden_size"),
            hidden_size=section.size("hidden_size", 768),
            intermediate_size=section.size("intermediate_size", 3072),
            num_layers=section.integer("num_hidden_layers", 12, least=1, most=MAX_LAYERS),
            num_heads=section.size("num_attention_heads", 12),
            every=section.size("cross_attention_frequency", 2),
            eps=section.number("layer_norm_eps", 1e-12),
            activation=BY_NAME[act],
        )
        if config.hidden_size % config.num_heads:
            raise ConfigError(f"{section.path}: hidden_size={config.hidden_size} must be a multiple of its heads")
        return config


class QueryAttention:
    """norm(x + attention from x to rows of width `seen`)."""

    def __init__(self, config: QueriesConfig, seen: int) -> None:
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.query = Linear(size, size, bias=True)
        self.kv = Linear(seen, size, size, bias=True)
        self.out = Linear(size, size, bias=True)
        self.norm = LayerNorm(size, config.eps)

    def __call__(self, x: Tensor, seen: Tensor) -> Tensor:
        """x [count, queries, hidden], seen [count, length, width] -> like x."""
        count, queries, size = x.shape
        q = self.query(x).view(count, queries, self.num_heads, -1).transpose(1, 2)
        k, v = self.kv(seen).view(count, seen.shape[1], 2, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind()
        out = functional.scaled_dot_product_attention(q, k, v)
        return self.norm(self.out(out.transpose(1, 2).reshape(count, queries, size)) + x)


class QueryLayer:
    """Attention among queries, in some layers attention to the window, then an MLP."""

    def __init__(self, config: QueriesConfig, sees: bool) -> None:
        size, width = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.own = QueryAttention(config, size)
        self.window = QueryAttention(config, config.input_dim) if sees else None
        self.up = Linear(size, width, bias=True)
        self.down = Linear(width, size, bias=True)
        self.norm = LayerNorm(size, config.eps)

    def __call__(self, x: Tensor, windows: Tensor) -> Tensor:
        x = self.own(x, x)
        if self.window is not None:
            x = self.window(x, windows)
        return self.norm(self.down(pointwise(self.up(x), self.activation)) + x)


class Queries:
    """The transformer and the output projection."""

    def __init__(self, config: QueriesConfig) -> None:
        self.queries = Bare("query", 1, config.count, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.eps)
        self.layers = [QueryLayer(config, number % config.every == 0) for number in range(config.num_layers)]
        self.last = Linear(config.hidden_size, config.output_dim, bias=True)

    def __call__(self, windows: Tensor) -> Tensor:
        """[count, length, input_dim] -> [count * queries, output_dim]."""
        x = self.norm(self.queries.value[0]).repeat(len(windows), 1, 1)
        for layer in self.layers:
            x = layer(x, windows)
        return self.last(x.flatten(0, 1))

    @staticmethod
    def rows(model: str, module: str) -> tuple[Row, ...]:
        """Weight rows of the model's attribute `model`, called `module` in checkpoints."""
        layer, target = f"{module}.qformer.encoder.layer.*.", f"{model}.layers.*."
        attentions = []
        for name, part in (("attention", "own"), ("crossattention", "window")):
            inner = f"{layer}{name}.attention."
            attentions += [
                Row((inner + "query",), f"{target}{part}.query"),
                Row((inner + "key", inner + "value"), f"{target}{part}.kv"),
                Row((f"{layer}{name}.output.dense",), f"{target}{part}.out"),
                Row((f"{layer}{name}.output.LayerNorm",), f"{target}{part}.norm"),
            ]
        return (
            Row((module,), f"{model}.queries"),
            Row((f"{module}.qformer.layernorm",), f"{model}.norm"),
            *attentions,
            Row((layer + "intermediate_query.dense",), target + "up"),
            Row((layer + "output_query.dense",), target + "down"),
            Row((layer + "output_query.LayerNorm",), target + "norm"),
            Row((f"{module}.linear",), f"{model}.last"),
        )
