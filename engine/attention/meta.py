"""AttentionMeta: where the rows of a step lie, in the batch and in the paged cache; WorkList: how kernels divide them.

Owner: device thread; made once per step, read by every layer, never changed. Row r holds the tokens
query_start[r]..query_start[r+1]-1 of the batch; they are the last ones of the context_len[r] tokens that the
cache holds once this step's keys and values are stored. So the token i of row r has the absolute position
context_len[r] - (query_start[r+1] - query_start[r]) + i, and prefill, chunks and decode are one case. A graph has room
for more rows than the step: those have no tokens and no context, and are skipped; tokens beyond query_start[-1] belong
to no row, and their result is not written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """Device tensors, int32; counts are on the device too, so a captured launch can read another step's list.

    Written by engine/kernels/attention/work, whose docstring says how rows are cut.
    """

    parts: Tensor  # [capacity, 8]: token, first key, last key + 1, context, line, the row's first part, last part + 1
    num_parts: Tensor  # [1]
    tiles: Tensor  # [max_tokens, 4]: first token, tokens, position of the first token, line
    num_tiles: Tensor  # [1]
    arrived: Tensor  # [capacity, heads]: zero between launches, see decode.py
    sums: Tensor  # [capacity, heads, head_dim] float32: what each part leaves for the merge
    stats: Tensor  # [capacity, heads, 2] float32
    max_rows: int
    per_unit: int  # parts times KV heads that a step aims at, for each unit of the device
    # The same rows in tiles of twice the lines, for long prompts over pages of codes; None: no kernel reads them.
    large_tiles: Tensor | None = None
    num_large_tiles: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMeta:
    """One step's rows; all tensors are contiguous and on the device of the batch."""

    query_start: Tensor  # [num_rows + 1] int32, offsets into the batch's tokens
    context_len: Tensor  # [num_rows] int32, tokens in the cache including this step's
    block_tables: Tensor  # [lines, max_blocks] int32; entries past the context are not read
    slot_mapping: Tensor  # [num_tokens] int64, block * block_size + offset
    work: WorkList | None = None  # on an accelerator: the step's work lists, made once and read by every layer
    table_row: Tensor | None = None  # [num_rows] int32: the line of block_tables that row r reads; None: line r
    # [num_tokens] int32, in steps of prompts whose tokens see later ones: the last position that each token sees, or
    # ~last where a window hides nothing from it. A row of one token sees up to itself. None: each token up to itself.
    last_keys: Tensor | None = None
    decode_only: bool = False  # no row has two tokens and the lists are not invariant: there are no tiles to launch

    def covering(self, num_tokens: int) -> AttentionMeta:
        """The same with one row more, of the tokens that pad a recorded step: every token has its row."""
        end = self.query_start.new_full((1,), num_tokens)
        return replace(self, query_start=torch.cat([self.query_start, end]))
