"""Present a GGUF file as a folder in Hugging Face's format: its metadata as small JSON files, its weights as a link.

Owner: any thread, at start. In: --model FILE.gguf. Out: a folder of this process, removed when the process ends. The
weights are not copied: the loader reads them from the file itself (engine/weights/gguf.py).
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path

from engine.base.errors import ConfigError
from server.render.gguf_tokenizer import tokenizer_files


def is_gguf(name: str) -> bool:
    """Whether a --model is a GGUF file."""
    return name.endswith(".gguf") and not Path(name).is_dir()


def as_folder(name: str, tokenizer: bool) -> str:
    """Make the folder; with `tokenizer`, also the tokenizer files from the GGUF file."""
    # Imported here, so that the server can bind its socket and answer 503 before torch is imported.
    from engine.weights.gguf import GGUF, read_gguf
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
    return str(folder)
