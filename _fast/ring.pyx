"""OutputRing: steps' news on their way from the device thread to the loop, written without the GIL, in one order.

Owner: the device thread writes (push, put), the loop reads (pop, acknowledge); one of each. In: a committed plan's
out arrays and the step's numbers, or any object that Python made of a step. Out: the same, first in, first out; `fd`,
an eventfd, becomes readable.

    device thread   write entry | pushed += 1 (release) | write(fd)
    loop            fd readable: acknowledge() | pop() until None       pushed (acquire) | read entry | popped += 1

A full ring refuses push(); put() then keeps its objects aside, behind everything in the ring, and push() goes on
refusing until the loop has taken them. So no news is lost and none overtakes another.
"""

import os
from collections import deque

cimport cython
from libc.stdlib cimport calloc, free
from posix.unistd cimport write

from _fast.shelves cimport give_pages, take_pages
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
    """Steps between the device thread and the loop; 64 of them are some hundred milliseconds of a loop that hangs."""

    def __cinit__(self, int32_t max_rows, int32_t num_entries=64):
        if max_rows < 1 or num_entries < 1:
            raise ValueError(f"max_rows={max_rows}, num_entries={num_entries}: need at least 1 of each")
        self.fd = -1
        self.max_rows = max_rows
        self.num_entries = num_entries
        self.entries = <Entry*>calloc(num_entries, sizeof(Entry))
        self.news = <News*>take_pages(<size_t>num_entries * max_rows * sizeof(News))
        self.firsts = <First*>calloc(<size_t>num_entries * max_rows, sizeof(First))
        if not (self.entries and self.news and self.firsts):
            raise MemoryError(f"no memory for {num_entries} steps of {max_rows} rows")

    def __init__(self, int32_t max_rows, int32_t num_entries=64):
        self.objects = [None] * num_entries
        self.backlog = deque()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __dealloc__(self):
        free(self.entries)
        give_pages(self.news, <size_t>self.num_entries * self.max_rows * sizeof(News))
        free(self.firsts)

    def close(self):
        """Gives the eventfd back; the loop no longer watches it, and nothing is written any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # The device thread.

    def put(self, value not None):
        """Appends what Python made of a step; it always finds room."""
        cdef int64_t at = self.pushed
        if load(&self.overflow) == 0 and at - load(&self.popped) < self.num_entries:
            self.objects[at % self.num_entries] = value
            self.entries[at % self.num_entries].is_object = True
            store(&self.pushed, at + 1)
        else:
            self.backlog.append(value)
            add(&self.overflow, 1)
        self.wake()

    cdef bint push(self, StepPlan plan, const int32_t* cached, StepNumbers* numbers) noexcept nogil:
        """Appends the rows of a committed plan that have news; False: there is no room.

        `cached` has a value per row: prompt tokens found in the prefix cache where the token is its request's first,
        else -1. Sets numbers.num_sampled.
        """
        cdef int64_t at = self.pushed
        cdef const int32_t* tokens = &plan.out_token[0]
        cdef const int32_t* finishes = &plan.out_finish[0]
        cdef const int64_t* requests = &plan.out_request[0]
        cdef int32_t num_sampled = 0
        cdef int32_t num_firsts = 0
        cdef int32_t count = 0
        cdef int32_t told
        cdef int32_t row
        cdef News* news
        cdef First* firsts
        cdef Entry* entry
        if load(&self.overflow) or at - load(&self.popped) >= self.num_entries:
            for row in range(plan.num_rows):
                num_sampled += tokens[row] >= 0
            numbers.num_sampled = num_sampled
            return False
        entry = &self.entries[at % self.num_entries]
        news = &self.news[(at % self.num_entries) * self.max_rows]
        firsts = &self.firsts[(at % self.num_entries) * self.max_rows]
        for row in range(plan.num_rows):
            # What is written for a row without news is written over, or not counted.
            news[count].request = requests[row]
            news[count].token = tokens[row]
            news[count].finish = finishes[row]
            told = (tokens[row] >= 0) | (finishes[row] != FINISH_NONE)
            if told & (cached[row] >= 0):
                firsts[num_firsts].place = count
                firsts[num_firsts].cached = cached[row]
                num_firsts += 1
            num_sampled += tokens[row] >= 0
            count += told
        numbers.num_sampled = num_sampled
        entry.numbers = numbers[0]
        entry.is_object = False
        entry.count = count
        entry.num_firsts = num_firsts
        store(&self.pushed, at + 1)
        self.wake()
        return True

    cdef void wake(self) noexcept nogil:
        cdef int64_t one = 1
        # An eventfd refuses only when its counter is at the end of 64 bits, and then it is readable already.
        cdef ssize_t ignored = write(self.fd, &one, sizeof(one))
        (<void>ignored)

    # The loop.

    def acknowledge(self):
        """Makes `fd` unreadable until the next entry; call it before pop(), so that no entry goes unseen."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass  # somebody popped without being woken, and came here since

    def pop(self):
        """The oldest entry or None: an object given to put(), else (numbers, ids, tokens, finishes, firsts).

        numbers: step_id, num_rows, num_tokens, num_sampled, running, waiting, blocks_used, preemptions,
        prefix_queries, prefix_hits, schedule_s, launch_s, wait_s, commit_s, device_s, gap_s. The lists are
        parallel; -1 is no token, 0 no finish. firsts: place in the lists -> cached prompt tokens, for requests
        whose first token this is.
        """
        # Read before the ring: while something is set aside nothing enters the ring, so it is empty only once.
        cdef int64_t aside = load(&self.overflow)
        cdef int64_t at = self.popped
        cdef int32_t i
        cdef News* news
        cdef First* firsts
        cdef Entry* entry
        if at < load(&self.pushed):
            entry = &self.entries[at % self.num_entries]
            if entry.is_object:
                value = self.objects[at % self.num_entries]
                self.objects[at % self.num_entries] = None
            else:
                news = &self.news[(at % self.num_entries) * self.max_rows]
                firsts = &self.firsts[(at % self.num_entries) * self.max_rows]
                value = (
                    as_tuple(&entry.numbers),
                    [news[i].request for i in range(entry.count)],
                    [news[i].token for i in range(entry.count)],
                    [news[i].finish for i in range(entry.count)],
                    {firsts[i].place: firsts[i].cached for i in range(entry.num_firsts)},
                )
            store(&self.popped, at + 1)
            return value
        if aside:
            value = self.backlog.popleft()
            add(&self.overflow, -1)
            return value
        return None

    def __len__(self):
        """Entries not yet popped; exact on either thread while the other one rests."""
        return load(&self.pushed) - load(&self.popped) + load(&self.overflow)


cdef tuple as_tuple(StepNumbers* of):
    return (
        of.step_id, of.num_rows, of.num_tokens, of.num_sampled, of.running, of.waiting, of.blocks_used,
        of.preemptions, of.prefix_queries, of.prefix_hits, of.schedule_s, of.launch_s, of.wait_s, of.commit_s,
        of.device_s, of.gap_s,
    )
