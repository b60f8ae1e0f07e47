"""Builds a module of transformers without weights from config.json, and finds its caches and experts.

Thread: any. The module is built on the meta device, where it takes no memory, and runs there once on three tokens. Its
attention calls (calls.py) give the number of caches, and their heads, widths, windows and scales; its experts calls
give the layers with experts and their numbers. State outside of attention (convolutions, recurrent states) has no place
in our cache, so such modules are refused.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from engine.base.errors import ConfigError
from engine.models.transformers_backend import experts
from engine.models.transformers_backend.attention import NAME, attention
from engine.models.transformers_backend.calls import Calls, recording

COPIES = {"kimi_k2": "deepseek_v3"}  # model_type of a copied class -> model_type of the original class
TOKENS = 3  # tokens of the forward on the meta device
LAYER_TYPES = {"full_attention", "sliding_attention"}
IGNORED = (
    "auto_map", "quantization_config", "_attn_implementation", "architectures", "torch_dtype", "dtype", "model_type",
)  # fmt: skip


@cache
def known() -> dict[str, str]:
    """Architecture -> model_type, of every text decoder in transformers with an attention interface."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    found: dict[str, str] = {}
    for kind, names in NAMES.items():
        for name in (names,) if isinstance(names, str) else names:
            if name.endswith(("ForCausalLM", "LMHeadModel")):
                found.setdefault(name, kind)
    return found


@cache
def seeing() -> dict[str, str]:
    """Architecture -> model_type, of every model in transformers that takes pictures or audio and generates text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as NAMES

    named = [(name, kind) for kind, name in {**NAMES, **SEEING}.items() if isinstance(name, str)]
    return {name: kind for name, kind in reversed(named) if name.endswith("ForConditionalGeneration")}


def decoder_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the decoder: all of it, or the text_config of a model with towers."""
    inside = values.get("text_config")
    if not isinstance(inside, dict):
        return values
    tied = {key: values[key] for key in ("tie_word_embeddings",) if key in values}
    return {**inside, **tied}


def config_of(architecture: str, values: Mapping[str, Any]) -> Any:
    """config.json as transformers' configuration object."""
    from transformers import CONFIG_MAPPING

    kind = kind_of(architecture, values)
    return CONFIG_MAPPING[kind].from_dict({key: value for key, value in values.items() if key not in IGNORED})


def kind_of(architecture: str, values: Mapping[str, Any]) -> str:
    """The model_type under which transformers registers the configuration."""
    kind = str(values.get("model_type") or {**seeing(), **known()}[architecture])
    return COPIES.get(kind, kind)


def build(architecture: str, values: Mapping[str, Any]) -> Any:
    """The module of a checkpoint on the meta device. Raises ConfigError; its text follows the architecture's name."""
    transformers, initialization, module_class = _imported(architecture)
    if not module_class._supports_attention_backend:
        raise ConfigError(f"is in transformers {transformers.__version__} without its attention interface")
    with refusing(), torch.device("meta"), initialization.no_init_weights():
        config = config_of(architecture, values)
        config._attn_implementation = NAME
        for name in config.sub_configs:
            section = getattr(config, name, None)
            if section is not None and section is not config.get_text_config(decoder=True):
                section._attn_implementation = None  # a tower uses transformers' own attention
        module = module_class(config)
        module.config._experts_implementation = experts.NAME
    return module.train(mode=False).requires_grad_(False)


def _imported(architecture: str) -> tuple[Any, Any, Any]:
    """transformers, its `initialization`, and the class; registers our attention and experts functions."""
    try:
        import transformers
        from transformers import initialization
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
        ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.experts)
        return transformers, initialization, getattr(transformers, architecture)
    except Exception as error:  # a package built for another torch may raise any exception
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        raise ConfigError(
            f"cannot be imported from transformers, which uses what else is installed (a torchvision must fit torch "
            f"{torch.__version__}): {_line(first)}"
        ) from None


