"""Tiny random checkpoints of dual-encoder models, in Hugging Face format, and what transformers computes with them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests import pooling_kit as kit
from tests import tiny
from tests.tiny_seeing import CLIP_MEAN, CLIP_STD, HALF, SQUARE

TEXT = {
    "vocab_size": tiny.VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 3,
    "num_attention_heads": 4, "bos_token_id": tiny.IDS["<|im_start|>"], "eos_token_id": tiny.IDS["<|im_end|>"],
    "pad_token_id": tiny.IDS["<|endoftext|>"],
}  # fmt: skip
SCALED = {"do_convert_rgb": True, "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "resample": 3,
          "do_normalize": True}  # fmt: skip


@functools.cache
def checkpoint(kind: str) -> Path:
    """A CLIPModel, whose tokenizer adds a token before and after a text, or a Siglip(2)Model, whose tokenizer appends
    one.
    """
    import transformers

    folder = kit.home() / f"towers-{kind}"
    if kind == "clip":
        config = transformers.CLIPConfig(
            text_config={**TEXT, "max_position_embeddings": 77}, vision_config=SQUARE, projection_dim=64
        )
        tiny.save(tiny._model(transformers.CLIPModel, config), folder)
        picture = {
            "size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "do_center_crop": True,
            "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "image_processor_type": "CLIPImageProcessor",
        }  # fmt: skip
    elif kind == "siglip2":
        sees = {**SQUARE, "hidden_size": 64, "num_attention_heads": 4, "num_patches": 25}
        config = transformers.Siglip2Config(
            text_config={**TEXT, "max_position_embeddings": 64, "projection_size": 64}, vision_config=sees
        )
        tiny.save(tiny._model(transformers.Siglip2Model, config), folder)
        picture = {"image_mean": HALF, "image_std": HALF, "patch_size": 14, "max_num_patches": 30, "resample": 2,
                   "image_processor_type": "Siglip2ImageProcessor"}  # fmt: skip
    else:
        sees = {**SQUARE, "hidden_size": 64, "num_attention_heads": 4}
        config = transformers.SiglipConfig(
            text_config={**TEXT, "max_position_embeddings": 64, "projection_size": 64}, vision_config=sees
        )
        tiny.save(tiny._model(transformers.SiglipModel, config), folder)
        picture = {"size": {"height": 56, "width": 56}, "image_mean": HALF, "image_std": HALF,
                   "image_processor_type": "SiglipImageProcessor"}  # fmt: skip
    kit.write(folder / "preprocessor_config.json", {**SCALED, **picture})
    (folder / "chat_template.jinja").unlink()
    kit.framed(folder, "bert" if kind == "clip" else "roberta")
    return folder


@functools.cache
def oracle(folder: Path) -> Any:
    """The checkpoint in transformers, float32 on the CPU."""
    from transformers import AutoModel

    with tiny.quiet():
        return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def of_text(folder: Path, ids: list[int]) -> np.ndarray:
    """The vector of one text; `ids` are padded as the model's own tokenizer pads them."""
    with torch.no_grad():
        return _vector(oracle(folder).get_text_features(torch.tensor([ids])))


def of_picture(folder: Path, picture: Image.Image) -> np.ndarray:
    """The vector of a picture that transformers' own processor scales and crops."""
    import transformers

    name = kit.read(folder / "preprocessor_config.json")["image_processor_type"]
    kind = getattr(transformers, name + "Pil", None) or getattr(transformers, name)
    made = kind.from_pretrained(folder)(picture, return_tensors="pt")
    with torch.no_grad():
        return _vector(oracle(folder).get_image_features(**made))


def _vector(made: Any) -> np.ndarray:
    return kit.unit((made if isinstance(made, torch.Tensor) else made.pooler_output)[0].numpy())
