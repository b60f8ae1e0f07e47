"""Tiny quantised checkpoints, one for each variant of a dialect: random codes, scales that differ, groups of scale 0.

`VARIANTS` maps a name to the settings of config.json and a function that writes one matrix [rows, columns] as tensors
by kind. Codes are drawn, not quantised from floats, so no value is right by chance. Only tests/quant/oracle.py computes
the values of the tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.kernels.gemm.codes import NORMAL
from tests import tiny

Tensors = dict[str, Tensor]
Writer = Callable[[torch.Generator, int, int], Tensors]
FP4 = (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4)  # bitsandbytes' values; the upper eight are negative
TABLES = {"nf4": NORMAL, "fp4": (*FP4, *(-value for value in FP4))}
SMALL = {"hidden": 192, "inner": 320}  # one and a half blocks of 128, and two and a half
EVEN = {"hidden": 256, "inner": 384}
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One way to store a quantised model."""

    settings: dict[str, Any]
    write: Writer
    sizes: dict[str, int] = field(default_factory=lambda: SMALL)
    skipped: tuple[str, ...] = ()  # endings of modules that stay in floats
    others: dict[str, Writer] = field(default_factory=dict)  # ending of a module -> how it is written instead
    head: bool = False  # lm_head is quantised too
    settings_file: str = ""  # the file that has the settings; "": config.json


