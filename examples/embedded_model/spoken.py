"""A small pack of held-out speech, for making held-out sounds on machines without espeak-ng.

`spoken.opus.ogg` is one recording; `spoken.json` lists each text with its first and last sample at 16 kHz. Made by
`python -m examples.embedded_model.spoken` with held-out voices only.
"""

from __future__ import annotations

import io
import json
from functools import cache

import numpy as np

from examples.embedded_model.blueprint import HERE, SAMPLE_RATE

SOUND, INDEX = HERE / "spoken.opus.ogg", HERE / "spoken.json"


def decode(data: bytes) -> np.ndarray:
    """Decodes any sound file to mono float32 at 16 kHz."""
    import av  # imported here because training machines often lack it, and do not need it

    pieces = []
    with av.open(io.BytesIO(data)) as container:
        resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
        for frame in container.decode(audio=0):
            pieces += [f.to_ndarray()[0] for f in resampler.resample(frame)]
        pieces += [f.to_ndarray()[0] for f in resampler.resample(None)]
    return np.concatenate(pieces).astype(np.float32)


@cache
def utterances() -> tuple[tuple[str, np.ndarray], ...]:
    """Each text with its samples."""
    wave = decode(SOUND.read_bytes())
    return tuple((text, wave[start:end]) for text, start, end in json.loads(INDEX.read_text()))


def main() -> None:
    """Speaks forty strings of digits, and every command word once."""
    from examples.embedded_model.media import encode_sound
    from examples.embedded_model.sample import Dice
    from examples.embedded_model.sounds import COMMANDS, digit_text, speak

    index, pieces, at = [], [], 0
    for number in range(40 + len(COMMANDS)):
        dice = Dice(f"spoken/{number}", held=True)
        if number < 40:
            text = "".join(dice.pick("0123456789") for _ in range(number % 6 + 1))
            wave = speak(dice, digit_text(dice, text))
        else:
            text = COMMANDS[number - 40]
            wave = speak(dice, text)
        index.append((text, at, at + len(wave)))
        pieces.append(np.concatenate([0.9 * wave, np.zeros(800, np.float32)]))
        at += len(pieces[-1])
    SOUND.write_bytes(encode_sound(np.concatenate(pieces), "ogg", bit_rate=20000))
    INDEX.write_text(json.dumps(index) + "\n")
    print(f"{len(index)} utterances, {at / SAMPLE_RATE:.0f} s, {SOUND.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
