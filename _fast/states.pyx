"""StateRuns: tracks the runs of each row's state and tail, the row's base, and which of its states are named.

Owner: the device thread, through BlockTables, Planner and Settler. In: planned chunks and committed steps. Out: the
columns of states in the StepPlan. A row's base run holds the state after `base` tokens, a multiple of `chunk`; the
inputs of later tokens are in its tail run, by position. A step that folds writes the state after a later base into
another run, which is the base run of the row's next step:

    plan N    base 32 in A, writes 48 to B, computes 49     plan N+1    base 48 in B, computes 50     A loses a user

A token whose step is not committed is never folded, because it may be computed again, or be a draft. But if a step
computes known tokens, all of them except the last are final. A run that a step reads keeps its user until the row is
planned again; all later writes come after this read. So naming a state needs no copy: both the name and the row hold
the base run, and the row continues. Intermediate states in a chunk are each written to a run that has a user until its
step is settled.
"""

cimport cython
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from _fast.blocks cimport STATE_RUN, TAIL_RUN
from _fast.layout cimport (
    CHECKPOINTS, HEADER_VARIANT, STATE_BASE, STATE_BASE_RUN, STATE_CHECKPOINT_AT, STATE_CHECKPOINT_RUN, STATE_COLUMNS,
    STATE_NEW_BASE, STATE_TAIL_RUN, STATE_WRITE_RUN,
)

NONE = STATES_NONE
ALIGN = STATES_ALIGN
ALL = STATES_ALL

cdef int32_t NEVER = 0x7FFFFFFF
cdef int32_t ANSWERED = 256  # tokens of an answer between two named states


cdef inline int32_t rounded_up(int32_t count, int32_t unit) noexcept nogil:
    return (count + unit - 1) // unit * unit


