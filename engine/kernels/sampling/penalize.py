"""The penalties of penalties.py for many rows at once, from counts that stay on the device.

    l = l / r if l > 0 else l * r        where the token is in the prompt or the answer
    l = l - frequency * count - presence * (count > 0)

`penalize` changes the logits, `count` adds the tokens that were drawn. Users: engine/sampling/device.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.sampling.mask import bits_at, unpack
from engine.kernels.sampling.penalties import penalties_reference
from engine.kernels.step_tensors import SlotTensors, real
from engine.kernels.target import tl, triton

PRESENCE = tl.constexpr(int(SlotWord.PRESENCE))
FREQUENCY = tl.constexpr(int(SlotWord.FREQUENCY))
REPETITION = tl.constexpr(int(SlotWord.REPETITION))
BLOCK = 1024


@triton.jit
def penalize_kernel(
    logits,  # [rows, vocab] float32
    counts,  # [lines, vocab] int32
    prompt_bits,  # [lines, words] int32
    slot_words,  # [slots, SLOT_WORDS] int32
    line,  # [rows] int32; -1: no penalties
    slot,  # [rows] int32
    vocab,
    words,
    BLOCK: tl.constexpr,
):
    """BLOCK tokens of one row per program."""
    row = tl.program_id(1)
    number = tl.load(line + row).to(tl.int64)
    if number >= 0:
        at = tl.load(slot + row)
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        count = tl.load(counts + number * vocab + token, mask=inside, other=0)
        said = count > 0
        seen = said | bits_at(prompt_bits + number * words, token, inside)
        factor = real(slot_words, at, REPETITION)
        place = logits + row.to(tl.int64) * vocab + token
        x = tl.load(place, mask=inside, other=0.0)
        x = tl.where(seen, tl.where(x > 0.0, x / factor, x * factor), x)
        x -= real(slot_words, at, FREQUENCY) * count.to(tl.float32)
        x -= tl.where(said, real(slot_words, at, PRESENCE), 0.0)
        tl.store(place, x, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def count_kernel(
    counts,  # [lines, vocab] int32
    token,  # [rows] int32; -1: none
    line,  # [rows] int32; -1: not counted
    rows,
    vocab,
    BLOCK: tl.constexpr,
):
    """BLOCK rows per program; no two rows have the same line."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(token + row, mask=row < rows, other=-1)
    number = tl.load(line + row, mask=row < rows, other=-1)
    inside = (chosen >= 0) & (chosen < vocab) & (number >= 0)
    place = counts + number.to(tl.int64) * vocab + chosen
    tl.store(place, tl.load(place, mask=inside, other=0) + 1, mask=inside)


def penalize(
    logits: Tensor, counts: Tensor, prompt_bits: Tensor, slots: SlotTensors, line: Tensor, slot: Tensor
) -> None:
    """Changes logits float32 [rows, vocab] in place.

    counts int32 [lines, vocab] of the answer; prompt_bits int32 [lines, ceil(vocab / 32)], as in mask.py; line and slot
    int32 [rows].
    """
    if not logits.is_cuda:
        penalize_reference(logits, counts, prompt_bits, slots, line, slot)
        return
    launch_penalize(logits, counts, prompt_bits, slots, line, slot)


def launch_penalize(
    logits: Tensor, counts: Tensor, prompt_bits: Tensor, slots: SlotTensors, line: Tensor, slot: Tensor
) -> None:
    """The kernel."""
    rows, vocab = logits.shape
    assert (
        logits.is_contiguous() and counts.is_contiguous() and counts.shape[1] == vocab and prompt_bits.is_contiguous()
    )
    assert len(line) == len(slot) == rows and prompt_bits.shape[1] * 32 >= vocab
    if rows:
        penalize_kernel[(triton.cdiv(vocab, BLOCK), rows)](
            logits, counts, prompt_bits, slots.words, line, slot,
            vocab, prompt_bits.shape[1], BLOCK=BLOCK,
        )  # fmt: skip


def penalize_reference(
    logits: Tensor, counts: Tensor, prompt_bits: Tensor, slots: SlotTensors, line: Tensor, slot: Tensor
) -> None:
    fields = [slots.real(one) for one in (SlotWord.PRESENCE, SlotWord.FREQUENCY, SlotWord.REPETITION)]
    for row, (number, at) in enumerate(zip(line.tolist(), slot.tolist())):
        if number >= 0:
            numbers = (float(field[at]) for field in fields)
            penalties_reference(logits[row], counts[number], unpack(prompt_bits[number], logits.shape[1]), *numbers)


def count(counts: Tensor, token: Tensor, line: Tensor) -> None:
    """counts[line, token] += 1 in place, where neither is -1; token and line int32 [rows], lines all different."""
    if not counts.is_cuda:
        count_reference(counts, token, line)
        return
    launch_count(counts, token, line)


def launch_count(counts: Tensor, token: Tensor, line: Tensor) -> None:
    """The kernel."""
    assert counts.is_contiguous() and token.shape == line.shape
    if len(token):
        count_kernel[(triton.cdiv(len(token), 256),)](counts, token, line, len(token), counts.shape[1], BLOCK=256)


def count_reference(counts: Tensor, token: Tensor, line: Tensor) -> None:
    inside = (token >= 0) & (line >= 0)
    counts[line[inside].long(), token[inside].long()] += 1
