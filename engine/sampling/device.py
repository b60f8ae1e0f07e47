"""DeviceSampler: the sampler of an accelerator. Plain rows are one call that can be captured; others take Python.

Owner: device thread. A row is special while its request has rules or wants log-probabilities; whether it is never
changes, so a request's tokens come from the same kernels on the same data in every step, whoever shares it.

    plain rows     logits -----------------------------------------------------------> choose
    special rows   logits -> float32 copy -> edits -> allowed ids -> penalties ------> choose -> count -> logprobs

Nothing here waits for the device: what the host knows goes up from pinned memory, what it wants to know is a Pending.
Semantics are those of sampler.py and rules.py, which the tests hold it to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from _fast.layout import SLOT_WORDS, SlotWord
from engine.config import LogprobsMode
from engine.kernels.sampling.choose import choose, choose_room
from engine.kernels.sampling.edit import edit
from engine.kernels.sampling.mask import mask
from engine.kernels.sampling.penalize import count, penalize
from engine.request import SamplingParams
from engine.sampling.lines import TokenLines
from engine.sampling.logprobs import CHUNK, together
from engine.sampling.pending import Pending, prompt_logprobs, send, tell
from engine.sampling.row_rules import HostRules
from engine.sampling.rules import needs_rules

if TYPE_CHECKING:
    from engine.kernels.step_tensors import SlotTensors, StepInputs

__all__ = ["DeviceSampler", "Pending", "prompt_logprobs"]


class DeviceSampler:
    """Per-slot rules on the host, workspaces on the device, and the two ways to sample a step."""

    def __init__(
        self,
        slots: SlotTensors,
        max_slots: int,
        max_rows: int,
        vocab: int,
        device: torch.device | str,
        logprobs_mode: LogprobsMode,
        max_logprobs: int,
    ) -> None:
        self._slots = slots
        self._device = torch.device(device)
        self._vocab = vocab
        self._max_logprobs = vocab if max_logprobs < 0 else max_logprobs
        self._raw = logprobs_mode in ("raw_logprobs", "raw_logits")
        self._as_logits = logprobs_mode in ("raw_logits", "processed_logits")
        self._room = choose_room(max_rows, vocab, self._device)
        self._lines = TokenLines(max_rows, vocab, self._device)
        self._special = np.zeros(max_slots, np.bool_)  # has rules or log-probabilities
        self._rules: dict[int, HostRules] = {}
        self._logprobs: dict[int, SamplingParams] = {}

    def admit(self, slot: int, params: SamplingParams, prompt: np.ndarray, seed: int, words: np.ndarray) -> None:
        """Stages a request; prompt int32 [prompt_len]; seed any integer, taken modulo 2^64.

        Writes what the device needs to sample into the slot's row of words, int32 [SLOT_WORDS] (layout.SlotWord).
        """
        if needs_rules(params):
            self._rules[slot] = HostRules(params, prompt)
        if params.logprobs is not None:
            assert params.logprobs <= self._max_logprobs, "more are refused at the edge"
            self._logprobs[slot] = params
        self._special[slot] = slot in self._rules or slot in self._logprobs
        words[SlotWord.TOP_K] = min(params.top_k, self._vocab)
        low, high = SlotWord.SEED_LOW, SlotWord.SEED_HIGH
        words[[low, high]] = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64).view(np.int32)
        reals = words.view(np.float32)
        reals[SlotWord.TEMPERATURE], reals[SlotWord.TOP_P] = params.temperature, params.top_p
        reals[SlotWord.MIN_P], reals[SlotWord.REPETITION] = params.min_p, params.repetition_penalty
        reals[SlotWord.PRESENCE], reals[SlotWord.FREQUENCY] = params.presence_penalty, params.frequency_penalty

    def reset(self, slot: int, poison: bool = False) -> None:
        """Forgets a freed slot; with `poison` what its line counted becomes numbers that would show at once.

        Its words on the device are written anew with the first step that has the slot's next request.
        """
        self._special[slot] = False
        self._rules.pop(slot, None)
        self._logprobs.pop(slot, None)
        self._lines.release(slot, poison)

    def is_plain(self, slot_ids: np.ndarray) -> bool:
        """True when no row of these slots needs `launch_special`."""
        return not self._special[slot_ids].any()

    def launch_plain(self, inputs: StepInputs, logits: Tensor, tokens_out: Tensor) -> None:
        """Tokens for logits [S, vocab] of the step's first S sampled rows, into tokens_out int32 [max_rows].

        tokens_out is by plan row. Can be captured: fixed grids and addresses, rows beyond num_sampled write nothing.
        """
        choose(tokens_out, self._slots, self._room, logits, inputs.sample_row, inputs.sample_slot, inputs.sample_place)

    def warm_up(self, inputs: StepInputs, logits: Tensor, tokens_out: Tensor) -> None:
        """Runs every kernel of a special row once, on logits [1, vocab]: none is compiled while requests wait.

        At start, before slot 0 has a request; `inputs` as `empty_inputs` made them.
        """
        rules = SamplingParams(
            logit_bias=((0, 1.0),), allowed_token_ids=(0, 1), presence_penalty=1.0, logprobs=2, logprob_token_ids=(0,)
        )
        self.admit(0, rules, np.zeros(1, np.int32), 0, np.zeros(SLOT_WORDS, np.int32))
        self.launch_special(inputs, logits, tokens_out, np.zeros(1, np.int64), np.zeros(1, np.int64))
        self.reset(0)

    def special_bytes(self, rows: int) -> int:
        """Device memory that launch_special takes at most for so many rows, beside what was made at start: float32
        logits, before and after the rules, and of CHUNK rows at a time what a sort of all values needs."""
        return 4 * self._vocab * (2 * rows + 10 * min(rows, CHUNK))

    def record(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Committed tokens of a step's sampled rows (-1: none), before the next launch_special."""
        for row in np.flatnonzero(self._special[slots]).tolist():
            rules = self._rules.get(int(slots[row]))
            if rules is not None and tokens[row] >= 0:
                rules.record(int(tokens[row]))

    def launch_special(
        self, inputs: StepInputs, logits: Tensor, tokens_out: Tensor, slots: np.ndarray, index: np.ndarray
    ) -> Pending | None:
        """As launch_plain for a step with special rows; slots, index int [S]: each row's slot and its token's number.

        Committed tokens of these slots must have been recorded. Returns log-probabilities by sampled row, if any row
        wants them. Not for capture.
        """
        special = np.flatnonzero(self._special[slots])
        number = len(special)
        if number == 0:  # a row that ended since this step was planned was the special one
            self.launch_plain(inputs, logits, tokens_out)
            return None
        lines, edits = self._rules_of(special, slots, index)
        # Parts begin at multiples of 16 bytes: Triton would compile a kernel again for other addresses.
        width = -(-number // 4) * 4
        words = np.full((3, width), -1, np.int32)
        words[0, :number], words[1:, :number] = special, lines
        sent = send(np.concatenate([words.ravel(), edits.ravel()]), self._device)
        rows, line = sent[:number].long(), sent[width : 3 * width].view(2, width)[:, :number]
        row, slot, place = (
            field.index_select(0, rows) for field in (inputs.sample_row, inputs.sample_slot, inputs.sample_place)
        )
        if number < len(slots):
            others = inputs.sample_row[: len(slots)].index_fill(0, rows, -1)
            choose(tokens_out, self._slots, self._room, logits, others, inputs.sample_slot, inputs.sample_place)
        work = logits.index_select(0, rows).to(torch.float32, copy=True)  # [R, vocab]
        asked = [k for k in range(number) if int(slots[special[k]]) in self._logprobs]
        changed = bool(len(edits)) or bool((lines >= 0).any())
        raw = work.clone() if asked and self._raw and changed else work
        edit(work, sent[3 * width :].view(-1, 3))
        if (lines[1] >= 0).any():
            mask(work, self._lines.allowed, line[1])
        if (lines[0] >= 0).any():
            penalize(work, self._lines.counts, self._lines.prompt, self._slots, line[0], slot)
        choose(tokens_out, self._slots, self._room, work, row, slot, place, thresholds=not self._raw)
        tokens = tokens_out.index_select(0, row.long().clamp(min=0))  # [R]
        if (lines[0] >= 0).any():
            count(self._lines.counts, tokens, line[0])
        if not asked:
            return None
        heat = self._slots.real(SlotWord.TEMPERATURE).index_select(0, slot.long())
        return self._tell(raw, tokens, heat, asked, special, slots)

    def _rules_of(self, special: np.ndarray, slots: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For the special rows: lines int32 [2, R] of counts and of allowed ids (-1: none), edits int32 [n, 3]."""
        rules = {int(slots[row]): self._rules[int(slots[row])] for row in special if int(slots[row]) in self._rules}
        held = self._lines.take({slot: one for slot, one in rules.items() if one.needs_line})
        lines = np.full((2, len(special)), -1, np.int32)
        found: list[tuple[int, int, float]] = []
        for number, row in enumerate(special.tolist()):
            slot = int(slots[row])
            if slot not in rules:
                continue
            found += [(number, token, value) for token, value in rules[slot].edits(int(index[row])).items()]
            if rules[slot].penalised:
                lines[0, number] = held[slot]
            if rules[slot].params.allowed_token_ids is not None:
                lines[1, number] = held[slot]
        edits = np.zeros((len(found), 3), np.int32)
        if found:
            edits[:, 0], edits[:, 1] = [one[0] for one in found], [one[1] for one in found]
            edits[:, 2] = np.array([one[2] for one in found], np.float32).view(np.int32)
        return lines, edits

    def _tell(
        self, work: Tensor, tokens: Tensor, heat: Tensor, asked: list[int], special: np.ndarray, slots: np.ndarray
    ) -> Pending:
        """Log-probabilities of the special rows `asked`; work float32 [R, vocab], tokens int32 and heat float32 [R]."""
        pending = Pending()
        params = [self._logprobs[int(slots[special[k]])] for k in asked]
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
                told = work.index_select(0, rows)  # [n, vocab]
                if not self._raw:
                    told = self._processed(told, heat.index_select(0, rows), self._room.threshold.index_select(0, rows))
                ids = sent[:, 1:].contiguous() if extra else None
                lines = tell(told, tokens.index_select(0, rows).long(), width, self._as_logits, ids)
                numbers = [int(special[asked[n]]) for n in part]
                pending.add(lines, width, numbers, [(counts[n], params[n].logprob_token_ids) for n in part])
        return pending

    def _processed(self, logits: Tensor, heat: Tensor, threshold: Tensor) -> Tensor:
        """What the tokens were drawn from, -inf where none can fall; greedy rows are neither scaled nor cut."""
        scaled = logits / torch.where(heat > 0, heat, 1.0)[:, None]
        return scaled.masked_fill_(logits < threshold[:, None], float("-inf"))
