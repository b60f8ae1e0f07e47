"""AttentionMeta: where a step's rows lie in the batch and in the paged cache; WorkList: how kernels divide the rows.

Owner: device thread; made once per step, read by every layer, never changed. Row r holds the tokens
query_start[r]..query_start[r+1]-1 of the batch. These tokens are the last of the context_len[r] tokens that the
cache holds once this step's keys and values are stored. So token i of row r has the absolute position
context_len[r] - (query_start[r+1] - query_start[r]) + i, and prefill, chunks and decode are one case. A graph may have
more rows than the step: the extra rows have no tokens and no context, and kernels skip them. Tokens beyond
query_start[-1] belong to no row, and kernels write no result for them.
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

    # [capacity, 8]: first token, first key, last key + 1, context of the stripe's last token, line, first part of the
    # stripe, last part + 1, tokens of the stripe
    parts: Tensor
    num_parts: Tensor  # [1]
    tiles: Tensor  # [max_tokens, 4]: first token, tokens, position of the first token, line
    num_tiles: Tensor  # [1]
    arrived: Tensor  # [capacity, heads]: zero between launches, see decode.py
    sums: Tensor  # [capacity, stripe * heads, head_dim] float32: each part's partial result, which is merged
    stats: Tensor  # [capacity, stripe * heads, 2] float32
    max_rows: int
    per_unit: int  # target of (parts * KV heads) per multiprocessor of the device
    most_cut: int = 1  # most queries of a row that is cut into parts; such a row is cut into stripes first
    stripe: int = 1  # most queries of a stripe
    # The same rows in tiles of twice the lines, for long prompts over quantised pages; None: no kernel reads them.
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
    # [num_tokens] int32, for prompts with bidirectional tokens: the last position that each token sees, or ~last where
    # a window hides nothing from the token. A row of one token sees up to itself. None: every token sees up to itself.
    last_keys: Tensor | None = None
    first_key: int = 0  # earlier keys are hidden, and never read
    decode_only: bool = False  # every row has at most one token and the lists are not invariant: no tiles are launched
    cut: bool = False  # no row has more tokens than WorkList.most_cut: no tiles are launched
    whole: bool = False  # `cut` rows whose tokens see all of the row's keys, later ones too

    def covering(self, num_tokens: int) -> AttentionMeta:
        """A copy with one more row, which holds the tokens that pad a recorded step: every token belongs to a row."""
        end = self.query_start.new_full((1,), num_tokens)
        return replace(self, query_start=torch.cat([self.query_start, end]))
