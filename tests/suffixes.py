"""Suffix decoding by its definition, over all places and in fractions, as an oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction


def drafted(text: Sequence[int], count: int, depth: int = 24, factor: float = 1.0, least: float = 0.1) -> list[int]:
    """At most `count` drafts after a text whose every match is counted, so not more than some hundreds of tokens."""
    length, best, score = len(text), [], Fraction(0)
    for m in range(min(depth, length - 1), 0, -1):
        places = [end for end in range(length - 1, m - 1, -1) if text[end - m : end] == text[length - m :]]
        path, sums, left = [], Fraction(0), places
        while len(path) < min(count, int(factor * m + 1e-6)) and left:
            after = Counter(extended(text, end)[len(path)] for end in left)  # of equal counts the newest place's first
            token, number = after.most_common(1)[0]
            if Fraction(number, len(places)) < Fraction(least).limit_denominator(1000):
                break
            path.append(token)
            sums += Fraction(number, len(places))
            left = [end for end in left if extended(text, end)[len(path) - 1] == token]
        if sums > score:
            best, score = path, sums
    return best


def extended(text: Sequence[int], end: int) -> list[int]:
    """What follows a place, repeated behind the text's end."""
    after = list(text[end:])
    return after * (64 // len(after) + 1)
