"""Voxtral Realtime: the model reads sound from its first token on, 80 ms with each token of prompt and answer.

Pool (`process`) and loop (`fill`). The prompt is mistral-common's (AudioEncoder.encode_streaming_tokens): a beginning
token, then padding tokens for the silence before the sound and for the delay of the text. Silence follows the sound, so
that the delayed text can end. Mel energies are clamped to a range below a loudness that is equal for all sounds
(VoxtralRealtimeFeatureExtractor of transformers), so a frame does not depend on later frames.

    sound    [silence, 32 tokens][recording ..............][silence: delay, beginning, a long word]
    tokens   <s> [PAD] .. [PAD], as long as silence and delay | answer ........................
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.base.request import Modality
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.processors.base import Filling, read_processor_files
from mm.processors.whisper import Whisper
from mm.transform.mel import log_mel

PAD, PAD_ID = "[STREAMING_PAD]", 32  # and its id in published files
LONG_WORD = 10  # most tokens of a word after it has begun (OFFLINE_STREAMING_BUFFER_TOKENS)


class VoxtralRealtime(Whisper):
    """Processor of VoxtralRealtimeForConditionalGeneration."""

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        tower = config.get("audio_config", {})
        super().__init__(folder, {"num_mel_bins": tower.get("num_mel_bins", 128)}, picture_bytes)
        loudest = read_processor_files(folder).audio.get("global_log_mel_max", 1.5)
        self.mel = replace(self.mel, loudest=None if loudest is None else float(loudest))
        tekken = Path(folder) / "tekken.json"
        said = json.loads(tekken.read_text(encoding="utf-8")) if tekken.is_file() else {}
        special = {str(token["token_str"]): int(token["rank"]) for token in said.get("special_tokens", ())}
        self._id = special.get(PAD, PAD_ID)
        self.media_token_ids = frozenset((self._id,))
        delay = int(config.get("default_num_delay_tokens", 6))
        self.before = int(said.get("audio", {}).get("streaming_n_left_pad_tokens", 32))  # tokens of silence
        self.behind = delay + 1 + LONG_WORD
        self.samples = int(config.get("audio_length_per_tok", 8)) * self.mel.hop  # samples per token
        begin = int(config.get("text_config", {}).get("bos_token_id", 1))
        self.tokens = np.array([begin, *[self._id] * (self.before + delay)], np.int32)  # the prompt

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        return f"{type(self).__name__}{self.before},{self.behind},{self.samples}{self.mel!r}".encode()

    def cost(self, modality: Modality, item_bytes: int) -> int:
        samples = item_bytes // 4 + (self.before + self.behind + 1) * self.samples
        return samples * 4 + samples // self.mel.hop * self.mel.num_mels * 8 * 2

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        sound = np.pad(item.data, (0, -len(item.data) % self.samples + self.behind * self.samples))
        return self._first_rows(sound, digest, self.before + len(sound) // self.samples)

    def process_beginning(self, sound: np.ndarray, digest: bytes) -> Processed:
        """float32 [samples], the beginning of a sound -> the rows that no later sample changes; they have this
        digest.
        """
        return self._first_rows(sound, digest, self.settled(len(sound)))

    def settled(self, samples: int) -> int:
        """Number of rows that no later sample changes, given a sound's first samples and the silence before them: a
        frame reads half of its width after its centre."""
        known = self.before * self.samples + samples - self.mel.n_fft // 2 + self.mel.hop
        return known // self.samples

    def _first_rows(self, sound: np.ndarray, digest: bytes, count: int) -> Processed:
        """The first `count` rows of a sound and of the silence before it."""
        sound = np.pad(sound, (self.before * self.samples, 0))
        features = log_mel(sound, replace(self.mel, chunk=len(sound)))[:, : count * self.samples // self.mel.hop]
        return Processed("audio", (Part("audio", digest, count, {"input_features": features}),))

    def fill(self, processed: Processed) -> Filling:
        return Filling(self.tokens, (((0, processed.parts[0].num_tokens),),))
