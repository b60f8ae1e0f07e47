"""TokenLines: device memory for what rules know about every token of the vocabulary, a line per row of a step.

    counts int32 [lines, vocab]      times in the answer (penalties); counted up on the device
    prompt int32 [lines, words]      bits: in the prompt (repetition penalty)
    allowed int32 [lines, words]     bits: may be drawn (allowed_token_ids)

Owner: device thread. There are as many lines as rows in a step, made at start. A slot takes one when a step samples it
and keeps it until it is reset, or until a step needs lines that idle slots hold: such a slot's line is written again
from the host's lists when the slot comes back. A line is written whole before its new owner reads it, on the stream
that all steps use, so nothing of an earlier owner can be seen.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.sampling.pending import send
from engine.sampling.row_rules import HostRules

TOGETHER = 64  # lines that are written with one copy, a mebibyte of a large vocabulary


class TokenLines:
    """The pool and who holds what."""

    def __init__(self, num_lines: int, vocab: int, device: torch.device) -> None:
        words = -(-vocab // 32)
        self.counts = torch.zeros(num_lines, vocab, dtype=torch.int32, device=device)
        self.prompt = torch.zeros(num_lines, words, dtype=torch.int32, device=device)
        self.allowed = torch.zeros(num_lines, words, dtype=torch.int32, device=device)
        self._vocab = vocab
        self._free = list(range(num_lines))
        self._line_of: dict[int, int] = {}  # by slot

    def __len__(self) -> int:
        """Lines in use."""
        return len(self._line_of)

    def take(self, rules: dict[int, HostRules]) -> dict[int, int]:
        """The line of every slot of `rules`, written where the slot had none; no more slots than lines."""
        fresh = []
        for slot in rules:
            if slot not in self._line_of:
                if not self._free:
                    idle = next(other for other in self._line_of if other not in rules)
                    self.release(idle)
                line = self._line_of[slot] = self._free.pop()
                fresh.append((line, rules[slot]))
        for start in range(0, len(fresh), TOGETHER):
            self._write(fresh[start : start + TOGETHER])
        return {slot: self._line_of[slot] for slot in rules}

    def release(self, slot: int, poison: bool = False) -> None:
        """Gives a slot's line back; fine for a slot without one."""
        line = self._line_of.pop(slot, None)
        if line is not None:
            if poison:
                self.counts[line].fill_(2**30)
                self.prompt[line].fill_(-1)
                self.allowed[line].zero_()
            self._free.append(line)

    def _write(self, fresh: list[tuple[int, HostRules]]) -> None:
        """Lines and whose they become. Each copy takes pinned memory of its own, so there is one of each kind."""
        penalised = [(line, rules) for line, rules in fresh if rules.penalised]
        self._set_bits(self.prompt, [(line, rules.prompt) for line, rules in penalised])
        allowed = [(line, rules.params.allowed_token_ids) for line, rules in fresh]
        self._set_bits(self.allowed, [(line, np.asarray(ids, np.int64)) for line, ids in allowed if ids is not None])
        if penalised:
            lines = send(np.array([line for line, _ in penalised], np.int64), self.counts.device)
            self.counts.index_fill_(0, lines, 0)
        said = [line * self._vocab + np.asarray(rules.answer, np.int64) for line, rules in penalised if rules.answer]
        if said:
            places = send(np.concatenate(said), self.counts.device)
            self.counts.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _set_bits(self, table: Tensor, named: list[tuple[int, np.ndarray]]) -> None:
        """Writes lines of table [lines, words]: a bit set for each of its tokens."""
        if not named:
            return
        words = np.zeros((len(named), 1 + table.shape[1]), np.int32)  # line and bits
        for row, (line, tokens) in zip(words, named):
            flags = np.zeros(table.shape[1] * 32, np.bool_)
            flags[tokens[(tokens >= 0) & (tokens < self._vocab)]] = True
            row[0], row[1:] = line, np.packbits(flags, bitorder="little").view(np.int32)
        sent = send(words, table.device)
        table.index_copy_(0, sent[:, 0].long(), sent[:, 1:])
