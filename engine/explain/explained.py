"""Explained: the model of a configuration as text: every part, its cache, and the kernels that steps launch.

Thread: any; nothing is allocated. In: an EngineConfig whose `model` is a folder with a config.json, and a device, which
need not be present. The model is built as at start. Its parts are filled with tensors without memory and its real steps
run, so the printed kernels are the kernels of a server. Out: lines. Raises the ConfigErrors of a start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import TypeVar

import torch

from engine.base.config import EngineConfig
from engine.base.model_config import ModelConfig
from engine.cache.layout import CacheLayout
from engine.cache.spec import CacheSpec, KeyValueSpec
from engine.cache.state import StateSpec
from engine.checkpoint.config import resolve_dtype
from engine.encoders.tower import Tower, each
from engine.explain.launches import Launches
from engine.explain.parts import fields_of, held_of, line_of, modules_of, objects_of
from engine.explain.runs import DECODED, fill, steps_of, towers_of
from engine.explain.sections import Section, Steps
from engine.kernels.gemm.pack import Placement
from engine.kernels.target import target
from engine.layers.states import set_states
from engine.models.base.model import Model
from engine.models.registry import build_model, family_of, load_model_config
from engine.quant.kv import stored_specs
from engine.quant.online import requested

T = TypeVar("T")
V = TypeVar("V")
POOLER = "pooler"  # the attribute of engine/models/base/model.py: Model
BLOCK = 16  # tokens, over which a page's alignment is shared
NOTE = (
    f"kernels by the number of tokens: up to {DECODED} are one token of a request each, more are a prompt; of "
    "an encoder by the rows of an item"
)
TIMED = (
    "torch.mm and torch.addmm are products of the vendor's library; the start measures which algorithm is "
    "fastest, and from how many rows on matrices are dequantised as a whole"
)


def explain(config: EngineConfig, device: str) -> Iterator[str]:
    """The lines. Raises ConfigError if a start would refuse the configuration; `device`: "cpu" or a name of torch's."""
    model_config = load_model_config(
        config.model, config.hf_overrides, config.without_media, config.model_impl, config.runner, config.pooler
    )
    model_config = requested(model_config, config.quantization)
    dtype = resolve_dtype(model_config, config.dtype, device)
    owners: dict[int, str] = {}
    with torch.no_grad(), Launches(owners, device, pretend=True) as launches:
        model = build_model(model_config, dtype, device)
        set_states(model, config.states, device == "cpu", exact=config.deterministic)
        parts = Parts(model)
        owners |= parts.paths | {id(model): ""}
        specs = stored_specs(model, config.kv_cache_dtype, config.kv_cache_skip_layers, None, read=False)
        with model.abridged():
            fill(model, launches.tensors, Placement(dtype, device, config.deterministic), parts.is_run)
            layout = CacheLayout(specs, config.block_size)
            run = partial(steps_of, model, layout, device, launches, config.deterministic)
            steps, unknown = of_any_class(model_config, run)
        items, unknown_items = of_any_class(model_config, partial(towers_of, model, launches))
    yield from head(model, device)
    yield from parts.body(specs, steps).text()
    if model.pooler is not None:
        yield from parts.pooler(steps).text()
    for tower in each(model.towers):
        yield from parts.tower(tower, items.get(tower.modalities[0], {})).text()
    yield from (f"kernels that are not named: {reason}" for reason in (unknown, unknown_items) if reason)
    yield NOTE
    if device != "cpu":
        yield TIMED


def of_any_class(config: ModelConfig, run: Callable[[], dict[T, V]]) -> tuple[dict[T, V], str]:
    """The result of `run` and "", or for classes of transformers {} and the reason why `run` failed: such a class may
    read tensors' values."""
    try:
        return run(), ""
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if config.implementation == "native":
            raise
        return {}, f"transformers' class cannot be followed without its weights ({error})"


