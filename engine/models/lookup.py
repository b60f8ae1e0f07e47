"""Finds the file that serves an architecture: the file with its name, or the file that ALIASES names.

A file of text/, media/ or pooling/ has the `model_type` of its checkpoints as name, and its FAMILY lists the classes of
config.json that it serves. Names are compared without case and underscores, first whole, then without the ending that
names the class's task. A file is imported when a checkpoint needs it; only `families` imports all files. Thread: any.

    Qwen3VLMoeForConditionalGeneration -> qwen3vlmoe -> engine/models/media/qwen3_vl_moe.py -> FAMILY
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from functools import cache

from engine.models.base.family import Family

ROOMS = ("text", "media", "pooling")
ALIASES = {  # class, or beginning of class names -> file, where the file has a different name
    "Camembert": "roberta",
    "FalconMamba": "mamba",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "GLM4VForCausalLM": "chatglm",
    "HF_ColBERT": "colbert",
    "HunYuanDenseV1": "hunyuan_v1_dense",
    "HunYuanMoEV1": "hunyuan_v1_moe",
    "Llama4ForCausalLM": "llama4_text",
    "MT5": "t5",
    "Mamba2": "mamba",
    "New": "gte",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "SmolVLM": "idefics3",
    "XLMRobertaLoRA": "xlm_roberta",
}
ENDING = re.compile(r"(Thinker)?(For[A-Z]\w*|LMHeadModel|EncoderModel|Model)$", re.IGNORECASE)
THROUGH = "engine.models.transformers_backend.model"  # serves other text models of transformers
SEEING = "engine.models.transformers_backend.seeing"  # serves other vision models of transformers
MIXED = "engine.models.transformers_backend.mixed"  # serves transformers' towers with a native decoder


def family_of(architecture: str, implementation: str = "native") -> Family:
    """The family of an architecture with this implementation."""
    found = served(architecture)
    if implementation == "native" or (found is not None and found[1].through):
        assert found is not None, architecture
        return found[1]
    through = SEEING if architecture.endswith("ForConditionalGeneration") else THROUGH
    family: Family = importlib.import_module(MIXED if implementation == "mixed" else through).FAMILY
    return family


def served(architecture: str) -> tuple[str, Family] | None:
    """(class in the family's spelling, family); None: no file serves the class."""
    module = file_of(architecture)
    family = None if module is None else _family_in(module)
    if family is None:
        return None
    if architecture in family.architectures:
        return architecture, family
    wanted = architecture.lower()  # early files say LLaMAForCausalLM
    return next(((name, family) for name in family.architectures if name.lower() == wanted), None)


def file_of(architecture: str) -> str | None:
    """The module with the name of an architecture, whether or not it serves the class."""
    named, aliases = files(), {_plain(name): _plain(file) for name, file in ALIASES.items()}
    whole, family = _plain(architecture), _plain(ENDING.sub("", architecture))
    file = aliases.get(whole) or aliases.get(family)
    return named[file] if file else named.get(whole) or named.get(family)


def inner_decoder(model_type: str) -> Family | None:
    """The family of a decoder section with this model_type inside a model with towers; None: unknown."""
    module = files().get(_plain(model_type), "")
    family = _family_in(module) if module == f"engine.models.text.{model_type}" else None
    return family if family is not None and family.inside else None


def inner_decoders() -> list[str]:
    """Every model_type with an inner decoder, for an error text; imports all decoders."""
    kinds = [module.rpartition(".")[2] for module in files().values() if module.startswith("engine.models.text.")]
    return [kind for kind in kinds if inner_decoder(kind) is not None]


@cache
def families() -> dict[str, Family]:
    """Architecture -> family, for all native files; imports all files."""
    found = [family for module in files().values() if (family := _family_in(module)) is not None]
    return {name: family for family in found for name in family.architectures}


def files() -> dict[str, str]:
    """Name without underscores -> module, for all three packages."""
    found = {}
    for room in ROOMS:
        package = importlib.import_module(f"engine.models.{room}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            found[_plain(module.name.rpartition(".")[2])] = module.name
    return found


def _family_in(module: str) -> Family | None:
    """The module's FAMILY; None: the file only holds parts for families."""
    return getattr(importlib.import_module(module), "FAMILY", None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
