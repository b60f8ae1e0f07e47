"""Tiny random adapters of the checkpoints of tests/tiny.py, made and saved by PEFT.

`adapted(name, folder, ...)` gives PEFT's model after it has saved the adapter: the oracle of tokens and merged weights.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from tests import tiny

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(name: str, folder: Path, seed: int = 0, size: float = 0.3, **settings: Any) -> Any:
    """Saves an adapter of the tiny checkpoint in `folder`; `settings` go to LoraConfig. B is not zero."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(tiny.reference(tiny.checkpoint(name)), LoraConfig(**{"lora_alpha": 16, **settings}))
        with torch.no_grad():
            for key, tensor in model.named_parameters():
                if ".lora_B." in key:
                    tensor.normal_(0, size / tensor.shape[1] ** 0.5)
        model.save_pretrained(folder)
    return model.eval()
