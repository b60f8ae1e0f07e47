"""DRY by its definition, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence, Set


def dry_penalties(
    text: Sequence[int],
    breakers: Set[int],
    multiplier: float,
    base: float = 1.75,
    allowed: int = 2,
    last_n: int = 8192,
) -> dict[int, float]:
    """The amount that each token's logit loses after `text`; tokens that lose nothing are left out."""
    text = text[-last_n:]
    longest: dict[int, int] = {}
    for place in range(len(text) - 1):
        length = 0
        while length <= place and text[place - length] == text[-1 - length] and text[-1 - length] not in breakers:
            length += 1
        behind = text[place + 1]
        if length >= allowed and behind not in breakers:
            longest[behind] = max(length, longest.get(behind, 0))
    return {token: multiplier * base ** (length - allowed) for token, length in longest.items()}


def packed(tokens: Set[int], vocab: int) -> bytes:
    """A set of tokens as SamplingParams.dry_breakers."""
    flags = bytearray(-(-vocab // 8))
    for token in tokens:
        flags[token // 8] |= 1 << token % 8
    return bytes(flags)
