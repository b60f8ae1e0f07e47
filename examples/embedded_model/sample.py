"""The result of a generator, a conversation with its media; and `Dice`, the generators' source of chance.

`Dice` is the only source of chance: equal seeds give equal samples. `held=True` switches every generator to the
phrasings, words, fonts, voices, backgrounds and codecs that training never uses.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from examples.embedded_model.blueprint import HERE
from examples.embedded_model.phrases import PHRASES
from examples.embedded_model.wordings import ASIDES, COMMAND_VERBS, LEADS, SWAPS, SYSTEMS, WISHES

T = TypeVar("T")


@dataclass
class Media:
    """A picture [height, width, 3] uint8, a sound [samples] float32, or a film: frames, with or without its sound."""

    kind: str  # image, audio, video
    data: np.ndarray
    rate: float = 0.0  # sound: samples a second; film: frames a second
    sound: Media | None = None  # the sound track of a film


@dataclass
class Turn:
    """A question and its answer. `check`: how to judge it (exact, cased, json, schema, call); `task`: its table row."""

    parts: list[str | Media]
    answer: str
    check: str = "exact"
    task: str = ""


@dataclass
class Sample:
    """A conversation; `task` is the task that the generator got."""

    task: str
    turns: list[Turn]
    system: str = ""


class Dice:
    """Seeded random choices, with a switch for the held-out set."""

    def __init__(self, seed: int | str, held: bool = False, portable: bool = False) -> None:
        self.held = held
        self.portable = portable  # uses only this repository and Pillow, no fonts or voices of the machine
        self.task = ""  # the current generator, which decides the split of the word list
        self.tools = ""  # the text about tools in the system message
        self.r = random.Random(f"{seed}/{held}")
        self.np = np.random.default_rng(self.r.getrandbits(63))

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, all with equal probability."""
        return options[int(self.r.random() * len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options."""
        return self.r.sample(list(options), count)

    def chance(self, share: float) -> bool:
        """True with this probability."""
        return self.r.random() < share

    def between(self, low: float, high: float) -> float:
        """A random real number between low and high."""
        return self.r.uniform(low, high)

    def whole(self, low: int, high: int) -> int:
        """A random integer; both ends are included."""
        return self.r.randint(low, high)

    def ask(self, name: str, **values: object) -> str:
        """A question in one of its phrasings, sometimes with polite words, sometimes with careless spelling."""
        plain, held = PHRASES[name]
        text = (self.pick(held) if self.held else self._reworded(self.pick(plain), held)).format(**values)
        roll = self.r.random()
        if roll < 0.12:
            text = f"{self.pick(LEADS)} {text}"
        elif roll < 0.20:
            text = f"{text} {self.pick(ASIDES)}"
        elif roll < 0.28 and not values:
            text = text.lower()
        elif roll < 0.33:
            text = text.rstrip("?.!")
        return text

    def _reworded(self, text: str, held: Sequence[str]) -> str:
        """A training phrasing, some words swapped, some commands turned into wishes; never a held-out phrasing."""
        words = text.split(" ")
        for index, word in enumerate(words):
            bare = word.strip("?.,:!")
            if bare in SWAPS and self.chance(0.35):
                words[index] = word.replace(bare, self.pick(SWAPS[bare]))
        new = " ".join(words)
        if words[0] in COMMAND_VERBS and not new.endswith("}") and self.chance(0.3):
            new = self.pick(WISHES).format(c=new[0].lower() + new[1:].rstrip(".?"))
        return text if new in held else new

    def invented(self) -> str:
        """An invented name: syllables, or a word with a capital letter."""
        if self.chance(0.4):
            return self.word(8).capitalize()
        syllables = (
            self.pick("bcdfghjklmnprstvwz")
            + self.pick("aeiou")
            + self.pick(("", "", "n", "r", "l", "s", "m", "ck", "th"))
            for _ in range(self.whole(1, 3))
        )
        return "".join(syllables).capitalize()

    def system(self) -> str:
        """The system message: mostly empty, except for the text about tools."""
        text = self.pick(SYSTEMS) if self.chance(0.2) else ""
        return "\n\n".join(part for part in (text, self.tools) if part)

    def word(self, longest: int = 9) -> str:
        """An English word; each task reserves a tenth of the list, chosen by the task's name, for the held-out set."""
        if self.chance(0.12) and not self.held:  # two joined words, so that every word also occurs inside others
            half = _words(False, 5, "halves")
            return self.pick(half) + self.pick(half)
        return self.pick(_words(self.held, longest, self.task))


@cache
def _words(held: bool, longest: int, task: str) -> tuple[str, ...]:
    """The words in words.txt, split by checksum so that the split never changes."""
    words = (HERE / "words.txt").read_text().split()
    return tuple(w for w in words if len(w) <= longest and (zlib.crc32(f"{task}/{w}".encode()) % 10 == 0) == held)
