"""Tiny random models that hear sounds of any length, and each one's prompts as transformers computes them.

A `Sounds` is one family: the folder of a finished checkpoint (kept as tests/tiny_hearing.py keeps its own), and the
features that the published processor makes of a sound. Windows have two seconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny
from tests.tiny_hearing import kept

AUDIO, MELS, SECONDS = tiny.IDS["<|AUDIO|>"], 32, 2
TEXT = {**tiny._SMALL, "model_type": "llama", "hidden_size": 96, "max_position_embeddings": 1024, "head_dim": 32}
TOWER = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_mel_bins": MELS,
}  # fmt: skip
QWEN3_TOWER = {  # windows of two seconds, too
    "num_mel_bins": MELS, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 112, "d_model": 64,
    "n_window": 50, "n_window_infer": SECONDS * 100, "downsample_hidden_size": 24, "output_dim": 96,
}  # fmt: skip
Features = tuple[dict[str, Any], int]  # a sound's arguments of the oracle, and its rows


@dataclass(frozen=True, eq=False)
class Sounds:
    """One family."""

    name: str
    make: Callable[[], Any]  # the model with its weights
    features: Callable[[Path, np.ndarray], Features]
    extractor: dict[str, Any]
    alone: bool = False  # the oracle would hear the silence behind the shorter ones of several sounds

    @property
    def folder(self) -> Path:
        """Read only."""
        return kept(self.name, self._save, __file__)

    def _save(self, folder: Path) -> None:
        tiny.save(self.make(), folder)
        for other in ("processor_config.json", "video_preprocessor_config.json"):
            (folder / other).unlink(missing_ok=True)
        (folder / "preprocessor_config.json").write_text(json.dumps({**EXTRACTOR, **self.extractor}))

    @functools.cached_property
    def oracle(self) -> Any:
        """The checkpoint as transformers computes it."""
        import torch

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
    text = {**TEXT, "vocab_size": 1024}  # as many as the tekken.json of tests has
    config = VoxtralConfig(audio_config=tower, text_config=text, audio_token_id=AUDIO, tie_word_embeddings=False)
    return tiny._model(VoxtralForConditionalGeneration, config)


def voxtral_features(folder: Path, sound: np.ndarray) -> Features:
    """As VoxtralProcessor._retrieve_input_features."""
    import torch
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    made = extractor(
        sound, sampling_rate=16000, padding=True, truncation=False, pad_to_multiple_of=SECONDS * 16000,
        return_tensors="pt",
    )  # fmt: skip
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
    for number, layer in enumerate(model.model.encoder.layers):  # as training leaves them
        draw = np.random.default_rng(number)
        for buffer, low in ((layer.conv.batch_norm.running_mean, -1.0), (layer.conv.batch_norm.running_var, 0.2)):
            buffer.copy_(buffer.new_tensor(draw.uniform(low, 1.0, len(buffer))))
    return model


def granite_speech_features(folder: Path, sound: np.ndarray) -> Features:
    """As GraniteSpeechFeatureExtractor, whose frames are torchaudio's: torch's stft and HTK's filters."""
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
    extractor = GraniteSpeechFeatureExtractor.__new__(GraniteSpeechFeatureExtractor)  # the others need torchaudio
    extractor.melspec_kwargs = {"hop_length": 160}
    extractor.projector_window_size, extractor.projector_downsample_rate = 15, 5
    return {"input_features": pairs}, extractor._get_num_audio_features([len(sound)])[0]


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
    """As Qwen3OmniMoeProcessor._process_audio."""
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    made = WhisperFeatureExtractor.from_pretrained(folder)(
        [sound], sampling_rate=16000, padding=True, truncation=False, return_attention_mask=True, return_tensors="pt"
    )
    mask = made.attention_mask
    rows = int(_get_feat_extract_output_lengths(mask.sum(-1)))
    return {"input_features": made.input_features, "feature_attention_mask": mask}, rows


def processed(kind: Any, extractor: Any, folder: Path, sound: np.ndarray, **options: Any) -> Features:
    """By a processor of transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    made = kind(extractor.from_pretrained(folder), tokenizer, **options)(
        text="<|AUDIO|>", audio=[sound], sampling_rate=16000
    )
    rows = int((made.pop("input_ids") == AUDIO).sum())
    return {key: made[key] for key in ("input_features", "input_features_mask")}, rows


GRANITE_SPEECH = {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "melspec_kwargs": {"n_mels": MELS}}
SOUNDS = (
    Sounds("voxtral", voxtral, voxtral_features, {}),
    Sounds("glm-asr", glm_asr, glm_asr_features, {}),
    Sounds("audio-flamingo", audio_flamingo, audio_flamingo_features, {}),
    Sounds("qwen3-asr", qwen3_asr, qwen3_asr_features, {"feature_extractor_type": "Qwen3ASRFeatureExtractor"}),
    Sounds("granite-speech", granite_speech, granite_speech_features, GRANITE_SPEECH, alone=True),
    Sounds("qwen3-omni", qwen3_omni, qwen3_omni_features, PICTURES),
)
