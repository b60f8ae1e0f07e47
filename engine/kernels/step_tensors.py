"""Fixed tensors of steps on an accelerator, and access to a slot's numbers in kernels.

Owner: device thread, at start; then the stream, in step order. SlotTensors holds the device's state of live requests;
StepInputs is one step as forward and sampler read it. `layout.SlotWord` and `layout.SamplerWord` define the contents of
a slot's row. A kernel gets `words` and reads a number with `word` and `real`:

    TOP_K = tl.constexpr(int(SlotWord.TOP_K))                  in the kernel's module
    k = tl.load(word(words, slot, TOP_K))                      in the kernel
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from _fast.layout import SLOT_WORDS, SamplerWord, SlotWord
from engine.kernels.survivals import Survivals, empty_survivals
from engine.kernels.target import tl, triton

ROW = tl.constexpr(SLOT_WORDS)
SEED_LOW = tl.constexpr(int(SlotWord.SEED_LOW))
SEED_HIGH = tl.constexpr(int(SlotWord.SEED_HIGH))


@dataclass(frozen=True, slots=True, eq=False)
class SlotTensors:
    """The device's state of each live request, by slot; row max_slots is used by padding rows."""

    block_tables: Tensor  # [num_groups, max_slots + 1, max_blocks] int32
    words: Tensor  # [max_slots + 1, SLOT_WORDS] int32, floats as their bits
    drafts: Tensor  # [max_slots + 1, most drafts] int32: SlotWord.NUM_DRAFTS of them follow the slot's newest token
    survivals: Survivals  # of these drafts

    def word(self, number: SlotWord | SamplerWord) -> Tensor:
        """Return this number of every slot, int32 [max_slots + 1], a view."""
        return self.words[:, number]

    def real(self, number: SlotWord | SamplerWord) -> Tensor:
        """Return this number of every slot, float32 [max_slots + 1], a view."""
        return self.words.view(torch.float32)[:, number]

    @property
    def seed(self) -> Tensor:
        """Seeds of all slots, int64 [max_slots + 1], a view."""
        return self.words.view(torch.int64)[:, SlotWord.SEED_LOW // 2]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step as forward and sampler read it, at addresses that never change; N = max_tokens, R = max_rows."""

    token_ids: Tensor  # [N] int64, rows of the embedding; 0 beyond the step's tokens
    positions: Tensor  # [N] int64, or [axes, N] for M-RoPE; 0 beyond
    slot_mapping: Tensor  # [num_groups, N] int64, block * block_size + offset; -1 beyond
    query_start: Tensor  # [R + 1] int32; beyond the step's rows: the number of tokens
    context_len: Tensor  # [R] int32; 0 beyond
    row_slot: Tensor  # [R] int32; max_slots beyond
    # L lines, of which each chooses a token: the last token of each sampled row, rows ascending; with drafts (L > R)
    # the row's newest token, then its drafts.
    sample_index: Tensor  # [L] int64, the token; 0 beyond the lines
    sample_row: Tensor  # [L] int32, place of the chosen token among all runs: row * width + place in the run; -1 beyond
    sample_slot: Tensor  # [L] int32; max_slots beyond
    sample_place: Tensor  # [L] int32, the number of the token in the answer; 0 beyond
    num_rows: Tensor  # [1] int32
    num_sampled: Tensor  # [1] int32: lines
    home: Tensor  # [1] int32: number of the host buffer that receives the tokens
    last_keys: Tensor | None  # [N] int32, for models whose tokens attend to later tokens (AttentionMeta); 0 beyond
    adapters: Tensor | None  # [N] int32, for models with adapters: each token's adapter; 0 beyond
    row_drafts: Tensor | None  # [R] int32, for runs: drafts that follow a sampled row's newest token; -1: none sampled

    @property
    def axes(self) -> int:
        """Number of positions per token."""
        return len(self.positions) if self.positions.dim() == 2 else 1


def empty_slots(
    max_slots: int, max_blocks: int, num_groups: int, device: str | torch.device, num_drafts: int = 0
) -> SlotTensors:
    """Allocate rows of zeros."""
    lines = max_slots + 1
    shapes = (num_groups, lines, max_blocks), (lines, SLOT_WORDS), (lines, num_drafts)
    tables, words, drafts = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)
    return SlotTensors(tables, words, drafts, empty_survivals(lines, num_drafts, device))


def empty_inputs(
    max_rows: int,
    max_tokens: int,
    num_groups: int,
    axes: int,
    device: str | torch.device,
    bidirectional: bool = False,
    adapted: bool = False,
    max_lines: int = 0,
) -> StepInputs:
    """Allocate the inputs of a step without rows. Slots of padding rows are 0 until the first `step_inputs`.

    axes: number of positions per token. max_lines: most lines of a step with runs; 0: a row yields one token.
    """
    positions = torch.zeros((axes, max_tokens) if axes > 1 else max_tokens, dtype=torch.int64, device=device)

    def row(count: int = max_rows, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((count,), fill, dtype=dtype, device=device)

    return StepInputs(
        token_ids=row(max_tokens, 0, torch.int64),
        positions=positions,
        slot_mapping=row(num_groups * max_tokens, -1, torch.int64).view(num_groups, max_tokens),
        query_start=row(max_rows + 1),
        context_len=row(),
        row_slot=row(),
        sample_index=row(max_lines or max_rows, dtype=torch.int64),
        sample_row=row(max_lines or max_rows, fill=-1),
        sample_slot=row(max_lines or max_rows),
        sample_place=row(max_lines or max_rows),
        num_rows=row(1),
        num_sampled=row(1),
        home=row(1),
        last_keys=row(max_tokens) if bidirectional else None,
        adapters=row(max_tokens) if adapted else None,
        row_drafts=row(fill=-1) if max_lines else None,
    )


@triton.jit
def word(words, slot, NUMBER: tl.constexpr):
    """Return the address of number NUMBER of a slot."""
    return words + slot * ROW + NUMBER


@triton.jit
def real(words, slot, NUMBER: tl.constexpr):
    """Load a slot's number NUMBER as float32."""
    return tl.load(words + slot * ROW + NUMBER).to(tl.float32, bitcast=True)


@triton.jit
def seed_of(words, slot):
    """Load a slot's int64 seed."""
    low = tl.load(words + slot * ROW + SEED_LOW).to(tl.int64) & 0xFFFFFFFF
    return low | (tl.load(words + slot * ROW + SEED_HIGH).to(tl.int64) << 32)
