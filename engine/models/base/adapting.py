"""Models with adapters of their matrices (engine/layers/adapted.py): reads adapters and adds them to a model.

Thread: device. In: a decoder whose parts are empty, and its adapters. Out: the decoder with a site at each matrix that
an adapter changes, and a row for each site in its weight table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section
from engine.layers.adapted import Adapter, Chosen, Site
from engine.layers.linear import Linear
from engine.models.base.decoder import Decoder
from engine.models.base.model import Model
from engine.weights.table import Row, Table, parts_of


def adapt(model: Decoder, adapters: Sequence[Adapter]) -> None:
    """Gives the linear layers of the decoder's layers their adapters, numbered from 1."""
    model.chosen = Chosen([each.scale for each in adapters])
    model.adapters = tuple(each.name for each in adapters)
    rows = place(model, model.table, adapters, model.chosen)
    model.table = replace(model.table, rows=(*model.table.rows, *rows))


def place(
    model: Model, table: Table, adapters: Sequence[Adapter], chosen: Chosen, kind: type[Site] = Site
) -> list[Row]:
    """Adds a site to each linear layer that an adapter changes; returns the weight rows of the sites."""
    modules = {name for each in adapters for name in each.modules}
    sites: dict[str, Row] = {}
    part: Any
    for row, names, part in parts_of(table, model):
        changed = modules & {name.rpartition(".")[2] for name in names}
        if changed and row.target.startswith("layers.") and isinstance(part, Linear):
            part.site = kind(part, names, adapters, chosen)
            sites[row.target] = replace(row, target=f"{row.target}.site")
    return list(sites.values())


def read_adapter(section: Section, name: str) -> Adapter:
    """Reads PEFT's adapter_config.json; `name`: the modality or the task of the adapter."""
    plain = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}
    for key, needed in {**plain, "rank_pattern": {}, "alpha_pattern": {}}.items():
        given = section.values.get(key)
        if given is not None and given != needed:
            raise ConfigError(f"{section.path}: {key}={given!r}; an adapter is read with {needed!r}")
    modules = [str(name) for name in section.items("target_modules", ())]
    if not modules:
        raise ConfigError(f"{section.path}: target_modules must be a list of the matrices that the adapter changes")
    rank = section.size("r")
    return Adapter(name, frozenset(modules), rank, section.number("lora_alpha") / rank)
