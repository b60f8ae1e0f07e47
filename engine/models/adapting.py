"""Models made of matrices and of adapters (engine/layers/adapted.py): how adapters are read and placed.

Thread: device. In: a decoder whose parts are empty, and its adapters. Out: the same with a site beside each matrix that
an adapter changes, and a row of its table for each site.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.checkpoint.section import Section
from engine.errors import ConfigError
from engine.layers.adapted import Adapter, Chosen, Site
from engine.layers.linear import Linear
from engine.models.decoder import Decoder
from engine.request import Modality
from engine.weights.table import Row, parts_of


def adapt(model: Decoder, adapters: Sequence[Adapter]) -> None:
    """Gives the linear layers of the decoder's layers their adapters, numbered from 1."""
    model.chosen = chosen = Chosen([each.scale for each in adapters])
    model.adapters = tuple(each.media for each in adapters)
    modules = {name for each in adapters for name in each.modules}
    sites: dict[str, Row] = {}
    part: Any
    for row, names, part in parts_of(model.table, model):
        changed = modules & {name.rpartition(".")[2] for name in names}
        if changed and row.target.startswith("layers.") and isinstance(part, Linear):
            part.site = Site(part, names, adapters, chosen)
            sites[row.target] = replace(row, target=f"{row.target}.site")
    model.table = replace(model.table, rows=(*model.table.rows, *sites.values()))


def read_adapter(section: Section, media: Modality) -> Adapter:
    """Of adapter_config.json, as PEFT writes it."""
    plain = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}
    for key, needed in {**plain, "rank_pattern": {}, "alpha_pattern": {}}.items():
        given = section.values.get(key)
        if given is not None and given != needed:
            raise ConfigError(f"{section.path}: {key}={given!r}; an adapter is read with {needed!r}")
    modules = [str(name) for name in section.items("target_modules", ())]
    if not modules:
        raise ConfigError(f"{section.path}: target_modules must be a list of the matrices that the adapter changes")
    rank = section.size("r")
    return Adapter(media, frozenset(modules), rank, section.number("lora_alpha") / rank)
