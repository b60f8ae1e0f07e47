"""Present a GGUF file as a folder in Hugging Face's format: its metadata as small JSON files, its weights as a link.

Owner: any thread, at start. In: --model FILE.gguf, or the files of a repository. Out: a folder of this process, removed
when the process ends. The weights are not copied: the loader reads them from the file itself (engine/weights/gguf.py).
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from engine.base.errors import ConfigError
from server.render.gguf_tokenizer import tokenizer_files

USUAL = "Q4_K_M"
PIECE = re.compile(r"-\d{5}-of-\d{5}$")
OTHER_GGUF = re.compile(r"mmproj|.*imatrix", re.I)  # encoders and statistics


def is_gguf(name: str) -> bool:
    """Whether a --model is a GGUF file."""
    return name.endswith(".gguf") and not Path(name).is_dir()


def as_folder(name: str, tokenizer: bool) -> str:
    """Make the folder; with `tokenizer`, also the tokenizer files from the GGUF file."""
    # Imported here, so that the server can bind its socket and answer 503 before torch is imported.
    from engine.weights.gguf import GGUF, piece_path, read_gguf
    from engine.weights.gguf_config import config_of, generation_of

    path = Path(name).absolute()
    if not path.is_file():
        raise ConfigError(f"--model {name}: there is no such file")
    file = read_gguf(path)
    files = {"config.json": config_of(file), "generation_config.json": generation_of(file)}
    if tokenizer:
        files["tokenizer.json"], files["tokenizer_config.json"] = tokenizer_files(file.facts, path)
    folder = Path(tempfile.mkdtemp(prefix="omniloop-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for each, value in files.items():
        (folder / each).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    (folder / GGUF).symlink_to(path)
    for number, piece in enumerate(file.paths[1:], 2):
        piece_path(folder / GGUF, number, len(file.paths)).symlink_to(piece)
    return str(folder)


def chosen(name: str, quant: str, files: Collection[str]) -> list[str]:
    """The files of one model in a repository of GGUF files: one, or all pieces.

    `quant` is the end of the file's name, such as Q4_K_M, or the whole name; empty: Q4_K_M, or the only model there is.
    Raises ConfigError that lists the choices.
    """
    models: dict[str, list[str]] = {}  # name without .gguf and without the piece's number -> files
    for file in sorted(files):
        if file.endswith(".gguf") and not OTHER_GGUF.match(file.rpartition("/")[2]):
            models.setdefault(PIECE.sub("", file.removesuffix(".gguf")), []).append(file)
    asked = quant.removesuffix(".gguf")
    found = [each for each in models if _ends_in(each, asked or USUAL)]
    found = [each for each in found if each.rpartition("/")[2] == asked] or found
    if not asked and not found and len(models) == 1:
        found = list(models)
    if len(found) != 1:
        choices = ", ".join(each.rpartition("/")[2] for each in (found or models)) or "none"
        said = "several files match" if found else "no file matches"
        raise ConfigError(
            f"--model {name}{f':{quant}' if quant else ''}: {said}; the choices are {choices}; write {name}:QUANT with "
            "the end of one of these names, or all of it"
        )
    return models[found[0]]


def _ends_in(name: str, end: str) -> bool:
    head = name[: len(name) - len(end)]
    return name.lower().endswith(end.lower()) and (not head or head[-1] in "-._/")
