"""The table quant_method -> dialect: a dialect is a file of this folder and one line here. None is served yet.

Thread: any; filled at import. A dialect tells from a module's name and `quantization_config` how the module is stored:
a Scheme, or None where the module is not quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.quant.base import Scheme

Dialect = Callable[[str, Mapping[str, Any]], "Scheme | None"]

DIALECTS: dict[str, Dialect] = {}