@cython.final
cdef class StateRuns:
    """States of one scheduler's rows; without states only `active` is read."""

    def __cinit__(self, Checkpoints cache not None, BlockPool pool not None, SeqTable seqs not None, int32_t chunk,
                  int32_t mode, int32_t every):
        cdef int32_t block_size = cache.names.block_size
        if mode not in (STATES_NONE, STATES_ALIGN, STATES_ALL) or every < 1:
            raise ValueError(f"state_mode={mode}, state_every={every}: modes are 0 to 2, and the distance at least 1")
        self.active = pool.sizes[STATE_RUN] > 0
        self.cache, self.pool, self.seqs = cache, pool, seqs
        self.chunk = max(chunk, 1)
        self.unit = block_size
        while self.unit % self.chunk:  # a named state is after whole blocks, and its position is a base
            self.unit += block_size
        self.mode = mode
        self.every = rounded_up(every if mode == STATES_ALL else ANSWERED, self.unit)
        self.rows = <RowState*>calloc(<size_t>seqs.num_slots if self.active else 1, sizeof(RowState))
        if not self.rows:
            raise MemoryError(f"no memory for the states of {seqs.num_slots} slots")

    def __dealloc__(self):
        free(self.rows)

    def scan_in(self, int32_t variant):
        """Request this variant of the graphs for steps with chunks; no other step has a row that is scanned."""
        self.scan_variant = variant

    def enter(self, int32_t slot, boundaries):
        """Start a request in the slot; boundaries: prompt lengths after which other requests may differ."""
        cdef list places = sorted(set(boundaries))
        cdef int32_t k
        if len(places) > MAX_BOUNDARIES or any(not 0 < place <= self.seqs.of[slot].prompt_len for place in places):
            raise ValueError(
                f"boundaries {places}: at most {MAX_BOUNDARIES}, each from 1 to {self.seqs.of[slot].prompt_len}, the "
                "prompt's length"
            )
        if self.active:
            memset(&self.rows[slot], 0, sizeof(RowState))
            self.rows[slot].num_boundaries = <int32_t>len(places)
            for k in range(<int32_t>len(places)):
                self.rows[slot].boundaries[k] = <int32_t>places[k] // self.unit * self.unit

    # Planning.

    cdef void turn(self, slot_t slot) noexcept nogil:
        """Release the run that the row's previous step read, if it writes another; at the row's next plan."""
        if self.rows[slot].old_run:
            self._drop_run(&self.rows[slot].old_run)

    cdef int32_t next_base(self, slot_t slot, int32_t start, int32_t count) noexcept nogil:
        """Return the row's base after a step of `count` tokens from `start` on; 0: the base stays the same."""
        cdef int32_t end = self.seqs.of[slot].committed
        if not self.seqs.of[slot].choosing:  # known tokens, all final except the last
            end = start + count - 1
        end = end // self.chunk * self.chunk
        return end if end > self.rows[slot].base else 0

    cdef int32_t missing(self, slot_t slot, int32_t start, int32_t count) noexcept nogil:
        """Return how many blocks of runs the row still needs for this step."""
        cdef RowState* row = &self.rows[slot]
        cdef int32_t blocks = 0
        if not row.tail_run:
            blocks = self.pool.sizes[TAIL_RUN]
        if not row.write_run and self.next_base(slot, start, count):
            blocks += self.pool.sizes[STATE_RUN]
        return blocks

    cdef bint take(self, slot_t slot, int32_t start, int32_t count) noexcept nogil:
        """Take the runs that this step needs. False: there is no room."""
        cdef RowState* row = &self.rows[slot]
        if not row.tail_run:
            row.tail_run = self.cache.acquire(TAIL_RUN)
        if not row.write_run and self.next_base(slot, start, count):
            row.write_run = self.cache.acquire(STATE_RUN)
            return row.tail_run and row.write_run
        return row.tail_run != 0

    cdef int32_t demand(self, int32_t hit) noexcept nogil:
        """Return the most blocks of runs that a row holds at once, without the state at which it begins."""
        return self.pool.sizes[TAIL_RUN] + self.pool.sizes[STATE_RUN] * (1 if hit else 2)

    cdef int32_t shorten(self, slot_t slot, int32_t count, const int32_t* blocks) noexcept nogil:
        """Return after how many of `count` entries, which the token groups have found, there is a state to begin at.

        blocks: the primary group's blocks of these entries; NULL: there is no primary group.
        """
        cdef int32_t step = self.unit // self.cache.names.block_size
        cdef int32_t j = count // step * step
        self.found = 0
        while j and self.mode != STATES_NONE:
            self.found = self.cache.find(slot, j - 1, blocks[j - 1] if blocks else 0)
            if self.found:
                return j
            j -= step
        return 0

    cdef int32_t revived(self) noexcept nogil:
        """Return the number of blocks of the state just found, if it is idle."""
        return self.pool.sizes[STATE_RUN] if self.found and self.pool.refs[self.found] == 0 else 0

    cdef void attach(self, slot_t slot, int32_t count, const int32_t* blocks) noexcept nogil:
        """Start the row after `count` entries, at the state just found, or at 0 without one. It holds no run."""
        cdef RowState* row = &self.rows[slot]
        cdef int32_t block_size = self.cache.names.block_size
        row.base_run = row.old_run = row.write_run = row.tail_run = row.newest = row.newest_answered = 0
        row.base = row.sure = count * block_size
        row.extends = count > 0
        row.branch = self.reach * block_size // self.unit * self.unit
        if count:
            row.base_run = row.newest = self.found
            row.newest_above = blocks[count - 1] if blocks else 0
            self.cache.hit(row.base_run)
        row.due = self.next_due(slot, row.base)

    cdef int32_t next_due(self, slot_t slot, int32_t after) noexcept nogil:
        """Return the first position after `after` whose state is named."""
        cdef RowState* row = &self.rows[slot]
        cdef int32_t last = (self.seqs.of[slot].prompt_len - 1) // self.unit * self.unit
        cdef int32_t due
        cdef int32_t k
        if self.mode == STATES_NONE:
            return NEVER
        if self.mode == STATES_ALL:
            return (after // self.every + 1) * self.every
        due = last if last > after else last + ((after - last) // self.every + 1) * self.every
        if after < row.branch < due:
            due = row.branch
        for k in range(row.num_boundaries):
            if after < row.boundaries[k] < due:
                due = row.boundaries[k]
        return due

    cdef int32_t cut(self, slot_t slot, int32_t start, int32_t end) noexcept nogil:
        """Return the end of a chunk, so that its checkpoints fit; the last checkpoint may be its new base."""
        cdef int32_t count = 0
        cdef int32_t due = self.next_due(slot, start)
        while due < end:
            count += 1
            if count > CHECKPOINTS:
                return due + 1
            due = self.next_due(slot, due)
        return end

    cdef void plan_row(self, slot_t slot, int32_t row, int32_t count, int32_t reserve, StepPlan plan) noexcept nogil:
        """Write a row's columns and make the new base its base. reserve: blocks that checkpoints must leave idle."""
        cdef RowState* of = &self.rows[slot]
        cdef int32_t start = self.seqs.of[slot].computed
        cdef int32_t new_base = self.next_base(slot, start, count)
        cdef int32_t* column = plan.lines.states + row
        cdef int32_t width = plan.max_rows
        cdef int32_t places[CHECKPOINTS]
        cdef int32_t num_places
        cdef int32_t k
        cdef block_t head
        if count > 1:  # a row with drafts counts one token, and its positions fit in the tail
            plan.lines.record[HEADER_VARIANT] |= self.scan_variant
        for k in range(STATE_COLUMNS):
            column[k * width] = 0
        column[STATE_BASE_RUN * width] = self.pool.ids[of.base_run]
        column[STATE_TAIL_RUN * width] = self.pool.ids[of.tail_run]
        column[STATE_BASE * width] = of.base
        memset(of.checkpoints, 0, sizeof(of.checkpoints))
        if not new_base:
            return
        column[STATE_WRITE_RUN * width] = self.pool.ids[of.write_run]
        column[STATE_NEW_BASE * width] = new_base
        # A step of few tokens scans nothing on an accelerator, and drafts may move the base by several chunks.
        num_places = self._checkpoints(slot, new_base, places) if count > 1 or self.chunk == 1 else 0
        for k in range(num_places):
            head = 0
            if self.pool.num_idle() >= reserve + self.pool.sizes[STATE_RUN]:
                head = self.cache.acquire(STATE_RUN)
            if not head:
                self.cache.num_dropped += num_places - k
                break
            of.checkpoints[k] = head
            column[(STATE_CHECKPOINT_RUN + k) * width] = self.pool.ids[head]
            column[(STATE_CHECKPOINT_AT + k) * width] = places[k]
        of.old_run, of.old_base = of.base_run, of.base
        of.base_run, of.base = of.write_run, new_base
        of.write_run = 0

    cdef int32_t _checkpoints(self, slot_t slot, int32_t end, int32_t* places) noexcept nogil:
        """Return positions before `end` whose intermediate states the step writes, longest prefix first."""
        cdef int32_t count = 0
        cdef int32_t k
        cdef int32_t due = self.rows[slot].due
        if self.seqs.of[slot].unnamed:
            return 0
        if due <= self.rows[slot].base:
            due = self.next_due(slot, self.rows[slot].base)
        while due < end:
            count = min(count + 1, CHECKPOINTS)
            for k in range(count - 1, 0, -1):
                places[k] = places[k - 1]
            places[0] = due
            due = self.next_due(slot, due)
        return count

    # Committed steps.

    cdef void settle(self, slot_t slot, StepPlan plan, int32_t row, const int32_t* blocks) noexcept nogil:
        """Name the states that are due, after a commit of the row's step and the naming of its full blocks."""
        cdef RowState* of = &self.rows[slot]
        cdef int32_t* column = plan.lines.states + row
        cdef int32_t width = plan.max_rows
        cdef int32_t k
        cdef block_t head
        if column[STATE_NEW_BASE * width]:
            of.sure = column[STATE_NEW_BASE * width]
        if of.sure < of.due:
            return
        for k in range(CHECKPOINTS - 1, -1, -1):  # the shortest prefix first
            if column[(STATE_CHECKPOINT_RUN + k) * width]:
                head = self.pool.heads[column[(STATE_CHECKPOINT_RUN + k) * width]]
                self._name(slot, head, column[(STATE_CHECKPOINT_AT + k) * width], blocks)
                self.cache.release(head)
                column[(STATE_CHECKPOINT_RUN + k) * width] = 0
        if of.old_run and of.due <= of.old_base <= of.sure and self.next_due(slot, of.old_base - 1) == of.old_base:
            self._name(slot, of.old_run, of.old_base, blocks)
        if of.due <= of.base <= of.sure and self.next_due(slot, of.base - 1) == of.base:
            self._name(slot, of.base_run, of.base, blocks)
        of.due = self.next_due(slot, of.sure)

    cdef void pass_over(self, StepPlan plan, int32_t row) noexcept nogil:
        """Drop the intermediate states of a row's step that failed or is ignored."""
        cdef int32_t* column = plan.lines.states + row
        cdef int32_t k
        for k in range(CHECKPOINTS):
            if column[(STATE_CHECKPOINT_RUN + k) * plan.max_rows] == 0:  # later ones are 0 as well
                return
            self.cache.release(self.pool.heads[column[(STATE_CHECKPOINT_RUN + k) * plan.max_rows]])

    cdef void _name(self, slot_t slot, block_t head, int32_t position, const int32_t* blocks) noexcept nogil:
        """Name the run as the state after `position` tokens of the row, so that rows with this prefix find it."""
        cdef RowState* row = &self.rows[slot]
        cdef int32_t j = position // self.cache.names.block_size - 1
        cdef bint answered = position > self.seqs.of[slot].prompt_len
        cdef block_t above
        if self.mode == STATES_NONE or self.seqs.of[slot].unnamed or j < 0 or j >= self.seqs.of[slot].num_named:
            return
        above = blocks[j] if blocks else 0
        # The next turn of a conversation goes on from the prompt; from an answer only if it has all of its tokens.
        if self.cache.name(slot, j, above, head, 2 if row.extends and not answered else 1):
            if row.newest and row.newest_answered >= answered:
                self.cache.supersede(row.newest, row.newest_above)
            row.newest, row.newest_above, row.newest_answered = head, above, answered

    cdef void release(self, slot_t slot, const int32_t* blocks) noexcept nogil:
        """Release the row's runs. Its own state may be named, for the row itself or the chat's next turn."""
        cdef RowState* row = &self.rows[slot]
        if self.mode == STATES_ALIGN:
            if row.base_run and row.base <= row.sure and row.base % self.unit == 0:
                self._name(slot, row.base_run, row.base, blocks)
            elif row.old_run and row.old_base <= row.sure and row.old_base % self.unit == 0:
                self._name(slot, row.old_run, row.old_base, blocks)
        self._drop_run(&row.old_run)
        self._drop_run(&row.base_run)
        self._drop_run(&row.write_run)
        self._drop_run(&row.tail_run)

    cdef void _drop_run(self, block_t* run) noexcept nogil:
        if run[0]:
            self.cache.release(run[0])
            run[0] = 0

    cdef bint has_new_runs(self, slot_t slot, StepPlan plan) noexcept nogil:
        """Whether the row, or its newest step, has a run whose blocks this plan was the last to send to the device."""
        cdef RowState* row = &self.rows[slot]
        cdef int32_t k
        for k in range(CHECKPOINTS):
            if self.cache.is_new(row.checkpoints[k], plan):
                return True
        return (
            self.cache.is_new(row.base_run, plan) or self.cache.is_new(row.old_run, plan)
            or self.cache.is_new(row.write_run, plan) or self.cache.is_new(row.tail_run, plan)
        )

    cdef void disown(self, slot_t slot) noexcept nogil:
        """Unname the states of a row whose results are wrong, unless the names of blocks hold them."""
        cdef block_t head
        cdef int32_t j
        self.seqs.of[slot].unnamed = 1
        if self.cache.names.primary >= 0:  # the states were dropped with the blocks' names
            return
        for j in range(self.seqs.of[slot].num_named):
            head = self.cache.find(slot, j, 0)
            if head:
                self.cache.drop(head)

    def row(self, int32_t slot):
        """Return a slot's runs by id, and its positions (for tests)."""
        if not (0 <= slot < self.seqs.num_slots and self.active):
            raise ValueError(f"slot {slot}: {self.seqs.num_slots} slots have states, or none has any")
        cdef RowState* row = &self.rows[slot]
        return {
            "base_run": self.pool.ids[row.base_run],
            "old_run": self.pool.ids[row.old_run],
            "write_run": self.pool.ids[row.write_run],
            "tail_run": self.pool.ids[row.tail_run],
            "base": row.base,
            "old_base": row.old_base,
            "sure": row.sure,
            "due": row.due,
        }

    @property
    def counts(self):
        """Counts of states for the engine's reports."""
        cdef int32_t used = 0
        cdef int32_t i
        for i in range(<int32_t>self.pool.heads.shape[0]):
            used += self.pool.heads[i] > 0 and self.pool.refs[self.pool.heads[i]] > 0
        return {
            "named": self.cache.num_named,
            "stored": self.cache.num_stored,
            "hit": self.cache.num_hit,
            "dropped": self.cache.num_dropped,
            "runs_used": used,
            "attention_hit_tokens": self.reached,
        }
