"""The forms of an entry for a flag of another server: refused, without effect, or taken as a flag of ours.

Owner: the command line; values. Tables: foreign_vllm, foreign_sglang, foreign_llamacpp; bench/foreign_flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Foreign(NamedTuple):
    """One flag. A value is looked for in `holds`, then taken as `as_`, then passed over, and refused otherwise."""

    advice: str
    holds: tuple[str, ...] = ()  # values that change nothing here ("" is the flag without a value)
    switch: bool = False  # takes no value
    anything: bool = False  # every value is passed over
    as_: str = ""  # our flag; a path with dots for a key of a JSON flag; or a flag with =VALUE
    values: Mapping[str, str] = {}  # their values and ours
    only: bool = False  # no other values are taken


ONE_DEVICE = "use --tensor-parallel-size, or start a server for each device behind a router (see /docs/deployment)"
OWN_KERNELS = "the server has its own attention kernels; leave the flag out"
NO_CODE = "code from a request or a checkpoint never runs; leave the flag out"
NO_DRAFTS = 'use --speculative-config {"method": "ngram", "num_speculative_tokens": 4}, or {"model": DRAFTER}'
SHARED_POOL = "states and tokens share one pool of blocks; --state-cache-share bounds the states of idle prefixes"
NO_TRANSFER = "the cache is not shared with other processes; leave the flag out"
NO_BALANCE = "experts are neither copied nor moved between ranks; leave the flag out"
NO_STAGES = "layers cannot be put on different GPUs: use --tensor-parallel-size, which shares each layer among GPUs"
NO_OFFLOAD = "keys and values stay on the device; leave the flag out"
NO_CLIENT_CERTIFICATES = "clients authenticate by keys (--api-key); a proxy in front can check certificates"


def drafted_by(methods: Mapping[str, str], name: str) -> Foreign:
    """The flag `name` that chooses how drafts are made; `methods`: those that are served, and their names here."""
    return taken("speculative-config.method", methods, f"--{name} takes {', '.join(methods)} here; or {NO_DRAFTS}")


def renamed(name: str) -> Foreign:
    return Foreign(f"use --{name}")


def taken(name: str, values: Mapping[str, str] | None = None, advice: str = "") -> Foreign:
    """A flag with the meaning of ours. `values`: the only values that are taken; `advice` is for all others."""
    if values is None:
        return Foreign(f"taken as --{name}", as_=name)
    return Foreign(advice, as_=name, values=values, only=True)


def switch(name: str) -> Foreign:
    """A switch with the meaning of our flag, which may have =VALUE."""
    return Foreign(f"taken as --{name}", switch=True, as_=name)


def always(advice: str) -> Foreign:
    """A switch that changes nothing here, because this server always behaves so."""
    return Foreign(advice, ("",), switch=True)


def passed_over(advice: str) -> Foreign:
    """A flag whose values ask for what is decided here already."""
    return Foreign(advice, anything=True)


def hint(advice: str) -> Foreign:
    """A switch about speed, which may be on or off."""
    return Foreign(advice, switch=True, anything=True)


DRAFTER = taken("speculative-config.model")
NUM_DRAFTS = taken("speculative-config.num_speculative_tokens")