def write(folder: Path, variant: Variant, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the checkpoint; tensors that are not quantised have `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner = variant.sizes["hidden"], variant.sizes["inner"]
    heads, kv_heads, dim = hidden // 32, 2, 32
    shapes = dict(zip(PROJECTIONS, (
        (heads * dim, hidden), (kv_heads * dim, hidden), (kv_heads * dim, hidden), (hidden, heads * dim),
        (inner, hidden), (inner, hidden), (hidden, inner),
    )))  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    tensors: Tensors = {
        "model.embed_tokens.weight": torch.randn(tiny.VOCAB_SIZE, hidden, generator=draw).to(dtype),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
    }
    modules = [(f"model.layers.{layer}.{name}", shape) for layer in range(2) for name, shape in shapes.items()]
    modules.append(("lm_head", (tiny.VOCAB_SIZE, hidden)))
    for module, (rows, columns) in modules:
        kept = not variant.head if module == "lm_head" else module.endswith(variant.skipped)
        if kept and (module == "lm_head" or variant.skipped):
            found = {"weight": (torch.randn(rows, columns, generator=draw) / columns**0.5).to(dtype)}
        else:
            found = variant.others.get(module.rpartition(".")[2], variant.write)(draw, rows, columns)
        tensors |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in found.items()}
    for layer in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden, dtype=dtype)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, "vocab_size": tiny.VOCAB_SIZE, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "eos_token_id": tiny.IDS["<|im_end|>"], "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    if variant.settings_file:
        (folder / variant.settings_file).write_text(json.dumps(variant.settings))
    elif variant.settings:
        config["quantization_config"] = variant.settings
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny.checkpoint("llama") / name, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def words(draw: torch.Generator, *shape: int) -> Tensor:
    """Random int32 words; every bit may be set."""
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=draw, dtype=torch.int64).to(torch.int32)


def scales(draw: torch.Generator, *shape: int, about: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random scales that differ from matrix to matrix; a larger matrix of scales has a zero."""
    found = torch.rand(shape, generator=draw) + 0.5
    found = found * about * (0.5 + float(torch.rand((), generator=draw)))
    if len(found.shape) == 2 and found.numel() > 8:
        found[-1, 0] = 0
    return found.to(dtype)


def e4m3(draw: torch.Generator, rows: int, columns: int) -> Tensor:
    """Codes up to 2, with both zeros and with subnormal numbers."""
    bits = torch.randint(0, 0x41, (rows, columns), generator=draw, dtype=torch.uint8)
    bits |= torch.randint(0, 2, (rows, columns), generator=draw, dtype=torch.uint8) << 7
    bits[0, :4] = torch.tensor([0x80, 0x01, 0x87, 0x00], dtype=torch.uint8)
    return bits.view(torch.float8_e4m3fn)


def nibbles(draw: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.randint(0, 256, (rows, columns // 2), generator=draw, dtype=torch.uint8)


def floats8(
    kind: str = "weight_scale_inv",
    per: str = "tensor",
    block: int = 128,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (),
    static: str = "",
) -> Writer:
    def made(draw: torch.Generator, rows: int, columns: int) -> Tensors:
        sizes = {"tensor": shape, "row": (rows, 1), "flat": (rows,), "block": (-(-rows // block), -(-columns // block))}
        sizes["group"] = (rows, columns // 32)
        sizes["four"] = (-(-rows // block), 1, -(-columns // block), 1)
        if dtype == torch.uint8:
            scale = torch.randint(118, 122, sizes[per], generator=draw, dtype=torch.uint8)
        else:
            scale = scales(draw, *sizes[per], about=0.06, dtype=torch.float32)
            scale = torch.exp2(scale.log2().round()).to(dtype) if dtype == torch.float8_e8m0fnu else scale.to(dtype)
        found = {"weight": e4m3(draw, rows, columns), kind: scale}
        return {**found, static: torch.tensor(0.5)} if static else found

    return made


def packed(bits: int, group: int, zeros: str = "", dtype: torch.dtype = torch.float32, g_idx: bool = False) -> Writer:
    def made(draw: torch.Generator, rows: int, columns: int) -> Tensors:
        groups = 1 if group == -1 else columns // group
        found = {
            "weight_packed": words(draw, rows, columns * bits // 32),
            "weight_scale": scales(draw, rows, groups, about=0.3 / 2**bits, dtype=dtype),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if zeros == "words":
            found["weight_zero_point"] = words(draw, -(-rows * bits // 32), groups)
        elif zeros:
            found["weight_zero_point"] = torch.randint(-8, 8, (rows, groups), generator=draw, dtype=torch.int8)
        if g_idx:
            found["weight_g_idx"] = shuffled(None, columns, group)
        return found

    return made


def shuffled(draw: torch.Generator | None, columns: int, group: int) -> Tensor:
    """Group of each column in random order; without `draw` equal for all matrices of a width, as for q, k and v."""
    order = torch.randperm(columns, generator=draw or torch.Generator().manual_seed(columns))
    return (torch.arange(columns) // group)[order].to(torch.int32)


def gptq(bits: int, group: int, act: bool = False, bias: bool = False, unlike: bool = False) -> Writer:
    def made(draw: torch.Generator, rows: int, columns: int) -> Tensors:
        size = columns if group == -1 else group
        in_order = (torch.arange(columns) // size).to(torch.int32)
        found = {
            "qweight": words(draw, columns * bits // 32, rows),
            "qzeros": words(draw, columns // size, rows * bits // 32),
            "scales": scales(draw, columns // size, rows, about=0.3 / 2**bits, dtype=torch.float16),
            "g_idx": shuffled(draw if unlike else None, columns, size) if act else in_order,
        }
        return {**found, "bias": torch.zeros(rows, dtype=torch.float16)} if bias else found

    return made


def awq(group: int) -> Writer:
    def made(draw: torch.Generator, rows: int, columns: int) -> Tensors:
        size = columns if group == -1 else group
        return {
            "qweight": words(draw, columns, rows // 8),
            "qzeros": words(draw, columns // size, rows // 8),
            "scales": scales(draw, columns // size, rows, about=0.02, dtype=torch.float16),
        }

    return made


def int8(static: bool = False, whole: bool = False) -> Writer:
    def made(draw: torch.Generator, rows: int, columns: int) -> Tensors:
        found = {
            "weight": torch.randint(-128, 128, (rows, columns), generator=draw, dtype=torch.int8),
            "weight_scale": scales(draw, *((1,) if whole else (rows, 1)), about=0.001),
        }
        return {**found, "input_scale": torch.tensor([0.03])} if static else found

    return made


def floats4(dialect: str) -> Writer:
    def made(draw: torch.Generator, rows: int, columns: int) -> Tensors:
        if dialect == "mxfp4":
            powers = torch.randint(119, 123, (rows, columns // 32), generator=draw, dtype=torch.uint8)
            return {"weight_packed": nibbles(draw, rows, columns), "weight_scale": powers}
        group = scales(draw, rows, columns // 16, about=8.0).to(torch.float8_e4m3fn)
        whole = 400.0 * (1 + torch.rand((), generator=draw))
        if dialect == "compressed":
            return {"weight_packed": nibbles(draw, rows, columns), "weight_scale": group,
                    "weight_global_scale": whole[None], "input_global_scale": torch.tensor([3.0])}  # fmt: skip
        return {"weight": nibbles(draw, rows, columns), "weight_scale": group, "weight_scale_2": 1 / whole,
                "input_scale": torch.tensor(0.01)}  # fmt: skip

    return made


def table_floats(nested: bool, table: str = "nf4") -> Writer:
    """bitsandbytes' format. The quantised scales use a table of values in the file, so any table will do."""

    def made(draw: torch.Generator, rows: int, columns: int) -> Tensors:
        blocks = -(-rows * columns // 64)
        state = {"quant_type": table, "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
        found = {"weight": nibbles(draw, rows, columns).view(-1, 1), "weight.quant_map": torch.tensor(TABLES[table])}
        found["weight.absmax"] = scales(draw, blocks, about=0.1)
        if nested:
            found["weight.absmax"] = torch.randint(0, 256, (blocks,), generator=draw, dtype=torch.uint8)
            found["weight.nested_absmax"] = scales(draw, -(-blocks // 256), about=0.05)
            found["weight.nested_quant_map"] = torch.linspace(-0.99, 1, 256)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
        kind = f"weight.quant_state.bitsandbytes__{table}"
        return {**found, kind: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}

    return made


def llm_int8(draw: torch.Generator, rows: int, columns: int) -> Tensors:
    return {"weight": torch.randint(-127, 128, (rows, columns), generator=draw, dtype=torch.int8),
            "SCB": scales(draw, rows, about=0.1), "weight_format": torch.tensor(0, dtype=torch.uint8)}  # fmt: skip


def groups(form: str, inputs: dict | None = None, **weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors with one group for all linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
            "ignore": ["lm_head"]}  # fmt: skip


def packed_settings(bits: int, group: int, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    said = {"strategy": "group", "group_size": group} if group != -1 else {"strategy": "channel", "group_size": None}
    return groups("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **said, **more)


def gptq_settings(bits: int, group: int, sym: bool = True, form: str | None = "gptq", act: bool = False) -> dict:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act,
            "checkpoint_format": form}  # fmt: skip


BF16, F16, U8, E8M0 = torch.bfloat16, torch.float16, torch.uint8, torch.float8_e8m0fnu
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
E4M3 = {"num_bits": 8, "type": "float"}
TOKENS8, STATIC8 = {**E4M3, "dynamic": True}, {**E4M3, "dynamic": False}  # settings of quantised inputs
FLOAT = "float-quantized"
VARIANTS: dict[str, Variant] = {
    "fp8 tensor": Variant(FP8, floats8()),
    "fp8 tensor static": Variant({**FP8, "activation_scheme": "static"}, floats8(static="activation_scale")),
    "fp8 tensor weight_scale": Variant(FP8, floats8("weight_scale", shape=(1,), static="input_scale")),
    "fp8 blocks": Variant(BLOCKS, floats8(per="block")),
    "fp8 blocks bf16": Variant(BLOCKS, floats8(per="block", dtype=BF16)),
    "fp8 blocks ue8m0": Variant({**BLOCKS, "scale_fmt": "ue8m0"}, floats8(per="block", dtype=E8M0)),
    "fp8 blocks u8": Variant({**BLOCKS, "scale_fmt": "ue8m0"}, floats8(per="block", dtype=U8)),
    "fp8 blocks mixed": Variant(BLOCKS, floats8(per="block"), skipped=("k_proj", "o_proj", "down_proj")),
    "fp8 qscale_weight": Variant(FP8, floats8("qscale_weight", static="qscale_act")),
    "ct float tensor": Variant(groups(FLOAT, TOKENS8, **E4M3), floats8("weight_scale", shape=(1,))),
    "ct float channel": Variant(
        groups(FLOAT, TOKENS8, **E4M3, strategy="channel"), floats8("weight_scale", "row", dtype=BF16)
    ),
    "ct float static": Variant(
        groups(FLOAT, STATIC8, **E4M3), floats8("weight_scale", shape=(1,), static="input_scale")
    ),
    "ct float block": Variant(
        groups(FLOAT, TOKENS8, **E4M3, strategy="block", block_structure=[128, 128]), floats8("weight_scale", "block")
    ),
    "ct naive": Variant(groups("naive-quantized", TOKENS8, **E4M3), floats8("weight_scale", shape=(1,))),
    "ct head": Variant(groups(FLOAT, TOKENS8, **E4M3, strategy="channel"), floats8("weight_scale", "row"), head=True),
    "ct mxfp8": Variant(
        groups("mxfp8-quantized", **E4M3, strategy="group", group_size=32), floats8("weight_scale", "group", dtype=U8)
    ),
    "ct int8": Variant(groups("int-quantized", INT8, num_bits=8, type="int", strategy="channel"), int8()),
    "ct int8 matrix": Variant(
        groups("int-quantized", None, num_bits=8, type="int", strategy="tensor"), int8(whole=True)
    ),
    "ct int8 weights": Variant(groups("int-quantized", None, num_bits=8, type="int", strategy="channel"), int8()),
    "ct w4 32": Variant(packed_settings(4, 32), packed(4, 32, dtype=BF16)),
    "ct w4 64": Variant(packed_settings(4, 64), packed(4, 64, dtype=F16)),
    "ct w4 128": Variant(packed_settings(4, 128), packed(4, 128), EVEN),
    "ct w4 channel": Variant(packed_settings(4, -1), packed(4, -1)),
    "ct w4 asymmetric": Variant(packed_settings(4, 32, False), packed(4, 32, "words")),
    "ct w4 asymmetric bytes": Variant(packed_settings(4, 32, False), packed(4, 32, "bytes")),
    "ct w4 g_idx": Variant(packed_settings(4, 32, actorder="group"), packed(4, 32, g_idx=True)),
    "ct w8 channel": Variant(packed_settings(8, -1), packed(8, -1)),
    "ct w8 32": Variant(packed_settings(8, 32), packed(8, 32)),
    "ct w8 asymmetric": Variant(packed_settings(8, 64, False), packed(8, 64, "words")),
    "ct w4 mixed": Variant(packed_settings(4, 32), packed(4, 32), skipped=("v_proj", "up_proj")),
    "ct nvfp4": Variant(groups("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), floats4("compressed")),
    "ct mxfp4": Variant(groups("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), floats4("mxfp4")),
    "modelopt fp8": Variant(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, floats8("weight_scale", static="input_scale")
    ),
    "modelopt fp8 rows": Variant(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, floats8("weight_scale", "flat")
    ),
    "modelopt fp8 blocks": Variant(
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, floats8("weight_scale", "four")
    ),
    "modelopt mxfp8": Variant(
        {"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8", "exclude_modules": ["lm_head"]}},
        floats8("weight_scale", "group", dtype=U8),
    ),
    "modelopt nvfp4": Variant({"quant_method": "modelopt", "quant_algo": "NVFP4"}, floats4("modelopt")),
    "modelopt file": Variant(
        {"quantization": {"quant_algo": "W4A16_NVFP4", "exclude_modules": ["lm_head"]}},
        floats4("modelopt"), settings_file="hf_quant_config.json",
    ),
    "gptq 32": Variant(gptq_settings(4, 32), gptq(4, 32, bias=True)),
    "gptq 128": Variant(gptq_settings(4, 128), gptq(4, 128), EVEN),
    "gptq channel": Variant(gptq_settings(4, -1), gptq(4, -1)),
    "gptq 8": Variant(gptq_settings(8, 64), gptq(8, 64)),
    "gptq asymmetric": Variant(gptq_settings(4, 64, False), gptq(4, 64)),
    "gptq 8 asymmetric": Variant(gptq_settings(8, 64, False), gptq(8, 64)),
    "gptq v2": Variant(gptq_settings(4, 64, False, "gptq_v2"), gptq(4, 64)),
    "gptq act": Variant(gptq_settings(4, 32, act=True), gptq(4, 32, act=True)),
    "gptq act unlike": Variant(gptq_settings(4, 32, act=True), gptq(4, 32, act=True, unlike=True)),
    "gptq act asymmetric": Variant(gptq_settings(4, 32, False, act=True), gptq(4, 32, act=True)),
    "gptq file": Variant({"bits": 4, "group_size": 64, "sym": True}, gptq(4, 64), settings_file="quantize_config.json"),
    "auto-round gptq": Variant(
        {**gptq_settings(4, 64), "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, gptq(4, 64)
    ),
    "auto-round awq": Variant(
        {**gptq_settings(4, 64), "quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, awq(64)
    ),
    "bnb nf4": Variant(NF4, table_floats(nested=False)),
    "bnb nf4 nested": Variant({**NF4, "bnb_4bit_use_double_quant": True}, table_floats(nested=True)),
    "bnb fp4 nested": Variant({**NF4, "bnb_4bit_quant_type": "fp4"}, table_floats(nested=True, table="fp4")),
    "bnb nf4 across rows": Variant(NF4, table_floats(nested=True), {"hidden": 192, "inner": 300}),
    "bnb fp4 across rows": Variant(
        {**NF4, "bnb_4bit_quant_type": "fp4"}, table_floats(nested=False, table="fp4"), {"hidden": 192, "inner": 302}
    ),
    "bnb int8": Variant({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
    "awq 32": Variant({**AWQ, "group_size": 32}, awq(32)),
    "awq 64": Variant({**AWQ, "group_size": 64}, awq(64)),
    "awq channel": Variant({**AWQ, "group_size": -1}, awq(-1)),
    "awq file": Variant(
        {"w_bit": 4, "q_group_size": 64, "zero_point": True}, awq(64), settings_file="quant_config.json"
    ),
}  # fmt: skip
MIXED = {
    "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["re:.*[qk]_proj$", "re:.*o_proj$"], "format": FLOAT, "input_activations": TOKENS8,
                    "weights": {**E4M3, "strategy": "channel"}},
        "group_1": {"targets": ["re:.*v_proj$"], "format": "pack-quantized", "input_activations": None,
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}},
        "group_2": {"targets": ["re:.*mlp.*"], "format": "pack-quantized", "input_activations": None,
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                                "symmetric": True}},
    },
}  # fmt: skip
LAYERS = {
    f"model.layers.{number}.{name}": {"quant_algo": "FP8"} if "attn" in name else {"quant_algo": "NVFP4"}
    for number in range(2)
    for name in PROJECTIONS
}
ROWS8, STATIC_TENSOR = floats8("weight_scale", "row"), floats8("weight_scale", static="input_scale")
VARIANTS |= {
    "ct mixed": Variant(MIXED, packed(4, 32), others={
        "q_proj": ROWS8, "k_proj": ROWS8, "o_proj": ROWS8, "v_proj": packed(8, -1),
    }),
    "modelopt mixed": Variant(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}, floats4("modelopt"),
        others=dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), STATIC_TENSOR),
    ),
    "gptq dynamic": Variant(
        {**gptq_settings(4, 64), "dynamic": {"+:.*down_proj": {"bits": 8, "group_size": 32}, "-:.*v_proj": {}}},
        gptq(4, 64), skipped=("v_proj",), others={"down_proj": gptq(8, 32)},
    ),
}  # fmt: skip
STATIC = Variant(groups("int-quantized", {**INT8, "dynamic": False}, num_bits=8, type="int"), int8(static=True))
VARIANTS["ct int8 static"] = STATIC
