"""StepPlan: the arrays of one step, written by the scheduler and read by the device.

Owner: the device thread. In: schedule() fills rows, tokens and block-table changes; commit() fills the out_* arrays.
Out: views at full capacity; readers slice them to the counts. The device's data are in one int32 record, which the
engine may place in pinned memory, where the device reads it:

    header | row_slot | row_start | row_len | row_computed | row_flags | token_ids | updates, params, positions | states

layout.py defines the layout. Only the first used_len values are valid. Encodes, media runs and results stay on the
host, in memory of the plan. The next schedule() with the plan rewrites it; the engine must not call that before the
device has read the record and the step is committed. Code that appends after the params updates POSITIONS_AT and
USED_LEN of the header.
"""

from array import array

cimport cython
from libc.string cimport memcpy, memset

from _fast.layout import RowColumn, column_at, record_len, runs_at, states_at, tail_at, tokens_at

from _fast.layout cimport (
    HEADER_HOME, HEADER_LEN, HEADER_NUM_DECODE_ROWS, HEADER_NUM_ROWS, HEADER_NUM_RUNS, HEADER_NUM_SAMPLED,
    HEADER_NUM_TOKENS, HEADER_NUM_UPDATES, HEADER_RESTING, HEADER_STEP_HIGH, HEADER_STEP_LOW, HEADER_USED_LEN,
    HEADER_VARIANT, ROW_EXACT, ROW_FEED, ROW_SAMPLE, STATE_COLUMNS, UPDATE_BLOCK, UPDATE_GROUP, UPDATE_INDEX,
    UPDATE_SLOT, UPDATE_WORDS,
)
from _fast.seqs cimport Seq, Span


MAX_WIDTH = 127  # two steps in flight may yield twice as many tokens per row, and a byte counts them


