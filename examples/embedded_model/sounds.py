"""Generates sounds: espeak-ng speech in many voices, beeps and slides, with effects of rooms, telephones and codecs.

espeak-ng runs inside the process through ctypes (library and voices from the `espeakng-loader` package, or the
system's). If it is missing, `speak` raises `NoVoice`. Out: float32 samples at 16 kHz.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from functools import cache
from pathlib import Path

import numpy as np
from scipy.signal import firwin, lfilter, resample_poly

from examples.embedded_model.blueprint import SAMPLE_RATE
from examples.embedded_model.sample import Dice

ACCENTS = ("en-us", "en-us", "en-us", "en-us", "en", "en", "en-gb-x-rp", "en-029", "en-us-nyc")
HELD_ACCENTS = ("en-us", "en-us", "en", "en-gb-x-gbcwmd")
VARIANTS = ("", "m1", "m2", "m3", "m4", "m6", "m7", "m8", "f1", "f2", "f3", "f4", "Alex", "Alicia", "Andrea", "Annie", "Denis",
            "Gene", "Henrique", "Hugo", "Jacky", "Lee", "Marco", "Mario", "Michael", "Mike", "Nguyen", "Reed", "adam", "anika",
            "antonio", "aunty", "belinda", "benjamin", "boris", "caleb", "david", "ed", "edward", "grandma", "grandpa",
            "gustave", "ian", "iven", "iven2", "john", "kaukovalta", "klatt", "klatt2", "klatt3", "linda", "max", "michel",
            "miguel", "norbert", "pablo", "paul", "pedro", "rob", "robert", "sandro", "shelby", "steph", "travis", "zac")  # fmt: skip
HELD_VARIANTS = ("", "m5", "f5", "Andy", "Diogo", "marcelo", "quincy", "victor", "iven3", "steph2", "edward2")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go", "start", "pause", "play", "next", "back",
            "open", "close", "help", "menu", "home", "save", "delete", "copy", "search", "print", "louder", "quieter",
            "faster", "slower", "lights", "music", "camera", "call", "cancel", "repeat", "weather", "timer", "hello",
            "goodbye", "thanks")  # fmt: skip
VOICE_RATE = 22050
RATE, PITCH, RANGE, GAP = 1, 3, 4, 7  # espeak's parameter numbers


class NoVoice(RuntimeError):
    """espeak-ng is not on this machine."""


class _Espeak:
    """The library, one for each process; sound arrives in a callback while `espeak_Synth` runs."""

    def __init__(self) -> None:
        path, data = _find_library()
        self.lib = ctypes.CDLL(path)
        rate = self.lib.espeak_Initialize(2, 0, data, 0)  # 2: synchronous, samples to the callback
        if rate != VOICE_RATE:
            raise NoVoice(f"espeak-ng gives {rate} samples a second, {VOICE_RATE} expected; check its voice data")
        self.pieces: list[np.ndarray] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self.callback = kind(self._take)
        self.lib.espeak_SetSynthCallback(self.callback)

    def _take(self, samples, count, _events) -> int:
        if samples and count > 0:
            self.pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, text: str, voice: str, rate: int, pitch: int, spread: int, gap: int) -> np.ndarray:
        """The spoken text as float32 in [-1, 1] at 22,050 Hz."""
        self.pieces.clear()
        self.lib.espeak_SetVoiceByName(voice.encode())
        for number, value in ((RATE, rate), (PITCH, pitch), (RANGE, spread), (GAP, gap)):
            self.lib.espeak_SetParameter(number, value, 0)
        raw = text.encode()
        self.lib.espeak_Synth(raw, len(raw) + 1, 0, 1, 0, 1, None, None)
        self.lib.espeak_Synchronize()
        return np.concatenate(self.pieces).astype(np.float32) / 32768 if self.pieces else np.zeros(2205, np.float32)


def _find_library() -> tuple[str, bytes | None]:
    """Path of the bundled library and of its data, or else of the system's library."""
    try:
        import espeakng_loader

        if Path(espeakng_loader.get_library_path()).exists():
            return espeakng_loader.get_library_path(), espeakng_loader.get_data_path().encode()
    except ImportError:
        pass
    found = ctypes.util.find_library("espeak-ng")
    if not found:
        raise NoVoice("espeak-ng is missing: pip install espeakng-loader, or install the package espeak-ng")
    return found, None


