"""A tiny nomic-embed-text-v2-moe: a checkpoint in the published layout, and an independent reference computation.

The architecture's own code is remote (https://huggingface.co/nomic-ai/nomic-bert-2048, modeling_hf_nomic_bert.py):
post-norm layers, Wqkv with biases, rotary halves, exact GELU. Layers 1, 3, ... have megablocks' experts: the softmax
runs over all experts, the weights of the chosen experts are not renormalised, and all experts share one bias.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests import pooling_kit as kit
from tests import tiny

HIDDEN, INNER, LAYERS, HEADS, EXPERTS, CHOSEN = 64, 96, 4, 4, 8, 2
CONFIG = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "torch_dtype": "float32", "n_embd": HIDDEN,
    "n_inner": INNER, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 128, "vocab_size": tiny.VOCAB_SIZE,
    "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_epsilon": 1e-5, "activation_function": "gelu",
    "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "causal": False, "prenorm": False,
    "parallel_block": False, "use_rms_norm": None, "scale_attn_weights": True, "rotary_emb_base": 10000,
    "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None, "max_trained_positions": 2048, "ffn_div": 1, "num_experts": EXPERTS,
    "moe_top_k": CHOSEN, "moe_every_n_layers": 2, "num_shared_experts": 0, "expert_choice_router": False,
    "moe_impl": "megablocks", "moe_normalize_expert_weights": False, "moe_resid_pdrop": 0.0,
}  # fmt: skip
PROMPTS = {"query": "search_query: ", "passage": "search_document: "}


@functools.cache
def checkpoint() -> Path:
    """A checkpoint with random weights, mean pooling, L2 normalisation, and prompts for queries and documents."""
    folder = kit.home() / "nomic-moe"
    folder.mkdir()
    kit.write(folder / "config.json", CONFIG)
    tiny.write_tokenizer(folder)
    kit.framed(folder, "xlm_roberta")
    kit.save_file(_weights(), folder / "model.safetensors", {"format": "pt"})
    types = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [{"path": path, "type": f"{kit.ST}.models.{kind}"} for path, kind in types]
    kit.write(folder / "modules.json", [{"idx": at, "name": str(at), **one} for at, one in enumerate(listed)])
    kit.write(folder / "sentence_bert_config.json", {"max_seq_length": 128, "do_lower_case": False})
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    kit.write(folder / "1_Pooling" / "config.json", pooling)
    kit.write(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "similarity_fn_name": "cosine"})
    return folder


def _weights() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (tiny.VOCAB_SIZE, HIDDEN),
        "embeddings.token_type_embeddings.weight": (1, HIDDEN), "emb_ln.weight": (HIDDEN,), "emb_ln.bias": (HIDDEN,),
    }  # fmt: skip
    for number in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "attn.Wqkv.weight": (3 * HIDDEN, HIDDEN), "attn.Wqkv.bias": (3 * HIDDEN,),
            "attn.out_proj.weight": (HIDDEN, HIDDEN), "attn.out_proj.bias": (HIDDEN,),
            **{f"norm{k}.{kind}": (HIDDEN,) for k in (1, 2) for kind in ("weight", "bias")},
        }  # fmt: skip
        if number % 2:
            parts |= {"mlp.router.layer.weight": (EXPERTS, HIDDEN), "mlp.experts.bias": (HIDDEN,)}
            parts |= {f"mlp.experts.mlp.{name}": (EXPERTS * INNER, HIDDEN) for name in ("w1", "w2")}
        else:
            parts |= {"mlp.fc1.weight": (INNER, HIDDEN), "mlp.fc1.bias": (INNER,)}
            parts |= {"mlp.fc2.weight": (HIDDEN, INNER), "mlp.fc2.bias": (HIDDEN,)}
        shapes |= {f"encoder.layers.{number}.{name}": shape for name, shape in parts.items()}
    draw = torch.Generator().manual_seed(3)
    made = {}
    for name, shape in shapes.items():
        gain = float(name.endswith(("norm1.weight", "norm2.weight", "emb_ln.weight")))
        drawn = torch.randn(shape, generator=draw)
        made[name] = drawn * 1.5 * shape[1] ** -0.5 if len(shape) > 1 else drawn * 0.1 + gain
    return made


def body_of(folder: Path) -> Any:
    """A function that maps token ids to hidden states [tokens, width]."""
    tensors = kit.load_file(folder / "model.safetensors")
    return lambda ids: _hidden(tensors, torch.tensor(ids)).numpy()


def _hidden(tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-5)

    def product(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    x = tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = norm("emb_ln", x)
    width = HIDDEN // HEADS
    angles = torch.outer(torch.arange(len(ids)), 10000.0 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
    for number in range(LAYERS):
        at = f"encoder.layers.{number}."
        q, k, v = product(at + "attn.Wqkv", x).view(len(ids), 3, HEADS, width).permute(1, 2, 0, 3)
        q, k = (each * angles.cos() + _half_turned(each) * angles.sin() for each in (q, k))
        attended = (q @ k.mT * width**-0.5).softmax(-1) @ v
        x = norm(at + "norm1", x + product(at + "attn.out_proj", attended.transpose(0, 1).flatten(1)))
        if number % 2:
            inner = _mixture(tensors, at + "mlp.", x)
        else:
            inner = product(at + "mlp.fc2", F.gelu(product(at + "mlp.fc1", x)))
        x = norm(at + "norm2", x + inner)
    return x


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _mixture(tensors: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    """Computes every expert for every token and multiplies all but the chosen experts by zero."""
    shares = (x @ tensors[at + "router.layer.weight"].T).softmax(-1)
    kept = torch.zeros_like(shares).scatter(1, shares.topk(CHOSEN).indices, 1.0)
    w1, w2 = (tensors[f"{at}experts.mlp.{name}"].view(EXPERTS, INNER, HIDDEN) for name in ("w1", "w2"))
    made = torch.einsum("tei,eih->teh", F.gelu(torch.einsum("th,eih->tei", x, w1)), w2)
    return torch.einsum("te,teh->th", shares * kept, made) + tensors[at + "experts.bias"]


def vector(hidden: np.ndarray) -> np.ndarray:
    """The mean over tokens, normalised to length 1."""
    return kit.unit(hidden.mean(0))
