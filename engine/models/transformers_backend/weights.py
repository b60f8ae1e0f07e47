"""Names and shapes of a checkpoint's tensors for a transformers module, and their conversion to its parameters.

transformers reads and writes checkpoints with a list of conversions (renamed modules, stacked experts). Running the
list backwards on the meta device gives the tensors that a checkpoint must hold. Each of our parts takes the tensors of
one conversion and runs it forwards. Thread: the thread that builds the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.base.errors import ConfigError
from engine.kernels.gemm.pack import Placement
from engine.weights.table import Row, Table, Wanted


@dataclass(frozen=True, slots=True)
class Names(Table):
    """A table that also ignores names that match transformers' regular expressions."""

    unexpected: tuple[str, ...] = ()

    def ignored(self, name: str) -> bool:
        full = (name, *(prefix + name for prefix in self.prefixes))
        return Table.ignored(self, name) or any(
            re.search(pattern, text) for pattern in self.unexpected for text in full
        )


class Parameters:
    """The parameters that one conversion makes, or a single parameter without conversion."""

    __slots__ = ("converter", "filled", "in_float32", "kind", "module", "sources", "target")

    def __init__(self, module: Any, target: str, converter: Any, kind: str, in_float32: frozenset[str]) -> None:
        self.module = module
        self.filled: Callable[[], None] | None = None  # called once these parameters are filled
        self.target = target  # the parameter's name, or the first name
        self.converter = converter
        self.kind = kind  # the last word of the tensors' names
        self.in_float32 = in_float32  # parameters that stay float32
        self.sources: list[tuple[str, str, torch.Size]] = []  # name in the checkpoint, pattern, shape

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {self.kind: tuple(Wanted(tuple(shape)) for _, _, shape in self.sources)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        found = [piece for piece in pieces[self.kind] if piece is not None]
        if self.converter is None:
            made = {self.target: found[0]}
        else:
            converter = deepcopy(self.converter)
            for (name, pattern, _), piece in zip(self.sources, found):
                converter.add_tensor(self.target, name, pattern, piece)
            made = converter.convert(self.target, model=self.module, config=self.module.config)
        for name, value in made.items():
            self._set(name, value[0] if isinstance(value, list) else value, placement)
        assert self.filled is not None
        self.filled()

    def _set(self, name: str, value: Tensor, placement: Placement) -> None:
        path, _, last = name.rpartition(".")
        owner = self.module.get_submodule(path)
        if last in owner._buffers:
            held = owner._buffers[last]
            assert held is not None
            owner._buffers[last] = value.to(placement.device, held.dtype, copy=value.is_cpu)
            return
        dtype = torch.float32 if name in self.in_float32 else placement.dtype
        placed = value.to(placement.device, dtype, copy=value.is_cpu).contiguous()
        owner._parameters[last] = nn.Parameter(placed, requires_grad=False)


def await_all(parts: Sequence[Parameters], done: Callable[[], None]) -> None:
    """Arranges that `done` is called once all parts are filled."""
    left = len(parts)

    def filled() -> None:
        nonlocal left
        left -= 1
        if not left:
            done()

    for part in parts:
        part.filled = filled


def parts_and_table(module: Any) -> tuple[list[Parameters], Names]:
    """The parts of a module on the meta device, and their weight rows (`parts.*` of the model)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
        revert_weight_conversion,
    )

    tied = set(module.all_tied_weights_keys)
    state = {name: value for name, value in module.state_dict().items() if name not in tied}
    transforms = get_model_conversion_mapping(module, add_legacy=False)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming) and not isinstance(each, PrefixChange)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, in_float32 = module.base_model_prefix, _in_float32(module)
    parts: dict[str, Parameters] = {}
    for name, value in revert_weight_conversion(module, state).items():
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        kind = name.rpartition(".")[2]
        part = parts.setdefault(target, Parameters(module, target, by_pattern.get(pattern or ""), kind, in_float32))
        if kind != part.kind or (part.converter is None and (target not in state or part.sources)):
            raise ConfigError(f"{type(module).__name__}: how {name} becomes {target} is not supported")
        part.sources.append((name, pattern or name, value.shape))
    stem = f"{prefix}."
    # A decoder inside a model with towers has two orders of prefixes, as in Table.
    prefixes = (stem, "language_model.", stem) if stem == "model." else (stem,)
    names = Names((), prefixes, unexpected=(*(module._keys_to_ignore_on_load_unexpected or ()), *_further(module)))
    rows = tuple(
        Row(tuple(names.canonical(name).rpartition(".")[0] for name, _, _ in part.sources), f"parts.p{number}")
        for number, part in enumerate(parts.values())
    )
    ignore = (*map(names.canonical, tied), "*rotary_emb.inv_freq")
    return list(parts.values()), replace(names, rows=rows, ignore=ignore)


def _further(module: Any) -> list[str]:
    """Regular expressions for multi-token-prediction layers, which come after the last layer."""
    config = module.config.get_text_config(decoder=True)
    count, further = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", 0)
    return [rf"\blayers\.{count + number}\." for number in range(further if isinstance(further, int) else 0)]


def _in_float32(module: Any) -> frozenset[str]:
    """Names of the parameters that stay float32 whatever the model's dtype."""
    patterns = {*(module._keep_in_fp32_modules or ()), *(module._keep_in_fp32_modules_strict or ())}
    words = re.compile("|".join(rf"(^|\.){re.escape(word)}($|\.)" for word in patterns) or "(?!)")
    return frozenset(name for name, _ in module.named_parameters() if words.search(name))
