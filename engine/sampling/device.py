"""DeviceSampler: the sampler of an accelerator. Sampling parameters are data per slot; few features need Python.

Owner: device thread. The same launches, which can be captured, choose every step's tokens. A row's token comes from the
same kernels on the same data, whatever other rows share the step:

    logits -> groups (with the rules of slots that have some) -> pick -> cut (counts tokens) -> top log-probabilities

A slot is special if it needs more, and each of its steps waits for the previous step. Special are: grammars and bad
words of several tokens, whose masks change with the answer; log-probabilities of more than MOST tokens, of named
tokens, or of processed logits. Nothing here waits for the device: inputs are copied from pinned memory, results go to
a buffer of the step or a Pending. The semantics equal sampler.py's, which tests check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from _fast.layout import SLOT_WORDS, SamplerWord, SlotWord
from engine.base.config import LogprobsMode
from engine.base.request import SamplingParams, TokenLogprob
from engine.kernels.sampling.choose import choose, choose_room
from engine.kernels.sampling.rules import ALONG, COUNTED, REPEATS, SEEN
from engine.kernels.sampling.top_logprobs import MOST, top_logprobs
from engine.sampling.dry import LEAST_HISTORY
from engine.sampling.lines import RuleLines, allowed_bits
from engine.sampling.logprobs import CHUNK, together
from engine.sampling.pending import Pending, logprob_lines, prompt_logprobs, send
from engine.sampling.rules import RowRules, needs_rules
from engine.sampling.timestamps import unpacked, weighed

if TYPE_CHECKING:
    from engine.kernels.step_tensors import SlotTensors, StepInputs

__all__ = ["DeviceSampler", "Pending", "prompt_logprobs"]

SPECIAL = np.uint8(1)  # each step of the slot waits for the previous step
MOVES = np.uint8(2)  # the host writes the slot's mask for each step
APART = np.uint8(4)  # the slot's steps need separate launches


class DeviceSampler:
    """Rules per slot, workspaces on the device, and the sampling of a step's tokens."""

    def __init__(
        self,
        slots: SlotTensors,
        max_slots: int,
        max_rows: int,
        vocab: int,
        device: torch.device | str,
        logprobs_mode: LogprobsMode,
        max_logprobs: int,
        logprob_words: Tensor,
        history: int = LEAST_HISTORY,
        max_lines: int = 0,
    ) -> None:
        """logprob_words: int32 [buffers, max_rows, width, LINE] in pinned memory: kernels/sampling/top_logprobs writes
        it. width: places of a row's run; a step has at most max_lines such places (0: max_rows). history: tokens in
        which DRY finds repetitions, a power of two."""
        self._slots = slots
        self._device = torch.device(device)
        self._vocab = vocab
        self._max_logprobs = vocab if max_logprobs < 0 else max_logprobs
        self._raw = logprobs_mode in ("raw_logprobs", "raw_logits")
        self._as_logits = logprobs_mode in ("raw_logits", "processed_logits")
        self._room = choose_room(max_lines or max_rows, vocab, self._device)
        self._tops = torch.zeros_like(self._room.chosen)
        places = len(self._room.best) if logprob_words.shape[2] > 1 else 0  # for drafts
        self.lines = RuleLines(max_rows, vocab, self._device, history, places)
        self.logprob_words = logprob_words
        self.asked = np.zeros(max_slots, np.uint8)  # by slot: 1 + top log-probabilities to report; 0: no report
        self._how = np.zeros(max_slots, np.uint8)  # by slot: bits SPECIAL, MOVES, APART
        self._rules: dict[int, RowRules] = {}
        self._words: dict[int, np.ndarray] = {}  # words of slots with rules
        self._unlined: set[int] = set()  # slots with rules but without a line
        self._logprobs: dict[int, SamplingParams] = {}  # slots that are special because of log-probabilities

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt: np.ndarray,
        seed: int,
        words: np.ndarray,
        has_grammar: bool = False,
    ) -> None:
        """Stages a request; prompt int32 [prompt_len]; seed any integer, taken modulo 2^64.

        Writes what the device needs to sample into the slot's row of words, int32 [SLOT_WORDS] (layout.SlotWord).
        """
        words[SlotWord.TOP_K] = min(params.top_k, self._vocab)
        low, high = SlotWord.SEED_LOW, SlotWord.SEED_HIGH
        words[[low, high]] = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64).view(np.int32)
        reals = words.view(np.float32)
        reals[SlotWord.TEMPERATURE], reals[SlotWord.TOP_P] = params.temperature, params.top_p
        reals[SlotWord.MIN_P], reals[SlotWord.REPETITION] = params.min_p, params.repetition_penalty
        reals[SlotWord.PRESENCE], reals[SlotWord.FREQUENCY] = params.presence_penalty, params.frequency_penalty
        reals[SamplerWord.TOP_N_SIGMA] = params.top_n_sigma
        reals[SamplerWord.XTC_PROBABILITY], reals[SamplerWord.XTC_THRESHOLD] = (
            params.xtc_probability,
            params.xtc_threshold,
        )
        how = APART * (params.timestamps is not None)
        if has_grammar or needs_rules(params):
            rules = self._rules[slot] = RowRules(params, prompt, self._vocab, self.lines.tables.history, has_grammar)
            words[SlotWord.RULE_KINDS], words[SlotWord.NUM_EDITS] = rules.kinds, len(rules.edits)
            if rules.dry is not None:
                reals[SamplerWord.DRY_MULTIPLIER], reals[SamplerWord.DRY_BASE] = params.dry_multiplier, params.dry_base
                words[SamplerWord.DRY_ALLOWED], words[SamplerWord.DRY_WINDOW] = (
                    params.dry_allowed_length,
                    rules.dry.window,
                )
            self._words[slot] = words
            self._unlined.add(slot)
            how |= SPECIAL * (rules.moves or has_grammar) | MOVES * (rules.moves and not has_grammar)
        if params.logprobs is not None:
            assert params.logprobs <= self._max_logprobs, "more are refused at the edge"
            if self._raw and 0 <= params.logprobs <= min(MOST, self._vocab - 1) and not params.logprob_token_ids:
                words[SlotWord.TOP_LOGPROBS] = self.asked[slot] = 1 + params.logprobs
            else:
                self._logprobs[slot] = params
                how |= SPECIAL | APART
        self._how[slot] = how

    def reset(self, slot: int, poison: bool = False) -> None:
        """Forgets a freed slot; with `poison` its counts are overwritten by values that would be noticed at once.

        The slot's words on the device are rewritten with the first step of the slot's next request.
        """
        self._how[slot] = 0
        self.asked[slot] = 0
        self._rules.pop(slot, None)
        self._words.pop(slot, None)
        self._unlined.discard(slot)
        self._logprobs.pop(slot, None)
        self.lines.release(slot, poison)

    def is_plain(self, slot_ids: np.ndarray) -> bool:
        """True when no row of these slots needs `launch_special`."""
        return not (self._how[slot_ids] & SPECIAL).any()

    def takes_part(self, slot: int) -> bool:
        """Whether the slot has rules or log-probabilities that need the host in each step."""
        return slot in self._rules or slot in self._logprobs

    def take_lines(self, slots: np.ndarray) -> tuple[list[np.ndarray], list[int]]:
        """Assigns lines before a step of these slots; returns the new words of slots that got a line, and the parked
        slots.

        A parked slot has lost its line; it gets a line again by this call before its next step.
        """
        if not self._unlined:
            return [], []
        named = set(slots.tolist())
        wanted = {slot: self._rules[slot] for slot in sorted(named & self._unlined)}
        parked = self.lines.take(wanted, named)
        self._unlined.difference_update(wanted)
        self._unlined.update(parked)
        for slot in wanted:
            self._words[slot][SlotWord.RULE_LINE] = 1 + self.lines[slot]
        return [self._words[slot] for slot in wanted], parked

    @property
    def allowed_table(self) -> Tensor:
        """The masks of allowed tokens, int32 [lines, ceil(vocab / 32)]; `line` and `line_behind` give the lines."""
        return self.lines.tables.allowed

    def may_sleep(self, slot: int) -> bool:
        """Whether steps of a slot with a sleeping grammar can be plain, because a token sampled too early has no
        effect."""
        rules = self._rules[slot]
        reports = self.asked[slot] or slot in self._logprobs
        return not (rules.moves or rules.kinds & (SEEN | COUNTED | REPEATS) or rules.params.min_tokens or reports)

    def set_asleep(self, slot: int, asleep: bool) -> None:
        """Sets whether a slot's grammar sleeps; if the slot may sleep, its steps are plain meanwhile, and no masks come
        for the tokens behind its drafts."""
        waits = not (asleep and self.may_sleep(slot))
        self._how[slot] = self._how[slot] & ~SPECIAL | SPECIAL * waits
        if self.logprob_words.shape[2] > 1:  # the server has drafts
            words = self._words[slot]
            kinds = self._rules[slot].kinds | ALONG * waits
            if slot in self.lines and words[SlotWord.RULE_KINDS] != kinds:
                self._slots.word(SlotWord.RULE_KINDS)[slot : slot + 1].copy_(
                    send(np.array([kinds], np.int32), self._device)
                )
            words[SlotWord.RULE_KINDS] = kinds

    def line(self, slot: int) -> int:
        """A slot's line in the tables; valid from the launch of its step on."""
        return self.lines[slot]

    def line_behind(self, place: int) -> int:
        """The line of masks for the token behind a draft; place: its line of logits in the step."""
        return len(self.lines.tables.counts) + place

    def allowed_of(self, slot: int) -> np.ndarray | None:
        """bool [vocab]: the tokens that a slot's rules allow, without its grammar; None: all."""
        return self._rules[slot].bits()

    def launch_plain(
        self,
        inputs: StepInputs,
        logits: Tensor,
        tokens_out: Tensor,
        thresholds: bool = False,
        drawn: Tensor | None = None,
        runs: bool = True,
    ) -> None:
        """Samples tokens for logits [S, vocab] of the step's first S lines, into tokens_out int32 [max_rows * width].

        tokens_out: a run per plan row; `runs`: `verify` follows, False: the step has no drafts. Can be captured: grids
        and addresses are fixed, and lines beyond num_sampled write nothing. `drawn`: logits to sample from; None:
        `logits`. Log-probabilities always come from `logits`.
        """
        rows = inputs.sample_row, inputs.sample_slot
        choose(
            tokens_out,
            self._slots,
            self.lines.tables,
            self._room,
            logits if drawn is None else drawn,
            *rows,
            inputs.sample_place,
            thresholds,
            self.logprob_words.shape[2] if runs else 1,
        )
        if self._raw:
            top_logprobs(
                self.logprob_words.flatten(1, 2),
                self._tops,
                logits,
                self._slots,
                tokens_out,
                inputs.home,
                *rows,
                as_logits=self._as_logits,
            )

    def guess(self, logits: Tensor, slots: Tensor, run: Tensor, place: Tensor) -> Tensor:
        """See StepSampler; the rules of a row count the drafts before its guess. Can be captured."""
        width = self.logprob_words.shape[2]
        found = torch.empty(len(slots) * width, dtype=torch.int32, device=logits.device)
        choose(found, self._slots, self.lines.tables, self._room, logits, run, slots, place, False, width, True)
        return found

    def warm_up(self, inputs: StepInputs, logits: Tensor, tokens_out: Tensor) -> None:
        """Runs every kernel of a special row once, on logits [1, vocab], so that none is compiled while requests wait.

        Called at start, before slot 0 has a request; `inputs`: from `empty_inputs`.
        """
        rules = SamplingParams(
            logit_bias=((0, 1.0),), allowed_token_ids=(0, 1), presence_penalty=1.0, repetition_penalty=1.1,
            bad_words=((0, 1),), logprobs=2, logprob_token_ids=(0,), top_n_sigma=1.0, dry_multiplier=1.0,
        )  # fmt: skip
        self.admit(0, rules, np.zeros(1, np.int32), 0, np.zeros(SLOT_WORDS, np.int32))
        self.take_lines(np.zeros(1, np.int64))
        self.launch_special(inputs, logits, tokens_out, np.zeros(1, np.int64))
        self.reset(0)

    def record(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Records the committed tokens of a step's sampled rows (-1: none); called before the next launch_special."""
        for row in np.flatnonzero(self._how[slots] & SPECIAL).tolist():
            rules = self._rules.get(int(slots[row]))
            if rules is not None and tokens[row] >= 0:
                rules.record(int(tokens[row]))

    def is_by_lines(self, slots: np.ndarray) -> bool:
        """Whether `launch_plain` can sample for all of these slots once their masks are in the table."""
        return not (self._how[slots] & APART).any()

    def send_moved(self, slots: np.ndarray) -> None:
        """Writes the masks of slots whose rules, other than grammars, change with the answer into the table."""
        moving = [(self.lines[slot], self._rules[slot]) for slot in slots[(self._how[slots] & MOVES) > 0].tolist()]
        self.lines.set_bits(self.lines.tables.allowed, allowed_bits(moving))

    def launch_special(
        self, inputs: StepInputs, logits: Tensor, tokens_out: Tensor, slots: np.ndarray, runs: bool = True
    ) -> Pending | None:
        """As launch_plain, for a step with special rows; slots int [S]: each row's slot.

        The slots' committed tokens must have been recorded. Returns log-probabilities by sampled row, if a special row
        wants them. Cannot be captured.
        """
        special = np.flatnonzero(self._how[slots] & SPECIAL).tolist()
        self.send_moved(slots)
        asked = [row for row in special if int(slots[row]) in self._logprobs]
        drawn = self._weighed(logits, slots, special)
        self.launch_plain(inputs, logits, tokens_out, bool(asked) and not self._raw, drawn, runs)
        return self._write_logprob_lines(inputs, logits, tokens_out, asked, slots) if asked else None

    def _weighed(self, logits: Tensor, slots: np.ndarray, special: list[int]) -> Tensor | None:
        """The logits to sample from if some row writes timestamps; None: no row does."""
        rules = {row: found for row in special if (found := self._rules.get(int(slots[row]))) and found.times}
        if not rules:
            return None
        places = send(np.array([(row, self.lines[int(slots[row])]) for row in rules], np.int64), self._device)
        flags = unpacked(self.lines.tables.allowed.index_select(0, places[:, 1]), self._vocab)
        times = next(iter(rules.values())).times
        assert times is not None
        return weighed(logits, places[:, 0].contiguous(), flags, times.rules.first)

    def read(
        self, buffer: int, rows: np.ndarray, slots: np.ndarray, counts: np.ndarray | int = 1
    ) -> dict[int, TokenLogprob]:
        """Log-probabilities that the kernel wrote, by plan row * width + place in the run; rows int [S]: plan rows;
        slots int [S]; counts int [S]: tokens of each row's run."""
        asked = self.asked[slots]
        found, counts = {}, np.broadcast_to(counts, len(slots))
        for number in np.flatnonzero(asked).tolist():
            row, k = int(rows[number]), int(asked[number]) - 1
            for place in range(int(counts[number])):
                words = self.logprob_words[buffer, row, place].numpy()
                values = words.view(np.float32)
                if words[0] >= 0:
                    ids, logprobs = words[3 : 3 + k].tolist(), values[3 + MOST : 3 + MOST + k].tolist()
                    entry = TokenLogprob(int(words[0]), float(values[1]), int(words[2]), ids, logprobs)
                    found[row * self.logprob_words.shape[2] + place] = entry
        return found

    def _write_logprob_lines(
        self, inputs: StepInputs, logits: Tensor, tokens_out: Tensor, asked: list[int], slots: np.ndarray
    ) -> Pending:
        """Log-probabilities of the sampled rows `asked`, ascending."""
        pending = Pending()
        params = [self._logprobs[int(slots[row])] for row in asked]
        counts = [self._vocab if one.logprobs == -1 else min(one.logprobs or 0, self._vocab) for one in params]
        for alike, width in together(np.array(counts), self._vocab):
            for start in range(0, len(alike), CHUNK):
                part = alike[start : start + CHUNK].tolist()
                extra = max(len(params[n].logprob_token_ids) for n in part)
                words = np.zeros((len(part), 1 + extra), np.int64)
                words[:, 0] = [asked[n] for n in part]
                for place, n in enumerate(part):
                    words[place, 1 : 1 + len(params[n].logprob_token_ids)] = params[n].logprob_token_ids
                sent = send(words, self._device)
                rows = sent[:, 0].contiguous()
                given = logits.index_select(0, rows).to(torch.float32)  # [n, vocab]
                if not self._raw:
                    given = self._processed(given, rows, inputs.sample_slot.index_select(0, rows).long())
                ids = sent[:, 1:].contiguous() if extra else None
                tokens = tokens_out.index_select(0, inputs.sample_row.index_select(0, rows).long().clamp(min=0))
                lines = logprob_lines(given, tokens.long(), width, self._as_logits, ids)
                numbers = [asked[n] for n in part]
                pending.add(lines, width, numbers, [(counts[n], params[n].logprob_token_ids) for n in part])
        return pending

    def _processed(self, logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """The logits from which the tokens of sampled rows were drawn, -inf for impossible tokens; greedy rows are not
        scaled, and only cut by top-n-sigma. logits float32 [n, vocab]; rows, slots int64 [n]."""
        has_rules = self._slots.word(SlotWord.RULE_LINE).index_select(0, slots)[:, None] > 0
        logits = torch.where(has_rules, self._room.work.index_select(0, rows), logits)
        heat = self._slots.real(SlotWord.TEMPERATURE).index_select(0, slots)
        scaled = logits / torch.where(heat > 0, heat, 1.0)[:, None]
        least, most = self._room.bounds.index_select(0, rows)[:, :, None].unbind(1)  # [n, 1] each
        return scaled.masked_fill_((logits < least) | (logits > most), float("-inf"))
