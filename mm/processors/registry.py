"""Which processor a checkpoint needs.

Loop, once at start-up. In: the checkpoint's folder and its config.json as a dict. Out: a Processor, or None for a model
that reads text only. The family's file is imported here, when it is needed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from mm.processors.base import Processor

_BY_MODEL_TYPE = {
    "qwen2_5_omni": "qwen_omni:QwenOmni",
    "qwen2_5_omni_thinker": "qwen_omni:QwenOmni",
    "qwen2_vl": "qwen_vl:QwenVL",
    "qwen2_5_vl": "qwen_vl:QwenVL",
}


def processor_for(folder: str | Path, raw_config: dict[str, Any], picture_bytes: int = 0) -> Processor | None:
    """The processor of the checkpoint in `folder`; ValueError when its files contradict each other.

    `picture_bytes`: the tower's device makes patches itself, of decoded pictures up to so large; 0: it does not.
    """
    place = _BY_MODEL_TYPE.get(raw_config.get("model_type", ""))
    if place is None:
        return None
    module, _, name = place.partition(":")
    family = getattr(importlib.import_module(f"mm.processors.{module}"), name)
    processor: Processor = family(folder, raw_config, picture_bytes)
    return processor
