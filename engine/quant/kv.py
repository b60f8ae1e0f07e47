"""kv: the dtype of cached keys and values, from the operator's flags, the checkpoint's scheme and its scales.

Owner: the thread that builds the model. In: the specs that the model declares, the values of --kv-cache-dtype and
--kv-cache-dtype-skip-layers, the headers of the files. Out: the specs with their final dtypes. e4m3 codes use the
checkpoint's scales, one per layer or per KV head. In a layer without scales in the files, each token gets a scale per
head when it is stored. e5m2 codes are a plain cast. Attention widens codes to the queries' dtype before it multiplies.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.cache.spec import CacheSpec, KeyValueSpec
from engine.weights.files import Shard
from engine.weights.names import compact
from engine.weights.table import Weighted

log = logging.getLogger("omniloop.engine")

FLAG, SKIP = "--kv-cache-dtype", "--kv-cache-dtype-skip-layers"
PER_TOKEN = "fp8_per_token_head"  # ignores scales in the files
WORDS = {
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    PER_TOKEN: torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Names of scales: compressed-tensors and ModelOpt, ModelOpt's projections (old and new), vLLM's old name, Mistral.
SCALE = re.compile(
    r"layers\.(?P<layer>\d+)\.(?:self_attn|attention|mixer)\.(?:"
    r"(?P<own>k|v|kv)_scale|(?P<proj>k|v)_proj\.(?:(?P=proj)_scale|output_scale)|(?P<fake>k|v)_fake_quantizer\.qscale_act)"
)


class Caching(Weighted, Protocol):
    """The part of a model that this module uses."""

    def cache_specs(self) -> list[CacheSpec]:
        """The caches of the decoder layers, in layer order."""

    def caches_of(self, number: int) -> Sequence[int]:
        """The indices in cache_specs of the caches that decoder layer `number` reads."""


@dataclass(frozen=True, slots=True)
class Found:
    """A scale in the files."""

    name: str
    shard: Shard


def stored_specs(
    model: Caching, word: str, skipped: Sequence[str], shards: Sequence[Shard] | None, read: bool = True
) -> list[CacheSpec]:
    """The model's specs with their final dtypes. `read`: False if only headers are available and scales do not
    matter."""
    specs, dtype = model.cache_specs(), WORDS.get(word)
    if word == "auto":
        dtype = torch.float8_e4m3fn if _scheme_is_fp8(model) else None
    if dtype is None:
        if skipped:
            raise ConfigError(
                f"{SKIP} {' '.join(skipped)}: the KV cache has no codes; name {FLAG} fp8, or leave it out"
            )
        return specs
    _check_architecture(model, specs, word)
    layers = _layers_of(model, specs)
    in_memory = _skipped(layers, specs, skipped)
    found = _scales_of(model, shards) if shards and dtype is torch.float8_e4m3fn and word != PER_TOKEN else {}
    stored: list[CacheSpec] = []
    for number, spec in enumerate(specs):
        if number in in_memory or not isinstance(spec, KeyValueSpec):
            stored.append(spec)
            continue
        layer = layers[number]
        scales = _given(found[layer], spec, read) if layer in found else None
        stored.append(replace(spec, dtype=dtype, given=scales))
    _warn_of_biases(model, dtype)
    return stored


def numbers_line(specs: Sequence[CacheSpec], activations: torch.dtype) -> str:
    """A short text about the caches' dtypes; "": all caches have the activations' dtype."""
    kinds: Counter[str] = Counter()
    for spec in specs:
        if isinstance(spec, KeyValueSpec):
            kinds[_kind(spec)] += 1
    if set(kinds) <= {str(activations).removeprefix("torch.")}:
        return ""
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{kind} ({count} layers)" for kind, count in kinds.most_common())


def _kind(spec: KeyValueSpec) -> str:
    name = str(spec.dtype).removeprefix("torch.")
    if spec.dtype not in CODES:
        return name
    if spec.dtype is torch.float8_e5m2:
        return "fp8_e5m2 without scales"
    return "fp8_e4m3 with " + ("a scale per token and head" if spec.given is None else "the checkpoint's scales")


def _scheme_is_fp8(model: Caching) -> bool:
    """Whether the checkpoint was made for an FP8 cache that this version supports."""
    settings = model.config.raw.get("quantization_config") or {}
    scheme, algorithm = settings.get("kv_cache_scheme"), settings.get("kv_cache_quant_algo")
    if not scheme and not algorithm:
        return False
    if algorithm == "FP8" or (
        isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    ):
        return model.config.implementation != "transformers"
    log.warning(
        "KV cache: the checkpoint's scheme %s is none that is served: kept in the activations' dtype",
        scheme or algorithm,
    )
    return False


def _check_architecture(model: Caching, specs: Sequence[CacheSpec], word: str) -> None:
    """Refuses models whose attention does not support the requested dtype."""
    name = model.config.architecture
    if model.config.implementation == "transformers":
        raise ConfigError(
            f"{FLAG} {word}: {name} runs through transformers, whose cache has the activations' dtype; "
            "leave the flag out"
        )
    if not any(isinstance(spec, KeyValueSpec) for spec in specs):
        raise ConfigError(f"{FLAG} {word}: {name} keeps no keys and values; leave the flag out")


def _layers_of(model: Caching, specs: Sequence[CacheSpec]) -> dict[int, int]:
    """Index in specs -> layer that writes these keys and values, which is the first layer that reads them."""
    numbers = reversed(range(len(model.config.text.layers)))
    found = {place: number for number in numbers for place in model.caches_of(number)}
    return {place: found[place] for place, spec in enumerate(specs) if isinstance(spec, KeyValueSpec)}


def _skipped(layers: Mapping[int, int], specs: Sequence[CacheSpec], words: Sequence[str]) -> set[int]:
    """Indices in specs of the keys and values that stay in the activations' dtype; `layers`: from _layers_of."""
    place_of = {layer: place for place, layer in layers.items()}
    in_memory: set[int] = set()
    for word in words:
        if word == "sliding_window":
            in_memory |= {place for place in layers if specs[place].kind.window}
        elif word.isdecimal() and int(word) in place_of:
            in_memory.add(place_of[int(word)])
        else:
            numbers = f"0 to {max(place_of)}" if len(place_of) > max(place_of) else ", ".join(map(str, place_of))
            raise ConfigError(f"{SKIP} {word}: allowed are sliding_window and numbers of layers, {numbers}")
    return in_memory


