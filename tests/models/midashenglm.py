"""MiDashengLM for the tests: a tiny random checkpoint in the published layout, and its tower's formulas.

After modeling_midashenglm.py of https://huggingface.co/mispeech/midashenglm-7b, which transformers lacks; the formulas
are also in https://github.com/vllm-project/vllm/pull/23652: DashengFrontend (torch's spectrogram, HTK's filters,
decibels),
AudioPatchEmbed, DashengBlock, the masks of DashengAudioTransformer, and AudioProjectorSubsample. The decoder is
transformers' Qwen2.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests import tiny

AUDIO = tiny.IDS["<|AUDIO|>"]
TOWER = {
    "embed_dim": 72, "depth": 3, "num_heads": 2, "mlp_ratio": 1.5, "n_mels": 20, "n_fft": 512, "win_length": 512,
    "hop_length": 160, "sample_rate": 16000, "f_min": 0.0, "f_max": 8000.0, "center": True, "qkv_bias": True,
    "patch_size": [20, 4], "patch_stride": [20, 4], "target_length": 28, "input_channels": 1, "init_values": None,
    "model_type": "midashenglm_dasheng_encoder",
}  # fmt: skip
CHUNK = TOWER["target_length"] // 4
TEXT = {
    "vocab_size": tiny.VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
CONFIG = {
    "architectures": ["MiDashengLMModel"], "model_type": "midashenglm", "audio_encoder_config": TOWER,
    "subsample_factor": 5, "audio_token_id": AUDIO, "torch_dtype": "float32", "tie_word_embeddings": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_midashenglm.MiDashengLMModel"},
    "text_config": {
        **TEXT, "model_type": "qwen2_5_omni_text", "use_sliding_window": False,
        "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
    },
}  # fmt: skip


@functools.cache
def decoder() -> Any:
    """The decoder: transformers' Qwen2 with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return tiny._model(Qwen2ForCausalLM, Qwen2Config(**TEXT)).eval()


def tower() -> dict[str, Tensor]:
    """Random weights of the tower by their published names."""
    size, bins = TOWER["embed_dim"], TOWER["n_mels"]
    inner = int(size * TOWER["mlp_ratio"])
    modules = {
        "audio_encoder.init_bn": (bins,), "audio_encoder.patch_embed.proj": (size, 1, bins, 4),
        "audio_encoder.norm": (size,), "audio_projector.net.0": (TEXT["hidden_size"], 5 * size),
        "audio_projector.net.2": (TEXT["hidden_size"],) * 2,
    }  # fmt: skip
    for number in range(TOWER["depth"]):
        block = f"audio_encoder.blocks.{number}."
        modules |= {
            block + "norm1": (size,), block + "attn.qkv": (3 * size, size), block + "attn.proj": (size, size),
            block + "norm2": (size,), block + "mlp.fc1": (inner, size), block + "mlp.fc2": (size, inner),
        }  # fmt: skip
    draw, made = torch.Generator().manual_seed(4), {}
    for name, shape in modules.items():
        tensor, wide = torch.randn(shape, generator=draw), torch.Size(shape[1:]).numel()
        made[name + ".weight"] = 1 + 0.1 * tensor if len(shape) == 1 else 1.2 * tensor * wide**-0.5
        made[name + ".bias"] = 0.1 * torch.randn(shape[:1], generator=draw)
    return made | {
        "audio_encoder.init_bn.running_mean": -20 + 5 * torch.randn(bins, generator=draw),
        "audio_encoder.init_bn.running_var": 100 + 20 * torch.rand(bins, generator=draw),
        "audio_encoder.init_bn.num_batches_tracked": torch.tensor(7),
        "audio_encoder.time_pos_embed": torch.randn(1, size, 1, CHUNK, generator=draw),
        "audio_encoder.freq_pos_embed": torch.randn(1, size, 1, 1, generator=draw),
        "audio_encoder.front_end.0.mel_scale.fb": torch.randn(257, bins, generator=draw),
        "audio_encoder.front_end.0.spectrogram.window": torch.hann_window(512),
    }


