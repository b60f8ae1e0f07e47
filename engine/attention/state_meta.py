"""StateMeta: the runs of cache pages that hold the states of a step's rows; StateWork: the chunks of a scan.

Owner: device thread; made once per step, read by every layer of the group, never changed. Row r holds the tokens
query_start[r]..query_start[r+1]-1 of the batch, at positions start[r] and on:

    0 ....... base ............. start ......... end         tail: inputs of positions >= base, a ring by position
      base run     |    tail run   | this step |             new_base: behind it, the step leaves its write run
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

MAX_CHECKPOINTS = 4  # per row and step


@dataclass(frozen=True, slots=True, eq=False)
class StateWork:
    """The chunks of the rows that a step scans; a kernel makes them on the device, every layer reads them."""

    chunks: Tensor  # [capacity, 4] int32: row, first token, tokens, 0; in no order
    count: Tensor  # [1] int32
    query_start: Tensor | None = None  # [num_rows + 1] int32: tokens of rows that are replayed from their base


@dataclass(frozen=True, slots=True, eq=False)
class StateMeta:
    """One step's rows, on the device of the batch. Rows that pad a recorded step have run 0 and no tokens."""

    runs: Tensor  # [run ids, blocks of a run] int32: this group's columns of the whole table; run 0 is block 0
    base_run: Tensor  # [num_rows] int32: the run that holds the state after `base` tokens; base 0: the empty state
    write_run: Tensor  # [num_rows] int32: the run that gets the state after `new_base` tokens; 0: no state is written
    tail_run: Tensor  # [num_rows] int32: the run that holds the inputs of positions >= base, at position % ring size
    base: Tensor  # [num_rows] int32, a multiple of the spec's chunk
    new_base: Tensor  # [num_rows] int32; base, or a later multiple of the chunk, before the row's last position
    query_start: Tensor  # [num_rows + 1] int32, offsets into the batch's tokens
    start: Tensor  # [num_rows] int32, the position of the row's first token in this step
    checkpoint_run: Tensor  # [num_rows, 4] int32: further runs to write, then zeros
    checkpoint_at: Tensor  # [num_rows, 4] int32: the number of tokens after which each checkpoint is taken
    num_rows: Tensor | None = None  # [1] int32: rows that are not padding; None: all rows
    work: StateWork | None = None  # the list of the layer that scans
    works: dict[int, StateWork] = field(default_factory=dict)  # by positions per chunk; all layers share a list
    decode_only: bool = False  # every row fits in the ring and has no checkpoint: nothing is scanned
