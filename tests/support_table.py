"""README's support table, made from the families of models, the readable dtypes and the route table.

`python -m tests.support_table` writes the table into README.md between its two marks; tests/test_support_table.py fails
when README holds another one.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from engine.checkpoint.section import Section
from engine.models.base.family import Family
from engine.models.lookup import families
from engine.quant.dialects import DIALECTS
from engine.weights.table import FLOATS
from mm.processors.base import Processor
from server.app import routes_of
from server.flags.config import Config

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- support table: python -m tests.support_table -->\n", "<!-- end of the support table -->\n"
MODALITIES = {"image": "pictures", "video": "films", "audio": "sound"}
REFUSED_FORMATS = "HQQ, AQLM, Quark; pickles (`.bin`, `.pt`)"

READ_CODES = (
    "FP8, INT8 (W8A8 and W8A16), INT4, NF4, FP4, NVFP4, MXFP4, MXFP8; GGUF: "
    "Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS"
)
REFUSED_CODES = "2 and 3 bits, 2:4 sparsity, inputs with zero points, quantised embeddings"


def architectures() -> str:
    """A line per family: its architectures and what its prompts may hold."""
    named: dict[str, list[str]] = {}
    for architecture, family in families().items():
        named.setdefault(family.name, []).append(f"`{architecture}`")
    takes = {}
    for family in families().values():
        read = processor_class(family).modalities if family.processor else ()
        takes[family.name] = ", ".join(["text", *(word for name, word in MODALITIES.items() if name in read)])
    rows = [f"| {name} | {', '.join(found)} | {takes[name]} |" for name, found in named.items()]
    return "\n".join(["| family | architectures | prompts hold |", "|---|---|---|", *rows])


def processor_class(family: Family) -> type[Processor]:
    """The class that makes the media of a family's checkpoints."""
    named = family.processor if isinstance(family.processor, str) else family.processor(Section({}, "config.json"), ())
    module, _, kind = named.partition(":")
    return getattr(importlib.import_module(f"mm.processors.{module}"), kind)


def routes() -> list[str]:
    """Paths of the route table."""
    return [f"`{path}`" for path in {line.path.replace(":path", ""): None for line in routes_of(Config())}]


def support_table() -> str:
    """The block between README's marks."""
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
    quantised = ", ".join(name for name in DIALECTS if " " not in name)
    kinds = [
        "| | works | refused, with the reason |",
        "|---|---|---|",
        f"| weights | safetensors in {dtypes}; Hugging Face and Mistral folders | {REFUSED_FORMATS} |",
        f"| quantised weights | {quantised}: {READ_CODES} | {REFUSED_CODES} |",
        f"| routes | {', '.join(routes())} | those of the other kind of model (501) |",
    ]
    return architectures() + "\n\n" + "\n".join(kinds) + "\n"


def in_readme(text: str) -> str:
    """The block that README's text holds now."""
    return text.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    README.write_text(before + BEGIN + support_table() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
