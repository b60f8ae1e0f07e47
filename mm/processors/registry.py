"""The processor of a served checkpoint, by the name that the model's family gives it (engine/models).

Loop, once at start-up. In: the name, "module:Class" of this folder; the checkpoint's folder and its config.json as a
dict. Out: a Processor, or None for a model that reads text only. The processor's file is imported when it is needed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from mm.processors.base import Encode, Processor, no_texts


def processor_for(
    name: str, folder: str | Path, raw_config: dict[str, Any], picture_bytes: int = 0, encode: Encode = no_texts
) -> Processor | None:
    """The processor of the checkpoint in `folder`; ValueError if its files contradict each other or are invalid.

    `picture_bytes`: the encoder's device makes patches of pictures up to this size itself; 0: the device makes none.
    `encode`: the tokenizer's, for the texts that a processor writes around and between its rows.
    """
    if not name:
        return None
    module, _, kind = name.partition(":")
    made: type[Processor] = getattr(importlib.import_module(f"mm.processors.{module}"), kind)
    texts = {"encode": encode} if made.writes_texts else {}
    try:
        return made(folder, raw_config, picture_bytes, **texts)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(
            f"config.json or the processor's files hold a value that cannot be read ({type(error).__name__}: {error})"
        ) from None
