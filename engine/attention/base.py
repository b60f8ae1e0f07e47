"""AttentionMeta: where the rows of a step lie, in the batch and in the paged cache.

Owner: device thread; made once per step by `engine/step/build`, read by every layer, never changed. Row r holds the
tokens query_start[r]..query_start[r+1]-1 of the batch; they are the last ones of the context_len[r] tokens that the
cache holds once this step's keys and values are stored. So the token i of row r has the absolute position
context_len[r] - (query_start[r+1] - query_start[r]) + i, and prefill, chunks and decode are one case.
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
    block_tables: Tensor  # [num_rows, max_blocks] int32; entries past the context are not read
    slot_mapping: Tensor  # [num_tokens] int64, block * block_size + offset
    max_query_len: int
    max_context_len: int
    work: WorkList | None = None  # on an accelerator: the step's work lists, made once and read by every layer
