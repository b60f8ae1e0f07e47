"""Pace: how long steps take, learned from the ones that ran; what planning needs to know about time.

Owner: device thread. In: the sizes of settled steps and their seconds, also those that the GIL-free loop learned. Out:
when to plan behind the step in flight, and how many prompt tokens may join a step. A step that decodes waits for the
weights, and one that computes prompts for the arithmetic: together they cost less than one after the other, so prompts
are distributed over the steps instead of filling a few of them:

    seconds of a step = max(the weights' reading, products of all its tokens) + reading the keys of rows that decode

A product is cut into tiles, as many of which run at once as the device has units. Of the numbers of tokens that come
near what time allows, one is taken whose last round of tiles leaves few units idle.
"""

from __future__ import annotations

from collections.abc import Callable

from _fast.clock import StepClock, believe
from _fast.plan import StepPlan
from engine.step.step import Step

LEAST_PROMPT = 256  # tokens: about as many as the weights' own reading time hides
COMPUTE_BOUND_TOKENS = 256  # a step of so many tokens takes the time of its products, no longer of the weights' reading
DECODE_SHARE = 8  # where at most one token in so many decodes, the cost of a token is learned from the step's time
LEAST_MARGIN = 0.0003  # seconds: what Python's turn takes
BUSY_QUEUE = 8  # with more requests waiting, their first tokens count as much as the pace of rows that decode
HORIZON = 8  # steps within which a busy queue's prompts are computed, if steps of twice the time do not hold them
LONG_STEP = 0.036  # seconds that a step may take for that
BURST = 4  # full steps of prompts: with so many waiting, prompts fill steps though rows that decode wait for them
FULL = 2048  # tokens of a full step; an operator who allows more wants long steps: any busy queue then makes a burst
MIN_FILL_GAIN = 0.2  # of fullness, for a step of twice the tiles; a step of up to MOST_ROUND_UP times the tiles counts
MOST_ROUND_UP = 1.25
PREFILL_ONLY_TOKENS = 512  # of a step in which nothing decodes: prompts that wait together end one after the other


