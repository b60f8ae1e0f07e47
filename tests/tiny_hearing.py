"""Tiny random models that take audio: Whisper with windows of two seconds and its own markers, and Qwen2-Audio.

`whisper()` gives the folder of a finished checkpoint, made once and cached like the folders of tests/tiny.py.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny

POSITIONS, MELS, CONTEXT = 100, 80, 64
LANGUAGES = ("en", "de", "ja")
MARKERS = (
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>",
    "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
    *(f"<|{number * 0.02:.2f}|>" for number in range(POSITIONS + 1)),
)  # fmt: skip
FIRST = 256 + len(tiny.MERGES)
IDS = {token: FIRST + index for index, token in enumerate(MARKERS)}
VOCAB_SIZE = FIRST + len(MARKERS)
SUPPRESSED = [1, 2, 7, IDS["<|startoftranscript|>"], IDS["<|startoflm|>"], IDS["<|startofprev|>"], IDS["<|nospeech|>"]]
SPACE = 220  # id of the space byte, written "Ġ"


def whisper() -> Path:
    """The folder of a Whisper checkpoint; read only."""
    return cached_checkpoint("whisper", save)


def qwen2_audio() -> Path:
    """The folder of a Qwen2-Audio checkpoint with windows of thirty seconds; read only."""

    def made(folder: Path) -> None:
        from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

        audio = {
            "num_mel_bins": tiny.MELS, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4,
            "encoder_ffn_dim": 112,
        }  # fmt: skip
        text = {**tiny._SMALL, "model_type": "qwen2", "hidden_size": 96, "max_position_embeddings": 1024}
        config = Qwen2AudioConfig(
            audio_config=audio, text_config=text, audio_token_index=tiny.IDS["<|AUDIO|>"], tie_word_embeddings=False
        )
        tiny.save(tiny._model(Qwen2AudioForConditionalGeneration, config), folder)
        write_published_names(folder)

    return cached_checkpoint("qwen2-audio", made)


def cached_checkpoint(name: str, make: Callable[[Path], None], source: str = __file__) -> Path:
    """The folder of a checkpoint, made once; `source` is the Python file that describes the checkpoint."""
    sources = b"".join(Path(file).read_bytes() for file in (__file__, tiny.__file__, source))
    digest = hashlib.sha256(sources + importlib.metadata.version("transformers").encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"omniloop-tiny-{name}-{os.getuid()}-{digest}"
    if not folder.is_dir():
        draft = Path(tempfile.mkdtemp())
        make(draft)
        try:
            draft.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(draft)
    return folder


def write_published_names(folder: Path) -> None:
    """Renames the decoder's tensors to language_model.model.*, as in published audio checkpoints.

    transformers 5.17 reads these names, but writes one "model." too many: language_model.model.model.*.
    """
    from safetensors.torch import load_file, save_file

    tensors, doubled = load_file(folder / "model.safetensors"), "language_model.model.model."
    if any(name.startswith(doubled) for name in tensors):
        renamed = {name.replace(doubled, "language_model.model.", 1): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def save(folder: Path, **overrides: Any) -> None:
    """Writes every file of a served folder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB_SIZE, num_mel_bins=MELS, d_model=64, encoder_layers=2, decoder_layers=3,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=112, decoder_ffn_dim=112,
        max_source_positions=POSITIONS, max_target_positions=CONTEXT, bos_token_id=FIRST, eos_token_id=FIRST,
        pad_token_id=FIRST, decoder_start_token_id=IDS["<|startoftranscript|>"],
        suppress_tokens=None, begin_suppress_tokens=None, **overrides,
    )  # fmt: skip
    model = tiny._model(WhisperForConditionalGeneration, config)
    with tiny.quiet():
        model.save_pretrained(folder)
    generation = {
        "bos_token_id": FIRST, "eos_token_id": FIRST, "pad_token_id": FIRST, "is_multilingual": True,
        "decoder_start_token_id": IDS["<|startoftranscript|>"], "max_length": CONTEXT,
        "lang_to_id": {f"<|{code}|>": IDS[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]},
        "no_timestamps_token_id": IDS["<|notimestamps|>"], "prev_sot_token_id": IDS["<|startofprev|>"],
        "suppress_tokens": SUPPRESSED, "begin_suppress_tokens": [SPACE, FIRST], "max_initial_timestamp_index": 50,
        "return_timestamps": False,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS, "sampling_rate": 16000,
        "hop_length": 160, "n_fft": 400, "chunk_length": POSITIONS // 50, "n_samples": POSITIONS * 320,
        "nb_max_frames": 2 * POSITIONS, "padding_side": "right", "padding_value": 0.0, "return_attention_mask": False,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor, indent=2))
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [tuple(merge.split()) for merge in tiny.MERGES]
    vocab = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "WhisperTokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@functools.cache
def oracle() -> Any:
    """The checkpoint loaded by transformers."""
    import torch
    from transformers import WhisperForConditionalGeneration

    with tiny.quiet():
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        return WhisperForConditionalGeneration.from_pretrained(whisper(), **options).eval()
