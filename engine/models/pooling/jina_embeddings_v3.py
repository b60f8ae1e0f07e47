"""Jina's XLM-R (jina-embeddings-v3, jina-reranker-v2): other names, optional rotary positions, an adapter per task.

The computation follows https://huggingface.co/jinaai/xlm-roberta-flash-implementation. An input without a task uses no
adapter. Released files hold the adapters of all tasks in one tensor per matrix, also for the embedding tables. Files
for transformers' class have PEFT folders and other names.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from engine.base.dealing import Axis
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
MODULES = (*TABLES, "Wqkv", "out_proj", "fc1", "fc2")  # modules that the released adapters change
HALVES = "lora_A", "lora_B"
KEYS = {"rotary_emb_base": "rope_theta"}


class Parametrized(Table):
    """Released names: torch.nn.utils.parametrize puts a matrix and its adapters below the matrix's name."""

    __slots__ = ()

    def canonical(self, name: str) -> str:
        name = super().canonical(name).replace(".parametrizations.weight.original", ".weight")
        return name.replace(".parametrizations.weight.0.", ".")


class ReleasedSite(Site):
    """A matrix's adapters in the released layout: one tensor of all A matrices, and one of all B matrices."""

    __slots__ = ()

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        count, rank, (rows,) = len(self.adapters), self.adapters[0].rank, self.linear.out_features
        a, b = (count, rank, self.linear.in_features), (count, rows, rank)
        return {half: (Wanted(shape),) for half, shape in zip(HALVES, (a, b))}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        super().fill(apart(pieces, [each.halves for each in self.adapters]), placement)

    def axes(self, kind: str, piece: int) -> tuple[Axis | None, ...]:
        return None, *super().axes(self.adapters[0].halves[HALVES.index(kind)], piece)


class ReleasedTableSite(TableSite):
    """An embedding table's adapters in the released layout, with transposed A and B matrices."""

    __slots__ = ()

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        count, rank = len(self.changing), self.changing[0].rank
        a, b = (count, self.num_rows, rank), (count, rank, self.width)
        return {half: (Wanted(shape),) for half, shape in zip(HALVES, (a, b))}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        upright = {half: [None if one is None else one.transpose(1, 2) for one in pieces[half]] for half in HALVES}
        super().fill(apart(upright, [each.table_halves for each in self.changing]), placement)


def apart(pieces: dict[str, list[Tensor | None]], halves: list[tuple[str, str]]) -> dict[str, list[Tensor | None]]:
    """Splits the tensors of all adapters into the A and B matrices of each adapter, by name."""
    found: dict[str, list[Tensor | None]] = {}
    for at, half in enumerate(HALVES):
        (whole,) = pieces[half]
        assert whole is not None
        found |= {names[at]: [one] for names, one in zip(halves, whole)}
    return found


class JinaLayer(EncoderLayer):
    """A layer that also passes `index`, the tokens that continue, to the adapters."""

    is_dealt = True
    chosen: Chosen | None = None

    def keep(self, index: Tensor, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        if self.chosen is not None:
            self.chosen.keep(index)
        return super().keep(index, x, attended)


class JinaV3(Encoder):
    """One token type; heads are rotated, or positions come from XLM-R's table."""

    WEIGHTS: ClassVar[Table] = Parametrized(RELEASED, prefixes=("roberta.",), ignore=IGNORED)
    SITES: ClassVar[tuple[type[Site], type[TableSite]]] = ReleasedSite, ReleasedTableSite

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        root = Section(config.raw, "config.json")
        types = root.size("type_vocab_size", 1)
        super().__init__(config, dtype, device, types, None if rotates(root) else first_position(root))
        self.chosen: Chosen | None = None
        self.of_tables: list[TableSite | None] = [None, None]  # the adapters of TABLES, in their order
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
        """The adapters of the tasks, all with the same rank."""
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
    """Transformers' class; adapters, if any, are in folders next to the weights."""

    WEIGHTS = Table(TRANSFORMERS, prefixes=("roberta.",), ignore=IGNORED)
    SITES = Site, TableSite

    def adapters_of(self, root: Section, tasks: tuple[str, ...]) -> list[Adapter]:
        """The adapters of the folders."""
        found = []
        for task in tasks:
            name = FOLDERS[task]
            path = f"{name}/{ADAPTER_CONFIG}"
            read = read_adapter(Section(read_json(Path(self.config.folder) / path), path), task)
            found.append(Adapter(task, read.modules, read.rank, read.scale, *two_halves(name)))
        return found


def two_halves(name: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Names of an adapter's A and B tensors, below a matrix and below a table."""
    return (f"lora_A.{name}.weight", f"lora_B.{name}.weight"), (f"lora_embedding_A.{name}", f"lora_embedding_B.{name}")


def rotates(root: Section) -> bool:
    """Whether heads are rotated."""
    return root.values.get("model_type") == JINA_V3 or root.values.get("position_embedding_type") == "rotary"


def first_position(body: Section) -> int:
    """Unused rows at the start of the position table."""
    return 0 if rotates(body) else body.integer("pad_token_id", 1) + 1


def text(body: Section, outer: Section) -> TextConfig:
    """The encoder's config, in either layout."""
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
