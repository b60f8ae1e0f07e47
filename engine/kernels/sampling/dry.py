"""DRY (don't repeat yourself): a token that would continue a repetition loses an amount that grows with its length.

    L(i) = length of the longest common end of the text up to place i and of the whole text, without breakers
    x -= multiplier * base^(L - allowed)      for the token behind i, if L >= allowed; the largest L of a token counts

Breakers are a set of tokens: a repetition ends at them, and they are never punished. A slot has one line of int32 in
the table of repetitions, in parts of `history` values (a power of two):

    number of listed tokens | (to HEAD) the last tokens, a ring by place | lags | listed tokens | their L

lags[d] is L(last place - d). A chosen token changes each lag on its own: it grows by one if the token d places before
equals the new token, and falls to 0 if not. So a token costs one pass over the window, whatever the text repeats, and
the pass lists the tokens to punish. `cut` calls `remember` after a token is chosen; the next `groups` calls `scatter`
and `repeated`. The host makes the first state from the prompt (engine/sampling/dry.py). Only the part of a repetition
inside the window counts. Source: the definition by p-e-w in text-generation-webui#5677.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from _fast.layout import SamplerWord, SlotWord
from engine.kernels.sampling.bits import bits_at
from engine.kernels.step_tensors import SlotTensors, real, word
from engine.kernels.target import tl, triton

MULTIPLIER = tl.constexpr(int(SamplerWord.DRY_MULTIPLIER))
BASE = tl.constexpr(int(SamplerWord.DRY_BASE))
ALLOWED = tl.constexpr(int(SamplerWord.DRY_ALLOWED))
WINDOW = tl.constexpr(int(SamplerWord.DRY_WINDOW))
PROMPT_LEN = tl.constexpr(int(SlotWord.PROMPT_LEN))
HEAD_LEN, PARTS = 16, 4  # values before the parts; number of parts
HEAD, PARTS_OF_LINE = tl.constexpr(HEAD_LEN), tl.constexpr(PARTS)
MOST = 1e15  # largest penalty: logits stay finite, and so do the squares of their sums
MOST_PENALTY = tl.constexpr(MOST)
LISTED = tl.constexpr(256)  # listed tokens that are read together
LAGS = tl.constexpr(1024)  # lags that are updated together


def line_len(history: int) -> int:
    """Return the number of values of a line."""
    return HEAD_LEN + PARTS * history


def history_of(length: int) -> int:
    """Return the tokens of history in a line of `length` values."""
    return (length - HEAD_LEN) // PARTS


@triton.jit
def scatter(lengths, repeats, first, count, HISTORY: tl.constexpr, SIZE: tl.constexpr):
    """Write to lengths[token], int32, for `count` tokens from `first` on, the largest L that is listed, or 0."""
    for start in range(0, count, SIZE):
        lane = start + tl.arange(0, SIZE)
        tl.store(lengths + first + lane, lane * 0, mask=lane < count)
    tl.debug_barrier()
    number = tl.minimum(tl.load(repeats), HISTORY)
    for start in range(0, number, LISTED):
        lane = start + tl.arange(0, LISTED)
        token = tl.load(repeats + HEAD + 2 * HISTORY + lane, mask=lane < number, other=-1)
        here = (token >= first) & (token < first + count)
        length = tl.load(repeats + HEAD + 3 * HISTORY + lane, mask=here, other=0)
        tl.atomic_max(lengths + token, length, mask=here)
    tl.debug_barrier()


@triton.jit
def repeated(x, length, words, slot):
    """Return logits x with the slot's penalties for repetitions of these lengths; 0 is none."""
    beyond = (length - tl.load(word(words, slot, ALLOWED))).to(tl.float32)
    penalty = real(words, slot, MULTIPLIER) * tl.exp2(tl.minimum(beyond * tl.log2(real(words, slot, BASE)), 64.0))
    return x - tl.where(length > 0, tl.minimum(penalty, MOST_PENALTY), 0.0)