def head(model: Model, device: str) -> Iterator[str]:
    """The lines about the model, its dtype and its device."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    how = {"native": "a file here", "transformers": "transformers' class", "mixed": "transformers' towers"}
    family = family_of(config.architecture, config.implementation).name
    yield f"{config.architecture} ({family}), by {how[config.implementation]}, in {dtype} on {device} ({target().arch})"
    yield f"text: {fields_of(config.text, ('layers',))}"
    if config.pooling is not None:
        yield f"pooling: {fields_of(config.pooling, ('labels', 'prompts'))}"


class Parts:
    """A model's parts by path, divided into sections."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._objects = objects_of(model)
        self.paths = {id(part): path for path, part in self._objects.items()}
        modules = modules_of(model.weight_table(), model)
        self._lines = {path: line_of(part, modules.get(id(part), ())) for path, part in self._objects.items()}

    def is_run(self, part: object) -> bool:
        """Whether forward runs a part; only parts of layers that forward leaves out are not run."""
        listed, _, rest = self.paths.get(id(part), "").partition(".")
        number = rest.partition(".")[0]
        return listed != "layers" or not number.isdigit() or self._model.is_run(int(number))

    def body(self, specs: Sequence[CacheSpec], steps: Steps) -> Section:
        """The section of all parts but pooler and towers."""
        others = (POOLER, *(self.paths[id(tower)] for tower in each(self._model.towers)))
        own = [path for path in self._objects if not any(map(partial(_is_below, path), others))]
        title = "encoder" if self._model.config.is_encoder else "decoder"
        return self._section(title, own, self._of_layers(specs), _without(POOLER, steps))

    def pooler(self, steps: Steps) -> Section:
        """The section of the pooler, which makes a vector or scores from hidden states."""
        own = [path for path in self._objects if _is_below(path, POOLER)]
        only = {size: [one for one in run if _is_below(one.owner, POOLER)] for size, run in steps.items()}
        return self._section("pooler", own, {}, only)

    def tower(self, tower: Tower, steps: Steps) -> Section:
        """The section of one tower."""
        root, config = self.paths[id(tower)], getattr(tower, "config", None)
        own = [path for path in self._objects if _is_below(path, root)]
        facts = {root: fields_of(config)} if is_dataclass(config) else {}
        return self._section(f"encoder of {' and '.join(tower.modalities)}", own, facts, steps)

    def _section(self, title: str, own: Collection[str], facts: Mapping[str, str], steps: Steps) -> Section:
        held = {path: text for path in own if (text := held_of(self._objects[path]))}
        lines = {path: self._lines[path] for path in own}
        return Section(title, lines, held, facts, steps)

    def _of_layers(self, specs: Sequence[CacheSpec]) -> dict[str, str]:
        """Path of a layer -> its configuration, and its cache per token."""
        facts = {}
        for number, layer in enumerate(self._model.config.text.layers):
            other, places = layer.kv_shared_with, self._model.caches_of(number)
            cached = "; ".join(captured_of(specs[place]) for place in places) or "no cache"
            if other is not None:
                cached = f"reads the cache of layer {other}"
            facts[f"layers.{number}"] = f"{fields_of(layer)}; {cached}"
        return facts


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}.")


def _without(root: str, steps: Steps) -> Steps:
    return {size: [one for one in run if not _is_below(one.owner, root)] for size, run in steps.items()}


def captured_of(spec: CacheSpec) -> str:
    """A layer's cache in words."""
    if isinstance(spec, StateSpec):
        each = spec.tail_bytes // spec.ring
        return f"caches a state of {spec.state_bytes:,} bytes, and of the last {spec.ring} tokens {each:,} bytes each"
    size = spec.block_bytes(BLOCK) // BLOCK
    window = f" of the last {spec.kind.window:,} tokens" if spec.kind.window else ""
    if isinstance(spec, KeyValueSpec):
        dtype = str(spec.dtype).removeprefix("torch.")
        what = f"keys and values of {spec.num_kv_heads} heads of {spec.head_dim} in {dtype}"
    else:
        what = type(spec).__name__
    return f"caches {what}{window}, {size:,} bytes a token" if size else "caches nothing"
