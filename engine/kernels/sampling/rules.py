"""A slot's rules for the logits of its next token: bias, bans, allowed ids, penalties; and the record of chosen tokens.

    x = x + value                        an edit (token, value, until); before token number `until` it adds -inf
    x = x - inf                          if the token has no bit in `allowed`
    x = x / r if x > 0 else x * r        if the token has a bit in `seen`: prompt and answer (r: repetition)
    x = x - frequency * count - presence * (count > 0)             count: times in the answer
    x = x - the penalty of repetitions                             (dry.py)

A slot with rules has one line in each table of RuleTables; SlotWord defines the line and which entries are used. Behind
a draft, a slot whose bits change with each token (ALONG) reads the bits of the step's line of logits instead. A ban
adds -inf, so NaN and +inf still yield NaN and are detected. Other kernels call these functions: `groups` applies rules
when it reads the logits, `cut` records the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from _fast.layout import SamplerWord, SlotWord
from engine.base.limits import MAX_EDITS
from engine.kernels.sampling.bits import bits_at, unpack
from engine.kernels.sampling.dry import (
    HEAD,
    HEAD_LEN,
    PARTS,
    PARTS_OF_LINE,
    line_len,
    remember,
    remember_reference,
    repeated,
    repeated_reference,
)
from engine.kernels.sampling.penalties import penalties_reference
from engine.kernels.step_tensors import SlotTensors, real, word
from engine.kernels.target import tl, triton

RULE_LINE = tl.constexpr(int(SlotWord.RULE_LINE))
RULE_KINDS = tl.constexpr(int(SlotWord.RULE_KINDS))
NUM_EDITS = tl.constexpr(int(SlotWord.NUM_EDITS))
PRESENCE = tl.constexpr(int(SlotWord.PRESENCE))
FREQUENCY = tl.constexpr(int(SlotWord.FREQUENCY))
REPETITION = tl.constexpr(int(SlotWord.REPETITION))
SEEN, COUNTED, ALLOWED, REPEATS, ALONG = 1, 2, 4, 8, 16  # bits of SlotWord.RULE_KINDS
IS_SEEN, IS_COUNTED, IS_ALLOWED = tl.constexpr(SEEN), tl.constexpr(COUNTED), tl.constexpr(ALLOWED)
IS_REPEATS, IS_ALONG = tl.constexpr(REPEATS), tl.constexpr(ALONG)
LINE_OF_EDITS = tl.constexpr(3 * MAX_EDITS)
LANES = tl.constexpr(256)  # edits that are processed together


@dataclass(frozen=True, slots=True, eq=False)
class RuleTables:
    """One line in each table for every slot with rules; entries that SlotWord does not mark as used are arbitrary."""

    counts: Tensor  # [lines, vocab] int32: times in the answer
    seen: Tensor  # [lines, ceil(vocab / 32)] int32, bits: in the prompt or the answer
    # [lines + places, ceil(vocab / 32)] int32, bits: may be chosen; the last lines are those of a step's logits
    allowed: Tensor
    edits: Tensor  # [lines, MAX_EDITS, 3] int32: token, value (float bits), until; no token twice
    repeats: Tensor  # [lines, dry.line_len(history)] int32
    breakers: Tensor  # [lines, ceil(vocab / 32)] int32, bits: ends repetitions

    @property
    def history(self) -> int:
        """Tokens of the text in which repetitions are found."""
        return (self.repeats.shape[1] - HEAD_LEN) // PARTS


def rule_tables(lines: int, vocab: int, device: str | torch.device, history: int = 64, places: int = 0) -> RuleTables:
    """Allocate tables of zeros; history: a power of two; places: lines of logits of a step with drafts."""
    bits = lines, -(-vocab // 32)
    allowed = lines + places, bits[1]
    shapes = (lines, vocab), bits, allowed, (lines, MAX_EDITS, 3), (lines, line_len(history)), bits
    return RuleTables(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


@triton.jit
def line_of(words, slot):
    """Return the line of a slot's rules; -1 for a slot without rules."""
    return tl.load(word(words, slot, RULE_LINE)) - 1


