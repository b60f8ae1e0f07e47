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
        for slot in rules:
            if slot not in self._line_of:
                if not self._free:
                    idle = next(other for other in self._line_of if other not in rules)
                    self.release(idle)
                line = self._line_of[slot] = self._free.pop()
                self._write(line, rules[slot])
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

    def _write(self, line: int, rules: HostRules) -> None:
        device = self.counts.device
        if rules.penalised:
            self.counts[line].zero_()
            if rules.answer:
                tokens = send(np.asarray(rules.answer, np.int64), device)
                self.counts[line].scatter_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))
            self.prompt[line].copy_(self._bits(rules.prompt))
        if rules.params.allowed_token_ids is not None:
            self.allowed[line].copy_(self._bits(np.asarray(rules.params.allowed_token_ids, np.int64)))

    def _bits(self, tokens: np.ndarray) -> Tensor:
        """int32 [words] on the device, a bit set for each token."""
        flags = np.zeros(self.prompt.shape[1] * 32, np.bool_)
        flags[tokens[(tokens >= 0) & (tokens < self._vocab)]] = True
        return send(np.packbits(flags, bitorder="little").view(np.int32), self.counts.device)
