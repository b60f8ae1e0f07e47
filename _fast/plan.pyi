from typing import Any

class StepPlan:
    """Array attributes are int32 memoryviews at full capacity (`out_request`: int64; `updates`: [max_updates, 4]);
    see plan.pyx."""

    max_rows: int
    max_tokens: int
    max_updates: int
    number: int
    width: int
    num_rows: int
    num_tokens: int
    num_decode_rows: int
    num_updates: int
    num_sampled: int
    num_lines: int
    num_drafted: int
    depth: int
    variant: int
    drafting: bool
    num_params: int
    tail_at: int
    num_encodes: int
    num_media: int
    step_id: int
    record: Any
    row_slot: Any
    row_start: Any
    row_len: Any
    row_computed: Any
    row_flags: Any
    token_ids: Any
    updates: Any
    encode_slot: Any
    encode_item: Any
    encode_entry: Any
    media_start: Any
    media_length: Any
    media_entry: Any
    media_row: Any
    out_token: Any
    out_count: Any
    out_drafted: Any
    out_accepted: Any
    out_finish: Any
    out_request: Any
    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        max_updates: int,
        buffer: Any = None,
        number: int = 0,
        width: int = 1,
        run_width: int = 0,
    ) -> None: ...
    @property
    def run_width(self) -> int: ...
    @property
    def states(self) -> list[list[int]]: ...
    @property
    def new_runs(self) -> dict[int, list[int]]: ...
    @property
    def used_len(self) -> int: ...