@triton.jit
def add_edits(work, edits, count, first, end, place):
    """work[token] += value for the edits of tokens first .. end - 1; afterwards visible to the whole program."""
    tl.debug_barrier()
    for start in range(0, count, LANES):
        number = start + tl.arange(0, LANES)
        token = tl.load(edits + 3 * number, mask=number < count, other=-1)
        here = (token >= first) & (token < end)
        value = tl.load(edits + 3 * number + 1, mask=here, other=0).to(tl.float32, bitcast=True)
        until = tl.load(edits + 3 * number + 2, mask=here, other=0)
        value = tl.where(place < until, float("-inf"), value)
        tl.store(work + token, tl.load(work + token, mask=here, other=0.0) + value, mask=here)
    tl.debug_barrier()


@triton.jit
def lengths_in(work):
    """The row's `work` as room for int32 values."""
    return work.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def ruled(x, token, first, end, vocab, work, words, slot, line, place, counts, seen, allowed, mask, edits, guesses,
          before):  # fmt: skip
    """Apply the slot's rules to the logits x of tokens first .. end - 1; also write them to `work`, the row's
    [vocab], where `scatter` has written the lengths of repetitions. mask: the line of `allowed`, -1 for none. With
    `guesses`, the first `before` of them count as tokens of the answer."""
    inside = token < vocab
    at, num_words = line.to(tl.int64), (vocab + 31) // 32
    kinds, num_edits = tl.load(word(words, slot, RULE_KINDS)), tl.load(word(words, slot, NUM_EDITS))
    length = token * 0
    if (kinds & IS_REPEATS) != 0:
        length = tl.load(lengths_in(work) + token, mask=inside, other=0)
        tl.debug_barrier()  # all lengths are read before logits take their place
    if num_edits > 0:
        tl.store(work + token, x, mask=inside)
        add_edits(work, edits + at * LINE_OF_EDITS, num_edits, first, tl.minimum(end, vocab), place)
        x = tl.load(work + token, mask=inside, other=float("-inf"))
    if ((kinds & IS_ALLOWED) != 0) & (mask >= 0):
        x = tl.where(bits_at(allowed + mask.to(tl.int64) * num_words, token, inside), x, x + float("-inf"))
    if (kinds & IS_SEEN) != 0:
        factor = real(words, slot, REPETITION)
        is_seen = bits_at(seen + at * num_words, token, inside)
        if guesses is not None:
            for k in range(before):
                is_seen = is_seen | (token == tl.load(guesses + k))
        x = tl.where(is_seen, tl.where(x > 0.0, x / factor, x * factor), x)
    if (kinds & IS_COUNTED) != 0:
        count = tl.load(counts + at * vocab + token, mask=inside, other=0)
        if guesses is not None:
            for k in range(before):
                count += (token == tl.load(guesses + k)).to(tl.int32)
        x -= real(words, slot, FREQUENCY) * count.to(tl.float32)
        x -= tl.where(count > 0, real(words, slot, PRESENCE), 0.0)
    if (kinds & IS_REPEATS) != 0:
        x = repeated(x, length, words, slot)
    tl.store(work + token, x, mask=inside)
    return x


@triton.jit
def mask_of(words, slot, line, row, behind, along):
    """The line of `allowed` for line `row` of the step's logits, whose token is behind a draft or not; along: the first
    line of those by line of logits, -1 while drafts are guessed: no mask is known there."""
    moves = (tl.load(word(words, slot, RULE_KINDS)) & IS_ALONG) != 0
    return tl.where(moves & (behind | (along < 0)), tl.where(along < 0, -1, along + row), line)


