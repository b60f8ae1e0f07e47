"""Random runs, drafts and texts for the kernels of speculative decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import SlotWord, TokenCode
from engine.kernels.drafts_features import Features
from engine.kernels.drafts_rows import DraftedRows
from engine.kernels.sampling.ngram import Texts, empty_texts
from engine.kernels.sampling.rules import COUNTED, SEEN, RuleTables, rule_tables
from engine.kernels.step_tensors import SlotTensors, StepInputs, empty_inputs, empty_slots

END = int(TokenCode.END)


def drawn(seed: int, *shape: int, low: int = 0, high: int = 3) -> Tensor:
    """Random int32."""
    return torch.randint(low, high, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def chosen_runs(rows: int, number: int) -> tuple[Tensor, SlotTensors, RuleTables, StepInputs]:
    """Tokens that were chosen at the places of `number` drafts, of which some are right; some rows have rules."""
    slots = empty_slots(rows, 1, 1, "cpu", number)
    slots.drafts.copy_(drawn(1, rows + 1, number))
    slots.word(SlotWord.LENGTH).copy_(drawn(17, rows + 1, high=2))  # 0: the slot's first verification
    slots.survivals.estimates.copy_(drawn(18, rows + 1, number, low=512, high=32768))
    slots.survivals.model.copy_(drawn(19, number, low=512, high=32768))
    inputs = empty_inputs(rows, rows * (number + 1), 1, 1, "cpu", max_lines=rows * (number + 1))
    assert inputs.row_drafts is not None
    inputs.row_slot.copy_(torch.randperm(rows, generator=torch.Generator().manual_seed(9)))
    inputs.row_drafts.copy_(drawn(2, rows, low=-1, high=number + 1))
    inputs.context_len.copy_(drawn(3, rows, low=number + 1, high=99))
    runs = drawn(4, rows, number + 2)
    runs[:6, 0] = runs[4:10, number // 2] = -1  # logits that are not finite
    for slot in range(0, rows, 2):
        slots.word(SlotWord.RULE_LINE)[slot] = 1 + slot
        slots.word(SlotWord.RULE_KINDS)[slot] = (COUNTED, SEEN, COUNTED | SEEN)[slot % 3]
    return runs, slots, rule_tables(rows, 5, "cpu"), inputs


def accepted(rows: int, number: int, width: int) -> tuple[DraftedRows, Tensor, Tensor]:
    """A step's rows with `number` drafts each, features of its tokens, and the runs that were chosen."""
    runs, slots, _, inputs = chosen_runs(rows, number)
    inputs.query_start.copy_(torch.arange(rows + 1) * (number + 1))
    assert inputs.row_drafts is not None
    numbers = inputs.row_slot, inputs.row_drafts, inputs.query_start, inputs.context_len
    return DraftedRows(*numbers, None, rows, slots), torch.randn((rows + 1) * (number + 2), width), runs


def written_texts(rows: int, number: int, longest: int) -> tuple[SlotTensors, Texts, Tensor, Tensor]:
    """Slots with the lengths of their texts, the texts, the runs that end them, and the runs' slots."""
    slots = empty_slots(rows, 1, 1, "cpu", number)
    texts = empty_texts(rows, longest, rows, "cpu")
    texts.tokens.copy_(drawn(6, rows + 1, longest, high=4))
    lengths = torch.arange(number + 1, number + 1 + rows // 2), drawn(7, rows - rows // 2, low=99, high=longest + 1)
    slots.word(SlotWord.LENGTH)[:rows] = torch.cat(lengths)
    runs = torch.full((rows, number + 2), END, dtype=torch.int32)
    for row in range(rows):
        count = row % (number + 2)
        runs[row, :count] = drawn(row, count, high=4)
    row_slot = torch.randperm(rows, generator=torch.Generator().manual_seed(8)).int()
    return slots, texts, runs, row_slot


def drafter_step(
    rows: int, number: int, size: int = 4, width: int = 40
) -> tuple[DraftedRows, Features, dict[str, Tensor]]:
    """A step of a server with a drafter: prompts, rows of one token, and last the rows with drafts; then padding.

    Of the tensors: tokens, their places in the cache, their features, and block tables.
    """
    blocks = max(9, -(-(number + 20) // size))  # of a slot: the longest context
    padded, slots = rows + 3, empty_slots(rows + 5, blocks, 1, "cpu", number)
    slots.word(SlotWord.PROMPT_LEN)[:] = drawn(11, rows + 6, high=3)
    drafts = torch.cat([drawn(12, rows - rows // 2, low=-1, high=1), drawn(13, rows // 2, low=1, high=number + 1)])
    lens = torch.where(drafts > 0, 1 + drafts, drawn(14, rows, low=1, high=9))
    context = lens + torch.cat([drawn(15, rows - 4, high=20), torch.tensor([0, size, 2 * size, 5])])
    starts = torch.cat([lens.new_zeros(1), lens.cumsum(0).int(), lens.sum().int().repeat(3)])
    own = torch.randperm(rows + 5, generator=torch.Generator().manual_seed(10))[:rows].int()
    slots.block_tables.copy_(torch.randperm((rows + 6) * blocks).view(1, rows + 6, blocks))
    tokens = int(starts[-1])
    row = torch.repeat_interleave(torch.arange(rows), lens)
    place = context[row] - lens[row] + torch.arange(tokens) - starts[row]
    mapping = slots.block_tables[0, own[row].long(), (place // size).long()] * size + place % size
    beyond = torch.zeros(3, dtype=torch.int32)
    line = torch.cat([own, beyond + rows + 5])
    contexts = torch.cat([context, beyond]).int()
    step = DraftedRows(line, torch.cat([drafts, beyond - 1]).int(), starts.int(), contexts, line, rows // 2, slots)
    held = Features(torch.randn(rows + 6, width), torch.randn((rows + 6) * blocks, width), size)
    tensors = {
        "tokens": torch.cat([drawn(16, tokens, high=99), beyond]).long(),
        "mapping": torch.cat([mapping, beyond - 1]).long(),
        "features": torch.randn(tokens + 3, width),
        "tables": slots.block_tables[0],
    }
    assert len(line) == padded
    return step, held, tensors


def confidences(rows: int, number: int) -> tuple[DraftedRows, Tensor]:
    """A step's rows with drafts, and the confidence of their drafter, of which some is no number."""
    step = accepted(rows, number, 4)[0]
    confidence = torch.rand(rows + 1, number, generator=torch.Generator().manual_seed(21)) * 1.3 - 0.15
    confidence[::7] = float("nan")
    return step, confidence


def convolved_blocks(
    queries: int, groups: int, group: int, taps: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of blocks of several lengths, what they add to a convolution's kernel, the kernel, and places in blocks."""
    draw = torch.Generator().manual_seed(23)
    lengths = drawn(24, queries, low=1, high=9).tolist()
    before = torch.cat([torch.arange(count) for count in lengths])[:queries].int()
    width = groups * group
    x, delta = (torch.randn(queries, size, generator=draw).to(dtype) for size in (width, 2 * taps * groups))
    return x, delta, torch.randn(2, taps, width, generator=draw), before
