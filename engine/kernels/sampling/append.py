"""Appends the tokens of a step without drafts to the slots' texts.

    text[prompt length + number of the token in the answer] = token

So a text is complete when drafts begin again (kernels/sampling/ngram). User: engine/step/parts/drafts.
"""

from __future__ import annotations

from torch import Tensor

from _fast.layout import SlotWord
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.target import tl, triton

PROMPT_LEN = tl.constexpr(int(SlotWord.PROMPT_LEN))
BLOCK = 256
Lines = tuple[Tensor, Tensor, Tensor]  # Chosen.lines


@triton.jit
def append_kernel(
    texts,  # [slots, longest] int32
    words,  # [slots, SLOT_WORDS] int32
    runs,  # flat int32
    target,  # [lines] int32, as the next two
    slots,
    number,
    longest,
    lines,
    BLOCK: tl.constexpr,
):
    """A program handles BLOCK lines."""
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(target + line, mask=line < lines, other=-1)
    here = at >= 0
    token = tl.load(runs + at, mask=here, other=-1)
    slot = tl.load(slots + line, mask=here, other=0)
    place = tl.load(word(words, slot, PROMPT_LEN), mask=here, other=0) + tl.load(number + line, mask=here, other=0)
    valid = here & (token >= 0) & (place >= 0) & (place < longest)
    tl.store(texts + slot.to(tl.int64) * longest + place, token, mask=valid)


def append(texts: Tensor, slots: SlotTensors, runs: Tensor, lines: Lines) -> None:
    """Write tokens of runs int32 [rows, width] to texts int32 [slots, longest]; negative tokens are left out.

    lines: int32 [lines] each: the token's place in the flattened runs (negative: none), its slot, its number in the
    answer.
    """
    run = launch_append if texts.is_cuda else append_reference
    run(texts, slots, runs, lines)


def launch_append(texts: Tensor, slots: SlotTensors, runs: Tensor, lines: Lines) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    assert runs.is_contiguous()
    count = len(lines[0])
    append_kernel[(triton.cdiv(count, BLOCK),)](
        texts, slots.words, runs, *lines, texts.shape[1], count, BLOCK=BLOCK, num_warps=4
    )


def append_reference(texts: Tensor, slots: SlotTensors, runs: Tensor, lines: Lines) -> None:
    target, slot, number = (each.long() for each in lines)
    token = runs.reshape(-1)[target.clamp(min=0)]
    place = slots.word(SlotWord.PROMPT_LEN)[slot] + number
    valid = (target >= 0) & (token >= 0) & (place >= 0) & (place < texts.shape[1])
    texts[slot[valid], place[valid]] = token[valid].int()
