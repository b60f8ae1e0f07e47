"""mxfp4: gpt-oss. Only experts are quantised; their tensors have special names, which their layer reads (blocks.py)."""

from __future__ import annotations

from engine.checkpoint.section import Section
from engine.quant.base import Headers, Stored


class Mxfp4:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        """Reads no settings: the files already show which modules are quantised."""

    def stored(self, module: str, columns: int, headers: Headers | None) -> Stored | None:
        """None: a module with one matrix is stored in floats."""
        return None
