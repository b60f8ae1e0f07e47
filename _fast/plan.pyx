"""StepPlan: the arrays of one step, as the scheduler writes them and the device reads them.

Owner: the device thread. In: schedule() fills rows, tokens and block-table changes; commit() fills the out_* arrays.
Out: views at full capacity; readers slice them to the counts. What the device needs lies in one int32 record, which
the engine may place in pinned memory, where the device reads it:

    header[16] | row_slot | row_start (+1) | row_len | row_computed | row_flags | token_ids | (to a multiple of 16) tail
    header: 0 num_rows, 1 num_tokens, 2 num_decode_rows, 3 num_updates, 4 low 31 bits of step_id, 5 the others,
            6 num_sampled, 7 num_params, 8 where positions begin (0: none), 9 used_len, 10 the plan's number, which
            says where its tokens go home to; the rest is 0
    tail:   updates [num_updates][4] = slot, index, block, group | params [num_params][12] | positions [3][num_tokens]

Only the first used_len values count. Encodes, media runs and results stay on the host, in memory of the plan. A plan
is rewritten by the next schedule() that is given it; the engine must not do that before the device has read its record
and its step is committed. What is appended behind the params keeps values 8 and 9 of the header true.
"""

from array import array

cimport cython
from libc.string cimport memcpy, memset

from _fast.seqs cimport Span
from _fast.types cimport ALIGNED, AT_HOME, AT_SAMPLED, AT_USED, HEADER, PARAM_WORDS, ROW_FEED, ROW_SAMPLE, token_t


