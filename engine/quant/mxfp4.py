"""mxfp4: gpt-oss. Experts alone are quantised, in tensors of their own names, which their layer reads (blocks.py)."""

from __future__ import annotations

from engine.checkpoint.section import Section
from engine.quant.base import Headers, Stored


class Mxfp4:
    """The dialect."""

    def __init__(self, settings: Section) -> None:
        """The configuration names what is not quantised; the files say the same."""

    def stored(self, module: str, columns: int, headers: Headers | None) -> Stored | None:
        """None: a module with one matrix is stored in floats."""
        return None
