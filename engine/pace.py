"""Pace: how long steps take, learned from the ones that ran; what planning needs to know about time.

Owner: device thread. In: the sizes of settled steps and their seconds. Out: when the step in flight should end, and how
many prompt tokens may join rows that decode, so that a long prompt slows the others to half their speed at worst.
"""

from __future__ import annotations

from _fast.plan import StepPlan

LEAST_PROMPT = 256  # tokens: about as many as the weights' own reading time hides
ENOUGH = 256  # tokens in a step whose time is the tokens' and no longer the weights'
FOUND_DONE = 20e-6  # seconds: a wait shorter than this was none
RISE = 0.05  # of a longer step that is believed at once; a shorter one is believed fully
FEW = 4  # prompts waiting; with more, the crowd's throughput counts more than the rhythm of those that decode
LONG_STEP = 0.036  # seconds that a step may then take
TILE = 128  # tokens: a product's time grows by tiles of so many rows, so a step that fills them costs no more


class Pace:
    """Seconds by size class, and seconds per token of a full step."""

    __slots__ = ("_decode", "_max_tokens", "_per_token", "_seconds")

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._seconds: dict[int, float] = {}  # by the bit length of a step's tokens
        self._decode: dict[int, float] = {}  # of steps that only decode, by the bit length of their rows
        self._per_token = 0.0  # of steps that computing bounds

    def expected(self, plan: StepPlan) -> float:
        """Seconds that a step takes, as far as is known; 0: nothing is."""
        return self._seconds.get(plan.num_tokens.bit_length(), 0.0)

    def note(self, plan: StepPlan, took: float, waited: float) -> None:
        """Learns from a settled step, for which the thread had to wait `waited` seconds.

        Estimates fall at once and rise slowly, so that planning is never late. A step found done ended at an unknown
        time before: half of what it seems to have taken is believed, or one slow step would make later ones wait.
        """
        rows, tokens = plan.num_rows, plan.num_tokens
        if waited < FOUND_DONE:
            took /= 2
        _learn(self._seconds, tokens.bit_length(), took)
        if waited < FOUND_DONE:
            return
        if plan.num_decode_rows == rows:
            _learn(self._decode, rows.bit_length(), took)
        elif tokens >= ENOUGH:
            self._per_token += (took / tokens - self._per_token) * (0.2 if self._per_token else 1.0)

    def prompt_budget(self, decoding: int, waiting: int) -> int:
        """Prompt tokens that a step may take beside `decoding` rows, with `waiting` requests queued.

        As many as double its time; with a crowd waiting, as many as fit into LONG_STEP. Rows and prompts together
        fill whole tiles.
        """
        alone = self._nearest(decoding.bit_length())
        if not decoding or not alone or not self._per_token:
            return self._max_tokens
        allowed = 2 * alone if waiting <= FEW else max(2 * alone, LONG_STEP)
        tiles = max(round(allowed / self._per_token / TILE), -(-(decoding + LEAST_PROMPT) // TILE))
        return min(self._max_tokens, tiles * TILE - decoding)

    def _nearest(self, bits: int) -> float:
        """Seconds of a step that decodes so many rows, or of the nearest size that was seen: they differ little."""
        return min(((abs(seen - bits), took) for seen, took in self._decode.items()), default=(0, 0.0))[1]


def _learn(known: dict[int, float], key: int, took: float) -> None:
    before = known.get(key, took)
    known[key] = took if took < before else before + RISE * (took - before)