@cache
def voice() -> _Espeak:
    """The espeak library of this process."""
    return _Espeak()


@cache
def _lowpass(up: int, down: int) -> np.ndarray:
    """The low-pass filter for resampling by up / down; cached, because its design takes longer than its use."""
    wide = max(up, down)
    return firwin(2 * 10 * wide + 1, 1 / wide, window=("kaiser", 5.0)).astype(np.float32)


def resample(wave: np.ndarray, up: int, down: int) -> np.ndarray:
    """Changes the sampling rate by up / down."""
    return resample_poly(wave, up, down, window=_lowpass(up, down)).astype(np.float32)


def speak(dice: Dice, text: str) -> np.ndarray:
    """The text in a random voice, speed and pitch, at 16 kHz, with a peak near one and silence trimmed."""
    variant = dice.pick(HELD_VARIANTS if dice.held else VARIANTS)
    accent = dice.pick(HELD_ACCENTS if dice.held else ACCENTS)
    name = f"{accent}+{variant}" if variant else accent
    rate = round(dice.between(110, 220))
    wave = voice().say(text, name, rate, dice.whole(20, 80), dice.whole(20, 80), dice.pick((0, 0, 0, 1, 3, 6)))
    wave = resample(wave, 320, 441)
    return trim(wave)


def trim(wave: np.ndarray) -> np.ndarray:
    """Removes the silence around the sound and scales its peak to one."""
    peak = float(np.abs(wave).max(initial=1e-6))
    loud = np.flatnonzero(np.abs(wave) > 0.01 * peak)
    if not len(loud):
        return wave
    return wave[max(0, loud[0] - 320) : loud[-1] + 800] / peak


def digit_text(dice: Dice, digits: str) -> str:
    """The text for reading the digits aloud: words, sometimes in groups."""
    words = [DIGITS[int(d)] for d in digits]
    style = dice.r.random()
    if style < 0.5:
        return " ".join(words)
    if style < 0.75:
        return ", ".join(words)
    if style < 0.9 and len(words) > 2:
        cut = dice.whole(1, len(words) - 1)
        return " ".join(words[:cut]) + ", " + " ".join(words[cut:])
    return " ".join(digits)


