"""Pooler: the computation after the body of a model that makes vectors or scores; its parts are HeadLayers.

Thread: device. In: a Batch and the body's forward. Out: float32 [rows, width], a row for each input whose last token
is in the step, in the order of the plan; the server applies activations (server/pooling). Weights are stored and
multiplied in float32.

    last, cls      forward of only these tokens -> layers
    mean etc.      forward of all tokens -> one row for each input (kernels/pool_rows) -> layers
    SPLADE         forward of all tokens -> layers, the last of which makes a logit for every vocabulary token -> the
                   maximum per vocabulary token, or 0, LOGITS_OF tokens at a time (the server applies log(1 + ...),
                   which commutes with the maximum)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, PoolingConfig
from engine.kernels.gemm.pack import Placement
from engine.kernels.pool_rows import pool_rows
from engine.layers.batch import Batch
from engine.layers.embed import Embedding
from engine.layers.norm import LayerNorm
from engine.weights.dummy import draw
from engine.weights.files import Shard, open_checkpoint, read_header
from engine.weights.table import Row, Table, Wanted

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # keys: names in config.json or in torch.nn
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), partial(functional.gelu, approximate="tanh")),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}
LOGITS_OF = 256  # tokens whose vocabulary logits are computed at a time: a full step's would take gigabytes


class PooledLinear:
    """One HeadLayer: norm(activation(W x + b)) on float32 rows."""

    bias: Tensor | None

    def __init__(self, layer: HeadLayer) -> None:
        self.layer = layer
        self.weight: Tensor | None = None  # [out_features, in_features] float32
        self.bias = None
        self.activation = ACTIVATIONS[layer.activation]
        self.norm = LayerNorm(layer.out_features, layer.norm_eps, bias=layer.norm_bias) if layer.norm else None

    def __call__(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        y = self.activation(functional.linear(x, self.weight, self.bias))
        return y if self.norm is None else self.norm(y)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        layer = self.layer
        wanted: dict[str, tuple[Wanted | None, ...]] = {"weight": (Wanted((layer.out_features, layer.in_features)),)}
        if layer.bias:
            wanted["bias"] = (Wanted((layer.out_features,)),)
        return wanted

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (weight,) = pieces["weight"]
        assert weight is not None
        self.weight = weight.to(placement.device, torch.float32, copy=True)
        if self.layer.bias:
            (bias,) = pieces["bias"]
            assert bias is not None
            self.bias = bias.to(placement.device, torch.float32, copy=True) + self.layer.offset


class TiedLogits(PooledLinear):
    """Logits of all vocabulary tokens: embeddings times x, plus a bias."""

    def __init__(self, layer: HeadLayer, embedding: Embedding) -> None:
        super().__init__(layer)
        self._embedding = embedding

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = self._embedding.table[: self.layer.out_features].float()
        return super().__call__(x)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"bias": (Wanted((self.layer.out_features,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (bias,) = pieces["bias"]
        assert bias is not None
        self.bias = bias.to(placement.device, torch.float32, copy=True)


class TokenLogits(PooledLinear):
    """Logits of given tokens, or the difference of two logits, from rows of the language model's head."""

    def __init__(self, layer: HeadLayer, embedding: Embedding, vocab_size: int, tied: bool) -> None:
        super().__init__(layer)
        self.tied = tied
        self._embedding, self._vocab_size = embedding, vocab_size

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = self._rows_of(self._embedding.table)
        return super().__call__(x)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {} if self.tied else {"weight": (Wanted((self._vocab_size, self.layer.in_features)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (weight,) = pieces["weight"]
        assert weight is not None
        self.weight = self._rows_of(weight).to(placement.device)

    def _rows_of(self, table: Tensor) -> Tensor:
        rows = [table[token].float() for token in self.layer.token_ids]
        if len(rows) == self.layer.out_features:
            return torch.stack(rows)
        true, *false = rows
        return (true - false[0] if false else true)[None].contiguous()


class Pooler:
    """Made with its model; `table` adds its parts to the weight table, `read_folders` fills parts from other
    folders."""

    def __init__(self, config: PoolingConfig, embedding: Embedding, vocab_size: int, tied: bool) -> None:
        self.config = config
        self.layers = [
            TiedLogits(layer, embedding)
            if layer.tied
            else TokenLogits(layer, embedding, vocab_size, tied)
            if layer.token_ids
            else PooledLinear(layer)
            for layer in config.layers
        ]
        self.token_heads = [[PooledLinear(layer) for layer in head.layers] for head in config.token_heads]

    def width(self, hidden_size: int) -> int:
        """Width of a result."""
        return self.config.layers[-1].out_features if self.config.layers else hidden_size

    def table(self, table: Table) -> Table:
        """The weight table of a model with this head instead of a language model's head."""
        own = [(k, layer) for k, layer in enumerate(self.config.layers) if not layer.folder]
        rows = [Row((layer.module,), f"pooler.layers.{k}") for k, layer in own]
        norms = [Row((layer.norm,), f"pooler.layers.{k}.norm") for k, layer in own if layer.norm]
        ignore = (*table.ignore, "lm_head.*")
        return replace(table, rows=(*table.rows, *rows, *norms), ignore=ignore)

    def read_folders(self, folder: str, load_format: str, placement: Placement, seed: int) -> None:
        """Fills the layers with separate folders. Raises ConfigError."""
        for layer in itertools.chain(self.layers, *self.token_heads):
            if not layer.layer.folder:
                continue
            where, before = Path(folder) / layer.layer.folder, f"{layer.layer.module}." if layer.layer.module else ""
            wanted = {f"{before}{kind}": piece for kind, (piece,) in layer.expects().items() if piece}
            if load_format == "dummy":
                found = {name: draw(name, torch.empty(piece.shape), seed) for name, piece in wanted.items()}
            else:
                found = _tensors(where, wanted)
            layer.fill({name.rpartition(".")[2]: [tensor] for name, tensor in found.items()}, placement)

    def lines(self, batch: Batch, rows: int, forward: Callable[[Batch], Tensor]) -> Tensor:
        """float32 [rows, width]: the results of the step's first `rows` inputs that end in the step.

        If inputs are computed in one step, every row's input ends in the step.
        """
        self.select(batch, rows)
        hidden = forward(batch)
        if self.config.kind not in ("last", "cls"):
            return self._pooled(hidden, batch.attention[0].query_start[: rows + 1], batch)
        return self.project(hidden)

    def select(self, batch: Batch, rows: int) -> None:
        """Sets the tokens whose hidden states the step's first `rows` inputs need: all, or one of each input."""
        if self.config.kind == "cls":
            last = len(batch.token_ids) - 1  # rows that pad the step begin after its tokens
            batch.sample_index = batch.attention[0].query_start[:rows].long().clamp(max=last)
        elif self.config.kind != "last":
            batch.sample_index = None

    def lines_of(self, hidden: Tensor, batch: Batch, ends: Tensor) -> Tensor:
        """As `lines`, from the hidden states of all tokens [T, hidden_size]; ends int64 [rows]: the last token of each
        input."""
        starts = batch.attention[0].query_start[: len(ends) + 1]
        kind = self.config.kind
        if kind == "last":
            return self.project(hidden.index_select(0, ends))
        if kind == "cls":
            return self.project(hidden.index_select(0, starts[:-1].long()))
        return self._pooled(hidden, starts, batch)

    def _pooled(self, hidden: Tensor, starts: Tensor, batch: Batch) -> Tensor:
        """A result row for each input from the hidden states of all tokens; `starts`: where inputs begin and end."""
        if self.config.layers_first:
            return self._highest(hidden, starts)
        kind, counted = self.config.kind, None if batch.pool_start is None else batch.pool_start[: len(starts) - 1]
        return self.project(pool_rows(hidden, starts, kind, counted))

    def _highest(self, hidden: Tensor, starts: Tensor) -> Tensor:
        """float32 [rows, width]: for each output of the layers the maximum over an input's tokens, at least 0."""
        found = torch.zeros(len(starts) - 1, self.layers[-1].layer.out_features, device=hidden.device)
        for first in range(0, len(hidden), LOGITS_OF):
            logits = self.project(hidden[first : first + LOGITS_OF])
            bounds = (starts - first).clamp_(0, len(logits))
            torch.maximum(found, pool_rows(logits, bounds, "max"), out=found)
        return found

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> float32 [n, width]."""
        return _through(self.layers, hidden.float())

    def project_tokens(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> float32 [T, width]: the concatenated outputs of all token heads."""
        if not self.token_heads:
            return self.project(hidden)
        return torch.cat([_through(head, hidden.float()) for head in self.token_heads], 1)


def _through(layers: Iterable[PooledLinear], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _tensors(folder: Path, wanted: dict[str, Wanted]) -> dict[str, Tensor]:
    """The tensors of a module's folder, or of its file."""
    if not folder.is_dir() and not folder.is_file():
        raise ConfigError(f"{folder} is missing, and modules.json names it")
    found: dict[str, Tensor] = {}
    for shard in open_checkpoint(folder) if folder.is_dir() else [Shard(folder, read_header(folder))]:
        for name, info in shard.tensors.items():
            if name not in wanted:
                raise ConfigError(f"{folder}: the tensor {name} is left over; expected are {', '.join(wanted)}")
            if info.shape != wanted[name].shape:
                shape = list(wanted[name].shape)
                raise ConfigError(f"{folder}: {name} has shape {list(info.shape)}, its config.json asks for {shape}")
        with shard.open() as reader:
            found |= {name: reader.tensor(name).clone() for name in shard.tensors}
    if missing := wanted.keys() - found.keys():
        raise ConfigError(f"{folder}: {', '.join(sorted(missing))} is missing")
    return found