def checkpoint(folder: Path, **changes: Any) -> Path:
    """Writes a folder in the published layout."""
    folder.mkdir(exist_ok=True)
    held = {f"decoder.{name}": tensor.clone() for name, tensor in decoder().state_dict().items()}
    save_file({**held, **tower()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    extractor = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": False, "sampling_rate": 16000}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    tiny.write_tokenizer(folder)
    return folder


def decibels(sound: np.ndarray) -> Tensor:
    """DashengFrontend: log-mel energies in decibels, [bins, frames]."""
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(257, TOWER["n_mels"], 0.0, 8000.0, 16000, norm=None, mel_scale="htk")
    spectrum = torch.stft(torch.tensor(sound), 512, 160, 512, torch.hann_window(512), return_complex=True)
    mel = torch.tensor(filters, dtype=torch.float32).T @ spectrum.abs().square()
    found = 10 * mel.clamp(min=1e-10).log10()
    return found.clamp(min=found.max() - 120)


@torch.inference_mode()
def rows(folder: Path, sound: np.ndarray) -> Tensor:
    """The tower's rows [rows, hidden]: DashengAudioTransformer, which masks keys after the sound, and its projector."""
    held = load_file(folder / "model.safetensors")
    sound = np.pad(sound, (0, max(0, 3200 - len(sound))))

    def product(name: str, x: Tensor) -> Tensor:
        return F.linear(x, held[name + ".weight"], held[name + ".bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], held[name + ".weight"], held[name + ".bias"], 1e-6)

    scaling = (held[f"audio_encoder.init_bn.{kind}"] for kind in ("running_mean", "running_var", "weight", "bias"))
    x = F.batch_norm(decibels(sound)[None], *scaling)[None]
    x = F.conv2d(x, *(held[f"audio_encoder.patch_embed.proj.{kind}"] for kind in ("weight", "bias")), stride=(20, 4))
    inside, made = len(sound) // 640, []
    for first, part in zip(range(0, x.shape[-1], CHUNK), x.split(CHUNK, dim=-1)):
        part = part + held["audio_encoder.time_pos_embed"][..., : part.shape[-1]] + held["audio_encoder.freq_pos_embed"]
        part = part.flatten(2)[0].T
        mask = torch.arange(first, first + len(part)) < inside
        mask = mask if mask.any() else ~mask  # the makers' code computes numbers for a fully masked part too
        for number in range(TOWER["depth"]):
            block = f"audio_encoder.blocks.{number}."
            qkv = product(block + "attn.qkv", norm(block + "norm1", part))
            heads = qkv.view(len(part), 3, TOWER["num_heads"], -1).permute(1, 2, 0, 3)
            attended = F.scaled_dot_product_attention(*heads, attn_mask=mask[None, None])
            part = part + product(block + "attn.proj", attended.transpose(0, 1).flatten(1))
            part = part + product(block + "mlp.fc2", F.gelu(product(block + "mlp.fc1", norm(block + "norm2", part))))
        made.append(norm("audio_encoder.norm", part))
    x = torch.cat(made)
    x = x[: len(x) // 5 * 5].reshape(-1, 5 * x.shape[1])
    return product("audio_projector.net.2", F.gelu(product("audio_projector.net.0", x)))


@torch.inference_mode()
def greedy(folder: Path, tokens: list[int], sounds: list[np.ndarray], count: int) -> list[int]:
    """`count` greedy tokens after the prompt; each sound replaces one AUDIO token."""
    embed, waiting = decoder().get_input_embeddings(), list(sounds)
    x = torch.cat(
        [rows(folder, waiting.pop(0)) if token == AUDIO else embed(torch.tensor([token])) for token in tokens]
    )
    made = decoder().generate(
        inputs_embeds=x[None], attention_mask=torch.ones(1, len(x)), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, eos_token_id=None,
    )  # fmt: skip
    return made[0, -count:].tolist()