@cython.final
cdef class StepPlan:
    """One step in integers. `num_*` are the used lengths of the arrays; `number` is the plan's place among plans."""

    def __init__(self, int32_t max_rows, int32_t max_tokens, int32_t max_updates, buffer=None, int32_t number=0,
                 int32_t width=1, int32_t run_width=0):
        """run_width: blocks of the longest run, for a model with states."""
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"width={width}: a row brings home at least 1 token, and at most {MAX_WIDTH}")
        if max_rows < 1 or max_tokens < max_rows or max_updates < 1:
            raise ValueError(
                f"max_rows={max_rows}, max_tokens={max_tokens}, max_updates={max_updates}: a plan needs at least "
                "one row, a token per row and one update"
            )
        cdef int32_t size = record_len(max_rows, max_tokens, max_updates, run_width)
        cdef int32_t at
        cdef int32_t[::1] record = array("i", bytes(4 * size)) if buffer is None else buffer
        if record.shape[0] < size:
            raise ValueError(f"buffer holds {record.shape[0]} int32 values: this plan needs {size}")
        self.record = record[:size]
        self.max_rows = max_rows
        self.number = number
        self.width = width
        at = column_at(RowColumn.START, max_rows)
        self.row_start = record[at:at + max_rows + 1]
        rows = {column: record[column_at(column, max_rows):][:max_rows] for column in RowColumn}
        self.row_slot = rows[RowColumn.SLOT]
        self.row_len = rows[RowColumn.LEN]
        self.row_computed = rows[RowColumn.COMPUTED]
        self.row_flags = rows[RowColumn.FLAGS]
        at = tokens_at(max_rows)
        self.token_ids = record[at:at + max_tokens]
        at = self.tail_at = tail_at(max_rows, max_tokens)
        # Updates are at the start of the tail; params and positions follow the last used update.
        updates = memoryview(record[at:at + UPDATE_WORDS * max_updates])
        self.updates = updates.cast("B").cast("i", (max_updates, UPDATE_WORDS))
        # Each encode (except one piece) and each media run covers at least one token of the step.
        self.encode_slot = array("i", bytes(4 * (max_tokens + 1)))
        self.encode_item = array("i", bytes(4 * (max_tokens + 1)))
        self.encode_entry = array("i", bytes(4 * (max_tokens + 1)))
        self.media_start = array("i", bytes(4 * max_tokens))
        self.media_length = array("i", bytes(4 * max_tokens))
        self.media_entry = array("i", bytes(4 * max_tokens))
        self.media_row = array("i", bytes(4 * max_tokens))
        # In one buffer, widest type first: requests, tokens, finishes, epochs and three counts.
        results = memoryview(array("q", bytes(8 * (3 + width) * max_rows))).cast("B")
        self.out_request = results[:8 * max_rows].cast("q")
        self.out_token = results[8 * max_rows:][:4 * width * max_rows].cast("i")
        self.out_finish = results[(8 + 4 * width) * max_rows:][:4 * max_rows].cast("i")
        self.row_epoch = results[(12 + 4 * width) * max_rows:][:max_rows]
        self.out_count = results[(13 + 4 * width) * max_rows:][:max_rows]
        self.out_drafted = results[(14 + 4 * width) * max_rows:][:max_rows]
        self.out_accepted = results[(15 + 4 * width) * max_rows:][:max_rows]
        self.lines = Lines(
            &self.row_slot[0], &self.row_start[0], &self.row_len[0], &self.row_computed[0], &self.row_flags[0],
            &self.token_ids[0], &self.out_token[0], &self.out_finish[0], &self.out_count[0], &self.out_request[0],
            &self.row_epoch[0], &self.out_drafted[0], &self.out_accepted[0], &self.record[0], NULL, NULL, run_width,
        )
        if run_width:
            at = states_at(max_rows, max_tokens, max_updates)
            self.lines.states = &self.record[at]
            at = runs_at(max_rows, max_tokens, max_updates)
            self.lines.runs = &self.record[at]
        self.row_start[0] = 0  # and stays 0
        self.clear()

    @property
    def max_tokens(self):
        return self.token_ids.shape[0]

    @property
    def max_updates(self):
        return self.updates.shape[0]

    @property
    def used_len(self):
        """Number of the record's values that the device needs; 0: nothing is scheduled."""
        return self.record[HEADER_USED_LEN]

    @property
    def drafting(self):
        """Whether the step's rows may have drafts, and find those of the next step."""
        return self.width > 1 and not self.record[HEADER_RESTING]

    @property
    def variant(self):
        """Bits of the graphs' variant that the whole step needs."""
        return self.record[HEADER_VARIANT]

    @property
    def run_width(self):
        """Blocks of the longest run; 0: the model has no states."""
        return self.lines.run_width

    @property
    def states(self):
        """Copy of the columns of states [STATE_COLUMNS, max_rows] (layout.StateColumn); empty without states."""
        cdef int32_t k
        cdef int32_t row
        cdef list columns = []
        cdef list column
        for k in range(STATE_COLUMNS if self.lines.run_width else 0):
            column = []
            for row in range(self.max_rows):
                column.append(self.lines.states[k * self.max_rows + row])
            columns.append(column)
        return columns

    @property
    def new_runs(self):
        """{run id: blocks} that are sent to the device with this step; zeros follow the run's last block."""
        cdef int32_t width = self.lines.run_width
        cdef int32_t k
        cdef int32_t i
        cdef dict found = {}
        for k in range(self.record[HEADER_NUM_RUNS] if width else 0):
            blocks = []
            for i in range(width):
                blocks.append(self.lines.runs[k * (width + 1) + 1 + i])
            found[self.lines.runs[k * (width + 1)]] = blocks
        return found

    cdef check_room(self, int32_t rows, int32_t tokens, int32_t updates):
        """Raise ValueError unless a step of these sizes fits."""
        if self.max_rows < rows or self.token_ids.shape[0] < tokens or self.updates.shape[0] < updates:
            raise ValueError(
                f"the plan holds {self.max_rows} rows, {self.max_tokens} tokens, {self.max_updates} updates: this "
                f"scheduler needs {rows}, {tokens}, {updates}"
            )

    cdef void clear(self) noexcept nogil:
        """Make the plan empty; data of its rows stay until new rows overwrite them."""
        if self.num_odd:
            memset(self.lines.out_finish, 0, <size_t>self.max_rows * sizeof(int32_t))
        self.num_odd = 0
        self.num_prompt_rows = 0
        self.num_rows = 0
        self.num_tokens = 0
        self.num_decode_rows = 0
        self.num_updates = 0
        self.num_sampled = 0
        self.num_lines = 0
        self.num_drafted = 0
        self.depth = 0
        self.num_params = 0
        self.num_encodes = 0
        self.num_media = 0
        self.step_id = -1
        memset(self.lines.record, 0, HEADER_LEN * sizeof(int32_t))

    cdef bint is_cut(self, int32_t row, const token_t* run) noexcept nogil:
        """Whether a settled row took fewer tokens than its run has."""
        cdef int32_t count = self.lines.out_count[row]
        return count < self.width and run[count] >= 0

    cdef void clear_runs(self) noexcept nogil:
        """Mark the rows as having no tokens yet."""
        cdef int32_t row
        for row in range(self.num_rows):
            self.lines.out_token[row * self.width] = -1
        memset(self.lines.out_count, 0, self.num_rows)
        memset(self.lines.drafted, 0, self.num_rows)

    cdef int32_t row(self, SeqTable seqs, slot_t slot, int32_t count, int32_t drafts) noexcept nogil:
        """Append a row with the slot's next `count` tokens and at most so many drafts; return its flags.

        The slot's span cursor moves. The step's places for drafts come later, for all rows together (add_drafts).

        A row with ROW_FEED begins at the newest token of the previous step, wherever this token is: without ROW_EXACT
        the row's number of computed tokens is only a minimum. Drafts follow only a single token.
        """
        cdef const Seq* own = &seqs.of[slot]
        cdef const Lines* lines = &self.lines
        cdef int32_t row = self.num_rows
        cdef int32_t at = self.num_tokens
        cdef int32_t start = own.computed
        cdef int32_t flags = 0
        lines.slot[row] = slot
        lines.len[row] = count + drafts
        lines.computed[row] = start
        lines.epoch[row] = own.epoch
        lines.out_request[row] = own.request
        if own.span_at < own.num_spans:
            self._media_runs(seqs, slot, start, count)
        self.num_prompt_rows += start < own.prompt_len
        if own.choosing or drafts:
            flags = ROW_FEED
            if own.pending == own.choosing and self.width > 1:
                flags |= ROW_EXACT
            lines.token[at] = -1
        elif count == 1:
            lines.token[at] = own.tokens[start]
        else:
            memcpy(lines.token + at, own.tokens + start, <size_t>count * sizeof(token_t))
        if start + count == own.num_tokens + own.choosing and not own.closing:
            flags |= ROW_SAMPLE
            self.num_sampled += 1
            self.num_lines += 1
        lines.flags[row] = flags
        self.num_drafted += drafts > 0
        self.depth = max(self.depth, drafts)
        self.num_rows = row + 1
        self.num_tokens = at + count
        lines.start[row + 1] = at + count
        return flags

    cdef void set_form(self, bint drafting, int32_t variant) noexcept nogil:
        """Decide whether rows may have drafts; `variant`: of the graphs in which they may."""
        self.lines.record[HEADER_RESTING] = not drafting
        self.lines.record[HEADER_VARIANT] = variant if drafting else 0

    cdef void add_drafts(self, int32_t count) noexcept nogil:
        """Add places for drafts after all rows; the device deals them out among the rows with drafts, the last rows."""
        self.num_drafted = min(self.num_drafted, count)
        self.num_tokens += count
        self.num_lines += count

    cdef void _media_runs(self, SeqTable seqs, slot_t slot, int32_t start, int32_t count) noexcept nogil:
        """Write which of the row's tokens take which rows of entries; move the slot's cursor past finished spans."""
        cdef int32_t k = seqs.of[slot].span_at
        cdef int32_t low
        cdef int32_t high
        cdef Span* span
        while k < seqs.of[slot].num_spans:
            span = &seqs.of[slot].spans[k]
            low = max(span.start, start)
            high = min(span.start + span.length, start + count)
            if low < high:
                self.media(self.num_tokens + low - start, high - low, span.entry, span.row + low - span.start)
            if span.start + span.length > start + count:
                break
            k += 1
        seqs.of[slot].span_at = k

    cdef void update(self, slot_t slot, int32_t group, int32_t index, block_t block) noexcept nogil:
        """Append the change: entry `index` of the slot's block table in `group` becomes `block`."""
        cdef int32_t at = self.num_updates
        self.updates[at, UPDATE_SLOT] = slot
        self.updates[at, UPDATE_INDEX] = index
        self.updates[at, UPDATE_BLOCK] = block
        self.updates[at, UPDATE_GROUP] = group
        self.num_updates = at + 1

    cdef void encode(self, slot_t slot, int32_t item, int32_t entry) noexcept nogil:
        """Plan to run the tower of `entry` before this step's forward; span `item` of the slot's media names it.

        slot -1: only a piece of the tower runs, with `item` units of its work.
        """
        cdef int32_t at = self.num_encodes
        self.encode_slot[at] = slot
        self.encode_item[at] = item
        self.encode_entry[at] = entry
        self.num_encodes = at + 1

    cdef void media(self, int32_t start, int32_t length, int32_t entry, int32_t row) noexcept nogil:
        """Append a media run: tokens start .. start + length - 1 of the step take the entry's rows from `row` on."""
        cdef int32_t at = self.num_media
        self.media_start[at] = start
        self.media_length[at] = length
        self.media_entry[at] = entry
        self.media_row[at] = row
        self.num_media = at + 1

    cdef void seal(self, int64_t step_id) noexcept nogil:
        """Complete the plan: write the header."""
        cdef int32_t* header = self.lines.record
        self.step_id = step_id
        header[HEADER_NUM_ROWS] = self.num_rows
        header[HEADER_NUM_TOKENS] = self.num_tokens
        header[HEADER_NUM_DECODE_ROWS] = self.num_decode_rows
        header[HEADER_NUM_UPDATES] = self.num_updates
        header[HEADER_STEP_LOW] = <int32_t>(step_id & 0x7FFFFFFF)
        header[HEADER_STEP_HIGH] = <int32_t>(step_id >> 31)
        header[HEADER_NUM_SAMPLED] = self.num_sampled
        header[HEADER_USED_LEN] = self.tail_at + UPDATE_WORDS * self.num_updates
        header[HEADER_HOME] = self.number
