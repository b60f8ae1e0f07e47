"""Jina's XLM-R (jina-embeddings-v3, jina-reranker-v2): other names, maybe rotary positions, and an adapter per task.

As https://huggingface.co/jinaai/xlm-roberta-flash-implementation computes it. An input without a task is computed by
the matrices alone. Released files hold the adapters of all tasks in one tensor for each matrix, the tables of
embeddings among them; those for transformers' class have PEFT's folders, and other names.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.files import read_json
from engine.checkpoint.pooling_tasks import ADAPTER_CONFIG, FOLDERS, JINA_V3
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.kernels.gemm.pack import Placement
from engine.layers.adapted import Adapter, Chosen, Site, TableSite
from engine.layers.batch import Batch
from engine.models.base.adapting import place, read_adapter
from engine.models.base.encoder import Encoder, EncoderLayer
from engine.models.base.family import Family
from engine.models.pooling.bert import post_norm_text
from engine.models.pooling.classes import ALL, classes
from engine.models.pooling.roberta import head
from engine.weights.table import Row, Table, Wanted

LAYER = "encoder.layers.*."
RELEASED = (
    Row(("embeddings.word_embeddings",), "embed"),
    Row(("embeddings.token_type_embeddings",), "types"),
    Row(("embeddings.position_embeddings",), "positions"),
    Row(("emb_ln",), "embed_norm"),
    Row((LAYER + "mixer.Wqkv",), "layers.*.qkv", "rows"),
    Row((LAYER + "mixer.out_proj",), "layers.*.o", "columns"),
    Row((LAYER + "norm1",), "layers.*.attention_norm"),
    Row((LAYER + "mlp.fc1",), "layers.*.up", "rows"),
    Row((LAYER + "mlp.fc2",), "layers.*.down", "columns"),
    Row((LAYER + "norm2",), "layers.*.mlp_norm"),
)
SELF = "layers.*.self_attn."
TRANSFORMERS = (
    Row(("embeddings.word_embeddings",), "embed"),
    Row(("embeddings.token_type_embeddings",), "types"),
    Row(("embeddings.LayerNorm",), "embed_norm"),
    Row((SELF + "q_proj", SELF + "k_proj", SELF + "v_proj"), "layers.*.qkv", "rows"),
    Row((SELF + "o_proj",), "layers.*.o", "columns"),
    Row(("layers.*.post_attention_layernorm",), "layers.*.attention_norm"),
    Row(("layers.*.mlp.fc1",), "layers.*.up", "rows"),
    Row(("layers.*.mlp.fc2",), "layers.*.down", "columns"),
    Row(("layers.*.post_mlp_layernorm",), "layers.*.mlp_norm"),
)
IGNORED = ("pooler.dense.*", "embeddings.position_ids", "lm_head.*")
TABLES = "word_embeddings", "token_type_embeddings"
MODULES = (*TABLES, "Wqkv", "out_proj", "fc1", "fc2")  # that the released adapters change
HALVES = "lora_A", "lora_B"
KEYS = {"rotary_emb_base": "rope_theta"}


class Parametrized(Table):
    """Released names: torch.nn.utils.parametrize keeps a matrix, and what changes it, below the matrix's name."""

    __slots__ = ()

    def canonical(self, name: str) -> str:
        name = super().canonical(name).replace(".parametrizations.weight.original", ".weight")
        return name.replace(".parametrizations.weight.0.", ".")


class ReleasedSite(Site):
    """The adapters of a matrix as released: a tensor of all first halves, and one of all second ones."""

    __slots__ = ()

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        count, rank, (rows,) = len(self.adapters), self.adapters[0].rank, self.linear.out_features
        a, b = (count, rank, self.linear.in_features), (count, rows, rank)
        return {half: (Wanted(shape),) for half, shape in zip(HALVES, (a, b))}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        super().fill(apart(pieces, [each.halves for each in self.adapters]), placement)


class ReleasedTableSite(TableSite):
    """The same of a table, whose halves lie transposed."""

    __slots__ = ()

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        count, rank = len(self.changing), self.changing[0].rank
        a, b = (count, self.num_rows, rank), (count, rank, self.width)
        return {half: (Wanted(shape),) for half, shape in zip(HALVES, (a, b))}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        upright = {half: [None if one is None else one.transpose(1, 2) for one in pieces[half]] for half in HALVES}
        super().fill(apart(upright, [each.table_halves for each in self.changing]), placement)


def apart(pieces: dict[str, list[Tensor | None]], halves: list[tuple[str, str]]) -> dict[str, list[Tensor | None]]:
    """The halves of all adapters -> those of each by their names."""
    found: dict[str, list[Tensor | None]] = {}
    for at, half in enumerate(HALVES):
        (whole,) = pieces[half]
        assert whole is not None
        found |= {names[at]: [one] for names, one in zip(halves, whole)}
    return found


