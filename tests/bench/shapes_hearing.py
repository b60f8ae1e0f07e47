"""Shapes of Whisper: sizes from the config.json of openai/whisper-large-v3 on Hugging Face, and its marker ids."""

from __future__ import annotations

from typing import Any

from server.speech.languages import LANGUAGES

MARKERS = ("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")


def whisper(first: int, mels: int, width: int, layers: int, heads: int, depth: int) -> dict[str, Any]:
    """A multilingual Whisper with windows of 30 seconds; `first`: the id of its first marker."""
    languages = [f"<|{code}|>" for code in LANGUAGES]
    times = [f"<|{number * 0.02:.2f}|>" for number in range(1501)]
    names = ("<|endoftext|>", "<|startoftranscript|>", *languages, *MARKERS, *times)
    ids = {name: first + number for number, name in enumerate(names)}
    generation = {
        "bos_token_id": first, "eos_token_id": first, "pad_token_id": first, "is_multilingual": True,
        "decoder_start_token_id": ids["<|startoftranscript|>"], "max_length": 448,
        "lang_to_id": {name: ids[name] for name in languages},
        "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        "no_timestamps_token_id": ids["<|notimestamps|>"], "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50, "return_timestamps": False,
    }  # fmt: skip
    sound = {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": mels, "sampling_rate": 16000,
        "hop_length": 160, "n_fft": 400, "chunk_length": 30, "n_samples": 480000, "nb_max_frames": 3000,
    }  # fmt: skip
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": first + len(names),
        "num_mel_bins": mels,
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": depth,
        "decoder_ffn_dim": depth,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "activation_function": "gelu",
        "scale_embedding": False,
        "torch_dtype": "float16",
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "bos_token_id": first,
        "eos_token_id": first,
        "pad_token_id": first,
        "special": ids,
        "files": {"generation_config.json": generation, "preprocessor_config.json": sound},
    }


HEARING = {
    "whisper-large-v3": whisper(50257, 128, 1280, 32, 20, 5120),
    "tiny-whisper": whisper(2048, 80, 64, 2, 2, 128),
}
