"""An adapter's tokenizer and chat template: the base's are used, so others than the base's are reported.

Thread: pool. In: the adapter's folder, the base's folder, and the number of the model's tokens. Out: a line of the log
if they differ; AdapterError if the adapter was trained with tokens that the model lacks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.base.errors import AdapterError

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
MOST = 1 << 27  # bytes of a file that is read
Read = Callable[[str, int], bytes | None]  # name, largest size -> the file's bytes; None: there is none
log = logging.getLogger("omniloop.engine")


def check_texts(name: str, read: Read, base: Path, num_tokens: int) -> None:
    """Compares the files of an adapter with those of the base; `num_tokens`: the rows of the model's logits."""

    def of_base(file: str, most: int) -> bytes | None:
        return (base / file).read_bytes() if (base / file).is_file() else None

    tokens = read(TOKENIZER, MOST)
    if tokens is not None and tokens != of_base(TOKENIZER, MOST):
        found = _tokens(tokens)
        last = max(found.values(), default=0)
        if last >= num_tokens:
            raise AdapterError(
                f"{TOKENIZER} has the token {last}, and the model has tokens up to {num_tokens - 1}; adapters with "
                "tokens of their own are not served"
            )
        if found != _tokens(of_base(TOKENIZER, MOST) or b"{}"):
            log.warning("adapter %s has another tokenizer than the model, whose tokenizer is used", name)
    template = _template(read)
    if template and template != _template(of_base):
        log.warning("adapter %s has another chat template than the model, whose template is used", name)


def _tokens(data: bytes) -> dict[str, int]:
    """Text -> id, of a tokenizer.json."""
    values = _json(data)
    model = values.get("model")
    found: dict[str, Any] = {}
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram: the place is the id
        found = {str(entry[0]): place for place, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    elif isinstance(vocabulary, dict):
        found = vocabulary
    added = values.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict):
            found[str(entry.get("content"))] = entry.get("id")
    return {text: number for text, number in found.items() if isinstance(number, int)}


def _template(read: Read) -> str:
    """The chat template, from its own file or from the tokenizer's settings; "": none."""
    data = read(TEMPLATE, MOST)
    if data is not None:
        return data.decode("utf-8", "replace").strip()
    found = _json(read(SETTINGS, MOST) or b"{}").get("chat_template")
    return found.strip() if isinstance(found, str) else ""


def _json(data: bytes) -> dict[str, Any]:
    """A JSON object; {} for anything else, because these files decide nothing."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
