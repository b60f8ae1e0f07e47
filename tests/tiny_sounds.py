"""Tiny random models that take audio of any length, and each model's prompts as transformers computes them.

A `Sounds` is one family: the folder of a finished checkpoint (cached like those of tests/tiny_hearing.py), and the
features that the published processor makes from a sound. Windows are two seconds long.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests import tiny
from tests.tiny_hearing import cached_checkpoint, write_published_names

AUDIO, MELS, SECONDS = tiny.IDS["<|AUDIO|>"], 32, 2
TEXT = {**tiny._SMALL, "model_type": "llama", "hidden_size": 96, "max_position_embeddings": 1024, "head_dim": 32}
TOWER = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_mel_bins": MELS,
}  # fmt: skip
QWEN3_TOWER = {  # windows of two seconds as well
    "num_mel_bins": MELS, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 112, "d_model": 64,
    "n_window": 50, "n_window_infer": SECONDS * 100, "downsample_hidden_size": 24, "output_dim": 96,
}  # fmt: skip
Features = tuple[dict[str, Any], int]  # the arguments of the oracle for a sound, and the number of the sound's rows


@dataclass(frozen=True, eq=False)
class Sounds:
    """One family of audio models: its checkpoint, its features and its oracle."""

    name: str
    make: Callable[[], Any]  # the model with its weights
    features: Callable[[Path, np.ndarray], Features]
    extractor: dict[str, Any]
    alone: bool = False  # one sound per call: the oracle would encode the padding of shorter sounds
    blocks: int = 15  # KV cache blocks: too few for all prompts of tests/models/test_sounds.py at one time
    around: tuple[int, ...] = ()  # the tokens that the processor writes before and after a sound
    released: Callable[[Path], None] | None = None  # rewrites transformers' layout into the published one

    @property
    def folder(self) -> Path:
        """The checkpoint's folder; read only."""
        return cached_checkpoint(self.name, self._save, __file__)

    def rows_of(self, features: dict[str, Any]) -> Any:
        """The embedding rows of a sound, computed by the oracle's tower."""
        from torch.nn.functional import gelu

        if self.name in ("ultravox", "fun-audio"):
            return {"ultravox": ultravox_rows, "fun-audio": fun_audio_rows}[self.name](features)
        if self.name != "phi4mm":
            return self.oracle.get_audio_features(**features, return_dict=True).pooler_output.flatten(0, 1)
        heard = self.oracle.model.embed_tokens_extend.audio_embed
        rows = heard.encoder(features["input_features"], None)[0]
        return heard.down_proj_for_speech(gelu(heard.up_proj_for_speech(rows)))

    def _save(self, folder: Path) -> None:
        tiny.save(self.make(), folder)
        write_published_names(folder)
        for other in ("processor_config.json", "video_preprocessor_config.json"):
            (folder / other).unlink(missing_ok=True)
        (folder / "preprocessor_config.json").write_text(json.dumps({**EXTRACTOR, **self.extractor}))
        if self.released is not None:
            self.released(folder)

    @functools.cached_property
    def oracle(self) -> Any:
        """The checkpoint loaded by transformers."""
        import torch

        if self.released is not None:
            return self.make().eval()
        with tiny.quiet():
            options = {"dtype": torch.float32, "attn_implementation": "eager"}
            return type(self.make()).from_pretrained(self.folder, **options).eval()


EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS, "sampling_rate": 16000,
    "hop_length": 160, "n_fft": 400, "chunk_length": SECONDS, "n_samples": SECONDS * 16000,
    "nb_max_frames": SECONDS * 100, "padding_side": "right", "padding_value": 0.0, "return_attention_mask": False,
}  # fmt: skip

