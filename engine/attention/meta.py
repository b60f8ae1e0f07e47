"""AttentionMeta: where the rows of a step lie, in the batch and in the paged cache.

Owner: device thread; made once per step by `engine/step/build`, read by every layer, never changed. Row r holds the
tokens query_start[r]..query_start[r+1]-1 of the batch; they are the last ones of the context_len[r] tokens that the
cache holds once this step's keys and values are stored. So the token i of row r has the absolute position
context_len[r] - (query_start[r+1] - query_start[r]) + i, and prefill, chunks and decode are one case. A graph has room
for more rows than the step: those have no tokens and no context, and are skipped; tokens beyond query_start[-1] belong
to no row, and their result is not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from engine.kernels.attention.work import WorkList


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMeta:
    """One step's rows; all tensors are contiguous and on the device of the batch."""

    query_start: Tensor  # [num_rows + 1] int32, offsets into the batch's tokens
    context_len: Tensor  # [num_rows] int32, tokens in the cache including this step's
    block_tables: Tensor  # [lines, max_blocks] int32; entries past the context are not read
    slot_mapping: Tensor  # [num_tokens] int64, block * block_size + offset
    max_query_len: int
    max_context_len: int
    work: WorkList | None = None  # on an accelerator: the step's work lists, made once and read by every layer
    table_row: Tensor | None = None  # [num_rows] int32: the line of block_tables that row r reads; None: line r
    decode_only: bool = False  # no row has two tokens and the lists are not invariant: there are no tiles to launch
