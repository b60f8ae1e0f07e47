"""MiDashengLM: a sound of any length as decibels of mel bins; one row per 0.2 seconds.

Pool (`process`) and loop (`fill`, `positions`). The sound is mirrored at both ends, so there is one frame more than
hops in the sound. Decibels are clamped to 120 below the loudest. A sound shorter than 0.2 seconds is padded with
silence. After DashengFrontend and MiDashengLMProcessor of https://huggingface.co/mispeech/midashenglm-7b, and vLLM's
version of both (https://github.com/vllm-project/vllm/pull/23652).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.processors.base import Filling, read_processor_files
from mm.processors.qwen_vl import token_id
from mm.processors.whisper import Whisper
from mm.transform.mel import hann, htk_filters, mel_energies

FRAMES = 4  # mel frames per patch
FLOOR, RANGE = 1e-10, 120.0  # smallest energy in the logarithm; range in decibels
# Defaults of settings that a file lacks.
USUAL = {"sample_rate": 16000, "n_fft": 512, "win_length": 512, "hop_length": 160, "n_mels": 64}
EDGES = {"f_min": 0.0, "f_max": 8000.0}  # hertz


class MiDashengLM(Whisper):
    """Processor of MiDashengLMModel."""

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        raw, tower = read_processor_files(folder).audio, config["audio_encoder_config"]
        self.frames = {key: int(tower.get(key, usual)) for key, usual in USUAL.items()}
        self.edges = {key: float(tower.get(key, usual)) for key, usual in EDGES.items()}
        whole = self.frames["win_length"] == self.frames["n_fft"] and tower.get("center", True)
        if not whole or raw.get("do_normalize", False) or self.frames["sample_rate"] != USUAL["sample_rate"]:
            raise ValueError(
                "win_length=n_fft, center=true, sample_rate=16000 and do_normalize=false are supported; others are not"
            )
        self.stack = int(config.get("subsample_factor", 5))
        self._id = token_id(config, "audio", 151_646)
        self.media_token_ids = frozenset((self._id,))

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return f"midashenglm{self.stack}{self.frames}{self.edges}".encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        return item_bytes // 4 // self.frames["hop_length"] * self.frames["n_mels"] * 8 * 3 + 2 * item_bytes

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        patch = self.frames["hop_length"] * FRAMES
        samples = np.pad(item.data, (0, max(0, self.stack * patch - len(item.data))))
        mel = self.decibels(samples)
        patches = mel.shape[1] // FRAMES
        made = {
            "input_features": np.ascontiguousarray(mel[:, : patches * FRAMES]),
            "num_patches": np.array(len(samples) // patch, np.int64),
        }
        return Processed("audio", (Part("audio", digest, patches // self.stack, made),))

    def decibels(self, samples: np.ndarray) -> np.ndarray:
        """Decibels of mel bins, float32 [bins, frames]."""
        of, half = self.frames, self.frames["n_fft"] // 2
        mirrored = np.pad(samples, half, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(mirrored, of["n_fft"])[:: of["hop_length"]]
        filters = htk_filters(of["n_mels"], of["sample_rate"], of["n_fft"], self.edges["f_min"], self.edges["f_max"])
        mel = mel_energies(frames, hann(of["n_fft"]), filters, of["n_fft"])
        np.log10(np.maximum(mel, FLOOR, out=mel), out=mel)
        mel *= 10.0
        return np.maximum(mel, mel.max() - RANGE, out=mel).astype(np.float32)

    def fill(self, processed: Processed) -> Filling:
        rows = processed.parts[0].num_tokens
        return Filling(np.full(rows, self._id, np.int32), (((0, rows),),))
