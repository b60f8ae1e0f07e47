"""Words for tools: verbs, keys, spellings and values, and the words that training never draws.

Training also has words of random syllables and values with digits and marks; held-out tools do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from examples.embedded_model import talk_tasks
from examples.embedded_model.sample import Dice

VERBS = ("get", "set", "find", "open", "close", "send", "book", "order", "start", "stop", "show", "add", "remove", "move",
         "check", "buy", "sell", "play", "paint", "count", "read", "write", "rent", "track", "update", "create", "delete",
         "save", "load", "call", "share", "clean", "build", "fix", "plan", "rate", "lock", "print", "copy", "test")  # fmt: skip
HELD_VERBS = ("look up", "cancel", "measure", "reserve", "schedule", "convert", "turn on", "ask for")
KEYS = ("name", "city", "level", "room", "count", "colour", "size", "day", "price", "title", "user", "street", "amount",
        "language", "speed", "weight", "path", "topic", "animal", "food", "person", "team", "number", "town", "item",
        "message", "file", "label", "first_name", "unit_price", "user_id", "room_name", "max_count", "order_id")  # fmt: skip
HELD_KEYS = ("place", "guest", "quantity", "height", "country", "product", "start_day", "seat_number", "code", "tag")
HELD_WORDS = frozenset(word for name in (*HELD_VERBS, *HELD_KEYS) for word in re.split(r"[_ ]", name)) - {"on", "for"}
# Held-out words, and other words that only held-out requests have.
NEVER = HELD_WORDS | {"seat", "seats", "coat", "coats", "taxi", "wall", "shade", "population"}
PARTICLES = (
    "in",
    "out",
    "over",
    "by",
    "with",
    "down",
    "off",
    "into",
    "away",
    "after",
    "back",
    "to",
    "through",
    "along",
)
MARKS = (
    "on",
    "off",
    "low",
    "high",
    "small",
    "large",
    "red",
    "blue",
    "fast",
    "slow",
    "north",
    "south",
    "metric",
    "round",
)


def throw_value(dice: Dice, kind: str) -> Any:
    """A value of a kind; texts come from lists with a held-out part."""
    if kind == "integer":
        return dice.whole(0, 9) if dice.chance(0.3) else dice.whole(10, 999)
    if kind == "number":
        return dice.whole(0, 999) / 10
    if kind == "boolean":
        return dice.chance(0.5)
    if kind == "town":
        return talk_tasks._town(dice)
    if kind == "name":
        return talk_tasks._name(dice)
    if kind == "mark":
        return dice.pick(MARKS)
    if not dice.held and dice.chance(0.15):
        return _odd_text(dice) if dice.chance(0.5) else made_up(dice)
    roll = dice.r.random()
    if roll < 0.35:
        return talk_tasks._name(dice) if roll < 0.2 else talk_tasks._town(dice)
    return " ".join(dice.word() for _ in range(1 if roll < 0.8 else dice.whole(2, 3)))


def made_up(dice: Dice) -> str:
    """An invented word, which the model can only copy."""
    starts, ends = ("b", "c", "d", "f", "g", "gr", "k", "l", "m", "n", "p", "qu", "r", "s", "st", "t", "tr", "v", "w", "z"), \
        ("", "", "n", "r", "l", "s", "m", "ck", "th", "x")  # fmt: skip
    return "".join(dice.pick(starts) + dice.pick("aeiouy") + dice.pick(ends) for _ in range(dice.whole(1, 3)))


def _odd_text(dice: Dice) -> str:
    """A text with digits or marks: a date, a time, a file, a code, a long name."""
    roll = dice.whole(0, 6)
    if roll == 0:
        return f"20{dice.whole(10, 39)}-{dice.whole(1, 12):02d}-{dice.whole(1, 28):02d}"
    if roll == 1:
        return f"{dice.whole(0, 23)}:{dice.whole(0, 59):02d}"
    if roll == 2:
        return f"{dice.word()}.{dice.pick(('txt', 'py', 'json', 'png'))}"
    if roll == 3:
        return f"{dice.pick('ABCDEFGHKLMNPRSTXZ')}{dice.pick(('', '-'))}{dice.whole(1, 999)}"
    if roll == 4:
        return f"{dice.word()}@{dice.word()}.{dice.pick(('com', 'org', 'net'))}"
    if roll == 5:
        return f"{dice.word()} {dice.whole(1, 99)}"
    return " ".join(dice.word() for _ in range(dice.whole(3, 5)))


def plain_words(dice: Dice, count: int) -> list[str]:
    """Words of the list, without held-out words in training."""
    words: list[str] = []
    while len(words) < count:
        word = made_up(dice) if not dice.held and dice.chance(0.15) else dice.word(9)
        if dice.held or word not in NEVER:
            words.append(word)
    return words


def spelled(dice: Dice, words: list[str]) -> str:
    """The words joined to an identifier, as programmers write it."""
    return dice.pick(("_".join(words), "_".join(words), words[0] + "".join(w.capitalize() for w in words[1:]),
                      "-".join(words)))  # fmt: skip


def some_keys(dice: Dice, count: int, among: Sequence[str] = KEYS) -> list[str]:
    """Different keys, from the list or made of one or two words; training may draw from fewer, `among`."""
    keys: list[str] = []
    while len(keys) < count:
        if dice.chance(0.5 if dice.held else 0.25):
            key = dice.pick(HELD_KEYS if dice.held else among)
        else:
            key = spelled(dice, plain_words(dice, 2 if dice.chance(0.35) else 1))
        if key not in keys:
            keys.append(key)
    return keys


def as_said(dice: Dice, key: str) -> str:
    """A key as people say it, or as its identifier."""
    return key if dice.chance(0.3) else spoken(key)


def spoken(key: str) -> str:
    """An identifier as people say it: words with spaces."""
    return re.sub(r"(?<=[a-z])([A-Z])", lambda found: f" {found[1].lower()}", key).replace("_", " ").replace("-", " ")


def shown(value: Any) -> str:
    """A value as people write it."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def schema_of(kind: str) -> dict[str, Any]:
    """The JSON schema of a kind."""
    return {"type": kind if kind in ("integer", "number", "boolean") else "string"}
