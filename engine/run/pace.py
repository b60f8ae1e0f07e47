"""Pace: a model of the duration of steps, learned from settled steps; planning reads it.

Owner: device thread. In: sizes and seconds of settled steps, including those that the GIL-free loop learned. Out: when
to plan the next step, and how many prompt tokens may join it. A decode step is bound by reading the weights, a prefill
step by arithmetic. A mixed step costs less than two separate steps, so prompts are distributed over many steps:

    seconds of a step = max(reading the weights, products of all its tokens) + reading the keys of rows that decode

A product is cut into tiles, and each unit of the device computes one tile at a time. Pace chooses a number of tokens
near the time budget whose last wave of tiles leaves few units idle.
"""

from __future__ import annotations

from collections.abc import Callable

from _fast.clock import StepClock, believe
from _fast.plan import StepPlan
from _fast.shares import UNLIMITED, TokenShares
from engine.step.step import Step

LEAST_PROMPT = 256  # tokens: about as many are computed while the weights are read
COMPUTE_BOUND_TOKENS = 256  # from so many tokens on, a step is bound by its products, not by reading the weights
DECODE_SHARE = 8  # if at most one token in so many decodes, the step's time gives the cost of a token
LEAST_MARGIN = 0.0003  # seconds that Python needs to plan and launch a step
BUSY_QUEUE = 8  # with more requests waiting, their time to first token counts as much as the speed of decoding
HORIZON = 8  # steps: a busy queue's prompts are computed within so many, if steps of twice the decode time cannot
LONG_STEP = 0.036  # seconds: the longest step that HORIZON may cause
BURST = 4  # with so many full steps of prompt tokens waiting, prompts fill the steps, and decoding slows down
FULL = 2048  # tokens of a full step; if the operator allows longer steps, any busy queue makes a burst
MIN_FILL_GAIN = 0.2  # gain of fullness that justifies twice the tiles; smaller increases need proportionally less
MOST_ROUND_UP = 1.25  # a number of tiles is rounded up by at most this factor
ROWS_BITS = 15  # bit length of more rows than a step has
RETRY = 512  # calls after which a number of rows is tried again that took too long
PREFILL_ONLY_TOKENS = 512  # tokens of a step without decoding: waiting prompts then finish one after the other