def _scales_of(model: Caching, shards: Sequence[Shard]) -> dict[int, dict[str, Found]]:
    """Layer -> "k" and "v" -> the scale's place; a layer with only one of the two is refused."""
    found: dict[int, dict[str, Found]] = {}
    canonical = model.weight_table().canonical
    for shard in shards:
        for name in shard.tensors:
            match = SCALE.fullmatch(canonical(name))
            if match is not None:
                kind = match["own"] or match["proj"] or match["fake"]
                found.setdefault(int(match["layer"]), {}).update(dict.fromkeys(kind, Found(name, shard)))
    half = [scales[kind].name for scales in found.values() if len(scales) == 1 for kind in scales]
    if half:
        raise ConfigError(
            f"{compact(half)}: the other scale of the layer's keys and values is missing; {FLAG} {PER_TOKEN} makes "
            "scales without the files'"
        )
    return found


def _given(found: dict[str, Found], spec: KeyValueSpec, read: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The scales of keys and of values, one per head."""
    keys, values = (_numbers(found[kind], spec.num_kv_heads, read) for kind in "kv")
    return keys, values


def _numbers(found: Found, num_heads: int, read: bool) -> tuple[float, ...]:
    """One scale for each head, checked."""
    info = found.shard.tensors[found.name]
    if math.prod(info.shape) not in (1, num_heads):
        raise ConfigError(
            f"{found.name} has shape {list(info.shape)}: allowed are one scale, or one for each of the {num_heads} KV "
            f"heads; {FLAG} {PER_TOKEN} makes scales without the files'"
        )
    if not read:
        return (1.0,) * num_heads
    with found.shard.open() as reader:
        tensor: Tensor = reader.tensor(found.name).flatten().float()
    numbers: list[float] = tensor.tolist()
    wrong: list[Any] = [number for number in numbers if not (number > 0 and math.isfinite(number))]
    if wrong:
        raise ConfigError(
            f"{found.name} is {wrong[0]}: a scale of the KV cache is a positive number; quantise the checkpoint again, "
            f"or {FLAG} {PER_TOKEN} makes scales without the files'"
        )
    return tuple(numbers) if len(numbers) == num_heads else (numbers[0],) * num_heads


def _warn_of_biases(model: Caching, dtype: torch.dtype) -> None:
    """Warns about models with biases of keys: keys with a few large values lose precision in 8-bit codes, whatever the
    scale. In models with an encoder prefix (Whisper) keys have no bias, although queries have one."""
    text = model.config.text
    if dtype in CODES and text.qkv_bias and text.qk_norm == "none" and not model.config.encoder_prefix:
        log.warning(
            "KV cache: keys of %s have biases and no norm, so some may be far larger than the others; if answers are "
            "worse with codes of 8 bits, %s keeps layers in the activations' dtype",
            model.config.architecture,
            SKIP,
        )
