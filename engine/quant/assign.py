"""assign: gives each linear layer of a model its scheme, before the layer says which tensors it expects.

Owner: the thread that builds the model. In: a model whose parts are empty, and its configuration. Out: the parts'
`scheme`, changed in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.quant.base import UNQUANTISED
from engine.quant.dialects import DIALECTS
from engine.weights.table import Table, parts_of

if TYPE_CHECKING:
    from engine.model_config import ModelConfig
    from engine.models.base import Model


def assign(model: Model, table: Table, config: ModelConfig) -> None:
    """Gives each linear layer of the model the scheme that the configuration names for its modules."""
    settings = config.raw.get("quantization_config")
    if settings is None:
        return
    dialect = DIALECTS[settings["quant_method"]]
    for _, names, part in parts_of(table, model):
        if not hasattr(part, "scheme"):
            continue
        schemes = [dialect(name, settings) or UNQUANTISED for name in names]
        if any(scheme != schemes[0] for scheme in schemes):
            raise ConfigError(f"{', '.join(names)} are stored in different ways; one product needs them stored alike")
        part.scheme = schemes[0]
