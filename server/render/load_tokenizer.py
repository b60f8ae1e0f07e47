"""Chooses and reads the tokenizer of a checkpoint's folder.

Owner: any thread; called once while the server loads. In: a folder or a file, and --tokenizer-mode. Out: a Tokenizer.
The kinds: tokenizer.json (hf_tokenizer.py), Mistral's tekken.json and versioned tokenizer.model (mistral_tokenizer.py),
tiktoken's merge files (tiktoken_tokenizer.py), other sentencepiece models (sentencepiece_model.py), vocabularies of
slow tokenizers (vocabulary_files.py). Two kinds need optional libraries, so a kind's module is imported only when it is
chosen.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.base.errors import ConfigError
from server.render.tokenizer import Tokenizer
from server.render.tokenizer_config import MERGES, VOCABULARY, WORDS, read_templates

MODES = ("auto", "hf", "mistral")
PIECES = "tokenizer.model"
_VERSIONED = re.compile(r"\.model\.v(\d+)(m\d+)?$")  # the names of Mistral's sentencepiece files contain the version


def load_tokenizer(path: str | Path, mode: str = "auto") -> Tokenizer:
    """Read a checkpoint's folder or one tokenizer file; every error names the file."""
    if mode not in MODES:
        raise ConfigError(f"--tokenizer-mode {mode}: allowed are {', '.join(MODES)}")
    source = tokenizer_file(Path(path), mode)
    if source.name == "tokenizer.json":
        from server.render.hf_tokenizer import HfTokenizer

        return HfTokenizer.read(source)
    if source.name in (VOCABULARY, WORDS):
        from server.render.hf_tokenizer import HfTokenizer
        from server.render.vocabulary_files import read_vocabulary_files

        core, config = read_vocabulary_files(source.parent)
        return HfTokenizer(core, config, read_templates(source.parent, config))
    if is_tiktoken(source):
        from server.render.tiktoken_tokenizer import TiktokenTokenizer

        return TiktokenTokenizer.read(source)
    mistrals = mode == "mistral" or (mode == "auto" and (source.parent / "params.json").is_file())
    if source.name == PIECES and not mistrals:
        from server.render.hf_tokenizer import HfTokenizer
        from server.render.sentencepiece_model import CHATGLM_ENDS, is_chatglm, read_pieces

        core, config = read_pieces(source)
        tokenizer = HfTokenizer(core, config, read_templates(source.parent, config))
        if is_chatglm(config):
            tokenizer.ends = tuple(map(tokenizer.added_tokens.__getitem__, CHATGLM_ENDS))
        return tokenizer
    from server.render.mistral_tokenizer import MistralTokenizer

    return MistralTokenizer.read(source)


def tokenizer_file(path: Path, mode: str) -> Path:
    """The tokenizer file to read."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"--tokenizer {path}: there is no such folder or file")
    whole = [path / "tokenizer.json"] if mode != "mistral" else []
    merges = [*path.glob("tiktoken.model"), *sorted(path.glob("*.tiktoken"))] if mode != "mistral" else []
    mistral = [path / "tekken.json", *_versioned(path)] if mode != "hf" else []
    # tokenizer.model may be tiktoken's text, Mistral's first version, or another sentencepiece model
    pairs = [path / VOCABULARY] if (path / MERGES).is_file() else []
    slow = [*pairs, path / WORDS] if mode != "mistral" else []
    for candidate in (*whole, *mistral, *merges, path / PIECES, *slow):
        if candidate.is_file():
            return candidate
    if mode == "mistral":
        raise ConfigError(
            f"{path}: no tekken.json and no tokenizer.model, which --tokenizer-mode mistral reads; "
            "name their folder with --tokenizer, or use --tokenizer-mode auto"
        )
    raise ConfigError(
        f"{path}: no tokenizer.json, and no other tokenizer that is read here (tekken.json, tokenizer.model.v3, "
        "tiktoken.model, *.tiktoken, tokenizer.model, vocab.json with merges.txt, vocab.txt); name a folder that has "
        "one with --tokenizer (transformers' AutoTokenizer.save_pretrained writes tokenizer.json)"
    )


def _versioned(folder: Path) -> list[Path]:
    """Mistral's sentencepiece files, newest version first."""
    found = [(match, path) for path in folder.glob("*.model.v*") if (match := _VERSIONED.search(path.name))]
    return [path for match, path in sorted(found, key=lambda pair: -int(pair[0][1]))]


def is_tiktoken(path: Path) -> bool:
    """Whether the file has tiktoken's format: lines with a token in base64 and its rank."""
    if path.suffix == ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", file.readline(4096)) is not None