class JinaLayer(EncoderLayer):
    """A layer that also passes the adapters the index of the tokens that go on."""

    chosen: Chosen | None = None

    def keep(self, index: Tensor, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        if self.chosen is not None:
            self.chosen.keep(index)
        return super().keep(index, x, attended)


class JinaV3(Encoder):
    """Of one type of tokens; heads are rotated, or positions have a table as XLM-R has it."""

    WEIGHTS: ClassVar[Table] = Parametrized(RELEASED, prefixes=("roberta.",), ignore=IGNORED)
    SITES: ClassVar[tuple[type[Site], type[TableSite]]] = ReleasedSite, ReleasedTableSite

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        root = Section(config.raw, "config.json")
        types = root.size("type_vocab_size", 1)
        super().__init__(config, dtype, device, types, None if rotates(root) else first_position(root))
        self.chosen: Chosen | None = None
        self.of_tables: list[TableSite | None] = [None, None]  # by TABLES
        self._sites: list[Row] = []
        if config.pooling is not None and config.pooling.adapters:
            adapters = self.adapters_of(root, config.pooling.adapters)
            self.adapters = config.pooling.adapters
            self.chosen = Chosen([each.scale for each in adapters])
            of_matrices, of_tables = self.SITES
            self._sites = place(self, self.WEIGHTS, adapters, self.chosen, of_matrices)
            for at, (name, rows) in enumerate(zip(TABLES, (config.text.vocab_size, types))):
                if any(name in each.modules for each in adapters):
                    self.of_tables[at] = of_tables(name, rows, config.text.hidden_size, adapters, self.chosen)
                    self._sites.append(Row((f"embeddings.{name}",), f"of_tables.{at}"))
            for layer in self.layers:
                assert isinstance(layer, JinaLayer)
                layer.chosen = self.chosen

    def adapters_of(self, root: Section, tasks: tuple[str, ...]) -> list[Adapter]:
        """All of one rank."""
        rank = root.size("lora_rank", 4)
        scale = root.number("lora_alpha", 1.0) / rank
        return [Adapter(task, MODULES, rank, scale, *two_halves(task)) for task in tasks]

    def layer(self, text: TextConfig) -> EncoderLayer:
        return JinaLayer(text)

    def weight_table(self) -> Table:
        table = super().weight_table()
        return replace(table, rows=(*table.rows, *self._sites))

    def forward(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        if self.chosen is not None:
            self.chosen.begin(batch.adapters)
        return super().forward(batch, out)

    def _embedded(self, batch: Batch, starts: Tensor) -> Tensor:
        x = super()._embedded(batch, starts)
        for site, ids in zip(self.of_tables, (batch.token_ids, torch.zeros_like(batch.token_ids))):
            if site is not None:
                site.add_to(x, ids)
        return x


class JinaEmbeddingsV3(JinaV3):
    """Transformers' class; adapters, if there are any, lie in folders next to the weights."""

    WEIGHTS = Table(TRANSFORMERS, prefixes=("roberta.",), ignore=IGNORED)
    SITES = Site, TableSite

    def adapters_of(self, root: Section, tasks: tuple[str, ...]) -> list[Adapter]:
        """Those of the folders."""
        found = []
        for task in tasks:
            name = FOLDERS[task]
            path = f"{name}/{ADAPTER_CONFIG}"
            read = read_adapter(Section(read_json(Path(self.config.folder) / path), path), task)
            found.append(Adapter(task, read.modules, read.rank, read.scale, *two_halves(name)))
        return found


def two_halves(name: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """What a named adapter's tensors are called, below a matrix and below a table."""
    return (f"lora_A.{name}.weight", f"lora_B.{name}.weight"), (f"lora_embedding_A.{name}", f"lora_embedding_B.{name}")


def rotates(root: Section) -> bool:
    """Whether heads are rotated."""
    return root.values.get("model_type") == JINA_V3 or root.values.get("position_embedding_type") == "rotary"


def first_position(body: Section) -> int:
    """Rows of the table of positions that no token has."""
    return 0 if rotates(body) else body.integer("pad_token_id", 1) + 1


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder, of both layouts."""
    named = body.values.get("model_type") == JINA_V3
    rope = RopeDefaults(20_000.0 if named else 10_000.0) if rotates(body) else None
    biases = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    return post_norm_text(body, rope, gated_mlp=False, qkv_layout="apart" if named else "joined", **biases)


FAMILY = Family(
    name="Jina embeddings v3",
    architectures=classes("JinaEmbeddingsV3", *ALL),
    model=JinaEmbeddingsV3,
    text=text,
    head=head,
)