@triton.jit
def record_token(token, vocab, words, slot, line, place, counts, seen, repeats, breakers, HISTORY: tl.constexpr):
    """Record the token number `place` of the answer (0 <= token < vocab) in the slot's line."""
    at, kinds = line.to(tl.int64), tl.load(word(words, slot, RULE_KINDS))
    if (kinds & IS_COUNTED) != 0:
        count = counts + at * vocab + token
        tl.store(count, tl.load(count) + 1)
    if (kinds & IS_SEEN) != 0:
        bits = seen + at * ((vocab + 31) // 32) + (token >> 5)
        tl.store(bits, tl.load(bits) | (1 << (token & 31)))
    if (kinds & IS_REPEATS) != 0:
        own, breaks = repeats + at * (HEAD + PARTS_OF_LINE * HISTORY), breakers + at * ((vocab + 31) // 32)
        remember(token, vocab, words, slot, place, own, breaks, HISTORY)


def mask_reference(slots: SlotTensors, slot: int, row: int, behind: bool, along: int) -> int:
    """Specification of mask_of."""
    moves = bool(int(slots.word(SlotWord.RULE_KINDS)[slot]) & ALONG)
    if not moves or (along >= 0 and not behind):
        return int(slots.word(SlotWord.RULE_LINE)[slot]) - 1
    return -1 if along < 0 else along + row


def ruled_reference(
    logits: Tensor, tables: RuleTables, slots: SlotTensors, slot: int, place: int, mask: int, before: int = 0
) -> Tensor:
    """Specification: one row of logits [vocab] after the rules of its slot, float32; mask: the line of `allowed`, -1
    for none; the slot's first `before` drafts count as tokens of the answer."""
    x = logits.float().clone()
    line, kinds = int(slots.word(SlotWord.RULE_LINE)[slot]) - 1, int(slots.word(SlotWord.RULE_KINDS)[slot])
    edits = tables.edits[line, : int(slots.word(SlotWord.NUM_EDITS)[slot])]
    value, until = edits[:, 1].contiguous().view(torch.float32), edits[:, 2]
    x.index_add_(0, edits[:, 0].long(), torch.where(place < until, float("-inf"), value))
    if kinds & ALLOWED and mask >= 0:
        x += torch.where(unpack(tables.allowed[mask], len(x)), 0.0, float("-inf"))
    if kinds & (SEEN | COUNTED):
        fields = SlotWord.PRESENCE, SlotWord.FREQUENCY, SlotWord.REPETITION
        numbers = [float(slots.real(field)[slot]) for field in fields]
        nothing = torch.zeros(len(x), dtype=torch.int32)
        counts = tables.counts[line] if kinds & COUNTED else nothing
        seen = unpack(tables.seen[line], len(x))
        for token in filter(lambda draft: draft >= 0, slots.drafts[slot, :before].tolist()):  # the others are invalid
            counts = counts.index_add(0, torch.tensor([token]), torch.tensor([int(kinds & COUNTED > 0)]).int())
            seen[token] = True
        penalties_reference(x, counts, seen, *numbers)
    return repeated_reference(x, tables.repeats[line], slots, slot) if kinds & REPEATS else x


def record_reference(token: int, tables: RuleTables, slots: SlotTensors, slot: int, place: int) -> None:
    """Specification of record_token."""
    line, kinds = int(slots.word(SlotWord.RULE_LINE)[slot]) - 1, int(slots.word(SlotWord.RULE_KINDS)[slot])
    if kinds & COUNTED:
        tables.counts[line, token] += 1
    if kinds & SEEN:
        tables.seen[line, token >> 5] |= torch.tensor(1 << (token & 31)).to(torch.int32)
    if kinds & REPEATS:
        vocab = tables.counts.shape[1]
        numbers = (int(slots.word(one)[slot]) for one in (SamplerWord.DRY_WINDOW, SamplerWord.DRY_ALLOWED))
        position = int(slots.word(SlotWord.PROMPT_LEN)[slot]) + place
        breaks = unpack(tables.breakers[line], vocab).numpy()
        remember_reference(token, vocab, tables.repeats[line].numpy(), breaks, position, *numbers)