@triton.jit
def remember(token, vocab, words, slot, place, repeats, breakers, HISTORY: tl.constexpr):
    """Append token number `place` of the answer to the slot's history, and list the tokens to punish next. `repeats`,
    `breakers`: the slot's lines."""
    position = tl.load(word(words, slot, PROMPT_LEN)) + place
    least = tl.load(word(words, slot, ALLOWED))
    held = tl.minimum(position + 1, tl.minimum(tl.load(word(words, slot, WINDOW)), HISTORY))
    tokens, lags = repeats + HEAD, repeats + HEAD + HISTORY
    breaks = bits_at(breakers, token, token >= 0)
    count = 0
    for start in range(0, held, LAGS):
        lag = start + tl.arange(0, LAGS)
        here = (lag > 0) & (lag < held)
        same = tl.load(tokens + ((position - lag) & (HISTORY - 1)), mask=here, other=-1) == token
        length = tl.where(same & (breaks == 0), tl.load(lags + lag, mask=here, other=0) + 1, 0)
        tl.store(lags + lag, length, mask=here)
        behind = tl.load(tokens + ((position - lag + 1) & (HISTORY - 1)), mask=here & (lag > 1), other=0)
        behind = tl.where(lag == 1, token, behind)
        length = tl.minimum(length, held - lag)
        listed = here & (length >= least) & (behind >= 0) & (behind < vocab)
        listed = listed & (bits_at(breakers, behind, listed) == 0)
        spot = count + tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(repeats + HEAD + 2 * HISTORY + spot, behind, mask=listed)
        tl.store(repeats + HEAD + 3 * HISTORY + spot, length, mask=listed)
        count += tl.sum(listed.to(tl.int32), 0)
    tl.store(tokens + (position & (HISTORY - 1)), token)
    tl.store(repeats, count)


def repeated_reference(x: Tensor, repeats: Tensor, slots: SlotTensors, slot: int) -> Tensor:
    """Specification of scatter and repeated: logits float32 [vocab] with the penalties of a line of repetitions."""
    history, count = history_of(len(repeats)), int(repeats[0])
    listed, lengths = repeats[HEAD_LEN:].view(PARTS, history)[2:, :count]
    numbers = float(slots.real(SamplerWord.DRY_MULTIPLIER)[slot]), float(slots.real(SamplerWord.DRY_BASE)[slot])
    return punished(x, listed, lengths, *numbers, int(slots.word(SamplerWord.DRY_ALLOWED)[slot]))


def punished(x: Tensor, listed: Tensor, lengths: Tensor, multiplier: float, base: float, allowed: int) -> Tensor:
    """Return x float32 [vocab] without the penalties of the listed tokens, int [n], some of them more than once."""
    longest = torch.zeros(len(x), dtype=torch.int64)
    longest.scatter_reduce_(0, listed.long(), lengths.long(), "amax")
    powers = torch.exp2(((longest - allowed).double() * np.log2(base)).clamp(max=64.0))
    return x - torch.where(longest > 0, (multiplier * powers).clamp(max=MOST), 0.0).float()


def remember_reference(
    token: int, vocab: int, repeats: np.ndarray, breaks: np.ndarray, position: int, window: int, allowed: int
) -> None:
    """Specification of remember: repeats int32, a line; breaks bool [vocab]; position: the token's place."""
    history = history_of(len(repeats))
    tokens, lags = repeats[HEAD_LEN:].reshape(PARTS, history)[:2]
    held = min(position + 1, window, history)
    lag = np.arange(1, held)
    same = tokens[(position - lag) % history] == token
    lags[1:held] = np.where(same & ~breaks[token], lags[1:held] + 1, 0)
    tokens[position % history] = token
    list_repeats(repeats, vocab, breaks, position, held, allowed)


def list_repeats(repeats: np.ndarray, vocab: int, breaks: np.ndarray, position: int, held: int, allowed: int) -> None:
    """Write the list of tokens to punish; `held`: tokens of the window, of which the last has the place `position`."""
    tokens, lags, listed, lengths = repeats[HEAD_LEN:].reshape(PARTS, -1)
    lag = np.arange(1, held)
    length, behind = np.minimum(lags[1:held], held - lag), tokens[(position - lag + 1) % len(tokens)]
    found = np.flatnonzero((length >= allowed) & (behind >= 0) & (behind < vocab))
    found = found[~breaks[behind[found]]]
    repeats[0] = len(found)
    listed[: len(found)], lengths[: len(found)] = behind[found], length[found]