class Pace:
    """The clock of steps that Python launches, and seconds per token of a full step."""

    __slots__ = ("_decode", "_full", "_max_tokens", "_noted", "_per_token", "_tile", "clock")

    def __init__(self, max_tokens: int, tile: int, fullness: Callable[[int], float]) -> None:
        """`fullness(tokens)`: how much of the device works on the products of so many tokens, at most 1."""
        self._max_tokens = max_tokens
        self._tile = tile
        self._full = round_up_tiles(-(-max_tokens // tile), lambda tiles: fullness(tiles * tile))
        self.clock = StepClock(max(tile, self._class(max_tokens)) + 1, LEAST_MARGIN)
        self._decode: dict[int, float] = {}  # of steps that only decode, by the bit length of their rows
        self._noted: dict[int, float] = {}  # by the bit length of rows: what note_decode got last
        self._per_token = 0.0  # seconds of products per token, of steps that computing bounds

    def plan_at(self, step: Step) -> float:
        """When to plan behind the step in flight: as long before its end as the host needs; 0: at once."""
        took = self.clock.at_least(self._class(step.plan.num_tokens))
        return step.times.plan_at or self.clock.plan_at(step.times.started_at or step.times.launched_at, took)

    def note(self, plan: StepPlan, took: float, waited: float, began_before: bool = False) -> None:
        """Learns from a settled step, for which the thread had to wait `waited` seconds.

        `began_before`: the step took longer than `took`, for the step before was already done when polled.

        What decoding takes, where steps are found done, is the time between two of them; prompts in such steps cost
        nothing, so nothing is learned of theirs.
        """
        rows, tokens = plan.num_rows, plan.num_tokens
        kind = self._class(tokens)
        self.clock.adapt(self.clock.expected(kind), waited)
        exact = self.clock.learn(kind, took, not began_before, waited) and not began_before
        if plan.num_decode_rows == rows:
            self._learn_decode(rows.bit_length(), took, at_once=exact)
        elif tokens >= COMPUTE_BOUND_TOKENS and exact:
            self._learn_products(plan.num_decode_rows, tokens, took)

    def _learn_products(self, decoding: int, tokens: int, took: float) -> None:
        """Learns from a compute-bound step what a token costs or, where many rows decode, what these rows cost alone.

        During a steady stream of prompts no step only decodes, and what such steps taught grows old.
        """
        if decoding <= tokens // DECODE_SHARE or not self._per_token:
            per_token = max(took - self._attention(decoding), 0.0) / tokens
            self._per_token += (per_token - self._per_token) * (0.2 if self._per_token else 1.0)
            return
        keys = took - max(self._weights, self._per_token * tokens)
        alone = max(keys, 0.0) + max(self._weights, self._per_token * decoding)
        self._learn_decode(decoding.bit_length(), alone, at_once=False)

    def _learn_decode(self, rows_bits: int, took: float, at_once: bool) -> None:
        self._decode[rows_bits] = believe(self._decode.get(rows_bits, 0.0), took, at_once)

    def prompt_budget(self, decoding: int, waiting: int, lacking: int, following: int) -> int:
        """Prompt tokens that a step may take.

        `decoding` rows are in the step, `waiting` requests have not begun, all prompts lack `lacking` tokens and the
        prompt that is served next lacks `following`. With rows that decode: as many as double the step's time; with a
        busy queue as many as compute its prompts within HORIZON steps, up to LONG_STEP; in a burst as many as fit. Rows
        and prompts fill whole tiles.
        """
        busy = waiting > BUSY_QUEUE
        large = busy and (2 * waiting > decoding or self._max_tokens > FULL)
        burst = lacking >= BURST * min(self._max_tokens, FULL) and (not decoding or large)
        if not decoding:
            some = self._max_tokens if burst or lacking == following else max(PREFILL_ONLY_TOKENS, following)
            return min(self._max_tokens, some)
        alone = self._nearest(decoding.bit_length())
        if burst or not alone or not self._per_token:
            return self._max_tokens
        attention = self._attention(decoding)
        tokens = (2 * alone - attention) / self._per_token
        if busy:
            longest = (LONG_STEP - attention) / self._per_token
            tokens = max(tokens, min(lacking / HORIZON + decoding, longest))
        tiles = max(round(tokens / self._tile), -(-(decoding + LEAST_PROMPT) // self._tile))
        tiles = self._full[min(tiles, len(self._full) - 1)]
        return min(self._max_tokens, tiles * self._tile - decoding)

    def note_decode(self, rows_bits: int, seconds: float) -> None:
        """Seconds of steps that only decode, by the bit length of their rows, as the GIL-free loop has learned them.

        The GIL-free loop repeats old values; only changed ones are news.
        """
        if self._noted.get(rows_bits) != seconds:
            self._noted[rows_bits] = self._decode[rows_bits] = seconds

    def _attention(self, decoding: int) -> float:
        """Seconds that decoding rows add to those of weights and products: for reading the keys of long contexts."""
        if not decoding:
            return 0.0
        return max(self._nearest(decoding.bit_length()) - max(self._weights, self._per_token * decoding), 0.0)

    @property
    def _weights(self) -> float:
        """Seconds that reading the weights takes, or a little more: the shortest of all steps that decode."""
        return min(self._decode.values(), default=0.0)

    def _class(self, tokens: int) -> int:
        """Steps of one class take about as long: by bit length up to a tile, then by tiles, which products fill."""
        return tokens.bit_length() if tokens <= self._tile else self._tile + -(-tokens // self._tile)

    def _nearest(self, bits: int) -> float:
        """Seconds of a step that decodes so many rows, or of the nearest size that was seen: they differ little."""
        return min(((abs(seen - bits), took) for seen, took in self._decode.items()), default=(0, 0.0))[1]


def round_up_tiles(most: int, fullness: Callable[[int], float]) -> list[int]:
    """For each number of tiles from 0 to `most`: the number near it, at least as large, whose last wave is fuller."""
    chosen = [0]
    for tiles in range(1, most + 1):
        near = range(tiles, min(int(MOST_ROUND_UP * tiles), most) + 1)
        chosen.append(max(near, key=lambda more: fullness(more) - MIN_FILL_GAIN * (more - tiles) / tiles))
    return chosen