def decoder_in(module: Any) -> Any:
    """The decoder without the head and without towers."""
    base = getattr(module, module.base_model_prefix, None)
    return module.get_decoder() if type(module).__name__ in seeing() else base


def axes_of(base: Any) -> int:
    """Position axes per token: 1, or one per mrope section; 3 if the class has M-RoPE without named sections."""
    if not hasattr(base, "get_rope_index"):
        return 1
    rope = getattr(base.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return len(rope.get("mrope_section") or (1, 1, 1))


def calls_of(module: Any) -> Calls:
    """The calls of a forward of a module on the meta device. The run may change the module."""
    calls = Calls()
    base = decoder_in(module)
    if base is None or "position_ids" not in inspect.signature(base.forward).parameters:
        raise ConfigError("has a decoder that takes no position_ids: a chunk of a prompt would stand at its beginning")
    _refuse_states(module, base)
    config, positions = base.config, torch.arange(TOKENS, device="meta")
    with refusing(), recording(calls, TOKENS):
        axes = axes_of(getattr(module, module.base_model_prefix, None))
        visible = positions.expand(axes, -1) if axes > 1 else positions
        run(base, visible, input_ids=torch.zeros(1, TOKENS, dtype=torch.int64, device="meta"))
    types = getattr(config, "layer_types", None) or []
    if len(calls.attention) < config.num_hidden_layers:
        raise ConfigError(
            f"has {config.num_hidden_layers} layers and {len(calls.attention)} attend: what the others "
            "keep of earlier tokens is not served through transformers"
        )
    hidden = [call for call, of in zip(calls.attention, types) if of == "sliding_attention" and not call.window]
    if hidden:
        raise ConfigError("has layers whose window is set by a mask alone")
    return calls


def run(base: nn.Module, positions: Tensor, **tokens: Tensor) -> Tensor:
    """Runs the decoder on positions [T] or [axes, T] and `input_ids` [1, T] or `inputs_embeds` [1, T, hidden].

    Returns hidden states after the final norm, [T, hidden].
    """
    found = base(position_ids=positions.unsqueeze(-2), use_cache=False, return_dict=True, **tokens)
    hidden: Tensor = found.last_hidden_state[0]
    return hidden


def fill_buffers(module: Any, device: str) -> None:
    """Computes the module's buffers that depend only on the configuration (frequency tables), on the device."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor._is_hf_initialized = True  # the loader has filled what checkpoints hold
    for name, buffer in list(module.named_non_persistent_buffers()):
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner).register_buffer(last, torch.empty_like(buffer, device=device), persistent=False)
    module.initialize_weights()


def settle_frequencies(module: Any, longest: int, device: str) -> None:
    """Fixes length-dependent frequency tables at the longest context, so that a step's rows do not affect each
    other."""
    for part in module.modules():
        kind = getattr(part, "rope_type", None)
        kinds = kind if isinstance(kind, dict) else {None: kind}
        if not any(name in ("dynamic", "longrope") for name in kinds.values()):
            continue
        if isinstance(kind, dict):
            raise ConfigError(f"{type(part).__name__}: frequencies that stretch, by layer type, are not supported")
        part(torch.zeros(1, 1, 1, device=device), torch.tensor([[longest - 1]], device=device))
        part.rope_type = "default"


def _refuse_states(module: Any, decoder: Any) -> None:
    config = module.config.get_text_config(decoder=True)
    types = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    convolutions = decoder is not None and any(isinstance(part, nn.Conv1d) for part in decoder.modules())
    if types or convolutions or module._is_stateful:
        what = ", ".join(sorted(types)) or "a state that goes from token to token"
        raise ConfigError(f"has {what}: only attention over all or the last tokens is served")


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turns any exception of transformers about a configuration into a one-line ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except NotImplementedError:  # an operation whose result or shape depends on values
        raise ConfigError(
            "reads numbers on the host to decide what its layers compute, and a step's graph records one course: "
            "only layers whose course is fixed are served through transformers"
        ) from None
    except Exception as error:
        raise ConfigError(f"cannot be built by transformers from this config.json: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:200]
