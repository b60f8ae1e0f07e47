"""Which file serves an architecture: the one that has its name, or the one that ALIASES names.

A file of text/, media/ or pooling/ is named as the `model_type` of its checkpoints, and its FAMILY lists the classes of
config.json that it serves. Names are compared without case and underscores, whole and without the ending that says what
a class is for. A file is imported when a checkpoint names it; only the list of all families imports all. Thread: any.

    Qwen3VLMoeForConditionalGeneration -> qwen3vlmoe -> engine/models/media/qwen3_vl_moe.py -> FAMILY
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from functools import cache

from engine.models.base.family import Family

ROOMS = ("text", "media", "pooling")
ALIASES = {  # a class, or the beginning of some classes, whose file has another name
    "Camembert": "roberta",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "GLM4VForCausalLM": "chatglm",
    "HF_ColBERT": "colbert",
    "HunYuanDenseV1": "hunyuan_v1_dense",
    "HunYuanMoEV1": "hunyuan_v1_moe",
    "Llama4ForCausalLM": "llama4_text",
    "MT5": "t5",
    "New": "gte",
    "SmolVLM": "idefics3",
    "XLMRobertaLoRA": "xlm_roberta",
}
ENDING = re.compile(r"(Thinker)?(For[A-Z]\w*|LMHeadModel|EncoderModel|Model)$", re.IGNORECASE)
THROUGH = "engine.models.transformers_backend.model"  # serves the others that transformers has
SEEING = "engine.models.transformers_backend.seeing"  # and of these the ones that see
MIXED = "engine.models.transformers_backend.mixed"  # or their towers alone, before a decoder of ours


def family_of(architecture: str, implementation: str = "native") -> Family:
    """The family of an architecture that is served in this way."""
    if implementation == "native":
        found = served(architecture)
        assert found is not None, architecture
        return found[1]
    through = SEEING if architecture.endswith("ForConditionalGeneration") else THROUGH
    family: Family = importlib.import_module(MIXED if implementation == "mixed" else through).FAMILY
    return family


def served(architecture: str) -> tuple[str, Family] | None:
    """A class as its family spells it, and the family; None where no file serves it."""
    module = file_of(architecture)
    family = None if module is None else _family_in(module)
    if family is None:
        return None
    if architecture in family.architectures:
        return architecture, family
    wanted = architecture.lower()  # the first files say LLaMAForCausalLM
    return next(((name, family) for name in family.architectures if name.lower() == wanted), None)


def file_of(architecture: str) -> str | None:
    """The module that has the name of an architecture, whether it serves the class or not."""
    named, aliases = files(), {_plain(name): _plain(file) for name, file in ALIASES.items()}
    whole, family = _plain(architecture), _plain(ENDING.sub("", architecture))
    file = aliases.get(whole) or aliases.get(family)
    return named[file] if file else named.get(whole) or named.get(family)


def inner_decoder(model_type: str) -> Family | None:
    """The decoder that a section of this model_type describes, where models with towers have it inside."""
    module = files().get(_plain(model_type), "")
    family = _family_in(module) if module == f"engine.models.text.{model_type}" else None
    return family if family is not None and family.inside else None


def inner_decoders() -> list[str]:
    """Every model_type for which there is an inner decoder, for an error; imports all decoders."""
    kinds = [module.rpartition(".")[2] for module in files().values() if module.startswith("engine.models.text.")]
    return [kind for kind in kinds if inner_decoder(kind) is not None]


@cache
def families() -> dict[str, Family]:
    """Every architecture that a file of ours serves, and its family; imports all."""
    found = [family for module in files().values() if (family := _family_in(module)) is not None]
    return {name: family for family in found for name in family.architectures}


def files() -> dict[str, str]:
    """The modules of all rooms by their names without underscores."""
    found = {}
    for room in ROOMS:
        package = importlib.import_module(f"engine.models.{room}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            found[_plain(module.name.rpartition(".")[2])] = module.name
    return found


def _family_in(module: str) -> Family | None:
    """None for a file that has parts for families and is none itself."""
    return getattr(importlib.import_module(module), "FAMILY", None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
