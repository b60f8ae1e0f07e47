"""What a checkpoint's files say of results of single tokens: BGE-M3's two further layers, and which token ends a step.

In: a folder. Out: heads of tokens, a token id. Thread: any; pure but for the files that they read.
"""

from __future__ import annotations

import logging
from pathlib import Path

from engine.checkpoint.files import read_json
from engine.errors import ConfigError
from engine.model_config import Activation, HeadLayer, TokenHead

log = logging.getLogger(__name__)
SPARSE, COLBERT = "sparse_linear", "colbert_linear"
CONVERT = (
    "python -c \"import torch, safetensors.torch as s; [s.save_file(torch.load(n + '.pt', weights_only=True), n + "
    f"'.safetensors') for n in ('{SPARSE}', '{COLBERT}')]\""
)


def token_heads(folder: Path, hidden: int, activation: Activation) -> tuple[TokenHead, ...]:
    """BGE-M3's: weights of tokens, and vectors of tokens; (): an embedder without them. Pickles are not read."""
    files = [folder / f"{name}.safetensors" for name in (SPARSE, COLBERT)]
    if not all(file.is_file() for file in files):
        if (folder / f"{SPARSE}.pt").is_file() or (folder / f"{COLBERT}.pt").is_file():
            log.warning(
                "%s: weights and vectors of tokens lie in .pt files, which are pickles and are not read; inputs are "
                "served without them. To have both, run in that folder: %s", folder, CONVERT,
            )  # fmt: skip
        return ()
    sparse, colbert = (
        HeadLayer("", hidden, width, bias=True, folder=file.name) for file, width in zip(files, (1, hidden))
    )
    return (
        TokenHead("token_classify", (sparse,), "relu", dropped=(1, 1)),
        TokenHead("token_embed", (colbert,), activation, dropped=(1, 0)),
    )


def step_tag(folder: Path, token: str) -> int:
    """The id of the token that ends a step."""
    tokenizer = read_json(folder / "tokenizer.json")
    for added in tokenizer.get("added_tokens") or ():
        if added.get("content") == token:
            return int(added["id"])
    found = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(found, dict) and token in found:
        return int(found[token])
    raise ConfigError(
        f"tokenizer.json: has no {token}, which ends the steps of a process reward model; name another by "
        "--pooler-config '{\"step_tag_id\": ...}'"
    )