@cython.final
cdef class StepPlan:
    """One step in integers. `num_*` properties say how much of each array counts; `number` is its place among plans."""

    def __init__(self, int32_t max_rows, int32_t max_tokens, int32_t max_updates, buffer=None, int32_t number=0):
        if max_rows < 1 or max_tokens < max_rows or max_updates < 1:
            raise ValueError(
                f"max_rows={max_rows}, max_tokens={max_tokens}, max_updates={max_updates}: a plan needs at least "
                "one row, a token per row and one update"
            )
        cdef int32_t size = StepPlan.record_len(max_rows, max_tokens, max_updates)
        cdef int32_t[::1] record = array("i", bytes(4 * size)) if buffer is None else buffer
        if record.shape[0] < size:
            raise ValueError(f"buffer holds {record.shape[0]} int32 values: this plan needs {size}")
        cdef int32_t at = HEADER
        self.record = record[:size]
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.max_updates = max_updates
        self.number = number
        self.row_slot = record[at:at + max_rows]
        at += max_rows
        self.row_start = record[at:at + max_rows + 1]
        at += max_rows + 1
        self.row_len = record[at:at + max_rows]
        at += max_rows
        self.row_computed = record[at:at + max_rows]
        at += max_rows
        self.row_flags = record[at:at + max_rows]
        at += max_rows
        self.token_ids = record[at:at + max_tokens]
        at = StepPlan.tail_of(max_rows, max_tokens)
        self.tail_at = at
        # Rows of four over the head of the tail; params and positions follow the last one that is used.
        self.updates = memoryview(record[at:at + 4 * max_updates]).cast("B").cast("i", (max_updates, 4))
        # Each encode and each media run covers at least one token of the step.
        self.encode_slot = array("i", bytes(4 * max_tokens))
        self.encode_item = array("i", bytes(4 * max_tokens))
        self.encode_entry = array("i", bytes(4 * max_tokens))
        self.media_start = array("i", bytes(4 * max_tokens))
        self.media_length = array("i", bytes(4 * max_tokens))
        self.media_entry = array("i", bytes(4 * max_tokens))
        self.media_row = array("i", bytes(4 * max_tokens))
        results = memoryview(array("q", bytes(24 * max_rows))).cast("B")
        self.out_request = results[:8 * max_rows].cast("q")
        self.out_token = results[8 * max_rows:12 * max_rows].cast("i")
        self.row_epoch = results[12 * max_rows:13 * max_rows]
        self.out_finish = results[16 * max_rows:20 * max_rows].cast("i")
        self.lines = Lines(
            &self.row_slot[0], &self.row_start[0], &self.row_len[0], &self.row_computed[0], &self.row_flags[0],
            &self.token_ids[0], &self.out_token[0], &self.out_finish[0], &self.out_request[0], &self.row_epoch[0],
            &self.record[0],
        )
        self.rows_of = -1
        self.row_start[0] = 0  # and nobody writes anything else there
        self.clear()

    @staticmethod
    def tail_of(int32_t max_rows, int32_t max_tokens):
        """Where the tail of the record of such a plan begins."""
        return (HEADER + 5 * max_rows + 1 + max_tokens + ALIGNED - 1) // ALIGNED * ALIGNED

    @staticmethod
    def record_len(int32_t max_rows, int32_t max_tokens, int32_t max_updates):
        """How many int32 values the record of such a plan takes."""
        cdef int32_t tail = 4 * max_updates + PARAM_WORDS * max_rows + 3 * max_tokens
        return StepPlan.tail_of(max_rows, max_tokens) + (tail + ALIGNED - 1) // ALIGNED * ALIGNED

    @property
    def used_len(self):
        """How much of the record the device needs; 0: nothing is scheduled."""
        return self.record[AT_USED]

    cdef check_room(self, int32_t rows, int32_t tokens, int32_t updates):
        """ValueError unless a step of these sizes fits."""
        if self.max_rows < rows or self.max_tokens < tokens or self.max_updates < updates:
            raise ValueError(
                f"the plan holds {self.max_rows} rows, {self.max_tokens} tokens, {self.max_updates} updates: this "
                f"scheduler needs {rows}, {tokens}, {updates}"
            )

    cdef void clear(self) noexcept nogil:
        """An empty plan; what rows were in it is not forgotten before there are others."""
        if self.num_odd:
            memset(self.lines.out_finish, 0, <size_t>self.max_rows * sizeof(int32_t))
        self.num_odd = 0
        self.num_prompt_rows = 0
        self.num_rows = 0
        self.num_tokens = 0
        self.num_decode_rows = 0
        self.num_updates = 0
        self.num_sampled = 0
        self.num_params = 0
        self.num_encodes = 0
        self.num_media = 0
        self.step_id = -1
        memset(self.lines.record, 0, HEADER * sizeof(int32_t))

    cdef int32_t row(self, SeqTable seqs, slot_t slot, int32_t count) noexcept nogil:
        """Append a row: the slot's next `count` tokens. Returns its flags; only the span cursor of the slot moves."""
        cdef int32_t row = self.num_rows
        cdef int32_t at = self.num_tokens
        cdef int32_t start = seqs.computed[slot]
        cdef int32_t flags = 0
        self.rows_of = -1
        self.row_slot[row] = slot
        self.row_len[row] = count
        self.row_computed[row] = start
        self.row_epoch[row] = seqs.epoch[slot]
        self.out_request[row] = seqs.request[slot]
        if seqs.span_at[slot] < seqs.num_spans[slot]:
            self._media_runs(seqs, slot, start, count)
        self.num_prompt_rows += start < seqs.prompt_len[slot]
        if seqs.pending[slot]:
            flags = ROW_FEED
            self.token_ids[at] = -1
        elif count == 1:
            self.token_ids[at] = seqs.tokens[slot][start]
        else:
            memcpy(&self.token_ids[at], seqs.tokens[slot] + start, <size_t>count * sizeof(token_t))
        if start + count == seqs.num_tokens[slot] + seqs.pending[slot]:
            flags |= ROW_SAMPLE
            self.num_sampled += 1
        self.row_flags[row] = flags
        self.num_rows = row + 1
        self.num_tokens = at + count
        self.row_start[row + 1] = at + count
        return flags

    cdef void _media_runs(self, SeqTable seqs, slot_t slot, int32_t start, int32_t count) noexcept nogil:
        """Which of the row's tokens take which rows of which entry; the slot's cursor moves past finished spans."""
        cdef int32_t k = seqs.span_at[slot]
        cdef int32_t low
        cdef int32_t high
        cdef Span* span
        while k < seqs.num_spans[slot]:
            span = &seqs.spans[slot][k]
            low = max(span.start, start)
            high = min(span.start + span.length, start + count)
            if low < high:
                self.media(self.num_tokens + low - start, high - low, span.entry, span.row + low - span.start)
            if span.start + span.length > start + count:
                break
            k += 1
        seqs.span_at[slot] = k

    cdef void update(self, slot_t slot, int32_t group, int32_t index, block_t block) noexcept nogil:
        """Entry `index` of the slot's block table in `group` is now `block`."""
        cdef int32_t at = self.num_updates
        self.updates[at, 0] = slot
        self.updates[at, 1] = index
        self.updates[at, 2] = block
        self.updates[at, 3] = group
        self.num_updates = at + 1

    cdef void encode(self, slot_t slot, int32_t item, int32_t entry) noexcept nogil:
        """The tower of `entry` runs before this step's forward; span `item` of the slot's media names it."""
        cdef int32_t at = self.num_encodes
        self.encode_slot[at] = slot
        self.encode_item[at] = item
        self.encode_entry[at] = entry
        self.num_encodes = at + 1

    cdef void media(self, int32_t start, int32_t length, int32_t entry, int32_t row) noexcept nogil:
        """Tokens start .. start + length - 1 of the step take the entry's rows from `row` on."""
        cdef int32_t at = self.num_media
        self.media_start[at] = start
        self.media_length[at] = length
        self.media_entry[at] = entry
        self.media_row[at] = row
        self.num_media = at + 1

    cdef void seal(self, int64_t step_id) noexcept nogil:
        """Write the header: the plan is complete."""
        cdef int32_t* header = self.lines.record
        self.step_id = step_id
        header[0] = self.num_rows
        header[1] = self.num_tokens
        header[2] = self.num_decode_rows
        header[3] = self.num_updates
        header[4] = <int32_t>(step_id & 0x7FFFFFFF)
        header[5] = <int32_t>(step_id >> 31)
        header[AT_SAMPLED] = self.num_sampled
        header[AT_USED] = self.tail_at + 4 * self.num_updates
        header[AT_HOME] = self.number
