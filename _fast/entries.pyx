"""Entries: the media entries that requests name, and the room that their embeddings take.

Owner: the device thread. In: a number of tower rows for each entry. Out: ids (1, 2, ...), room for an embedding, and
the list of entries whose embeddings the engine drops after commit. Entry 0 is the sentinel of the list of idle
embeddings, oldest first. When room is needed, idle embeddings are evicted, first those that no request names.

`refs` counts live requests that name an entry, so its id stays valid; `pins` counts requests whose next chunks read its
rows. An embedding that a step in flight reads stays until that step is committed. A capacity or budget of 0 means no
limit.
"""

from libc.stdlib cimport free, realloc
from libc.string cimport memset


cdef class Entries:
    """Entries by id. The only subclass, EncoderTable, decides what steps read and which towers they run."""

    def __cinit__(self, int32_t budget=0, int32_t capacity=0):
        if budget < 0 or capacity < 0:
            raise ValueError(f"encoder_budget={budget}, encoder_capacity={capacity}: both are 0 (no limit) or rows")
        self.budget = budget
        self.capacity = capacity
        self.settled = -1
        self._grow(64)

    def __dealloc__(self):
        free(self.entries)
        free(self.gone)

    cdef _grow(self, int32_t room):
        """Enlarge the arrays to `room` entries."""
        cdef int32_t i
        cdef Entry* entries = <Entry*>realloc(self.entries, <size_t>room * sizeof(Entry))
        if entries:
            self.entries = entries
        cdef int32_t* gone = <int32_t*>realloc(self.gone, <size_t>room * sizeof(int32_t))
        if gone:
            self.gone = gone
        if not entries or not gone:
            raise MemoryError(f"no memory for {room} media entries")
        memset(&self.entries[self.room], 0, <size_t>(room - self.room) * sizeof(Entry))
        # Free ids form a list through `after`; id 0 is never free.
        for i in range(room - 1, max(self.room, 1) - 1, -1):
            self.entries[i].after = self.free_id
            self.free_id = i
        self.room = room

    def add_entry(self, int32_t num_rows, int32_t work=0):
        """Return a new entry id (>= 1), or -3 if it can never fit into the cache. work: of its tower; 0: num_rows."""
        if num_rows < 1:
            raise ValueError(f"num_rows={num_rows}: a media entry has at least one row")
        if self.capacity and num_rows > self.capacity:
            return -3
        if not self.free_id:
            self._grow(2 * self.room)
        cdef int32_t entry = self.free_id
        self.free_id = self.entries[entry].after
        memset(&self.entries[entry], 0, sizeof(Entry))
        self.entries[entry].rows = num_rows
        self.entries[entry].work = work or num_rows
        self.num_large += self._is_large(entry)
        self.entries[entry].last_use = -1
        self.entries[entry].encoded_in = -1
        self.num_entries += 1
        return entry

    def discard_entry(self, int32_t entry):
        """Remove an entry that no live request names and that was never encoded; return whether this was the case."""
        known = 0 < entry < self.room and self.entries[entry].rows
        if not known or self.entries[entry].refs or self.entries[entry].state != NEW:
            return False
        self._forget(entry)
        return True

    def take_evicted(self):
        """Return (entry, dead) for every embedding to drop, once. A dead entry's id is free: drop its hash too."""
        cdef list dropped = []
        cdef int32_t i, entry
        for i in range(self.num_evicted):
            entry = self.gone[i]
            dropped.append((entry, self.entries[entry].refs == 0))
            self.entries[entry].state = NEW
            self.entries[entry].encoded_in = -1
            if self.entries[entry].refs == 0:
                self._forget(entry)
        self.num_evicted = 0
        return dropped

    cdef void _renew(self, int32_t entry) noexcept nogil:
        """Make an entry new, because its tower has to run again; free its id if no request names it."""
        self.rows_held -= self.entries[entry].rows
        self.entries[entry].state = NEW
        self.entries[entry].encoded_in = -1
        if self.entries[entry].refs == 0:
            self._evict(entry)

    cdef bint _is_large(self, int32_t entry) noexcept nogil:
        """Whether the work of an entry's tower exceeds the budget of a step."""
        return self.budget and self.entries[entry].work > self.budget

    cdef int64_t _evictable(self) noexcept nogil:
        """Return the number of rows of idle embeddings that no step in flight reads."""
        cdef int64_t rows = 0
        cdef int32_t i = self.entries[0].after
        while i:
            if self.entries[i].last_use <= self.settled:
                rows += self.entries[i].rows
            i = self.entries[i].after
        return rows

    cdef void _release(self, int32_t entry) noexcept nogil:
        """Remove a reader; without readers the embedding becomes idle."""
        self.entries[entry].pins -= 1
        if self.entries[entry].pins == 0 and self.entries[entry].state == READY:
            self._append(entry)

    cdef bint _make_room(self, int32_t rows) noexcept nogil:
        """Evict idle embeddings, oldest first: embeddings without a request, then those that no chunk has reached."""
        cdef int32_t wanted, i, following
        if self.capacity == 0:
            return True
        for wanted in range(2):
            i = self.entries[0].after
            while i and self.rows_held + rows > self.capacity:
                following = self.entries[i].after
                if self.entries[i].last_use <= self.settled and (self.entries[i].refs == 0 or wanted):
                    self._unlink(i)
                    self.rows_held -= self.entries[i].rows
                    self._evict(i)
                i = following
        return self.rows_held + rows <= self.capacity

    cdef void _evict(self, int32_t entry) noexcept nogil:
        """Put an embedding on the list of embeddings that the engine drops after commit."""
        self.entries[entry].state = EVICTED
        self.gone[self.num_evicted] = entry
        self.num_evicted += 1

    cdef void _recall(self, int32_t entry) noexcept nogil:
        """Take an entry off the list of dead entries, because a request names it again; the engine is not notified."""
        cdef int32_t at = 0
        while self.gone[at] != entry:
            at += 1
        self.num_evicted -= 1
        self.gone[at] = self.gone[self.num_evicted]
        self.entries[entry].state = NEW

    cdef void _forget(self, int32_t entry) noexcept nogil:
        """Free an entry's id."""
        self.num_large -= self._is_large(entry)
        self.entries[entry].rows = 0
        self.entries[entry].after = self.free_id
        self.free_id = entry
        self.num_entries -= 1

    cdef void _append(self, int32_t entry) noexcept nogil:
        """Make an embedding the newest idle one."""
        cdef int32_t left = self.entries[0].before
        self.entries[entry].before = left
        self.entries[entry].after = 0
        self.entries[left].after = entry
        self.entries[0].before = entry

    cdef void _unlink(self, int32_t entry) noexcept nogil:
        """Take an embedding out of the idle list."""
        cdef Entry* own = &self.entries[entry]
        self.entries[own.before].after = own.after
        self.entries[own.after].before = own.before