class Pace:
    """Learned durations: of steps by size, of decode steps by rows, and of one token in a compute-bound step."""

    __slots__ = ("_asked", "_decode", "_full", "_max_tokens", "_noted", "_per_token", "_slowdown", "_tile", "clock")

    def __init__(self, max_tokens: int, tile: int, fullness: Callable[[int], float], slowdown: float = 1.5) -> None:
        """`fullness(tokens)`: the fraction of the device's units that products of so many tokens use, 0 to 1.
        `slowdown`: most times that a step takes longer with idle rows than without them.
        """
        self._max_tokens = max_tokens
        self._slowdown = slowdown
        self._asked = 0  # calls of `idle_budgets`
        self._tile = tile
        self._full = round_up_tiles(-(-max_tokens // tile), lambda tiles: fullness(tiles * tile))
        self.clock = StepClock(max(tile, self._class(max_tokens)) + 1, LEAST_MARGIN)
        self._decode: dict[int, float] = {}  # seconds of decode-only steps, by the bit length of their number of rows
        self._noted: dict[int, float] = {}  # the last values passed to note_decode, by the same key
        self._per_token = 0.0  # seconds of products per token in compute-bound steps

    def plan_at(self, step: Step) -> float:
        """When to plan the next step: before the end of the step in flight, by the time the host needs; 0: at once."""
        took = self.clock.at_least(self._class(step.plan.num_tokens))
        return step.times.plan_at or self.clock.plan_at(step.times.started_at or step.times.launched_at, took)

    def note(self, plan: StepPlan, took: float, waited: float, began_before: bool = False) -> None:
        """Learns from a settled step that took `took` seconds; the thread waited `waited` seconds for its end.

        `began_before`: the step before was already done when polled, so this step really took longer than `took`. The
        time between the ends of two steps still measures decoding. Such steps teach nothing about prompts.
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
        """Learns the cost of a token from a compute-bound step; with many decoding rows, the cost of these rows alone.

        Under a steady stream of prompts no step only decodes, so the learned decode times would become outdated.
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
        """The number of prompt tokens that a step may take.

        `decoding`: rows that decode; `waiting`: requests without a step so far; `lacking`: uncomputed tokens of all
        prompts; `following`: uncomputed tokens of the next prompt. If rows decode, prompts may double the step's time.
        A busy queue gets enough tokens to finish its prompts within HORIZON steps, up to LONG_STEP. A burst gets as
        many tokens as fit. Decoding rows and prompt tokens together fill whole tiles.
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

    def set_budgets(self, shares: TokenShares, max_tokens: int) -> None:
        """Sets how many tokens the next step may have, how many for prompts, and its budgets for idle rows."""
        shares.max_tokens, load = max_tokens, shares.load()
        shares.prompt_budget = self.prompt_budget(*load)
        shares.idle_rows = shares.idle_budget = UNLIMITED
        if shares.any_idle() and shares.any_client():
            shares.idle_rows, shares.idle_budget = self.idle_budgets(load[0], shares.num_idle_decoding())

    def idle_budgets(self, decoding: int, idle: int) -> tuple[int, int]:
        """How many idle rows a step may have in addition to `decoding` other rows that decode, and how many prompt
        tokens it may have with tokens of idle prompts; `idle`: idle rows that could decode.

        The step may take `slowdown` times as long as without idle rows. An unknown time of the step without them is
        measured first; then larger numbers of rows are tried, a class at a time. Few prompt tokens cost more each than
        the tokens of a full step, so the measured time of a step of that size counts as well.
        """
        self._asked += 1
        bits = max(decoding, 1).bit_length()
        alone = self._decode.get(bits)
        if alone is None:
            return (1 << bits) - 1 - decoding, 0
        limit, most = self._slowdown * alone, bits
        while most < ROWS_BITS and (took := self._decode.get(most + 1, 0.0)) <= limit:
            most += 1
            if not took:
                break
        if took > limit and self._asked % RETRY == 0:  # the time of a class that is never used would never change
            most += 1
        rows = (1 << most) - 1 - decoding
        if not decoding:  # the others have prompts only, which these would delay
            return rows, 0
        if not self._per_token:
            return rows, LEAST_PROMPT
        joined = decoding + min(rows, idle)
        tokens = min(int((limit - self._attention(joined)) / self._per_token), self._max_tokens)
        while tokens > joined and self.clock.periods[self._class(tokens)] > limit and self._asked % RETRY:
            tokens = self._smaller(tokens)
        return rows, max(0, tokens - joined)

    def note_decode(self, rows_bits: int, seconds: float) -> None:
        """Takes over what the GIL-free loop learned: seconds of decode-only steps by the bit length of their rows.

        The GIL-free loop repeats old values; only a changed value is stored.
        """
        if self._noted.get(rows_bits) != seconds:
            self._noted[rows_bits] = self._decode[rows_bits] = seconds

    def _attention(self, decoding: int) -> float:
        """Seconds in which decoding rows read the keys of their contexts, in addition to weights and products."""
        if not decoding:
            return 0.0
        return max(self._nearest(decoding.bit_length()) - max(self._weights, self._per_token * decoding), 0.0)

    @property
    def _weights(self) -> float:
        """About the seconds for reading the weights: the time of the shortest decode-only step."""
        return min(self._decode.values(), default=0.0)

    def _class(self, tokens: int) -> int:
        """The class of a step; steps of one class take about the same time. Up to a tile: the bit length of the tokens;
        above: the number of tiles."""
        return tokens.bit_length() if tokens <= self._tile else self._tile + -(-tokens // self._tile)

    def _smaller(self, tokens: int) -> int:
        """The most tokens of the next smaller class."""
        if tokens > self._tile:
            return (-(-tokens // self._tile) - 1) * self._tile
        return (1 << (tokens.bit_length() - 1)) - 1

    def _nearest(self, bits: int) -> float:
        """Seconds of a decode-only step whose number of rows has this bit length, else of the nearest known one."""
        return min(((abs(seen - bits), took) for seen, took in self._decode.items()), default=(0, 0.0))[1]


def round_up_tiles(most: int, fullness: Callable[[int], float]) -> list[int]:
    """Maps each number of tiles, 0 to `most`, to an equal or slightly larger number whose last wave is fuller."""
    chosen = [0]
    for tiles in range(1, most + 1):
        near = range(tiles, min(int(MOST_ROUND_UP * tiles), most) + 1)
        chosen.append(max(near, key=lambda more: fullness(more) - MIN_FILL_GAIN * (more - tiles) / tiles))
    return chosen
