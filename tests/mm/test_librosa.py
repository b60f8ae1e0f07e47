"""Sound against librosa: resampling, log-mel, loudness, pauses, and where a recording is cut.

Long form: the first use of librosa takes two seconds of imports.
"""

from __future__ import annotations

import subprocess
import sys

import librosa
import numpy as np
import pytest

from mm.decode.alarm import Alarm
from mm.decode.audio import SAMPLE_RATE, SoundFile
from mm.limits import MediaLimits
from mm.transform.mel import MelSettings, log_mel, mel_filters
from mm.transform.quiet import FRAME_S, Cutting, loudness, windows
from tests.mm import made

pytestmark = pytest.mark.full
FRAME = int(SAMPLE_RATE * FRAME_S)


def speechlike(seconds: float, rate: int = SAMPLE_RATE) -> np.ndarray:
    """Noise whose loudness swells and fades four times a second; float32 [samples]."""
    draw, time = np.random.default_rng(3), np.arange(int(seconds * rate)) / rate
    return (0.1 * (1 + np.sin(8 * np.pi * time)) * draw.standard_normal(len(time))).astype(np.float32)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 96000])
def test_resampling_is_librosas(rate: int) -> None:
    sound = np.clip(speechlike(1.0, rate), -1, 1)
    data = made.sound(sound[None], rate, "wav", "pcm_f32le")
    found = SoundFile(data, "wav", MediaLimits()).decode(Alarm())
    wanted = librosa.resample(sound, orig_sr=rate, target_sr=SAMPLE_RATE, res_type="soxr_hq")
    size = min(len(found), len(wanted))
    assert abs(len(found) - len(wanted)) <= 1
    assert np.abs(found[:size] - wanted[:size]).max() < 1e-5


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("seconds", [1.0, 7.3])
def test_log_mels_are_librosas(mels: int, seconds: float) -> None:
    settings, sound = MelSettings(num_mels=mels), speechlike(seconds)
    filters = librosa.filters.mel(sr=SAMPLE_RATE, n_fft=settings.n_fft, n_mels=mels)
    assert np.abs(mel_filters(settings) - filters).max() < 1e-7
    # After its end the extractor pads with silence; librosa mirrors the sound there unless it gets silence appended.
    padded = np.pad(sound, (0, settings.n_fft))
    energies = librosa.feature.melspectrogram(
        y=padded, sr=SAMPLE_RATE, n_fft=settings.n_fft, hop_length=settings.hop, n_mels=mels, pad_mode="reflect"
    )
    wanted = np.log10(np.maximum(energies, 1e-10))
    wanted = (np.maximum(wanted, wanted.max() - 8) + 4) / 4
    found = log_mel(sound, settings)
    assert np.abs(found - wanted[:, : found.shape[1]]).max() < 1e-4


def test_loudness_holds_the_ragged_end_and_pieces_join() -> None:
    sound = speechlike(70.0)[: -FRAME // 2]  # longer than one piece
    padded = np.pad(sound, (0, -len(sound) % FRAME)).reshape(-1, FRAME)
    assert np.abs(loudness(sound, FRAME) - np.sqrt((padded.astype(np.float64) ** 2).mean(1))).max() < 1e-6


def test_pauses_are_librosas() -> None:
    """A sound of words of 0.6 to 1.4 s with a second of silence between them is cut at librosa's pauses."""
    lengths = (0.6, 1.0, 1.4, 0.8)
    gap = np.zeros(SAMPLE_RATE, np.float32)
    sound = np.concatenate([part for length in lengths for part in (gap, 0.3 + speechlike(length))] + [gap])
    wanted = librosa.effects.split(sound, top_db=40, frame_length=FRAME, hop_length=FRAME)
    found = windows(sound, SAMPLE_RATE, Cutting(longest=30.0, pause=0.6))
    assert len(found) == len(wanted) == len(lengths)
    margin = 0.2 * SAMPLE_RATE  # windows include this margin around the loud part
    for (start, end), (first, last) in zip(found, wanted):
        assert abs(start - (first - margin)) <= 3 * FRAME
        assert abs(end - (last + margin)) <= 3 * FRAME


def test_a_long_sound_is_cut_where_librosa_finds_it_quietest() -> None:
    sound, longest = speechlike(20.0), 8.0
    loud = librosa.feature.rms(y=sound, frame_length=FRAME, hop_length=FRAME, center=False)[0]
    typical = np.median(loud)
    for _, end in windows(sound, SAMPLE_RATE, Cutting(longest=longest))[:-1]:
        assert loud[end // FRAME - 1 : end // FRAME + 2].max() < 0.2 * typical


def test_a_read_only_installation_and_a_user_without_a_home_are_enough() -> None:
    """numba finds no folder for its compiled code, as in a container with a read-only root."""
    code = """
from numba.core import caching
caching.CompileResultCacheImpl._locator_classes[1:] = []  # the first one reads the setting
import numpy as np
from mm.transform.quiet import Cutting, windows
loud, silent = np.random.default_rng(0).normal(0, 0.2, 16000), np.zeros(16000)
print(len(windows(np.concatenate([loud, silent, loud]).astype(np.float32), 16000, Cutting(30.0, 0.5))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "2\n", done.stderr
