"""Extends oracles/device.py by states: records for each run which prefix its state or tail belongs to.

The plan that forms a run gives the run's blocks. Each block of a state holds the identity of the prefix, so a run that
another row, group or run overwrites is detected at once. A tail holds an identity for each place of its ring. All reads
of a step are checked before the step's writes. No run is read by one row and written by another.
"""

from _fast.layout import CHECKPOINTS, StateColumn
from tests.fast.oracles.device import GARBAGE, Device

FEED = 2
EMPTY = "zeros"


class StateDevice(Device):
    def __init__(self, rng, groups, block_size, draw, chunk, sizes, width=1):
        super().__init__(rng, groups, block_size, draw)
        self.chunk = chunk
        self.state_blocks, self.tail_blocks = sizes
        self.ring = chunk - 1 + 3 * width
        self.runs = {}  # id -> blocks
        self.unsent = set()  # ids of runs whose blocks only a failed step has sent
        self.blocks = {}  # block -> content that a run wrote into the block
        self.written_in = {}  # id of a state's run -> the step that wrote the run
        self.written_by = {}  # slot -> the run that the slot's newest fold wrote
        self.settled_step = -1
        self.started_at = 0  # number of rows so far that began at a state
        self.columns = []

    def run(self, plan, requests, fails):
        for run_id, blocks in plan.new_runs.items():
            self.runs[run_id] = [block for block in blocks if block]
        self.unsent = self.unsent | set(plan.new_runs) if fails else self.unsent - set(plan.new_runs)
        self.columns = plan.states
        self.step = plan.step_id
        rows = range(plan.num_rows)
        read = {self.at(row, StateColumn.BASE_RUN) for row in rows}
        written = [run for row in rows for run, _ in self.written(row)]
        tails = [self.at(row, StateColumn.TAIL_RUN) for row in rows]
        assert len(set(written)) == len(written)
        assert len(set(tails)) == len(tails)
        assert not (read | set(tails)) & set(written)
        assert not read & set(tails)
        self.fails = fails
        return super().run(plan, requests, fails)

    def at(self, row, column):
        return self.columns[column][row]

    def written(self, row):
        """(run, position) of each state that the row's step writes."""
        found = [(self.at(row, StateColumn.WRITE_RUN), self.at(row, StateColumn.NEW_BASE))]
        for k in range(CHECKPOINTS):
            found.append((self.at(row, StateColumn.CHECKPOINT_RUN + k), self.at(row, StateColumn.CHECKPOINT_AT + k)))
        return [(run, position) for run, position in found if run]

    def _row(self, plan, row, request, runs):
        slot, (start, count) = plan.row_slot[row], self.place_of(plan, row, request)
        base, new_base = self.at(row, StateColumn.BASE), self.at(row, StateColumn.NEW_BASE)
        base_run, tail = self.at(row, StateColumn.BASE_RUN), self.at(row, StateColumn.TAIL_RUN)
        request.broken |= not self.unsent.isdisjoint({base_run, tail, *(run for run, _ in self.written(row))})
        assert base % self.chunk == 0
        assert base <= start
        assert len(self.runs[tail]) == self.tail_blocks
        if base_run and base_run != self.written_by.get(slot):  # the row begins at a named state
            assert self.written_in[base_run] <= self.settled_step, "a state is found before its step is committed"
            assert base == start
            self.started_at += 1
        if not request.broken:
            self.check_state(base_run, base, request)
            for position in range(base, start):
                held = self.blocks.get(self.runs[tail][0], {})
                assert held.get(position % self.ring) == self.identity(request, position), f"tail of {position}"
        for _, position in self.written(row):
            assert position % self.chunk == 0
            assert base < position <= max(new_base, base)
            assert position < start + count
            if plan.row_flags[row] & FEED:
                assert position <= self.settled_of(slot), "a token is folded that may be computed again"
        self.written_by[slot] = self.at(row, StateColumn.WRITE_RUN) or base_run
        sampled = super()._row(plan, row, request, runs)
        for run, position in self.written(row):
            assert len(self.runs[run]) == self.state_blocks
            self.written_in[run] = plan.step_id
            for k, block in enumerate(self.runs[run]):
                self.take_over(block)
                self.blocks[block] = GARBAGE if request.broken else (k, self.identity(request, position - 1))
        ring = self.blocks.get(self.runs[tail][0])
        ring = dict(ring) if isinstance(ring, dict) else {}
        for position in range(max(start, new_base, start + count - self.ring), start + count):
            true = position < request.computed and not request.broken
            ring[position % self.ring] = self.identity(request, position) if true else GARBAGE
        for block in self.runs[tail]:
            self.take_over(block)
            self.blocks[block] = ring
        if plan.row_flags[row] & FEED:
            assert start + count - base <= self.ring, "the tail is too short"
        return sampled

    def place_of(self, plan, row, request):
        """Position of the row's first token, and number of its tokens."""
        return plan.row_computed[row], plan.row_len[row]

    def settled_of(self, slot):
        """Number of the slot's committed positions; the walk replaces this method."""
        raise NotImplementedError

    def check_state(self, run, position, request):
        if not run:
            assert position == 0
            return
        assert position > 0
        expected = self.identity(request, position - 1)
        assert [self.blocks.get(block) for block in self.runs[run]] == [
            (k, expected) for k in range(self.state_blocks)
        ], f"the state behind {position} tokens"

    def take_over(self, block):
        """A run writes into the block: the block no longer holds keys and values."""
        for offset in range(self.block_size):
            self.kv.pop((block, offset), None)

    def _read_write(self, request, group, slot, start, count):
        super()._read_write(request, group, slot, start, count)
        for position in range(start, start + count):
            self.blocks.pop(self.tables[group][slot, position // self.block_size], None)
