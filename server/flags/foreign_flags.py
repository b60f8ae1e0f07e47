"""Flags of vLLM, SGLang and llama.cpp that this server does not have, and the advice to users who set them.

A flag whose value describes this server anyway (`--pipeline-parallel-size 1`), or asks for speed only, is accepted with
a line on stderr; a flag with the meaning of ours is taken as ours, with a line too. Any other is refused, and the error
names the flag or the way that does the same here. Values that only the other servers have for our own flags
(`--dtype half`) are handled in the same way. Owner: the command line. Source of the names: the lists of flags in the
three projects' documentation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from server.flags.foreign import Foreign
from server.flags.foreign_llamacpp import LLAMACPP
from server.flags.foreign_sglang import SGLANG
from server.flags.foreign_vllm import VLLM


class Meant(NamedTuple):
    """A value of our own flag that only another server has. `value`: the equivalent here; "": the value is refused."""

    advice: str
    value: str = ""


FOREIGN: dict[str, Foreign] = {**VLLM, **SGLANG, **LLAMACPP}
# Values of our own flags that only other servers have, by flag and value.
PICKLES = Meant("pickles are never read; convert FOLDER writes safetensors")
READ_ANYWAY = Meant("the format is read from the files", "auto")
ONE_LIBRARY = Meant("one library compiles all grammars", "auto")
VALUES = {
    "dtype": {"half": Meant("use float16", "float16"), "float": Meant("use float32", "float32")},
    "endpoint": {
        "/v1/chat/completions": Meant("use chat", "chat"),
        "/v1/completions": Meant("use completions", "completions"),
    },
    "kv-cache-dtype": {
        "bf16": Meant("use bfloat16", "bfloat16"),
        "float16": Meant("16-bit values are bfloat16; use auto or bfloat16"),
        "fp8_inc": Meant("use fp8"),
    },
    "load-format": {
        **dict.fromkeys(("bitsandbytes", "gguf", "mistral", "fastsafetensors", "hf", "runai_streamer"), READ_ANYWAY),
        **dict.fromkeys(("pt", "npcache"), PICKLES),
    },
    "max-model-len": {"-1": Meant("use auto", "auto")},
    "model-impl": {"vllm": Meant("use native", "native")},
    "reasoning-parser": {"deepseek-r1": Meant("use deepseek_r1", "deepseek_r1")},
    "request-rate": {"inf": Meant("use 0 for all requests at once", "0")},
    "structured-outputs-backend": dict.fromkeys(
        ("guidance", "lm-format-enforcer", "outlines", "xgrammar"), ONE_LIBRARY
    ),
    "tokenizer-mode": {"slow": Meant("use hf, which reads tokenizer.json with its own library")},
}
SHORT = {  # of vLLM and llama.cpp, where this server has no meaning for the word
    "O": "optimization-level",
    "a": "alias",
    "ac": "attention-config",
    "asc": "api-server-count",
    "b": "batch-size",
    "c": "ctx-size",
    "cb": "cont-batching",
    "cc": "compilation-config",
    "cmoe": "cpu-moe",
    "ctk": "cache-type-k",
    "ctv": "cache-type-v",
    "dcp": "decode-context-parallel-size",
    "dp": "data-parallel-size",
    "fa": "flash-attn",
    "hf": "hf-repo",
    "hfd": "hf-repo-draft",
    "hff": "hf-file",
    "hfr": "hf-repo",
    "hft": "hf-token",
    "kvu": "kv-unified",
    "m": "model",
    "md": "model-draft",
    "mg": "main-gpu",
    "mm": "mmproj",
    "n": "n-predict",
    "ncmoe": "n-cpu-moe",
    "ngl": "n-gpu-layers",
    "np": "parallel",
    "ot": "override-tensor",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "s": "seed",
    "sc": "speculative-config",
    "sm": "split-mode",
    "t": "threads",
    "tb": "threads-batch",
    "tp": "tensor-parallel-size",
    "ts": "tensor-split",
    "ub": "ubatch-size",
}


def long_name(word: str) -> str:
    """The long form of a word that began with one dash: `tp=2` is `tensor-parallel-size=2`."""
    if word[0] == "O" and word[1:].isdigit():
        return f"optimization-level={word[1:]}"
    name = re.split(r"[.=]", word, maxsplit=1)[0]
    return SHORT.get(name, name) + word[len(name) :]


def meant(name: str, text: str) -> Meant | None:
    """The meaning of a value of our own flag, if only other servers have this value."""
    return VALUES.get(name, {}).get(text)


def foreign(name: str, others: Mapping[str, Foreign] = FOREIGN) -> Foreign | None:
    """The flag's entry. The opposite of a switch has an entry too, with the opposite effect."""
    found = others.get(name)
    if found is None and name.startswith("no-") and (found := others.get(name[3:])) is not None:
        opposite = Foreign(found.advice, () if found.holds else ("",), switch=True)
        return (found if found.anything else opposite) if found.switch else None
    return found