PICTURES = {
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 1024, "max_pixels": 65536,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


def voxtral() -> Any:
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration

    tower = {**TOWER, "max_source_positions": SECONDS * 50}
    text = {**TEXT, "vocab_size": 1024}  # the number of tokens in the tests' tekken.json
    config = VoxtralConfig(audio_config=tower, text_config=text, audio_token_id=AUDIO, tie_word_embeddings=False)
    return tiny._model(VoxtralForConditionalGeneration, config)


def voxtral_features(folder: Path, sound: np.ndarray) -> Features:
    """Features as VoxtralProcessor._retrieve_input_features makes them."""
    import torch
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    made = extractor(
        sound,
        sampling_rate=16000,
        padding=True,
        truncation=False,
        pad_to_multiple_of=SECONDS * 16000,
        return_tensors="pt",
    )
    windows = made.input_features.reshape(MELS, -1, SECONDS * 100).transpose(0, 1)
    return {"input_features": windows.to(torch.float32)}, len(windows) * SECONDS * 50 // 4


def glm_asr() -> Any:
    from transformers import GlmAsrConfig, GlmAsrForConditionalGeneration

    tower = {**TOWER, "max_position_embeddings": SECONDS * 50}
    config = GlmAsrConfig(audio_config=tower, text_config=TEXT, audio_token_id=AUDIO, tie_word_embeddings=False)
    return tiny._model(GlmAsrForConditionalGeneration, config)


def glm_asr_features(folder: Path, sound: np.ndarray) -> Features:
    from transformers import GlmAsrProcessor, WhisperFeatureExtractor

    return processed(GlmAsrProcessor, WhisperFeatureExtractor, folder, sound, audio_token="<|AUDIO|>")


def audio_flamingo() -> Any:
    from transformers import AudioFlamingo3Config, AudioFlamingo3ForConditionalGeneration

    tower = {**TOWER, "max_source_positions": SECONDS * 50}
    text = {**TEXT, "model_type": "qwen2"}
    config = AudioFlamingo3Config(audio_config=tower, text_config=text, audio_token_id=AUDIO, tie_word_embeddings=False)
    return tiny._model(AudioFlamingo3ForConditionalGeneration, config)


def audio_flamingo_features(folder: Path, sound: np.ndarray) -> Features:
    from transformers import AudioFlamingo3Processor, WhisperFeatureExtractor

    return processed(AudioFlamingo3Processor, WhisperFeatureExtractor, folder, sound, audio_token="<|AUDIO|>")


def qwen3_asr() -> Any:
    from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

    text = {**TEXT, "model_type": "qwen3", "tie_word_embeddings": True}
    config = Qwen3ASRConfig(audio_config=QWEN3_TOWER, text_config=text, audio_token_id=AUDIO, tie_word_embeddings=True)
    return tiny._model(Qwen3ASRForConditionalGeneration, config)


def qwen3_asr_features(folder: Path, sound: np.ndarray) -> Features:
    from transformers import Qwen3ASRFeatureExtractor, Qwen3ASRProcessor

    return processed(Qwen3ASRProcessor, Qwen3ASRFeatureExtractor, folder, sound)


def granite_speech() -> Any:
    from transformers import GraniteSpeechConfig, GraniteSpeechForConditionalGeneration

    tower = {
        "input_dim": 2 * MELS, "num_layers": 4, "hidden_dim": 48, "feedforward_mult": 3, "num_heads": 3, "dim_head": 20,
        "output_dim": 11, "context_size": 40, "max_pos_emb": 50, "conv_kernel_size": 7,
    }  # fmt: skip
    queries = {
        "model_type": "blip_2_qformer", "hidden_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
        "intermediate_size": 100, "encoder_hidden_size": 48, "cross_attention_frequency": 2,
    }  # fmt: skip
    multipliers = {"embedding_multiplier": 6.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
    text = {**tiny._SMALL, **multipliers, "model_type": "granite", "hidden_size": 96, "max_position_embeddings": 1024}
    config = GraniteSpeechConfig(
        encoder_config=tower, projector_config=queries, text_config={**text, "tie_word_embeddings": True},
        audio_token_index=AUDIO, has_lora_adapter=False, tie_word_embeddings=True,
    )  # fmt: skip
    model = tiny._model(GraniteSpeechForConditionalGeneration, config)
    for number, layer in enumerate(model.model.encoder.layers):  # batch-norm statistics, as after training
        draw = np.random.default_rng(number)
        for buffer, low in ((layer.conv.batch_norm.running_mean, -1.0), (layer.conv.batch_norm.running_var, 0.2)):
            buffer.copy_(buffer.new_tensor(draw.uniform(low, 1.0, len(buffer))))
    return model


def granite_speech_released(folder: Path) -> None:
    """The layout in which 3.3 is published: older names, and the adapter of q and v in a PEFT file."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    renamed = {"model.language_model.": "language_model.model.", "model.encoder.": "encoder.", "model.": ""}
    tensors, adapter = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        old = next((old for old in renamed if name.startswith(old)), "")
        name, module = renamed.get(old, "") + name.removeprefix(old), name.rpartition(".")[0]
        if module.endswith(("self_attn.q_proj", "self_attn.v_proj")):
            a, b = torch.randn(GRANITE_RANK, tensor.shape[1]) * 0.05, torch.randn(len(tensor), GRANITE_RANK) * 0.05
            halves = f"base_model.model.{name.rpartition('.')[0]}.lora_"
            adapter |= {f"{halves}A.weight": a, f"{halves}B.weight": b}
            tensor = tensor - 8 / GRANITE_RANK * b @ a
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(adapter, folder / "adapter_model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "has_lora_adapter": True}))
    peft = {"peft_type": "LORA", "r": GRANITE_RANK, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**peft, "bias": "none", "use_dora": False}))


def granite_speech_features(folder: Path, sound: np.ndarray) -> Features:
    """Features as GraniteSpeechFeatureExtractor makes them; torch's stft and HTK filters replace torchaudio."""
    import torch
    from transformers import GraniteSpeechFeatureExtractor
    from transformers.audio_utils import mel_filter_bank

    filters = torch.tensor(mel_filter_bank(257, MELS, 0.0, 8000.0, 16000, norm=None, mel_scale="htk")).float()
    window = torch.hann_window(400)
    spectrum = torch.stft(
        torch.tensor(sound), 512, 160, 400, window, center=True, pad_mode="reflect", return_complex=True
    )
    mel = (spectrum.abs().square().T @ filters).clip(min=1e-10).log10()
    mel = torch.maximum(mel, mel.max() - 8.0) / 4 + 1
    pairs = mel[: len(mel) // 2 * 2].reshape(1, -1, 2 * MELS)
    extractor = GraniteSpeechFeatureExtractor.__new__(GraniteSpeechFeatureExtractor)  # the constructor needs torchaudio
    extractor.melspec_kwargs = {"hop_length": 160}
    extractor.projector_window_size, extractor.projector_downsample_rate = 15, 5
    return {"input_features": pairs}, extractor._get_num_audio_features([len(sound)])[0]


PHI4_MERGED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
PHI4_RANK, PHI4_ALPHA, GRANITE_RANK = 5, 10, 4
PHI4_NAMES = {  # transformers -> Microsoft
    r"feed_forward_(in|out)\.gate_up_proj": r"feed_forward_\1.net.0.linear",
    r"feed_forward_(in|out)\.down_proj": r"feed_forward_\1.net.2",
    r"(encoders\.\d+\.self_attn)\.([qkv])_proj": r"\1.linear_\2",
    r"(encoders\.\d+\.self_attn)\.o_proj": r"\1.linear_out",
    r"up_proj_for_speech": "audio_projection.speech.0", r"down_proj_for_speech": "audio_projection.speech.2",
    r"up_proj_for_vision_speech": "audio_projection.vision.0",
    r"down_proj_for_vision_speech": "audio_projection.vision.2",
    r"img_projection_up": "img_projection.0", r"img_projection_down": "img_projection.2",
    r"global_img_feature_extensor": "glb_GN", r"sub_img_feature_extensor": "sub_GN",
}  # fmt: skip


def phi4mm() -> Any:
    """Phi4MultimodalForCausalLM; its matrices include the speech adapter."""
    from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

    audio = {
        "hidden_size": 48, "intermediate_size": 40, "num_blocks": 2, "num_attention_heads": 3, "input_size": MELS,
        "ext_pw_out_channel": 48, "depthwise_separable_out_channel": 48, "kernel_size": 3, "nemo_conv_channels": 12,
        "bias_max_distance": 9, "audio_token_id": AUDIO,
    }  # fmt: skip
    vision = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2,
        "image_token_id": tiny.IDS["<|IMAGE|>"],
    }  # fmt: skip
    text = {**tiny._SMALL, "hidden_size": 96, "max_position_embeddings": 2048, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
    config = Phi4MultimodalConfig(
        **text, rope_parameters=rope, audio_config=audio, vision_config=vision, original_max_position_embeddings=2048
    )
    model = tiny._model(Phi4MultimodalForCausalLM, config)
    seen = model.model.embed_tokens_extend.image_embed
    for number, separator in enumerate((seen.global_img_feature_extensor, seen.sub_img_feature_extensor)):
        draw = np.random.default_rng(number)
        separator.data.copy_(separator.new_tensor(draw.normal(0, 0.5, separator.shape)))
    norm, draw = model.model.embed_tokens_extend.audio_embed.encoder.encoder_embedding, np.random.default_rng(0)
    for buffer, low, high in ((norm.global_mean, 5.0, 9.0), (norm.global_invstd, 0.2, 0.4)):
        buffer.copy_(buffer.new_tensor(draw.uniform(low, high, MELS)))
    return model


def phi4mm_released(folder: Path) -> None:
    """Microsoft's published layout: adapters next to the matrices; names that transformers' script translates."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config, tensors = json.loads((folder / "config.json").read_text()), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if "embed_tokens_extend" in name or not module.endswith(PHI4_MERGED):
            for theirs, released in PHI4_NAMES.items():
                name = re.sub(theirs, released, name)
            tensors[name] = tensor
            continue
        for adapter in ("speech", "vision"):
            tensors[f"{module}.lora_A.{adapter}.weight"] = a = torch.randn(PHI4_RANK, tensor.shape[1]) * 0.05
            tensors[f"{module}.lora_B.{adapter}.weight"] = b = torch.randn(len(tensor), PHI4_RANK) * 0.05
            if adapter == "speech":
                tensors[f"{module}.base_layer.{kind}"] = tensor - PHI4_ALPHA / PHI4_RANK * b @ a
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    audio = config.pop("audio_config")
    renamed = {
        "attention_dim": "hidden_size", "attention_heads": "num_attention_heads", "linear_units": "intermediate_size",
        "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
    }  # fmt: skip
    released = {key: audio[theirs] for key, theirs in renamed.items()}
    released["nemo_conv_settings"] = {"conv_channels": audio["nemo_conv_channels"]}
    released["relative_attention_bias_args"] = {"type": "t5", "t5_bias_max_distance": audio["bias_max_distance"]}
    adapters = {f"{name}_lora": {"r": PHI4_RANK, "lora_alpha": PHI4_ALPHA} for name in ("speech", "vision")}
    pictures = {  # released files do not contain the sizes of the tower
        "crop_size": 448, "embedding_cls": "tune_image", "hd_transform_order": "sub_glb", "use_hd_transform": True,
        "image_token_compression_cls": "avg_pool_2d", "projection_cls": "mlp", "with_learnable_separator": True,
    }  # fmt: skip
    config |= {
        "embd_layer": {"embedding_cls": "image_audio", "image_embd_layer": pictures},
        "image_token_id": config["vision_config"]["image_token_id"],
        **adapters, "architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm", "audio_token_id": AUDIO,
        "audio_processor": {"name": "cascades", "config": {**audio, **released}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def phi4mm_features(folder: Path, sound: np.ndarray) -> Features:
    from transformers import Phi4MultimodalFeatureExtractor

    made = Phi4MultimodalFeatureExtractor(feature_size=MELS)(sound, sampling_rate=16000, return_tensors="pt")
    return {"input_features": made["audio_input_features"]}, int(made["audio_embed_sizes"][0])


def ultravox() -> Any:
    """The decoder of Ultravox; the last token of its vocabulary is the audio placeholder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return tiny._model(LlamaForCausalLM, LlamaConfig(**{**TEXT, "vocab_size": AUDIO + 1}))


@functools.cache
def ultravox_tower() -> tuple[Any, dict[str, Any]]:
    """Whisper's encoder, and the tensors of the projector."""
    import torch
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(7)
    config = WhisperConfig(
        num_mel_bins=MELS, d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=112,
        max_source_positions=SECONDS * 50, attn_implementation="eager",
    )  # fmt: skip
    encoder = WhisperEncoder(config).eval()
    sizes = {"ln_pre": (512,), "linear_1": (104, 512), "ln_mid": (52,), "linear_2": (96, 52)}
    return encoder, {
        name: torch.randn(size) * 0.1 if len(size) > 1 else torch.rand(size) + 0.5 for name, size in sizes.items()
    }


def ultravox_rows(features: dict[str, Any]) -> Any:
    """Rows as ultravox_model.py of fixie-ai/ultravox 0.5 (UltravoxProjector, ModifiedWhisperEncoder) makes them, per
    window.
    """
    import torch
    from torch.nn.functional import gelu, linear, pad, rms_norm, silu

    encoder, projector = ultravox_tower()
    parts = []
    for mel in features["input_features"].split(SECONDS * 100, dim=-1):
        x = gelu(encoder.conv2(gelu(encoder.conv1(mel)))).mT
        x = x + encoder.embed_positions.weight[: x.shape[1]]
        for layer in encoder.layers:
            x = layer(x, None)
            x = x if isinstance(x, torch.Tensor) else x[0]
        x = encoder.layer_norm(x)[0]
        x = pad(x, (0, 0, 0, -len(x) % 8)).reshape(-1, 512)
        x, gate = linear(rms_norm(x, (512,), projector["ln_pre"], 1e-6), projector["linear_1"]).chunk(2, dim=-1)
        parts.append(linear(rms_norm(x * silu(gate), (52,), projector["ln_mid"], 1e-6), projector["linear_2"]))
    return torch.cat(parts)


def ultravox_released(folder: Path) -> None:
    """Joins the decoder with a checkpoint of the projector and its encoder, as server/start/joined.py does."""
    from safetensors.torch import load_file, save_file

    encoder, projector = ultravox_tower()
    text = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"audio_tower.{name}": tensor.contiguous() for name, tensor in encoder.state_dict().items()}
    tensors |= {f"multi_modal_projector.{name}.weight": tensor for name, tensor in projector.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["UltravoxModel"], "model_type": "ultravox", "hidden_size": 104, "stack_factor": 8,
        "projector_act": "swiglu", "projector_ln_mid": True, "text_config": text, "dtype": "float32",
        "audio_config": encoder.config.to_dict(), "text_model_id": None, "audio_model_id": None,
        "eos_token_id": text["eos_token_id"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def ultravox_features(folder: Path, sound: np.ndarray) -> Features:
    """Features as ultravox_processing.py of fixie-ai/ultravox makes them."""
    from transformers import WhisperFeatureExtractor

    sound = np.pad(sound, (0, max(0, 320 - len(sound))))
    mel = WhisperFeatureExtractor.from_pretrained(folder)(
        sound, sampling_rate=16000, padding="longest", pad_to_multiple_of=160, truncation=False, return_tensors="pt"
    ).input_features
    lengths = [part.shape[-1] for part in mel.split(SECONDS * 100, dim=-1)]
    return {"input_features": mel}, sum(-(-length // 16) for length in lengths)


def fun_audio() -> Any:
    """The decoder of Fun-Audio-Chat."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return tiny._model(Qwen3ForCausalLM, Qwen3Config(**{**TEXT, "model_type": "qwen3"}))


@functools.cache
def fun_audio_tower() -> tuple[Any, dict[str, Any]]:
    """The encoder, equal to Qwen2.5-Omni's, and the tensors that follow the encoder."""
    import torch
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

    torch.manual_seed(8)
    config = Qwen2_5OmniAudioEncoderConfig(
        num_mel_bins=MELS, d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=112, n_window=50,
        max_source_positions=75, output_dim=96, attn_implementation="eager",
    )  # fmt: skip
    sizes = {"embed_tokens": (13, 96), "output_matching": (96, 96), "continual_output_matching": (96, 96)}
    return Qwen2_5OmniAudioEncoder(config).eval(), {name: torch.randn(size) * 0.2 for name, size in sizes.items()}


def fun_audio_rows(features: dict[str, Any]) -> Any:
    """Rows as vLLM's funaudiochat.py makes them after modeling_funaudiochat.py: every code is the padding code, 11."""
    from torch.nn.functional import linear, pad

    encoder, behind = fun_audio_tower()
    mel, codes = features["input_features"], features["codes"]
    lengths = mel.new_tensor([mel.shape[1]]).long()
    x = encoder(mel, lengths, (lengths - 1) // 2 + 1).last_hidden_state
    length = -(-codes // 5) * 5
    x = pad(x[:length], (0, 0, 0, max(0, length - len(x)))).reshape(-1, 5, 96).mean(1)
    discrete = behind["embed_tokens"][[11] * length].reshape(-1, 5, 96).mean(1)
    return linear(discrete, behind["output_matching"]) + linear(x, behind["continual_output_matching"])


def fun_audio_released(folder: Path) -> None:
    """The published layout, with tensors for speech output that this server does not read."""
    import torch
    from safetensors.torch import load_file, save_file

    encoder, behind = fun_audio_tower()
    text = json.loads((folder / "config.json").read_text())
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    own = {name: tensor for name, tensor in encoder.state_dict().items() if "positional" not in name}
    tensors |= {f"continuous_audio_tower.{name}": tensor.contiguous() for name, tensor in own.items()}
    tensors |= {f"audio_tower.{name}.weight": tensor for name, tensor in behind.items()}
    tensors["audio_invert_tower.lm_head.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    audio = {**encoder.config.to_dict(), "codebook_size": 13, "pad_token_id": 11, "group_size": 5}
    config = {
        "architectures": ["FunAudioChatForConditionalGeneration"], "model_type": "funaudiochat", "text_config": text,
        "audio_config": audio, "audio_token_index": AUDIO, "dtype": "float32", "eos_token_id": text["eos_token_id"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def fun_audio_features(folder: Path, sound: np.ndarray) -> Features:
    from transformers import WhisperFeatureExtractor

    sound = np.pad(sound, (0, max(0, 400 - len(sound))))
    made = WhisperFeatureExtractor.from_pretrained(folder)(
        sound, sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="pt"
    )
    mel = made.input_features[0][:, made.attention_mask[0].bool()]
    codes = max(1, int(len(sound) / 16000 * 25))
    return {"input_features": mel, "codes": codes}, -(-codes // 5)


def qwen3_omni() -> Any:
    """The thinker, with pictures and films, and experts in two of three layers."""
    from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    experts = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1]}
    vision = {
        "depth": 3, "hidden_size": 72, "intermediate_size": 100, "num_heads": 2, "out_hidden_size": 96,
        "num_position_embeddings": 36, "deepstack_visual_indexes": [1],
    }  # fmt: skip
    marks = {
        "audio_token_id": AUDIO, "image_token_id": tiny.IDS["<|IMAGE|>"], "video_token_id": tiny.IDS["<|VIDEO|>"],
        "audio_start_token_id": tiny.IDS["<|audio_bos|>"], "audio_end_token_id": tiny.IDS["<|audio_eos|>"],
        "vision_start_token_id": tiny.IDS["<|vision_bos|>"], "vision_end_token_id": tiny.IDS["<|vision_eos|>"],
    }  # fmt: skip
    config = Qwen3OmniMoeThinkerConfig(
        audio_config=QWEN3_TOWER, vision_config=vision, position_id_per_seconds=13, **marks,
        text_config={**TEXT, **experts, "model_type": "qwen3_omni_moe_text", "rope_parameters": rope},
    )  # fmt: skip
    return tiny._model(Qwen3OmniMoeThinkerForConditionalGeneration, config)


def qwen3_omni_features(folder: Path, sound: np.ndarray) -> Features:
    """Features as Qwen3OmniMoeProcessor._process_audio makes them."""
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    made = WhisperFeatureExtractor.from_pretrained(folder)(
        [sound], sampling_rate=16000, padding=True, truncation=False, return_attention_mask=True, return_tensors="pt"
    )
    mask = made.attention_mask
    rows = int(_get_feat_extract_output_lengths(mask.sum(-1)))
    return {"input_features": made.input_features, "feature_attention_mask": mask}, rows


def processed(kind: Any, extractor: Any, folder: Path, sound: np.ndarray, **options: Any) -> Features:
    """Features as a processor of transformers makes them."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    made = kind(extractor.from_pretrained(folder), tokenizer, **options)(
        text="<|AUDIO|>", audio=[sound], sampling_rate=16000
    )
    rows = int((made.pop("input_ids") == AUDIO).sum())
    return {key: made[key] for key in ("input_features", "input_features_mask")}, rows


def gemma4() -> Any:
    """Gemma 4 as E2B, with pictures and films; audio attention in chunks of 4 rows, clamped inputs of products."""
    from tests.tiny_seeing import gemma4

    audio = {
        "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "subsampling_conv_channels": [MELS, 6],
        "attention_chunk_size": 4, "attention_context_left": 5, "attention_logit_cap": 3.0, "output_proj_dims": 52,
    }  # fmt: skip
    ends = {"boa_token_id": tiny.IDS["<|audio_bos|>"], "eoa_token_index": tiny.IDS["<|audio_eos|>"]}
    return gemma4(small=True, audio_config=audio, audio_token_id=AUDIO, **ends)


def gemma4_features(folder: Path, sound: np.ndarray) -> Features:
    """Features, and the number of rows as Gemma4Processor.replace_audio_token counts it."""
    from transformers import Gemma4AudioFeatureExtractor, Gemma4Processor

    made = Gemma4AudioFeatureExtractor.from_pretrained(folder)([sound], return_tensors="pt")
    theirs = SimpleNamespace(boa_token="", audio_token="A", eoa_token="")
    return dict(made), len(Gemma4Processor.replace_audio_token(theirs, made, 0))


FUN_AUDIO = {"chunk_length": 5, "n_samples": 5 * 16000, "nb_max_frames": 500}
GEMMA4 = {
    "feature_extractor_type": "Gemma4AudioFeatureExtractor", "max_soft_tokens": 16, "num_frames": 3, "mel_floor": 1e-3,
    "preemphasis": 0.5, "input_scale_factor": 2.0, "fft_overdrive": True, "per_bin_mean": [0.5] * MELS,
    "per_bin_stddev": [1.5] * MELS,
}  # fmt: skip
GRANITE_SPEECH = {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "melspec_kwargs": {"n_mels": MELS}}
SOUNDS = (
    Sounds("voxtral", voxtral, voxtral_features, {}),
    Sounds("glm-asr", glm_asr, glm_asr_features, {}),
    Sounds("audio-flamingo", audio_flamingo, audio_flamingo_features, {}),
    Sounds("qwen3-asr", qwen3_asr, qwen3_asr_features, {"feature_extractor_type": "Qwen3ASRFeatureExtractor"}),
    Sounds("granite-speech", granite_speech, granite_speech_features, GRANITE_SPEECH, alone=True),
    Sounds(
        "granite-speech-3.3",
        granite_speech,
        granite_speech_features,
        GRANITE_SPEECH,
        True,
        15,
        (),
        granite_speech_released,
    ),
    Sounds("phi4mm", phi4mm, phi4mm_features, {}, alone=True, released=phi4mm_released),
    Sounds("ultravox", ultravox, ultravox_features, {}, True, 12, (), ultravox_released),
    Sounds("fun-audio", fun_audio, fun_audio_features, FUN_AUDIO, True, 11, (), fun_audio_released),
    Sounds(
        "gemma4-audio",
        gemma4,
        gemma4_features,
        GEMMA4,
        blocks=30,
        around=(tiny.IDS["<|audio_bos|>"], tiny.IDS["<|audio_eos|>"]),
    ),
    Sounds("qwen3-omni", qwen3_omni, qwen3_omni_features, PICTURES),
)
