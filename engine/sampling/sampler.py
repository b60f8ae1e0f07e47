"""logits -> token ids on a CPU, in fixed order: rules, then the draw (or the argmax), then log-probabilities.

Owner: the device thread stages rows at admission; the stream samples, in step order. A row's token depends only on
its own logits, rules, seed and place in the answer, not on other rows.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.base.config import LogprobsMode
from engine.base.limits import MAX_HISTORY
from engine.base.mask_lines import Lines
from engine.base.request import SamplingParams, TokenLogprob
from engine.kernels.sampling.draw import draw
from engine.kernels.sampling.penalties import penalties
from engine.kernels.sampling.top_k_top_p import top_k_top_p
from engine.kernels.sampling.top_n_sigma import top_n_sigma
from engine.kernels.sampling.xtc import xtc, xtc_applies
from engine.sampling.logprobs import answer_logprobs, processed
from engine.sampling.rules import RowRules, has_penalties, needs_rules
from engine.sampling.timestamps import weigh


class RuledRow:
    """The rules of one slot's request as tensors, and their counts, which survive preemption."""

    __slots__ = ("_banned", "_counts", "_in_prompt", "_rules", "_tokens", "_until", "_values")

    def __init__(self, params: SamplingParams, prompt: np.ndarray, vocab: int) -> None:
        rules = self._rules = RowRules(params, prompt, vocab, MAX_HISTORY)
        self._tokens = torch.tensor([token for token, _, _ in rules.edits], dtype=torch.int64)
        self._values = torch.tensor([value for _, value, _ in rules.edits], dtype=torch.float32)
        self._until = torch.tensor([until for _, _, until in rules.edits], dtype=torch.int64)
        self._banned: torch.Tensor | None = None
        self._ban()
        self._counts = self._in_prompt = None
        if has_penalties(params):
            self._counts = torch.zeros(vocab, dtype=torch.int32)
            self._in_prompt = torch.zeros(vocab, dtype=torch.bool)
            self._in_prompt[torch.from_numpy(rules.prompt.astype(np.int64))] = True

    def allowed(self) -> np.ndarray | None:
        """bool [vocab]: the tokens that may be chosen next; None: all."""
        return self._rules.bits()

    def _ban(self) -> None:
        flags = self._rules.bits()
        self._banned = None if flags is None else torch.from_numpy(~flags)

    def apply(self, logits: torch.Tensor, index: int, line: np.ndarray | None) -> None:
        """Changes logits float32 [vocab] in place for the answer's token number `index` (0 is the first).

        line bool [vocab]: the tokens that the row's grammar allows.
        """
        if len(self._tokens):
            logits.index_add_(0, self._tokens, torch.where(index < self._until, float("-inf"), self._values))
        if self._banned is not None:
            logits.masked_fill_(self._banned, float("-inf"))
        if line is not None:
            logits.masked_fill_(torch.from_numpy(~line), float("-inf"))
        if self._rules.times is not None:
            weigh(logits[None], self._rules.times.rules.first)
        if self._counts is not None and self._in_prompt is not None:
            params = self._rules.params
            numbers = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
            penalties(logits, self._counts, self._in_prompt, *numbers)
        if self._rules.dry is not None:
            self._rules.dry.apply(logits)
        if self._rules.params.top_n_sigma:
            logits.masked_fill_(logits < top_n_sigma(logits, self._rules.params.top_n_sigma), float("-inf"))

    def record(self, token: int) -> None:
        """Counts a sampled token."""
        if self._counts is not None:
            self._counts[token] += 1
        if self._rules.dry is not None:
            self._rules.dry.record(token)
        if self._rules.moves:
            self._rules.record(token)
            self._ban()