def _envelope(length: int, edge: int) -> np.ndarray:
    """An envelope that is 1, with linear ramps at both ends."""
    shape = np.ones(length, np.float32)
    edge = max(1, min(edge, length // 2))
    ramp = np.linspace(0, 1, edge, dtype=np.float32)
    shape[:edge], shape[length - edge :] = ramp, ramp[::-1]
    return shape


def _tone(dice: Dice, phase: np.ndarray, timbre: int) -> np.ndarray:
    """A sine, soft square, triangle or a few harmonics; `phase` is in cycles."""
    turn = 2 * math.pi * phase
    if timbre == 0:
        return np.sin(turn)
    if timbre == 1:
        return np.tanh(3 * np.sin(turn))
    if timbre == 2:
        return np.arcsin(np.sin(turn)) * (2 / math.pi)
    return 0.6 * np.sin(turn) + 0.3 * np.sin(2 * turn) + 0.1 * np.sin(3 * turn)


def slide(dice: Dice, rising: bool) -> np.ndarray:
    """A tone whose pitch only rises or only falls."""
    length = int(dice.between(0.5, 2.0) * SAMPLE_RATE)
    low = dice.between(180, 700)
    high = low * dice.between(1.5, 3.0)
    course = np.linspace(0, 1, length)
    if dice.chance(0.3):  # in steps
        steps = dice.whole(3, 7)
        course = np.floor(course * steps).clip(0, steps - 1) / (steps - 1)
    frequency = low * (high / low) ** (course if rising else 1 - course)
    wave = _tone(dice, np.cumsum(frequency) / SAMPLE_RATE, dice.whole(0, 3)) * _envelope(length, dice.whole(80, 800))
    return wave.astype(np.float32)


def beeps(dice: Dice, count: int, long: bool) -> np.ndarray:
    """`count` beeps of one pitch, short (0.06-0.18 s) or long (0.45-0.9 s), with gaps between them."""
    duration = dice.between(0.45, 0.9) if long else dice.between(0.06, 0.18)
    if long and count > 4:
        duration = dice.between(0.45, 0.55)
    gap = dice.between(0.1, 0.4)
    frequency, timbre = dice.between(300, 2200), dice.whole(0, 3)
    pieces: list[np.ndarray] = []
    for index in range(count):
        length = int(duration * dice.between(0.95, 1.05) * SAMPLE_RATE)
        phase = np.arange(length) * frequency / SAMPLE_RATE
        pieces.append(_tone(dice, phase, timbre) * _envelope(length, dice.whole(40, 240)))
        if index + 1 < count:
            pieces.append(np.zeros(int(gap * dice.between(0.9, 1.1) * SAMPLE_RATE)))
    return np.concatenate(pieces).astype(np.float32)


def _noise(dice: Dice, length: int) -> np.ndarray:
    """Noise from white to brown, with a root mean square of one."""
    white = dice.np.standard_normal(length, dtype=np.float32)
    colour = dice.pick((0.0, 0.5, 0.9, 0.97))
    noise = lfilter([1.0], [1.0, -colour], white) if colour else white
    return (noise / max(1e-6, float(np.sqrt(np.mean(noise**2))))).astype(np.float32)


def _room(dice: Dice, wave: np.ndarray) -> np.ndarray:
    """Adds a few echoes that decay."""
    length = int(dice.between(0.05, 0.3) * SAMPLE_RATE)
    count = dice.whole(8, 30)
    at = dice.np.integers(1, length, count)
    strength = dice.np.standard_normal(count) * np.exp(-4 * at / length) * dice.between(0.1, 0.45)
    wet = np.concatenate([wave, np.zeros(length, np.float32)])
    for delay, factor in zip(at.tolist(), strength.tolist(), strict=True):
        wet[delay : delay + len(wave)] += factor * wave
    return wet


def wear(dice: Dice, wave: np.ndarray, speech: bool = True) -> np.ndarray:
    """Adds silence around the sound, room, noise, a narrow band, coarse quantisation, and another loudness."""
    ends = [np.zeros(int(dice.between(0.02, 0.5) * SAMPLE_RATE), np.float32) for _ in range(2)]
    wave = np.concatenate([ends[0], wave, ends[1]])
    if dice.chance(0.3):
        wave = _room(dice, wave)
    if speech and dice.chance(0.2 if dice.held else 0.5):  # other speakers: pitch and formants change together
        near = ((10, 11), (11, 10), (15, 16), (16, 15), (20, 21), (21, 20))
        up, down = dice.pick(near if dice.held else (*near, (5, 6), (6, 5), (7, 8), (8, 7), (9, 8), (8, 9)))
        wave = resample(wave, up, down)
    if dice.chance(0.2):
        narrow = dice.pick((2, 2, 4)) if not speech else 2
        wave = resample(resample(wave, 1, narrow), narrow, 1)
    if dice.chance(0.5):
        level = 10 ** (-dice.between(8, 40) / 20) * float(np.sqrt(np.mean(wave**2)))
        wave = wave + level * _noise(dice, len(wave))
    if dice.chance(0.1):
        steps = dice.pick((63, 127))  # as mu-law telephones quantise
        wave = np.sign(wave) * np.round(np.log1p(255 * np.abs(wave).clip(0, 1)) / math.log(256) * steps) / steps
        wave = np.sign(wave) * (256 ** np.abs(wave) - 1) / 255
    peak = max(1e-6, float(np.abs(wave).max()))
    return (wave / peak * dice.between(0.05, 1.0)).astype(np.float32)
