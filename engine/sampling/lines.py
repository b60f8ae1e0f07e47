"""RuleLines: assigns lines of the device's RuleTables to slots, and writes them.

Owner: device thread. The tables have as many lines as a step has rows, and are made at start. A slot takes a line with
its first step and holds it until the slot is reset. If another slot needs a line, a waiting (preempted) slot is parked:
its counts go to host memory and come back with its next line. All copies run on the steps' stream, in order with the
steps, so a slot never sees data of a line's earlier owner.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.base.limits import MAX_EDITS
from engine.kernels.sampling.rules import COUNTED, SEEN, rule_tables
from engine.sampling.pending import home, send
from engine.sampling.rules import RowRules

TOGETHER = 64  # lines per copy: a mebibyte with a large vocabulary
HISTORIES = 8  # lines of repetitions per copy: a mebibyte with the longest history


class RuleLines:
    """The tables, and which slot holds which line."""

    def __init__(self, num_lines: int, vocab: int, device: torch.device, history: int, places: int = 0) -> None:
        """history: tokens of a slot's text in which DRY finds repetitions, a power of two; places: lines of logits of a
        step with drafts."""
        self.tables = rule_tables(num_lines, vocab, device, history, places)
        self._vocab = vocab
        self._free = list(range(num_lines))
        self._line_of: dict[int, int] = {}  # by slot
        # By slot: counts, seen tokens and, with DRY, repetitions, on the host.
        self._parked: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._with_repeats: set[int] = set()  # lines

    def __len__(self) -> int:
        """Lines in use."""
        return len(self._line_of)

    def __getitem__(self, slot: int) -> int:
        return self._line_of[slot]

    def __contains__(self, slot: int) -> bool:
        return slot in self._line_of

    def take(self, rules: dict[int, RowRules], named: set[int]) -> list[int]:
        """Gives each slot of `rules` a line and writes the line; `named`: the step's slots. Returns the parked slots.

        The slots of `rules` have no lines yet and are all in `named`; a step has at most as many slots as there are
        lines.
        """
        parked = []
        for slot in rules:
            if not self._free:
                parked.append(next(other for other in self._line_of if other not in named))
                self._park(parked[-1])
            self._line_of[slot] = self._free.pop()
        fresh = [(self._line_of[slot], of) for slot, of in rules.items() if slot not in self._parked]
        for start in range(0, len(fresh), TOGETHER):
            self._write(fresh[start : start + TOGETHER])
        back = [(self._line_of[slot], of) for slot, of in rules.items() if slot in self._parked]
        self._set_edits(back)
        self.set_bits(self.tables.allowed, allowed_bits(back))
        self._set_breakers(back)
        for slot in rules.keys() & self._parked.keys():
            line, (counts, seen, repeats) = self._line_of[slot], self._parked.pop(slot)
            self.tables.counts[line].copy_(counts, non_blocking=True)
            self.tables.seen[line].copy_(seen, non_blocking=True)
            if repeats is not None:
                self.tables.repeats[line].copy_(repeats, non_blocking=True)
        return parked

    def release(self, slot: int, poison: bool = False) -> None:
        """Frees a slot's line, if the slot has one."""
        self._parked.pop(slot, None)
        line = self._line_of.pop(slot, None)
        if line is not None:
            self._with_repeats.discard(line)
            if poison:
                self.tables.counts[line].fill_(2**30)
                self.tables.seen[line].fill_(-1)
                self.tables.allowed[line].zero_()
                self.tables.edits[line].fill_(MAX_EDITS)
                self.tables.repeats[line].fill_(2**30)
                self.tables.breakers[line].fill_(-1)
            self._free.append(line)

    def set_bits(self, table: Tensor, named: list[tuple[int, np.ndarray]]) -> None:
        """Writes lines of a bit table; `named`: (line, bool [vocab] or [1])."""
        if not named:
            return
        words = np.zeros((len(named), 1 + table.shape[1]), np.int32)  # line and bits
        packed = words.view(np.uint8).reshape(len(named), -1)
        for row, (line, flags) in enumerate(named):
            words[row, 0] = line
            packed[row, 4 : 4 + -(-self._vocab // 8)] = np.packbits(
                np.broadcast_to(flags, self._vocab), bitorder="little"
            )
        sent = send(words, table.device)
        table.index_copy_(0, sent[:, 0].long(), sent[:, 1:])

    def _park(self, slot: int) -> None:
        """Copies the counts of the slot's line to the host, after the steps that count there."""
        line = self._line_of.pop(slot)
        repeats = home(self.tables.repeats[line]) if line in self._with_repeats else None
        self._parked[slot] = home(self.tables.counts[line]), home(self.tables.seen[line]), repeats
        self._with_repeats.discard(line)
        self._free.append(line)

    def _write(self, fresh: list[tuple[int, RowRules]]) -> None:
        """Writes (line, rules) pairs. Each copy needs separate pinned memory, so there is only one copy of each
        kind."""
        self._set_edits(fresh)
        self.set_bits(self.tables.allowed, allowed_bits(fresh))
        seen = []
        for line, of in fresh:
            if of.kinds & SEEN:
                flags = np.zeros(self._vocab, np.bool_)
                flags[of.prompt] = True
                seen.append((line, flags))
        self.set_bits(self.tables.seen, seen)
        counted = [line for line, of in fresh if of.kinds & COUNTED]
        if counted:
            self.tables.counts.index_fill_(0, send(np.array(counted, np.int64), self.tables.counts.device), 0)

        self._set_breakers(fresh)
        histories = [(line, of.dry.line) for line, of in fresh if of.dry is not None]
        for start in range(0, len(histories), HISTORIES):
            lines, values = zip(*histories[start : start + HISTORIES])
            sent = send(np.column_stack((np.array(lines, np.int32), np.stack(values))), self.tables.repeats.device)
            self.tables.repeats.index_copy_(0, sent[:, 0].long(), sent[:, 1:])

    def _set_breakers(self, named: list[tuple[int, RowRules]]) -> None:
        """Writes the breakers of lines with DRY."""
        breaks = [(line, of.dry.breaks) for line, of in named if of.dry is not None]
        self.set_bits(self.tables.breakers, breaks)
        self._with_repeats.update(line for line, _ in breaks)

    def _set_edits(self, named: list[tuple[int, RowRules]]) -> None:
        """Writes the lists of edits with one scatter of all their words."""
        edits = [(line, np.array(of.edits, np.float64)) for line, of in named if of.edits]
        if not edits:
            return
        total = sum(len(of) for _, of in edits)
        words = np.empty((4, total), np.int32)  # where, then the three words
        done = 0
        for line, of in edits:
            end = done + len(of)
            words[0, done:end] = line * MAX_EDITS + np.arange(len(of))
            words[1, done:end], words[3, done:end] = of[:, 0], of[:, 2]
            words[2, done:end] = of[:, 1].astype(np.float32).view(np.int32)
            done = end
        sent = send(words, self.tables.edits.device)
        self.tables.edits.view(-1, 3).index_copy_(0, sent[0].long(), sent[1:].t())


def allowed_bits(rules: list[tuple[int, RowRules]]) -> list[tuple[int, np.ndarray]]:
    """(line, allowed tokens) for the rules that restrict tokens."""
    found = ((line, of.bits(), of.has_grammar) for line, of in rules)
    free = np.ones(1, np.bool_)  # a sleeping grammar allows all tokens
    return [(line, free if flags is None else flags) for line, flags, held in found if held or flags is not None]
