"""Tiny GGUF files of random blocks, written by llama.cpp's own library; dims are those of the smallest blocks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

WIDTH, INNER, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 2
TYPES = {"q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q4_k": (256, 144),
         "q5_k": (256, 176), "q6_k": (256, 210), "iq4_nl": (32, 18), "iq4_xs": (256, 136)}  # fmt: skip
WORDS = ["th", "the", "\u0120th", "\u0120the", "ing"]
MERGES = ["t h", "th e", "\u0120 th", "\u0120th e", "i n", "in g"]
PIECES = ["\u2581the", "\u2581th", "\u2581t", "he", "th", "\u2581", "t", "h", "e", "i", "n", "g", "ing", "in", "x", "y"]


def blocks(kind: str, rows: int, columns: int, draw: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes of blocks]: random codes and scales, small d and dmin; with offsets, a group of scale 0."""
    block, size = TYPES[kind]
    found = draw.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    d = (draw.random((rows, columns // block, 1)) * 0.02 + 0.005).astype(np.float16)
    if TYPES[kind][0] == 256:
        d = (d / np.float16(32)).astype(np.float16)
    if kind == "q6_k":
        found[:, :, 208:] = d.view(np.uint8)
        return found.reshape(rows, -1)
    found[:, :, :2] = d.view(np.uint8)
    if kind.endswith(("4_k", "5_k", "_1")):
        found[:, :, 2:4] = (d * np.float16(4)).view(np.uint8)
        found[0, 0, 0 if kind.endswith("_1") else 4] = 0
        if kind.endswith("_1"):
            found[0, 0, 1] = 0
    return found.reshape(rows, -1)


@cache
def byte_tokens() -> tuple[str, ...]:
    """A vocabulary of every byte, some words, and tokens that begin and end a turn."""
    return (*sorted(ByteLevel.alphabet()), "in", *WORDS, "<|end|>", "<|start|>", "<tool>")


def write(
    path: Path,
    architecture: str = "llama",
    kind: str = "q4_k",
    tied: bool = False,
    tokenizer: str = "qwen2",
    factors=None,
) -> Path:
    """A model whose layers are in `kind`, except v and down in q6_k; the embedding is in q6_k too."""
    draw = np.random.default_rng(0)
    file = gguf.GGUFWriter(path, architecture)
    file.add_block_count(LAYERS)
    file.add_context_length(512)
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KV_HEADS)
    file.add_key_length(WIDTH // HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(10_000.0)
    size = _add_tokenizer(file, tokenizer)
    if factors is not None:
        file.add_tensor("rope_freqs.weight", np.array(factors, np.float32))

    def matrix(name: str, rows: int, columns: int, form: str) -> None:
        data = blocks(form, rows, columns, draw)
        file.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[form.upper()])

    def vector(name: str, count: int, one: float) -> None:
        file.add_tensor(name, (draw.standard_normal(count) * 0.1 + one).astype(np.float32))

    matrix("token_embd", size, WIDTH, "q6_k")
    if not tied:
        matrix("output", size, WIDTH, "q8_0")
    vector("output_norm.weight", WIDTH, 1)
    head = WIDTH // HEADS
    for layer in range(LAYERS):
        at = f"blk.{layer}"
        vector(f"{at}.attn_norm.weight", WIDTH, 1)
        vector(f"{at}.ffn_norm.weight", WIDTH, 1)
        if architecture == "qwen3":
            vector(f"{at}.attn_q_norm.weight", head, 1)
            vector(f"{at}.attn_k_norm.weight", head, 1)
        shapes = {
            "attn_q": (WIDTH, WIDTH), "attn_k": (head * KV_HEADS, WIDTH), "attn_v": (head * KV_HEADS, WIDTH),
            "attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }  # fmt: skip
        for name, (rows, columns) in shapes.items():
            matrix(f"{at}.{name}", rows, columns, "q6_k" if name in ("attn_v", "ffn_down") else kind)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                vector(f"{at}.{name}.bias", rows, 0)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def _add_tokenizer(file: gguf.GGUFWriter, name: str) -> int:
    tokens = list(byte_tokens())
    if name == "llama":
        spelled = [f"<0x{byte:02X}>" for byte in range(256)]
        tokens = ["<unk>", "<s>", "</s>", *spelled, *PIECES]
        types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
        file.add_tokenizer_model("llama")
        file.add_token_scores([0.0] * 259 + [-float(number) for number in range(len(PIECES))])
        file.add_unk_token_id(0)
        file.add_bos_token_id(1)
        file.add_eos_token_id(2)
    else:
        types = [1] * len(tokens)
        types[-3:] = [3, 3, 4]
        file.add_tokenizer_model("gpt2")
        file.add_tokenizer_pre(name)
        file.add_token_merges(MERGES)
        file.add_eos_token_id(len(tokens) - 3)
        file.add_bos_token_id(len(tokens) - 2)
        file.add_add_bos_token(name == "llama-bpe")
        file.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}")
    file.add_token_list(tokens)
    file.add_token_types(types)
    return len(tokens)
