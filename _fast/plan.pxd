from _fast.layout cimport ROW_FEED
from _fast.seqs cimport SeqTable
from _fast.types cimport block_t, int32_t, int64_t, slot_t, token_t, uint8_t


cdef struct Lines:  # addresses of some arrays, close together, because each view has its own cache line
    int32_t* slot
    int32_t* start
    int32_t* len
    int32_t* computed
    int32_t* flags
    int32_t* token
    int32_t* out_token
    int32_t* out_finish
    uint8_t* out_count
    int64_t* out_request
    uint8_t* epoch
    uint8_t* drafted
    uint8_t* accepted
    int32_t* record
    int32_t* states  # [STATE_COLUMNS, max_rows]; NULL: the model has no states (same for runs)
    int32_t* runs  # [new_runs(max_rows), 1 + run_width]
    int32_t run_width


cdef inline int32_t most_of(const Lines* lines, int32_t row) noexcept nogil:
    """Return the most tokens that a sampled row gets: one, and one for each of its drafts."""
    return lines.len[row] if lines.flags[row] & ROW_FEED else 1


cdef class StepPlan:
    cdef readonly int32_t max_rows
    cdef readonly int32_t width  # most tokens per row and step, and the distance of rows in out_token
    cdef readonly int32_t number  # its place among the plans, and the number of the host buffer for its tokens
    cdef readonly int32_t num_rows
    cdef readonly int32_t num_tokens
    cdef readonly int32_t num_decode_rows
    cdef readonly int32_t num_updates
    cdef readonly int32_t num_sampled  # rows that yield a token
    cdef readonly int32_t num_lines  # places for which a token is chosen: those of sampled rows, and of their drafts
    cdef readonly int32_t num_drafted  # rows that may have drafts
    cdef readonly int32_t depth  # most drafts of a row
    cdef readonly int32_t num_params  # slots whose words are sent with this step
    cdef readonly int32_t tail_at  # start of the updates in the record
    cdef readonly int32_t num_encodes
    cdef readonly int32_t num_media
    cdef readonly int64_t step_id  # -1: nothing scheduled
    cdef int32_t num_prompt_rows  # rows that compute tokens of their prompts
    cdef int32_t num_odd  # settled rows without a token, or that end
    cdef Lines lines
    cdef readonly int32_t[::1] record
    cdef readonly int32_t[::1] row_slot
    cdef readonly int32_t[::1] row_start
    cdef readonly int32_t[::1] row_len
    cdef readonly int32_t[::1] row_computed
    cdef readonly int32_t[::1] row_flags
    cdef readonly int32_t[::1] token_ids
    cdef readonly int32_t[:, ::1] updates  # [max_updates, 4]: slot, index, block, group
    cdef readonly int32_t[::1] encode_slot
    cdef readonly int32_t[::1] encode_item
    cdef readonly int32_t[::1] encode_entry
    cdef readonly int32_t[::1] media_start
    cdef readonly int32_t[::1] media_length
    cdef readonly int32_t[::1] media_entry
    cdef readonly int32_t[::1] media_row
    cdef readonly int32_t[::1] out_token  # [max_rows * width]: a run for each row; -1 at its first place: none
    cdef readonly uint8_t[::1] out_count  # tokens of the row's run that reached its request
    cdef readonly int32_t[::1] out_finish
    cdef readonly int64_t[::1] out_request
    cdef readonly uint8_t[::1] out_drafted  # drafts that the row's step verified; 0: none, or the row is not settled
    cdef readonly uint8_t[::1] out_accepted  # of them, those that were right; only if out_drafted is not 0
    cdef uint8_t[::1] row_epoch

    cdef check_room(self, int32_t rows, int32_t tokens, int32_t updates)
    cdef void clear(self) noexcept nogil
    cdef bint is_cut(self, int32_t row, const token_t* run) noexcept nogil
    cdef void clear_runs(self) noexcept nogil
    cdef int32_t row(self, SeqTable seqs, slot_t slot, int32_t count, int32_t drafts) noexcept nogil
    cdef void _media_runs(self, SeqTable seqs, slot_t slot, int32_t start, int32_t count) noexcept nogil
    cdef void update(self, slot_t slot, int32_t group, int32_t index, block_t block) noexcept nogil
    cdef void encode(self, slot_t slot, int32_t item, int32_t entry) noexcept nogil
    cdef void media(self, int32_t start, int32_t length, int32_t entry, int32_t row) noexcept nogil
    cdef void set_form(self, bint drafting, int32_t variant) noexcept nogil
    cdef void add_drafts(self, int32_t count) noexcept nogil
    cdef void seal(self, int64_t step_id) noexcept nogil
