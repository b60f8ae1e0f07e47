"""OutputRing: FIFO for the steps' news from the device thread to the loop, written without the GIL.

Owner: the device thread writes (push, put), the loop reads (pop, acknowledge); one thread each. In: a committed plan's
out arrays and the step's numbers, or any object that Python made from a step. Out: the same, first in, first out; `fd`,
an eventfd, becomes readable.

    device thread   write entry | pushed += 1 (release) | write(fd)
    loop            fd readable: acknowledge() | pop() until None       pushed (acquire) | read entry | popped += 1

A full ring refuses push(). Then put() stores its objects in a backlog that comes after everything in the ring, and
push() refuses until the loop has read the backlog. So no news is lost or reordered.
"""

import os
from collections import deque

cimport cython
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.unistd cimport write

from _fast import step_numbers

from _fast.drafts cimport as_counts
from _fast.plan cimport Lines
from _fast.seqs cimport fetch_all
from _fast.types cimport FINISH_NONE

cdef extern from *:
    """
    #define omniloop_load(at) __atomic_load_n(at, __ATOMIC_ACQUIRE)
    #define omniloop_store(at, value) __atomic_store_n(at, value, __ATOMIC_RELEASE)
    #define omniloop_add(at, value) __atomic_add_fetch(at, value, __ATOMIC_ACQ_REL)
    """
    int64_t load "omniloop_load"(int64_t* at) noexcept nogil
    void store "omniloop_store"(int64_t* at, int64_t value) noexcept nogil
    int64_t add "omniloop_add"(int64_t* at, int64_t value) noexcept nogil


