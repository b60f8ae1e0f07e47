"""Load: from an adapter's folder to an Adapter in memory. Checks names, shapes, ranks and sizes before it allocates.

Thread: pool. In: a Source, and the Rules of the served model. Out: an Adapter; AdapterError with the reason, after
which nothing is left of the attempt. The Rules are frozen, so that several loads may run at once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.base.config import LoraConfig
from engine.base.errors import AdapterError, ConfigError
from engine.lora.adapter import Adapter
from engine.lora.config import AdapterConfig, read_config
from engine.lora.files import AdapterFiles, opened
from engine.lora.pack import Packing
from engine.lora.plan import Plan, plan_of
from engine.lora.source import Source
from engine.lora.targets import Targets
from engine.lora.texts import check_texts
from engine.weights.files import ADAPTER, open_checkpoint
from engine.weights.names import compact

log = logging.getLogger("omniloop.engine")

ROWS = 4096  # rows of a base's tensor that are compared at once
LARGEST = 4  # bytes in the file for each byte in memory, which may have a narrower dtype, with copies of the base's
OF_DECODER = ("layers.", "head")  # paths of sites outside of towers


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """What adapters of the served model must fit."""

    targets: Targets
    served: Collection[str]  # paths of the sites that have room for adapters
    settings: LoraConfig
    dtype: torch.dtype  # of the sites
    folder: str  # the base's
    num_tokens: int  # of the base


def load_adapter(source: Source, name: str, rules: Rules) -> Adapter:
    """Reads an adapter."""
    with opened(source, name) as files:
        config, plan = checked(files, name, rules)
        packing = Packing(plan, rules.dtype)
        base = _Base(rules) if plan.copies else None
        for tensor_name, tensor in files.read():
            if tensor_name in plan.pieces:
                packing.add(tensor_name, tensor)
            elif tensor_name in plan.unread:
                continue
            elif base is None or not base.equals(plan.copies[tensor_name], tensor):
                raise AdapterError(
                    f"{tensor_name} differs from the base's; modules_to_save are not served, train without them"
                )
        digest = files.sha256
    if source.sha256 not in ("", digest.hex()):
        raise AdapterError(f"sha256: the weights file has {digest.hex()}, and {source.sha256} was given")
    if trained := of_other_base(config, rules):
        log.warning("adapter %s was trained on %s; its shapes fit the served model", name, trained)
    sites = packing.sites()
    return Adapter(
        name=name,
        sha256=hashlib.sha256(digest + config.identity).digest(),
        rank=max(plan.ranks.values()),
        sites=sites,
        nbytes=sum(site.nbytes for site in sites.values()),
        in_towers=any(not path.startswith(OF_DECODER) for path in sites),
    )


def check_adapter(source: Source, name: str, rules: Rules) -> None:
    """Raises AdapterError for an adapter that its configuration and its header show not to fit; reads no weights."""
    with opened(source, name) as files:
        planned(files, rules)


def checked(files: AdapterFiles, name: str, rules: Rules) -> tuple[AdapterConfig, Plan]:
    """Configuration and plan, from the header and the small files alone."""
    config, plan = planned(files, rules)
    check_texts(name, files.side, Path(rules.folder), rules.num_tokens)
    return config, plan


def planned(files: AdapterFiles, rules: Rules) -> tuple[AdapterConfig, Plan]:
    """The same from the configuration and the header."""
    config = read_config(files.config)
    settings = rules.settings
    try:
        plan = plan_of(files.tensors, config, rules.targets, settings.targets)
    except AdapterError as error:
        trained = of_other_base(config, rules)
        raise AdapterError(f"{error}; the adapter was trained on {trained}" if trained else str(error)) from None
    unserved = [path for path in plan.targets if path not in rules.served]
    if unserved:
        raise AdapterError(f"{compact(unserved)}: adapters of these layers are not served; train without them")
    rank = max(plan.ranks.values())
    if rank > settings.max_rank:
        raise AdapterError(
            f"the adapter has rank {rank}; at most {settings.max_rank} is allowed: raise --max-lora-rank"
        )
    needed = plan.num_bytes(rules.dtype.itemsize)
    if needed > settings.max_bytes:
        raise AdapterError(
            f"the adapter takes {needed} bytes in memory; at most {settings.max_bytes} are allowed: raise "
            "--lora-max-bytes"
        )
    size, most = sum(info.num_bytes for info in files.tensors.values()), LARGEST * settings.max_bytes
    if size > most:
        raise AdapterError(f"{ADAPTER} has {size} bytes; at most {most} are read: raise --lora-max-bytes")
    return config, plan


def of_other_base(config: AdapterConfig, rules: Rules) -> str:
    """The base of the training, if its name differs from the served model's; folders differ from machine to machine."""
    trained, served = (text.rstrip("/").rpartition("/")[2] for text in (config.base, rules.folder))
    return ascii(trained) if trained and trained.lower() != served.lower() else ""


class _Base:
    """The base's tensors, for copies of them in an adapter's file."""

    def __init__(self, rules: Rules) -> None:
        self._table = rules.targets.table
        try:
            self._shards = open_checkpoint(Path(rules.folder))
        except ConfigError:
            self._shards = []  # random weights: no file holds the base

    def equals(self, name: str, tensor: Tensor) -> bool:
        """Whether the base has the same values; a tied head has the embedding's."""
        canonical = self._table.canonical(name)
        found = self._find(canonical)
        if found is None and canonical == "lm_head.weight":
            found = self._find("embed_tokens.weight")
        if found is None or found.shape != tensor.shape:
            return False
        return all(
            torch.equal(ours.float(), given.float()) for ours, given in zip(found.split(ROWS), tensor.split(ROWS))
        )

    def _find(self, canonical: str) -> Tensor | None:
        for shard in self._shards:
            for name in shard.tensors:
                if self._table.canonical(name) == canonical:
                    with shard.open() as reader:
                        return reader.tensor(name)
        return None
