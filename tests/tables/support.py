"""The tables of architectures, formats and routes, from the registry of models, the readable types and the routes."""

from __future__ import annotations

import importlib

from engine.checkpoint.section import Section
from engine.models.base.family import Family
from engine.models.lookup import families
from engine.quant.dialects import DIALECTS
from engine.weights.table import FLOATS
from mm.processors.base import Processor
from server.dialects.table import operations, routes_of
from server.flags.config import Config

MODALITIES = {"image": "images", "video": "video", "audio": "audio"}
REFUSED_FORMATS = "HQQ, AQLM, Quark; pickles (`.bin`, `.pt`; `omniloop convert` writes safetensors)"

READ_CODES = (
    "FP8, INT8 (W8A8 and W8A16), INT4, NF4, FP4, NVFP4, MXFP4, MXFP8; GGUF: "
    "Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS"
)
REFUSED_CODES = "2 and 3 bits, 2:4 sparsity, inputs with zero points, quantised embedding tables"


def architectures() -> str:
    """Markdown: a row for each family with its architectures and the media that its prompts may hold."""
    named: dict[str, list[str]] = {}
    for architecture, family in families().items():
        named.setdefault(family.name, []).append(f"`{architecture}`")
    takes = {}
    for family in families().values():
        read = processor_class(family).modalities if family.processor else ()
        takes[family.name] = ", ".join(["text", *(word for name, word in MODALITIES.items() if name in read)])
    rows = [f"| {name} | {', '.join(found)} | {takes[name]} |" for name, found in named.items()]
    return "\n".join(["| family | architectures | prompts hold |", "|---|---|---|", *rows]) + "\n"


def processor_class(family: Family) -> type[Processor]:
    """The processor class of a family's checkpoints."""
    named = family.processor if isinstance(family.processor, str) else family.processor(Section({}, "config.json"), ())
    module, _, kind = named.partition(":")
    return getattr(importlib.import_module(f"mm.processors.{module}"), kind)


def formats() -> str:
    """Markdown: the kinds of files that are served or refused."""
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
    quantised = ", ".join(name for name in DIALECTS if " " not in name)
    kinds = [
        "| | served | refused with a reason |",
        "|---|---|---|",
        f"| weights | safetensors in {dtypes}; Hugging Face and Mistral folders | {REFUSED_FORMATS} |",
        f"| quantised weights | {quantised}: {READ_CODES} | {REFUSED_CODES} |",
    ]
    return "\n".join(kinds) + "\n"


def routes() -> str:
    """Markdown: a row for each route that is served without further flags."""
    served = {line.path.replace(":path", ""): line.methods for line in routes_of(Config())}
    rows = [
        f"| `{method} {path}` | {operation.summary} |"
        for (method, path), operation in operations().items()
        if method in (served.get(path) or ())
    ]
    return "\n".join(["| route | |", "|---|---|", *rows]) + "\n"
