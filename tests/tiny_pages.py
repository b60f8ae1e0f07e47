"""Tiny random checkpoints of page retrievers, in Hugging Face format, and what transformers computes with them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests import pooling_kit as kit
from tests import tiny, tiny_seeing

WIDTH = 24  # size of a vector
PAGE = "<|im_start|>user\n<|vision_bos|><|IMAGE|><|vision_eos|>Describe the image.<|im_end|><|endoftext|>"
KINDS = {  # kind -> class of the image processor, class of the retriever, and the base model
    "colqwen2": ("Qwen2VLImageProcessor", "ColQwen2", tiny_seeing.qwen2_vl),
    "colqwen2_5": ("Qwen2VLImageProcessor", "ColQwen2", tiny.qwen2_5_vl),
    "colpali": ("SiglipImageProcessor", "ColPali", tiny_seeing.paligemma),
    "colpali-gemma2": ("SiglipImageProcessor", "ColPali", tiny_seeing.CHECKPOINTS["paligemma2"]),
}


@functools.cache
def checkpoint(kind: str) -> Path:
    """A ColQwen2ForRetrieval, or a ColPaliForRetrieval whose texts begin with <|im_start|>."""
    import transformers

    scales, name, inside = KINDS[kind]
    seeing = inside().config
    config = getattr(transformers, f"{name}Config")(vlm_config=seeing.to_dict(), embedding_dim=WIDTH)
    config.tie_word_embeddings = False
    folder = kit.home() / kind
    tiny.save(tiny._model(getattr(transformers, f"{name}ForRetrieval"), config), folder)
    if kind == "colqwen2_5":
        tiny._write_processors(folder)
    else:
        tiny_seeing.write_processors(seeing, folder)
    pictures = kit.read(folder / "preprocessor_config.json")
    kit.write(folder / "preprocessor_config.json", {**pictures, "image_processor_type": scales, "image_seq_length": 16})
    said = {"visual_prompt_prefix": PAGE} if name == "ColQwen2" else {}
    kit.write(folder / "processor_config.json", {"processor_class": f"{name}Processor", **said})
    if name == "ColPali":
        settings = kit.read(folder / "tokenizer_config.json")
        kit.write(folder / "tokenizer_config.json", {**settings, "bos_token": "<|im_start|>"})
    (folder / "chat_template.jinja").unlink()
    return folder


@functools.cache
def processor(kind: str) -> Any:
    """The processor of transformers; Pillow scales its pictures."""
    import transformers

    scales, name, _ = KINDS[kind]
    made = getattr(transformers, scales + "Pil", None) or getattr(transformers, scales)
    folder = checkpoint(kind)
    with tiny.quiet():
        parts = made.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
        said = {"visual_prompt_prefix": PAGE} if name == "ColQwen2" else {}
        return getattr(transformers, f"{name}Processor")(*parts, **said)


@functools.cache
def oracle(kind: str) -> Any:
    """The checkpoint in transformers, float32 on the CPU."""
    import transformers

    with tiny.quiet():
        model = getattr(transformers, f"{KINDS[kind][1]}ForRetrieval")
        return model.from_pretrained(checkpoint(kind), dtype=torch.float32, attn_implementation="eager").eval()


def of_query(kind: str, text: str) -> tuple[list[int], np.ndarray]:
    """The tokens of a query, and one vector per token."""
    with tiny.quiet():
        return _vectors(kind, **processor(kind)(text=[text]))


def of_page(kind: str, picture: Image.Image) -> tuple[list[int], np.ndarray]:
    """The tokens of a page, and one vector per token."""
    with tiny.quiet():
        made = dict(processor(kind)(images=[picture.convert("RGB")]))
    made.pop("labels", None)
    if "image_grid_thw" in made:  # transformers' class omits the positions on three axes
        marks = (made["input_ids"] == tiny.IDS["<|IMAGE|>"]).int()
        named = {"image_grid_thw": made["image_grid_thw"], "attention_mask": made["attention_mask"]}
        positions = oracle(kind).vlm.get_rope_index(made["input_ids"], mm_token_type_ids=marks, **named)
        made["position_ids"] = positions[0]
    return _vectors(kind, **made)


def of_text(kind: str, text: str) -> tuple[list[int], np.ndarray]:
    """The tokens of a text document, and one vector per token; the text is prepared as by colpali-engine."""
    tokenizer = processor(kind).tokenizer
    begin = "" if kind.startswith("colqwen") else tokenizer.bos_token
    ids = torch.tensor([tokenizer(begin + text, add_special_tokens=False).input_ids])
    types = {} if kind.startswith("colqwen") else {"token_type_ids": torch.zeros_like(ids)}
    return _vectors(kind, input_ids=ids, attention_mask=torch.ones_like(ids), **types)


def _vectors(kind: str, **inputs: torch.Tensor) -> tuple[list[int], np.ndarray]:
    inputs.pop("labels", None)
    with torch.no_grad():
        return inputs["input_ids"][0].tolist(), oracle(kind)(**inputs).embeddings[0].numpy()
