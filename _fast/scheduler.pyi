from collections.abc import Iterable, Sequence
from typing import Any

from _fast.blocks import BlockPool
from _fast.drafts import Drafts
from _fast.encoder import EncoderTable
from _fast.plan import StepPlan
from _fast.prefix import PrefixIndex
from _fast.queue import WaitQueue
from _fast.seqs import SeqTable
from _fast.settle import Settler
from _fast.shares import TokenShares
from _fast.states import StateRuns
from _fast.tables import BlockTables

IDLE: int

class Scheduler:
    max_slots: int
    max_rows: int
    max_tokens: int
    max_model_len: int
    num_running: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    num_freed: int
    next_step: int
    freed_slots: Any
    freed_lens: Any
    pool: BlockPool
    index: PrefixIndex
    seqs: SeqTable
    shares: TokenShares
    tables: BlockTables
    queue: WaitQueue
    encoder: EncoderTable
    drafts: Drafts
    settler: Settler
    def __init__(
        self,
        *,
        max_slots: int,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        groups: Sequence[tuple[int, int]] = ((0, 0),),
        prefix_caching: bool = True,
        hash_key: bytes = ...,
        policy: int = 0,
        max_chunk: int = 0,
        encoder_budget: int = 0,
        encoder_capacity: int = 0,
        hash_bits: int = 128,
        first_step: int = 0,
        whole_prompts: bool = False,
        state_blocks: int = 0,
        tail_blocks: int = 0,
        state_mode: int = 1,
        state_every: int = 1024,
        state_share: float = 0.25,
        max_lines: int = ...,
    ) -> None: ...
    def add(
        self,
        request_id: int,
        tokens: Any,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        eos_ids: Iterable[int] = (),
        stop_ids: Iterable[int] = (),
        priority: int = 0,
        arrival: float = 0.0,
        root: bytes = ...,
        keys: Any = None,
        media: Any = None,
        bi_spans: Any = None,
        read_cache: bool = True,
        traced: bool = False,
        flow: int = 0,
        weight: int = 1,
        deadline: float = ...,
        boundaries: Iterable[int] = (),
        drafts: int = 0,
    ) -> int: ...
    def abort(self, request_id: int, when_computed: bool = False) -> bool: ...
    def add_entry(self, num_rows: int, work: int = 0) -> int: ...
    def discard_entry(self, entry: int) -> bool: ...
    def take_evicted(self) -> list[tuple[int, bool]]: ...
    def schedule(self, plan: StepPlan) -> int: ...
    def commit(self, plan: StepPlan, sampled: Any, finish_override: Any = None) -> None: ...
    def fail(self, plan: StepPlan, again: Any = None) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def cached_tokens(self, slot: int) -> int: ...
    def last_place(self, slot: int) -> int: ...
    @property
    def states(self) -> StateRuns: ...
    @property
    def run_width(self) -> int: ...
    @property
    def state_counts(self) -> dict[str, int] | None: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_in_flight(self) -> int: ...
    def ledger(self) -> dict[str, int]: ...
