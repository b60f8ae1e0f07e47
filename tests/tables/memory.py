"""The memory table of README: what `omniloop check` prints for published configurations, without their weights.

Thread: main. In: the sizes of published checkpoints (tests/bench/shapes and below) and a size of card. Out: the rows.
The check runs as on an accelerator of the given memory, without such a device.
"""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_left
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from engine.base.errors import ConfigError
from engine.device.memory import GIB, DeviceMemory
from engine.run import estimate, shares
from server.cli import build
from server.start.check import lines, refused
from tests.bench.shapes import BGE_BASE, FORMS, GPT_OSS_20B, LLAMA31_8B, OURS, QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B
from tests.bench.shapes_hearing import HEARING
from tests.bench.shapes_seeing import QWEN25_7B, QWEN25_TOWER, QWEN25_VL_7B

CARDS = (4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 192)  # GiB, as cards are sold
TOTAL = 0.98  # the part of a card's memory that the driver reports
CONTEXT_BYTES = GIB // 2  # taken by the driver's context before anything is loaded
TOKENS = 8192  # tokens of context that the card must hold
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
LLAMA_70B = {
    **LLAMA31_8B, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
}  # fmt: skip
GPT_OSS_120B = {
    **GPT_OSS_20B, "num_hidden_layers": 36, "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
QWEN25_VL = {
    **QWEN25_7B, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": False,
    "vision_config": {**QWEN25_TOWER, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653, "eos_token_id": 151645, "files": QWEN25_VL_7B["files"],
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B, bfloat16": QWEN3_06B,
    "Qwen3-8B, bfloat16": QWEN3_8B,
    "Qwen3-8B, FP8": {**QWEN3_8B, "quantization_config": FORMS["fp8-blocks"]},
    "Qwen3-8B, 4 bits (AWQ)": {**QWEN3_8B, "quantization_config": AWQ},
    "Qwen3-30B-A3B, FP8": {**QWEN3_30B_A3B, "quantization_config": FORMS["fp8-blocks"]},
    "gpt-oss-20b, MXFP4": GPT_OSS_20B,
    "gpt-oss-120b, MXFP4": GPT_OSS_120B,
    "Qwen2.5-VL-7B, bfloat16": QWEN25_VL,
    "Llama-3.3-70B, 4 bits (AWQ)": {**LLAMA_70B, "quantization_config": AWQ},
    "Whisper large-v3, bfloat16": HEARING["whisper-large-v3"],
    "bge-base, bfloat16": BGE_BASE,
}


def printed(config: dict[str, Any], card: int) -> list[str]:
    """The lines that `check` prints for a configuration on a card of `card` GiB; a refusal is the last line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key not in OURS}))
        for file, settings in config.get("files", {}).items():
            (folder / file).write_text(json.dumps(settings))
        flags: dict[str, Any] = {"model": name, "load-format": "dummy", "skip-tokenizer-init": True}
        if most := config.get("max_position_embeddings"):
            flags["max-model-len"] = min(TOKENS, most)
        total = int(card * TOTAL * GIB)
        memory = DeviceMemory(total, total - CONTEXT_BYTES)
        found: list[str] = []
        with (
            mock.patch.object(estimate, "choose_device", return_value="cuda:0"),
            mock.patch.object(shares, "device_memory", return_value=memory),
        ):
            try:
                for line in lines(build(flags)):
                    found.append(line)
            except ConfigError as error:
                found.append(refused(error))
        return found


def fits(config: dict[str, Any], card: int) -> bool:
    """Whether TOKENS tokens of context fit, according to the last line that `check` prints."""
    return re.match(r"context: --max-model-len [\d,]+ fits", printed(config, card)[-1]) is not None


def smaller_card_refuses(config: dict[str, Any], card: int) -> bool:
    """Whether no card smaller than `card` fits; `card` is one of CARDS."""
    at = CARDS.index(card)
    return at == 0 or not fits(config, CARDS[at - 1])


def row_of(name: str, card: int) -> str:
    """The table's row of a model, from the lines that `check` prints for a card on which the context fits."""
    lines_of = printed(ROWS[name], card)
    assert re.match(r"context: --max-model-len [\d,]+ fits", lines_of[-1]), lines_of[-1]
    text = "\n".join(lines_of)
    (weights,) = re.findall(r"([\d.]+ GiB) on the device", text)
    (cache,) = re.findall(r"KV cache: ([\d.]+ MiB) per 1,000 tokens", text)
    return f"| {name} | {weights} | {'none' if cache == '0.0 MiB' else cache} | {card} GiB |"


def memory_table() -> str:
    """The memory table between its marks in README."""
    rows = [row_of(name, CARDS[bisect_left(CARDS, True, key=partial(fits, ROWS[name]))]) for name in ROWS]
    head = f"| model | weights | cache per 1,000 tokens | smallest card for {TOKENS:,} tokens |"
    return "\n".join([head, "|---|---|---|---|", *rows]) + "\n"
