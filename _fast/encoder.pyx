"""EncoderTable: tracks which media entries are encoded and which steps read them.

Owner: the device thread. In: entries (entries.pyx), spans of live requests, chunks that the scheduler wants to plan.
Out: the length that a chunk may have, and the entries that must be encoded in this step.

    new --(claimed by a chunk)--> ready --(capacity needed, unread)--> evicted --(engine drops it)--> new or gone
     |                          ^
     +--(large, rows decode)--> begun: a piece of its tower in each step, then ready; new when no row decodes

The budget bounds the work of a step. An entry with more work runs alone. While rows decode, such a large entry runs in
pieces: one piece in each step, one entry at a time, and its first reader waits. When no row decodes, it runs whole.
A request that reads an entry pins it from the first chunk that touches the entry until the last span is committed. So a
request that waits for capacity never takes capacity from others for entries that it has not reached.
"""

cimport cython

from _fast.entries cimport BEGUN, EVICTED, NEW, READY, Entries, Entry
from _fast.seqs cimport Span

cdef enum:
    NO_LIMIT = 0x7FFFFFFF

cdef int64_t IN_PIECES = 0x7FFFFFFFFFFFFFFF  # in place of the step that ran a tower: readers rerun it if a piece failed


@cython.final
cdef class EncoderTable(Entries):
    """Decides which entries the rows of a step read, and which towers the step runs."""

    def __cinit__(self, int32_t budget=0, int32_t capacity=0):
        self.advanced_in = -1

    cdef void begin(self, int64_t settled, bint crowded, StepPlan plan, int64_t step) noexcept nogil:
        """Prepare for planning a step; steps up to `settled` are committed. crowded: rows decode in the step.

        The entry under way gets its next piece, and becomes ready with its last piece. If no row decodes, the entry
        becomes new again: its tower runs with the first chunk that reads it. If no request names it, it is removed.
        """
        cdef Entry* entry = &self.entries[self.advanced]
        self.settled, self.crowded = settled, crowded
        self.spent = self.wanted = plan.num_encodes = 0
        if self.advanced_in == step and entry.state == READY and entry.pins == 0:
            self._unlink(self.advanced)  # an earlier plan of this step was dropped, and the last piece with it
            self._renew(self.advanced)
        if not self.under_way:
            return
        entry = &self.entries[self.under_way]
        if entry.refs == 0 or not crowded:
            # Else a piece of an entry without requests is in flight; or no step is, and its last plan was dropped.
            if entry.refs or self.advanced_in <= settled or settled == step - 1:
                self._renew(self.under_way)
                self.under_way = 0
            return
        self.spent = self.budget
        self._advance(plan, step)
        if self.pieces_left == 0:
            entry.state = READY
            entry.last_use = step
            entry.encoded_in = IN_PIECES
            self._append(self.under_way)
            self.under_way = 0

    cdef void start_wanted(self, StepPlan plan, int64_t step) noexcept nogil:
        """Begin the first large entry that shortened a chunk; called when all chunks of the step are planned."""
        cdef Entry* entry = &self.entries[self.wanted]
        if not self.wanted or self.under_way or entry.state != NEW or not self._make_room(entry.rows):
            return
        self.rows_held += entry.rows
        entry.state = BEGUN
        self.under_way = self.wanted
        self.pieces_left = (entry.work - 1) // self.budget + 1
        if self.spent == 0:
            self._advance(plan, step)

    cdef void _advance(self, StepPlan plan, int64_t step) noexcept nogil:
        """Plan a piece of the tower of the entry under way for this step."""
        plan.encode(-1, self.budget, self.under_way)
        self.pieces_left -= self.advanced_in != step  # else an earlier plan of this step was dropped
        self.advanced_in = step
        self.advanced = self.under_way

    cdef int32_t limit(self, SeqTable seqs, slot_t slot, int32_t start, int32_t count) noexcept nogil:
        """Return how many of `count` positions from `start` on can be planned now; changes only `wanted`."""
        cdef int32_t k = seqs.of[slot].span_at, spent = self.spent
        cdef int64_t room = NO_LIMIT
        cdef bint fits
        cdef Span* span
        cdef Entry* entry
        self.stamp += 1
        if self.capacity:
            room = self.capacity - self.rows_held + self._evictable()
        while k < seqs.of[slot].num_spans and seqs.of[slot].spans[k].start < start + count:
            span = &seqs.of[slot].spans[k]
            entry = &self.entries[span.entry]
            k += 1
            if span.start + span.length <= start or entry.stamp == self.stamp:
                continue
            entry.stamp = self.stamp
            if entry.state == READY:
                # An idle embedding was counted as room, but this chunk needs it.
                if entry.pins == 0 and entry.last_use <= self.settled:
                    room -= entry.rows
                fits = room >= 0
            else:
                room -= entry.rows
                fits = entry.state == NEW and room >= 0
                if self.budget and spent and spent + entry.work > self.budget:
                    fits = False
                if self.crowded and entry.state == NEW and self._is_large(span.entry):
                    if not self.wanted and room >= 0:
                        self.wanted = span.entry
                    fits = False
                spent += entry.work
            if not fits:
                count = max(span.start - start, 0)
                return seqs.whole(slot, start, count, count)
        return count

    cdef void claim(self, SeqTable seqs, slot_t slot, int32_t start, int32_t count, StepPlan plan,
                    int64_t step) noexcept nogil:
        """Plan a chunk: pin the entries that it reads, encode new ones. `limit` has checked that this fits."""
        cdef int32_t k = seqs.of[slot].span_at, first = k
        cdef Span* spans = seqs.of[slot].spans
        cdef Entry* entry
        while k < seqs.of[slot].num_spans and spans[k].start < start + count:
            if spans[k].start + spans[k].length > start and self.entries[spans[k].entry].state == READY:
                self._pin(seqs, slot, k, step)
            k += 1
        k = first
        while k < seqs.of[slot].num_spans and spans[k].start < start + count:
            entry = &self.entries[spans[k].entry]
            if spans[k].start + spans[k].length > start and entry.state == NEW:
                self._make_room(entry.rows)
                self.rows_held += entry.rows
                self.spent += entry.work
                entry.state = READY
                entry.encoded_in = step
                if entry.pins == 0:
                    self._append(spans[k].entry)
                plan.encode(slot, k, spans[k].entry)
                self._pin(seqs, slot, k, step)
            k += 1

    cdef void passed(self, SeqTable seqs, slot_t slot) noexcept nogil:
        """After a commit of positions, unpin entries whose last span the slot has passed."""
        cdef int32_t k = seqs.of[slot].span_done
        cdef Span* spans = seqs.of[slot].spans
        while k < seqs.of[slot].num_spans and spans[k].start + spans[k].length <= seqs.of[slot].committed:
            if spans[k].pinned:
                spans[k].pinned = 0
                self._release(spans[k].entry)
            k += 1
        seqs.of[slot].span_done = k

    cdef void unpin(self, SeqTable seqs, slot_t slot) noexcept nogil:
        """Unpin all entries of a slot that was preempted or ended; it would start again from its first span."""
        cdef int32_t k
        for k in range(seqs.of[slot].num_spans):
            if seqs.of[slot].spans[k].pinned:
                seqs.of[slot].spans[k].pinned = 0
                self._release(seqs.of[slot].spans[k].entry)
        seqs.of[slot].span_at = 0
        seqs.of[slot].span_done = 0

    cdef void hold(self, SeqTable seqs, slot_t slot) noexcept nogil:
        """Add a request's references to its entries."""
        cdef int32_t k
        cdef Entry* entry
        for k in range(seqs.of[slot].num_spans):
            if seqs.of[slot].spans[k].last == k:
                entry = &self.entries[seqs.of[slot].spans[k].entry]
                if entry.refs == 0:
                    self.num_in_use += 1
                    if entry.state == EVICTED and entry.encoded_in < 0:
                        self._recall(seqs.of[slot].spans[k].entry)
                entry.refs += 1

    cdef void drop(self, SeqTable seqs, slot_t slot) noexcept nogil:
        """Drop an ended request's references. Then unused unencoded entries end; others stay until room is needed."""
        cdef int32_t k
        cdef Entry* entry
        self.unpin(seqs, slot)
        for k in range(seqs.of[slot].num_spans):
            if seqs.of[slot].spans[k].last != k:
                continue
            entry = &self.entries[seqs.of[slot].spans[k].entry]
            entry.refs -= 1
            if entry.refs == 0:
                self.num_in_use -= 1
                if entry.state == NEW:
                    self._evict(seqs.of[slot].spans[k].entry)
        # The slot may still wait for a step in flight, so nothing must be dropped twice.
        seqs.of[slot].num_spans = 0

    cdef bint tainted(self, SeqTable seqs, slot_t slot, int64_t step) noexcept nogil:
        """Whether launched chunks of this slot read an entry that the failed step should have encoded."""
        cdef int32_t k
        cdef Span* span
        for k in range(seqs.of[slot].span_done, seqs.of[slot].num_spans):
            span = &seqs.of[slot].spans[k]
            if span.start < seqs.of[slot].computed and self.entries[span.entry].encoded_in == step:
                return True
        return False

    cdef void fail(self, int64_t step) noexcept nogil:
        """Make the entries that the failed step should have encoded new again."""
        cdef int32_t i
        for i in range(1, self.room):
            if self.entries[i].rows and self.entries[i].state == READY and self.entries[i].encoded_in == step:
                if self.entries[i].pins == 0:
                    self._unlink(i)
                self._renew(i)

    cdef int32_t largest_need(self, const int32_t[:, ::1] media) except -1:
        """Return the most rows that one request needs in the cache at once; check the ids and order of its spans."""
        cdef dict last = {}
        cdef set seen = set()
        cdef int32_t k, entry
        cdef int64_t now = 0, most = 0, end = 0
        for k in range(media.shape[0]):
            entry = media[k, 2]
            if media[k, 0] < end or media[k, 1] < 1:
                raise ValueError(f"media span {k} starts at {media[k, 0]} with length {media[k, 1]}: spans ascend")
            if not (0 < entry < self.room and self.entries[entry].rows):
                raise ValueError(f"media span {k} names entry {entry}, which does not exist")
            if media[k, 3] < 0 or <int64_t>media[k, 3] + media[k, 1] > self.entries[entry].rows:
                raise ValueError(f"media span {k} reads past the {self.entries[entry].rows} rows of entry {entry}")
            end = <int64_t>media[k, 0] + media[k, 1]
            last[entry] = k
        for k in range(media.shape[0]):
            entry = media[k, 2]
            if entry not in seen:
                seen.add(entry)
                now += self.entries[entry].rows
                most = max(most, now)
            if last[entry] == k:
                now -= self.entries[entry].rows
        return <int32_t>min(most, NO_LIMIT)

    cdef void _pin(self, SeqTable seqs, slot_t slot, int32_t item, int64_t step) noexcept nogil:
        """Pin the entry of this span: the slot reads it in the step, and until its last span is committed."""
        cdef Span* span = &seqs.of[slot].spans[seqs.of[slot].spans[item].last]
        cdef Entry* entry = &self.entries[span.entry]
        entry.last_use = step
        if span.pinned == 0:
            span.pinned = 1
            if entry.pins == 0:
                self._unlink(span.entry)
            entry.pins += 1