class Sampler:
    """Sampling parameters as arrays by slot, and the sampling of a step."""

    def __init__(self, max_slots: int, vocab: int, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        self._vocab = vocab
        self._raw = logprobs_mode in ("raw_logprobs", "raw_logits")
        self._as_logits = logprobs_mode in ("raw_logits", "processed_logits")
        self._temperature = np.zeros(max_slots, np.float32)
        self._top_k = np.zeros(max_slots, np.int64)
        self._top_p = np.ones(max_slots, np.float32)
        self._min_p = np.zeros(max_slots, np.float32)
        self._seed = np.zeros(max_slots, np.uint64)
        self._xtc_probability = np.zeros(max_slots, np.float32)
        self._xtc_threshold = np.zeros(max_slots, np.float32)
        self._special = np.zeros(max_slots, np.bool_)  # has rules or log-probabilities
        self._rules: dict[int, RuledRow] = {}
        self._logprobs: dict[int, SamplingParams] = {}

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt: np.ndarray,
        seed: int,
        words: np.ndarray | None = None,
        masked: bool = False,
    ) -> None:
        """Stages a request; prompt int32 [prompt_len]; seed any integer, taken modulo 2^64; `masked`: each step passes
        a mask of allowed tokens. `words` is for accelerators and unused here.
        """
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = seed & 0xFFFF_FFFF_FFFF_FFFF
        self._xtc_probability[slot] = params.xtc_probability
        self._xtc_threshold[slot] = params.xtc_threshold
        if masked or needs_rules(params) or params.top_n_sigma:
            self._rules[slot] = RuledRow(params, prompt, self._vocab)
        if params.logprobs is not None:
            self._logprobs[slot] = params
        self._special[slot] = slot in self._rules or slot in self._logprobs

    def reset(self, slot: int, poison: bool = False) -> None:
        """Forgets a freed slot; with `poison` its values are overwritten by values that would be noticed at once."""
        bad = np.float32(np.nan) if poison else np.float32(0)
        self._temperature[slot] = self._top_p[slot] = self._min_p[slot] = bad
        self._xtc_probability[slot] = self._xtc_threshold[slot] = bad
        self._top_k[slot] = 0
        self._seed[slot] = 0
        self._special[slot] = False
        self._rules.pop(slot, None)
        self._logprobs.pop(slot, None)

    def is_plain(self, slots: np.ndarray) -> bool:
        """True: on a host every step waits for the previous step, so it has all masks."""
        return True

    def may_sleep(self, slot: int) -> bool:
        """True: on a host no token is sampled too early."""
        return True

    def set_asleep(self, slot: int, asleep: bool) -> None:
        """Does nothing: on a host every step reads its masks."""

    def allowed_of(self, slot: int) -> np.ndarray | None:
        """bool [vocab]: the tokens that a slot's rules allow, without its grammar; None: all."""
        return self._rules[slot].allowed()

    def sample(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        index: np.ndarray,
        lines: Lines | None = None,
        stated: np.ndarray | None = None,
    ) -> tuple[np.ndarray, dict[int, TokenLogprob]]:
        """Tokens int64 [rows] (-1: a row's logits are not finite, or no token is left), and log-probabilities of rows
        that want them.

        logits float32 [rows, vocab], may be changed; slots, index int [rows]: the row's slot and its token's number
        in the answer; lines: masks of the rows with grammars; stated int64 [rows]: tokens that rows get whatever they
        would choose, -1: none.
        """
        finite = torch.isfinite(logits.sum(dim=-1)).numpy()
        special = np.flatnonzero(self._special[slots]).tolist()
        if special:
            return self._sample_special(logits, slots, index, finite, special, lines, stated)
        return self._tokens(logits, slots, index, finite, stated), {}

    def guess(self, logits: torch.Tensor, slots: torch.Tensor, run: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """See StepSampler; a guess regards no rules."""
        found, some = torch.full((int(run.max()) + 1,), -1, dtype=torch.int32), run >= 0
        logits = logits[some]
        finite = torch.isfinite(logits.sum(dim=-1)).numpy()
        tokens = self._tokens(logits, slots[some].numpy(), place[some].numpy(), finite, None)
        found[run[some].long()] = torch.from_numpy(tokens.astype(np.int32))
        return found

    def _sample_special(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        index: np.ndarray,
        finite: np.ndarray,
        special: list[int],
        lines: Lines | None,
        stated: np.ndarray | None,
    ) -> tuple[np.ndarray, dict[int, TokenLogprob]]:
        """As `sample`, if the rows of `special` have rules or want log-probabilities; finite bool [rows]."""
        allowed = {place: number for number, place in enumerate(lines.places)} if lines is not None else {}
        asked = [row for row in special if int(slots[row]) in self._logprobs]
        values = {row: logits[row].clone() for row in asked} if self._raw else {}
        for row in special:
            rules = self._rules.get(int(slots[row]))
            if rules is not None:
                line = lines.flags(allowed[row], self._vocab) if lines is not None and row in allowed else None
                rules.apply(logits[row], int(index[row]), line)
                finite[row] &= bool(logits[row].max() > float("-inf"))
        if not self._raw:
            values = {row: self._processed(logits[row], slots[row : row + 1], index[row : row + 1]) for row in asked}
        tokens = self._tokens(logits, slots, index, finite, stated)
        for row in special:
            rules = self._rules.get(int(slots[row]))
            if rules is not None and finite[row]:
                rules.record(int(tokens[row]))
        wanted = {row: self._logprobs[int(slots[row])] for row in asked if finite[row]}
        return tokens, answer_logprobs(values, tokens, wanted, self._as_logits) if wanted else {}

    def _processed(self, logits: torch.Tensor, slots: np.ndarray, index: np.ndarray) -> torch.Tensor:
        """The logits float32 [vocab] from which the token of one row is drawn; slots, index int [1]."""
        return processed(
            logits,
            float(self._temperature[slots[0]]),
            int(self._top_k[slots[0]]),
            float(self._top_p[slots[0]]),
            float(self._min_p[slots[0]]),
            float(self._xtc_threshold[slots[0]]) if self._applies_xtc(slots, index)[0] else 1.0,
        )

    def _applies_xtc(self, slots: np.ndarray, index: np.ndarray) -> np.ndarray:
        """bool [rows]: whether XTC applies to the rows' next tokens."""
        return xtc_applies(self._xtc_probability[slots], self._xtc_threshold[slots], self._seed[slots], index)

    def _tokens(
        self, logits: torch.Tensor, slots: np.ndarray, index: np.ndarray, finite: np.ndarray, stated: np.ndarray | None
    ) -> np.ndarray:
        """The rows' tokens, -1 where logits are not finite; see `sample`."""
        temperature = self._temperature[slots]
        drawn = np.flatnonzero((temperature > 0) & finite)
        tokens = self._drawn(logits, slots, index, drawn) if len(drawn) else logits.argmax(dim=-1).numpy()
        if stated is not None:
            tokens = np.where(stated >= 0, stated, tokens)
        tokens[~finite] = -1
        return tokens

    def _drawn(self, logits: torch.Tensor, slots: np.ndarray, index: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """Tokens of all rows, of which `drawn` draw theirs."""
        tokens = np.empty(len(slots), np.int64)
        if len(drawn) < len(slots):
            greedy = np.setdiff1d(np.arange(len(slots)), drawn, assume_unique=True)
            tokens[greedy] = logits[torch.from_numpy(greedy)].argmax(dim=-1).numpy()
        at = slots[drawn]
        probs = top_k_top_p(
            logits[torch.from_numpy(drawn)],
            torch.from_numpy(self._temperature[at]),
            torch.from_numpy(self._top_k[at]),
            torch.from_numpy(self._top_p[at]),
            torch.from_numpy(self._min_p[at]),
        )
        if self._xtc_probability[at].any():
            for row in np.flatnonzero(self._applies_xtc(at, index[drawn])).tolist():
                probs[row] = xtc(probs[row], float(self._xtc_threshold[at[row]]))
        tokens[drawn] = draw(probs, self._seed[at], index[drawn]).numpy()
        return tokens
