"""Times of words: a window's text, and Whisper's attention to the sound at each token -> words with their times.

Pure, of NumPy; called in the pool. The method is that of OpenAI's whisper (whisper/timing.py: find_alignment): the
attention weights of the alignment heads are normalised, smoothed and averaged; dynamic time warping finds the path
through tokens and time with the largest weights; a token begins where the path reaches it.

    tokens     ' the'    ' ca' 't'    |           time  -->
    words     [' the']  [' cat'     ] |  the  ##
    begin       0.30      0.52        |  cat    ####
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import numpy as np

from server.speech.languages import UNSPACED
from server.speech.segments import Word

FRAME_S = 0.02  # seconds per row of the encoder
BEFORE = "\"'“¡¿([{-"  # marks that belong to the next word
BEHIND = "\"'.。,，!！?？:：”)]}、"  # marks that belong to the word before


def words_of(
    token_ids: Sequence[int], weights: np.ndarray, decode: Callable[[Sequence[int]], str], language: str, smooth: int
) -> list[Word]:
    """Words with times from the window's beginning.

    `weights` [heads, tokens + 1, rows]: the first line belongs to the token before the text, which predicts the first
    of `token_ids`; rows are those of the window's sound. Tokens without a line, for which the decoder's context had no
    room, have no times.
    """
    token_ids = token_ids[: weights.shape[1] - 1]
    if not token_ids or not weights.shape[2]:
        return []
    lines, rows = warped(-aligned(weights, smooth))
    begins = rows[np.diff(lines, prepend=-1) > 0] * FRAME_S  # seconds at which each line begins
    words, at = [], 0
    for word in split(token_ids, decode, language):
        behind = at + len(word)
        words.append(Word(decode(word).strip(), float(begins[at]), float(begins[behind])))
        at = behind
    return words


def aligned(weights: np.ndarray, smooth: int) -> np.ndarray:
    """[heads, lines, rows] -> float64 [lines, rows]: normalised over the lines, smoothed over the rows, averaged."""
    deviation = weights.std(axis=1, keepdims=True)
    normal = (weights - weights.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1)
    half = smooth // 2
    if half and normal.shape[2] > half:
        padded = np.pad(normal, ((0, 0), (0, 0), (half, half)), mode="reflect")
        normal = np.median(np.lib.stride_tricks.sliding_window_view(padded, smooth, axis=2), axis=-1)
    return normal.mean(axis=0).astype(np.float64)


def warped(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest path from one corner to the other, by steps of one line, one row or both: its lines and rows.

    Cells of a diagonal do not depend on each other, so a whole diagonal is computed at a time.
    """
    lines, rows = costs.shape
    total = np.full((lines + 1, rows + 1), np.inf, np.float32)
    steps = np.zeros((lines + 1, rows + 1), np.int8)  # the step that led to a cell: 0 both, 1 a line, 2 a row
    total[0, 0] = 0
    for diagonal in range(2, lines + rows + 1):
        i = np.arange(max(1, diagonal - rows), min(lines, diagonal - 1) + 1)
        j = diagonal - i
        both, line, row = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where((both < line) & (both < row), 0, np.where((line < both) & (line < row), 1, 2))
        total[i, j] = costs[i - 1, j - 1] + np.choose(step, (both, line, row))
        steps[i, j] = step
    steps[0, :], steps[:, 0] = 2, 1
    path, i, j = [], lines, rows
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = steps[i, j]
        i, j = i - (step != 2), j - (step != 1)
    found = np.array(path[::-1])
    return found[:, 0], found[:, 1]


def split(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], language: str) -> list[list[int]]:
    """The tokens of each word; a mark belongs to the word next to it."""
    pieces = _characters(token_ids, decode)
    words: list[list[int]] = []
    for piece in pieces:
        text = decode(piece)
        is_mark = text.strip() in string.punctuation  # true for a space alone, too
        if language in UNSPACED or not words or text.startswith(" ") or is_mark:
            words.append(list(piece))
        else:
            words[-1] += piece
    return _with_marks(words, decode)


def _characters(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[list[int]]:
    """Group tokens so that each group is whole characters."""
    whole, done = decode(token_ids), 0
    pieces: list[list[int]] = [[]]
    for token in token_ids:
        pieces[-1].append(token)
        text = decode(pieces[-1])
        broken = text.find("\ufffd")
        if broken < 0 or whole[done + broken : done + broken + 1] in ("", "\ufffd"):
            done += len(text)
            pieces.append([])
    return [piece for piece in pieces if piece]


def _with_marks(words: list[list[int]], decode: Callable[[Sequence[int]], str]) -> list[list[int]]:
    """Join separate marks to the words after and before them."""
    found: list[list[int]] = []
    for word in reversed(words):
        text = decode(word)
        if found and text.startswith(" ") and text.strip() in BEFORE:
            found[-1] = word + found[-1]
        else:
            found.append(word)
    joined: list[list[int]] = []
    for word in reversed(found):
        if joined and not decode(joined[-1]).endswith(" ") and decode(word) in BEHIND:
            joined[-1] = joined[-1] + word
        else:
            joined.append(word)
    return joined