@cython.final
cdef class OutputRing:
    """Ring of steps from the device thread to the loop; 64 entries bridge some hundred milliseconds of a blocked loop.

    `lines`, by plan, row and place in the row's run, is where the device writes log-probabilities. A slot's lines are
    valid if `asked` of the slot is not 0; `asked` is 1 + the number of most likely tokens. With `lists_drafted`
    entries list the rows that verified drafts.
    """

    def __cinit__(self, int32_t max_rows, int32_t num_entries=64, const uint8_t[::1] asked=None,
                  const int32_t[:, :, :, ::1] lines=None, int32_t width=1, bint lists_drafted=False):
        cdef size_t count
        cdef size_t size
        if max_rows < 1 or num_entries < 1 or width < 1:
            raise ValueError(f"max_rows={max_rows}, num_entries={num_entries}, width={width}: need at least 1 of each")
        self.fd = -1
        self.max_rows = max_rows
        self.num_entries = num_entries
        self.stride = (max_rows * width + 63) // 64 * 64
        self.width = width
        self.lists_drafted = lists_drafted and width > 1
        count = <size_t>num_entries * self.stride
        if lines is not None:
            if asked is None or lines.shape[1] < max_rows or lines.shape[2] < 1 or lines.shape[3] < 3:
                raise ValueError(
                    f"lines {lines.shape[1]} x {lines.shape[2]} x {lines.shape[3]}: need `asked` and a line for "
                    f"{max_rows} rows"
                )
            self.asked, self.lines, self.num_words = asked, lines, <int32_t>lines.shape[3]
        size = num_entries * sizeof(Entry) + count * (sizeof(int64_t) + sizeof(int32_t) + 1)
        size += count * (sizeof(Reported) + self.num_words * sizeof(int32_t))
        size += num_entries * max_rows * sizeof(Drafted) if self.lists_drafted else 0
        self.room = <char*>calloc(1, size)
        if not self.room:
            raise MemoryError(f"no memory for {num_entries} steps of {max_rows} rows")
        self.requests = <int64_t*>self.room
        self.drafted = <Drafted*>(self.requests + count)
        self.tokens = <int32_t*>(self.drafted + num_entries * (max_rows if self.lists_drafted else 0))
        self.finishes = <uint8_t*>(self.tokens + count)
        self.entries = <Entry*>(self.finishes + count)
        self.reported = <Reported*>(self.entries + num_entries)
        self.words = <int32_t*>(self.reported + count)

    def __init__(self, int32_t max_rows, int32_t num_entries=64, const uint8_t[::1] asked=None,
                 const int32_t[:, :, :, ::1] lines=None, int32_t width=1, bint lists_drafted=False):
        self.objects = [None] * num_entries
        self.backlog = deque()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __dealloc__(self):
        free(self.room)

    def close(self):
        """Close the eventfd; the loop no longer watches it, and nothing is written afterwards."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # The device thread.

    def put(self, value not None):
        """Append an object that Python made from a step; there is always room."""
        cdef int64_t at = self.pushed
        if load(&self.overflow) == 0 and at - load(&self.popped) < self.num_entries:
            self.objects[at % self.num_entries] = value
            self.entries[at % self.num_entries].is_object = True
            store(&self.pushed, at + 1)
        else:
            self.backlog.append(value)
            add(&self.overflow, 1)
        self.wake()

    cdef bint push(self, StepPlan plan, StepNumbers* numbers, Drafts drafts) noexcept nogil:
        """Append the rows of a committed plan that have news; False: no room. Sets numbers.num_sampled."""
        cdef int64_t at = self.pushed
        cdef int64_t place = at % self.num_entries
        cdef Entry* entry = &self.entries[place]
        cdef int32_t row
        if load(&self.overflow) or at - load(&self.popped) >= self.num_entries:
            numbers.num_sampled = 0
            for row in range(plan.num_rows):
                numbers.num_sampled += plan.lines.out_count[row]
            return False
        if plan.num_odd or plan.width > 1:
            self._write(plan, place, numbers)
        else:  # every row has a token and continues
            entry.count = numbers.num_sampled = plan.num_rows
            memcpy(&self.requests[place * self.stride], plan.lines.out_request, plan.num_rows * sizeof(int64_t))
            memcpy(&self.tokens[place * self.stride], plan.lines.out_token, plan.num_rows * sizeof(int32_t))
            memset(&self.finishes[place * self.stride], FINISH_NONE, plan.num_rows)
        entry.num_reported = 0
        if self.num_words:
            self._report(plan, place)
        entry.num_drafted = 0
        if self.width > 1:
            entry.drafts = drafts.totals
        if self.lists_drafted:
            self._note_drafted(plan, place)
        entry.numbers = numbers[0]
        entry.is_object = False
        store(&self.pushed, at + 1)
        self.wake()
        return True

    cdef void load(self, StepPlan plan) noexcept nogil:
        """Begin to load the memory of the plan's entry, with two tokens for each row that may have several."""
        cdef int64_t place = self.pushed % self.num_entries
        cdef int32_t count = min(2, plan.width) * plan.num_rows
        fetch_all(&self.entries[place], sizeof(Entry))
        fetch_all(&self.requests[place * self.stride], count * sizeof(int64_t))
        fetch_all(&self.tokens[place * self.stride], count * sizeof(int32_t))
        fetch_all(&self.finishes[place * self.stride], count)

    cdef void _write(self, StepPlan plan, int64_t place, StepNumbers* numbers) noexcept nogil:
        """Write the rows that have news: an entry for each token; the row's last entry has the finish reason."""
        cdef int64_t* requests = &self.requests[place * self.stride]
        cdef int32_t* tokens = &self.tokens[place * self.stride]
        cdef uint8_t* finishes = &self.finishes[place * self.stride]
        cdef const Lines* lines = &plan.lines
        cdef int32_t width = plan.width
        cdef int32_t num_sampled = 0
        cdef int32_t count = 0
        cdef int32_t row
        cdef int32_t k
        for row in range(plan.num_rows):
            num_sampled += lines.out_count[row]
            for k in range(entries_of(plan, row)):
                requests[count] = lines.out_request[row]
                tokens[count] = lines.out_token[row * width + k]
                finishes[count] = FINISH_NONE
                count += 1
            if lines.out_finish[row] != FINISH_NONE:
                finishes[count - 1] = <uint8_t>lines.out_finish[row]
        numbers.num_sampled = num_sampled
        self.entries[place].count = count

    cdef void _report(self, StepPlan plan, int64_t place) noexcept nogil:
        """Copy the log-probabilities of the tokens of rows whose slots request them, if they have lines."""
        cdef int64_t base = place * self.stride
        cdef Reported* reported = &self.reported[base]
        cdef int32_t count = 0
        cdef int32_t num_reported = 0
        cdef int32_t row
        cdef int32_t k
        cdef uint8_t asked
        for row in range(plan.num_rows):
            asked = self.asked[plan.lines.slot[row]]
            for k in range(min(<int32_t>plan.lines.out_count[row], <int32_t>self.lines.shape[2]) if asked else 0):
                reported[num_reported].place = count + k
                reported[num_reported].k = asked - 1
                memcpy(&self.words[(base + num_reported) * self.num_words], &self.lines[plan.number, row, k, 0],
                       self.num_words * sizeof(int32_t))
                num_reported += 1
            count += entries_of(plan, row)
        self.entries[place].num_reported = num_reported

    cdef void _note_drafted(self, StepPlan plan, int64_t place) noexcept nogil:
        """Copy the counts of the rows that verified drafts."""
        cdef Drafted* drafted = &self.drafted[place * self.max_rows]
        cdef int32_t count = 0
        cdef int32_t row
        for row in range(plan.num_rows):
            if plan.lines.drafted[row]:
                drafted[count].request = plan.lines.out_request[row]
                drafted[count].verified = plan.lines.drafted[row]
                drafted[count].accepted = plan.lines.accepted[row]
                count += 1
        self.entries[place].num_drafted = count

    cdef void wake(self) noexcept nogil:
        cdef int64_t one = 1
        # An eventfd refuses only if its 64-bit counter is at its maximum; then it is readable already.
        cdef ssize_t ignored = write(self.fd, &one, sizeof(one))
        (<void>ignored)

    # The loop.

    def acknowledge(self):
        """Make `fd` unreadable until the next entry; must be called before pop(), so that no entry is missed."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass  # called without a wake-up: `fd` is already unreadable

    def pop(self):
        """Return the oldest entry or None: an object from put(), or (StepNumbers, ids, tokens, finishes, logprobs,
        counts, drafted).

        The lists are parallel and contain a row once per token; token -1: none, finish 0: none. logprobs: index in the
        lists -> the row's log-probabilities in the form of logprobs_of_words(). counts: Drafts.counts; None: rows have
        no drafts. drafted: (request, drafts, accepted drafts) of each row that verified drafts.
        """
        # Read before the ring: while the backlog is not empty nothing enters the ring, so its entries are older.
        cdef int64_t aside = load(&self.overflow)
        cdef int64_t at = self.popped
        cdef int32_t i
        cdef int64_t base
        cdef Entry* entry
        if at < load(&self.pushed):
            entry = &self.entries[at % self.num_entries]
            if entry.is_object:
                value = self.objects[at % self.num_entries]
                self.objects[at % self.num_entries] = None
            else:
                base = at % self.num_entries * self.stride
                value = (
                    named(&entry.numbers),
                    [self.requests[base + i] for i in range(entry.count)],
                    [self.tokens[base + i] for i in range(entry.count)],
                    [self.finishes[base + i] for i in range(entry.count)],
                    {
                        self.reported[base + i].place: as_logprobs(
                            &self.words[(base + i) * self.num_words], self.reported[base + i].k, self.num_words
                        )
                        for i in range(entry.num_reported)
                    },
                    as_counts(&entry.drafts) if self.width > 1 else None,
                    self._drafted(at % self.num_entries),
                )
            store(&self.popped, at + 1)
            return value
        if aside:
            value = self.backlog.popleft()
            add(&self.overflow, -1)
            return value
        return None

    cdef list _drafted(self, int64_t place):
        cdef Drafted* of = &self.drafted[place * self.max_rows]
        cdef int32_t i
        return [(of[i].request, of[i].verified, of[i].accepted) for i in range(self.entries[place].num_drafted)]

    def __len__(self):
        """Number of entries not yet popped; exact on either thread while the other thread is inactive."""
        return load(&self.pushed) - load(&self.popped) + load(&self.overflow)


cdef inline int32_t entries_of(StepPlan plan, int32_t row) noexcept nogil:
    """Return the number of entries for a committed row: one per token, or one for only its finish."""
    return max(<int32_t>plan.lines.out_count[row], <int32_t>(plan.lines.out_finish[row] != FINISH_NONE))


cdef object named(StepNumbers* of):
    """Build a StepNumbers; arguments in the order of its fields."""
    return step_numbers.StepNumbers(
        of.step_id, of.num_rows, of.num_tokens, of.num_sampled, of.running, of.waiting, of.blocks_used,
        of.preemptions, of.prefix_queries, of.prefix_hits, of.schedule_s, of.launch_s, of.wait_s, of.commit_s,
        of.device_s, of.gap_s, of.launched_at, of.ended_at,
    )


cdef tuple as_logprobs(const int32_t* words, int32_t k, int32_t num_words):
    """Convert a row's words to (token, log-probability, rank, k ids, their k log-probabilities)."""
    cdef const float* values = <const float*>words
    cdef int32_t most = (num_words - 3) // 2
    cdef int32_t i
    return (
        words[0], values[1], words[2], [words[3 + i] for i in range(k)], [values[3 + most + i] for i in range(k)]
    )


def logprobs_of_words(const int32_t[::1] words not None, int32_t k):
    """Return a row's log-probabilities for at most k tokens, from 3 + 2 * most words of
    kernels/sampling/top_logprobs."""
    return as_logprobs(&words[0], k, words.shape[0])
