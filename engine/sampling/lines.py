"""RuleLines: which slot has which line of the device's RuleTables, and what is written there.

Owner: device thread. There are as many lines as rows in a step, made at start. A slot takes a line with the first step
that names it and keeps the line until it is reset, or until others need lines that it does not use: a slot that waits
(preempted) is parked then. What its line counted goes to the host's memory and comes back with another line. All is
copied on the stream that all steps use, in order with them, so nothing of an earlier owner can be seen.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.base.limits import MAX_EDITS
from engine.kernels.sampling.rules import COUNTED, SEEN, rule_tables
from engine.sampling.pending import home, send
from engine.sampling.rules import RowRules

TOGETHER = 64  # lines that are written with one copy, a mebibyte of a large vocabulary


class RuleLines:
    """The tables and who holds what of them."""

    def __init__(self, num_lines: int, vocab: int, device: torch.device) -> None:
        self.tables = rule_tables(num_lines, vocab, device)
        self._vocab = vocab
        self._free = list(range(num_lines))
        self._line_of: dict[int, int] = {}  # by slot
        self._parked: dict[int, tuple[Tensor, Tensor]] = {}  # by slot: its counts and seen tokens, on the host

    def __len__(self) -> int:
        """Lines in use."""
        return len(self._line_of)

    def __getitem__(self, slot: int) -> int:
        return self._line_of[slot]

    def __contains__(self, slot: int) -> bool:
        return slot in self._line_of

    def take(self, rules: dict[int, RowRules], named: set[int]) -> list[int]:
        """Gives each slot of `rules` a line and writes the line; `named`: the slots of the step. Returns parked slots.

        None of `rules` has a line yet, and all are named; a step names no more slots than there are lines.
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
        for slot in rules.keys() & self._parked.keys():
            line, (counts, seen) = self._line_of[slot], self._parked.pop(slot)
            self.tables.counts[line].copy_(counts, non_blocking=True)
            self.tables.seen[line].copy_(seen, non_blocking=True)
        return parked

    def release(self, slot: int, poison: bool = False) -> None:
        """Gives a slot's line back; fine for a slot without one."""
        self._parked.pop(slot, None)
        line = self._line_of.pop(slot, None)
        if line is not None:
            if poison:
                self.tables.counts[line].fill_(2**30)
                self.tables.seen[line].fill_(-1)
                self.tables.allowed[line].zero_()
                self.tables.edits[line].fill_(MAX_EDITS)
            self._free.append(line)

    def set_bits(self, table: Tensor, named: list[tuple[int, np.ndarray]]) -> None:
        """Writes lines of a table of bits; by line bool [vocab] or [1]."""
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
        """Copies what the slot's line counted to the host, behind the steps that count there."""
        line = self._line_of.pop(slot)
        self._parked[slot] = home(self.tables.counts[line]), home(self.tables.seen[line])
        self._free.append(line)

    def _write(self, fresh: list[tuple[int, RowRules]]) -> None:
        """Lines and whose they become. Each copy takes pinned memory of its own, so there is one of each kind."""
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

    def _set_edits(self, named: list[tuple[int, RowRules]]) -> None:
        """Writes lists of edits: one scatter of all their words."""
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
    """By line which tokens may be chosen, of those rules that say so."""
    found = ((line, of.bits(), of.has_grammar) for line, of in rules)
    free = np.ones(1, np.bool_)  # a grammar that sleeps has said nothing yet
    return [(line, free if flags is None else flags) for line, flags, held in found if held or flags is not None]
