"""Qwen2.5-Omni (thinker): pictures, films, sound, and films with their sound, on one time axis (TMRoPE).

Pool (`process`) and loop (`fill`, `positions`). Time passes at 25 positions per second for films and sound alike. A
film with its sound takes one slot, in which seconds alternate: two seconds of frames, then the sound of those two
seconds.

    slot of a film with sound   [audio bos] V V V V  A A .. A  V V V V  A A .. A [audio eos]
    time axis                                 0   25   0  1 .. 49  50  75   50 51 .. 99
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engine.base.request import Modality
from mm.decode.frames import FilmPlan
from mm.item import MediaItem, MediaOptions, Part, Processed
from mm.limits import MediaLimits
from mm.processors.base import Filling, Placed, read_processor_files
from mm.processors.qwen_vl import Vision, count_up, token_id, vision_cost
from mm.transform.image import PatchSettings, Scale
from mm.transform.mel import MelSettings, log_mel, num_frames

_MIN_MEL_FRAMES = 3  # fewer give no row


class QwenOmni:
    """Processor of Qwen2_5OmniThinkerForConditionalGeneration and the full Qwen2_5Omni checkpoint's thinker."""

    modalities: frozenset[Modality] = frozenset(("image", "audio", "video"))
    writes_texts: ClassVar[bool] = False
    longest_sound: float = math.inf
    patching: ClassVar[PatchSettings] = PatchSettings()  # defaults of settings that the files lack
    film: ClassVar[Mapping[str, Any]] = {}  # settings that override the files

    def __init__(self, folder: str | Path, config: dict[str, Any], picture_bytes: int = 0) -> None:
        thinker = config.get("thinker_config", config)
        files = read_processor_files(folder)
        self.vision = Vision(files.image, {**files.video, **self.film}, picture_bytes, self.patching)
        self.picture_bytes = self.vision.picture_bytes
        self.mel = MelSettings(
            num_mels=int(files.audio.get("feature_size", 128)),
            sample_rate=int(files.audio.get("sampling_rate", 16000)),
            n_fft=int(files.audio.get("n_fft", 400)),
            hop=int(files.audio.get("hop_length", 160)),
            chunk=int(files.audio.get("chunk_length", 300)) * int(files.audio.get("sampling_rate", 16000)),
        )
        wanted = int(thinker.get("audio_config", {}).get("num_mel_bins", self.mel.num_mels))
        if wanted != self.mel.num_mels:
            raise ValueError(f"the feature extractor makes {self.mel.num_mels} mels; the audio tower reads {wanted}")
        self._ids: dict[Modality, int] = {
            "image": token_id(thinker, "image", 151655),
            "video": token_id(thinker, "video", 151656),
            "audio": token_id(thinker, "audio", 151646),
        }
        self.media_token_ids = frozenset(self._ids.values())
        self._vision_start = int(thinker.get("vision_start_token_id", 151652))
        self._vision_end = int(thinker.get("vision_end_token_id", 151653))
        self._audio_start = int(thinker.get("audio_start_token_id", 151647))
        self._audio_end = int(thinker.get("audio_end_token_id", 151648))
        self._per_second = int(thinker.get("position_id_per_seconds", 25))
        self._per_chunk = int(self._per_second * thinker.get("seconds_per_chunk", 2))

    def placeholder(self, modality: Modality) -> int:
        return self._ids[modality]

    def settings(self, modality: Modality, options: MediaOptions) -> bytes:
        own = repr(self.mel).encode()
        return b"qwen_omni" + (own if modality == "audio" else own + self.vision.settings(modality, options))

    def cost(self, modality: Modality, item_bytes: int) -> int:
        if modality == "audio":
            frames = item_bytes // 4 // self.mel.hop + 2
            return frames * self.mel.num_mels * 8 * 2 + item_bytes
        return vision_cost(self.vision, modality, item_bytes)

    def plan_image(self, height: int, width: int, options: MediaOptions) -> Scale:
        return self.vision.plan_image(height, width, options)

    def plan_film(
        self, num_frames: int, fps: float, height: int, width: int, options: MediaOptions, limits: MediaLimits
    ) -> FilmPlan:
        plan, capped = self.vision.plan(num_frames, fps, height, width, options, limits)
        # The family was trained with the nominal rate; the true rate is used only if frames had to be left out.
        rate = min(self.vision.rule.fps, options.fps or self.vision.rule.fps)
        return plan if capped else FilmPlan(plan.indices, plan.scale, 1 / rate)

    def process(self, item: MediaItem, digest: bytes, options: MediaOptions) -> Processed:
        if item.modality == "audio":
            return Processed("audio", (self._sound(item.data, digest),))
        if item.modality == "image":
            features, count = self.vision.still(item.data, item.scale)
            return Processed("image", (Part("image", digest, count, features),))
        features, count = self.vision.moving(item.data)
        per_grid = item.seconds_per_frame * self.vision.video.temporal_patch_size
        features["second_per_grid"] = np.array([per_grid], dtype=np.float32)
        parts = [Part("video", digest, count, features)]
        if item.sound is not None:
            parts.append(self._sound(item.sound, hashlib.blake2b(digest + b"sound", digest_size=16).digest()))
        return Processed("video", tuple(parts))

    def fill(self, processed: Processed) -> Filling:
        if len(processed.parts) == 1:
            (part,) = processed.parts
            return Filling(np.full(part.num_tokens, self._ids[part.modality], np.int32), (((0, part.num_tokens),),))
        film, sound = processed.parts
        token_ids = [np.array([self._audio_start], np.int32)]
        runs: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        at = 1
        for which, start, end in self._turns(film, sound.num_tokens):
            token_ids.append(np.full(end - start, self._ids["audio" if which else "video"], np.int32))
            runs[which].append((at, end - start))
            at += end - start
        token_ids.append(np.array([self._audio_end], np.int32))
        return Filling(np.concatenate(token_ids), (tuple(runs[0]), tuple(runs[1])))

    def positions(self, length: int, token_ids: np.ndarray, placed: list[Placed]) -> tuple[np.ndarray | None, int]:
        if all(item.processed.modality == "audio" for item in placed):
            return None, 0  # positions of sound simply count, like those of text
        out = np.empty((3, length), dtype=np.int32)
        following, done = 0, 0
        for item in placed:
            following = count_up(out, done, item.start, following)
            done = item.start + len(item.filling.token_ids)
            part = item.processed.parts[0]
            if part.modality == "audio":
                following = count_up(out, item.start, done, following)
            elif len(item.processed.parts) == 1:
                block = self.vision.grid_block(part.features["grid_thw"][0], following, self._interval(part))
                out[:, item.start : done] = block
                following = int(block.max()) + 1
            else:
                following = self._film_with_sound(out, token_ids, item, following)
        count_up(out, done, length, following)
        return out, int(out.max()) + 1 - length

    def _sound(self, samples: np.ndarray, digest: bytes) -> Part:
        least = _MIN_MEL_FRAMES * self.mel.hop
        if len(samples) < least:
            samples = np.pad(samples, (0, least - len(samples)))
        rows = (num_frames(len(samples), self.mel) - 1) // 2 + 1  # the encoder's strided convolution, then its pooling
        return Part("audio", digest, (rows - 2) // 2 + 1, {"input_features": log_mel(samples, self.mel)})

    def _interval(self, part: Part) -> np.float32:
        """Positions per temporal patch; 0 for a picture, which has one temporal patch."""
        if part.modality == "image":
            return np.float32(0)
        return part.features["second_per_grid"][0] * np.float32(self._per_second)

    def _turns(self, film: Part, num_sound: int) -> list[tuple[int, int, int]]:
        """The order of rows in a film with sound: (0 film or 1 sound, first row, end row), two seconds at a time."""
        times = self.vision.grid_block(film.features["grid_thw"][0], 0, self._interval(film))[0]
        seen = self._chunks(times)
        sounds = self._chunks(np.arange(num_sound))
        turns = []
        for index in range(max(len(seen), len(sounds))):
            if index < len(seen):
                turns.append((0, *seen[index]))
            if index < len(sounds):
                turns.append((1, *sounds[index]))
        return turns

    def _chunks(self, times: np.ndarray) -> list[tuple[int, int]]:
        """Split rows where their time reaches the next multiple of two seconds; after a gap, one split per row, as in
        training.
        """
        bounds = [0]
        index = 0
        while True:
            index = max(index, int(np.searchsorted(times, len(bounds) * self._per_chunk)))
            if index >= len(times):
                break
            bounds.append(index)
            index += 1
        return list(zip(bounds, [*bounds[1:], len(times)]))

    def _film_with_sound(self, out: np.ndarray, token_ids: np.ndarray, item: Placed, following: int) -> int:
        """Write the positions of a film with sound; its bos and eos share the positions of the vision bos and eos
        around it.
        """
        start, end = item.start, item.start + len(item.filling.token_ids)
        shared = start > 0 and token_ids[start - 1] == self._vision_start
        out[:, start] = following - 1 if shared else following
        following += 0 if shared else 1
        last = self._in_turns(out, item, following, end)
        closed = end < len(token_ids) and token_ids[end] == self._vision_end
        return last if closed else last + 1

    def _in_turns(self, out: np.ndarray, item: Placed, following: int, end: int) -> int:
        """Write the positions of frames and sound from `following` on, then of the eos after them; returns the eos's
        position.
        """
        film, sound = item.processed.parts
        seen = self.vision.grid_block(film.features["grid_thw"][0], following, self._interval(film))
        sounds = np.broadcast_to(np.arange(following, following + sound.num_tokens), (3, sound.num_tokens))
        at, last = item.start + 1, following - 1
        for which, first, stop in self._turns(film, sound.num_tokens):
            piece = (sounds if which else seen)[:, first:stop]
            out[:, at : at + stop - first] = piece
            at += stop - first
            last = int(piece.max())  # only the last piece counts, as in training
        out[:, end - 1] = last + 1
        return last + 1
