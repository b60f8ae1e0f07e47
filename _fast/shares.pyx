"""TokenShares: divides the tokens of a step among rows, before blocks are taken.

Owner: the device thread, only through Scheduler. In: running rows, the queue, and the number of tokens that the pace
allows for prompts. Out: a count per running slot, and the rest for waiting prompts. Decoding rows get their one token.
Prompts follow, the shortest remainder first, including waiting prompts, so no short prompt waits for the chunks of a
long one. A long prompt always gets its part of the budget, so it finishes, too. Idle rows come last: while others run
or wait, at most `idle_rows` of them are in the step, and their prompts take tokens only as long as the step has fewer
than `idle_budget` prompt tokens.
"""

from array import array

cimport cython

from _fast.seqs cimport left_of, reach_of
from _fast.types cimport IDLE_PRIORITY

cdef int32_t LONG_PART = 4  # a prompt that others overtake still gets 1 / LONG_PART of the budget
cdef int32_t REST_PART = 8  # a remainder of up to 1 / REST_PART of the budget is included: it would cost an extra step
cdef int32_t ANY = 0x7FFFFFFF
UNLIMITED = ANY  # for idle_rows and idle_budget


@cython.final
cdef class TokenShares:
    """Counts of the step that is being planned."""

    def __init__(self, SeqTable seqs not None, RunningRows running not None, WaitQueue queue not None,
                 BlockTables tables not None, int32_t max_tokens, int32_t max_chunk):
        self.seqs, self.running, self.queue, self.tables = seqs, running, queue, tables
        self.max_tokens = max_tokens
        self.max_chunk = max_chunk
        self.prompt_budget = max_tokens
        self.idle_rows = self.idle_budget = ANY
        self.dealt = 0
        self.of = array("i", bytes(4 * seqs.num_slots))
        self.prompts = array("i", bytes(4 * seqs.num_slots))

    def load(self):
        """Return (decoding rows, waiting requests, tokens left in all prompts, tokens left in the next prompt).

        Idle rows and requests count only if there are no others.
        """
        cdef int32_t i
        cdef int32_t waiting = self.queue.size
        cdef int32_t running = self.running.size
        cdef bint all = True
        cdef int32_t left
        cdef int32_t decoding = 0
        cdef int32_t following = 0
        cdef long long lacking = 0
        # The GIL is held: the loop takes a few microseconds, and reacquiring the GIL from a busy thread takes longer.
        if self.any_idle() and self.any_client():
            all = False
            waiting = self.queue.num_clients()
            running -= self.running.num_idle()
        for i in range(running):
            left = left_of(&self.seqs.of[self.running.slots[i]])
            if left == 1:
                decoding += 1
            elif left:
                lacking += left
                following = min(following, left) if following else left
        for i in range(self.queue.size if waiting else 0):
            if all or self.seqs.of[self.queue.slots[i]].priority != IDLE_PRIORITY:
                lacking += self.seqs.of[self.queue.slots[i]].num_tokens
        if not following and waiting:
            following = self.seqs.of[self.queue.first()].num_tokens
        return decoding, waiting, lacking, following

    cpdef bint any_idle(self):
        """Whether an idle row runs or waits."""
        return self.running.last_idle() >= 0 or self.queue.head[self.queue.preempted + 1] >= 0

    cpdef bint any_client(self):
        """Whether a row that is not idle runs or waits."""
        return self.queue.first_client() >= 0 or self.running.num_idle() < self.running.size

    def num_idle_decoding(self):
        """Return the number of idle rows that run and have their prompt."""
        cdef int32_t count = 0
        cdef int32_t i
        for i in range(self.running.num_idle()):
            count += left_of(&self.seqs.of[self.running.slots[self.running.size - 1 - i]]) <= 1
        return count

    cdef void deal(self, bint others_may_start) noexcept nogil:
        """Assign counts to all running rows; the rest is for waiting requests, if `others_may_start`."""
        cdef int32_t i
        cdef int32_t at
        cdef int32_t left
        cdef int32_t budget
        cdef int32_t withheld
        cdef int32_t idle = 0
        cdef slot_t slot
        self.num_prompts = 0
        self.room = self.max_tokens
        for i in range(self.running.size):
            slot = self.running.slots[i]
            left = left_of(&self.seqs.of[slot])
            if self.seqs.of[slot].priority == IDLE_PRIORITY:
                idle += 1
                if idle > self.idle_rows:
                    left = 0
            self.of[slot] = left
            if left == 1:
                self.room -= 1
            elif left:
                at = self.num_prompts
                while at and self._sooner(slot, self.prompts[at - 1]):
                    self.prompts[at] = self.prompts[at - 1]
                    at -= 1
                self.prompts[at] = slot
                self.num_prompts += 1
        self.room = max(self.room, 0)
        self.tokens_left = self.dealt = budget = min(self.room, max(self.prompt_budget, 1))
        for i in range(self.num_prompts):
            slot = self.prompts[i]
            withheld = self._waiting_shorter(slot, self.tokens_left) if others_may_start else 0
            if self.is_limited(slot):
                withheld = min(withheld + self.withheld(slot, True), self.tokens_left)
            else:
                withheld = min(withheld, max(self.tokens_left - max(budget // LONG_PART, 1), 0))
            self.tokens_left -= withheld
            self.of[slot] = self.fitting(slot, self.seqs.of[slot].computed, self.of[slot], 0)
            self.take(self.of[slot])
            self.tokens_left += withheld

    cdef bint is_limited(self, slot_t slot) noexcept nogil:
        """Whether a slot is idle while others run or wait."""
        return self.seqs.of[slot].priority == IDLE_PRIORITY and self.idle_budget != ANY

    cdef int32_t withheld(self, slot_t slot, bint runs) noexcept nogil:
        """Return how many of the tokens that are left an idle slot must not get; 0 for other slots."""
        if not self.is_limited(slot):
            return 0
        if not runs and self.running.num_idle() >= self.idle_rows:
            return self.tokens_left
        return max(self.tokens_left - max(self.idle_budget - (self.dealt - self.tokens_left), 0), 0)

    cdef check_bi_spans(self, const int32_t[:, ::1] bi_spans, int64_t prompt_len, int32_t max_rows):
        """Raise ValueError unless each span is in the prompt and fits into a step in which all other rows decode."""
        cdef int32_t most = min(self.max_chunk, self.max_tokens - max_rows + 1)
        cdef int32_t end = 0
        cdef int32_t k
        for k in range(bi_spans.shape[0]):
            if bi_spans.shape[1] != 2 or not end <= bi_spans[k, 0] < bi_spans[k, 1] <= prompt_len:
                raise ValueError(
                    f"bidirectional spans are ascending (start, end) inside the prompt of {prompt_len} tokens"
                )
            end = bi_spans[k, 1]
            if end - bi_spans[k, 0] > most:
                raise ValueError(f"a bidirectional span of {end - bi_spans[k, 0]} tokens: a step has room for {most}")

    cdef int32_t fitting(self, slot_t slot, int32_t start, int32_t lacking, int32_t granted) noexcept nogil:
        """Return the tokens for a prompt that lacks `lacking` from `start` on; `granted` of its chunk precede it.

        A bidirectional span may exceed the budget.
        """
        cdef int32_t limit = min(self.max_chunk, self.tokens_left)
        cdef int32_t count = max(0, min(lacking, limit))
        if limit < lacking <= min(self.max_chunk, min(self.tokens_left + self.tokens_left // REST_PART, self.room)):
            count = lacking
        return self._cut(slot, start, count, granted, min(self.max_chunk, self.room))

    cdef int32_t _cut(self, slot_t slot, int32_t start, int32_t count, int32_t granted, int32_t most) noexcept nogil:
        """Return about `count` tokens: the chunk ends where the cache kinds allow and cuts no bidirectional span.

        To complete a span the chunk may take up to `most` tokens.
        """
        cdef int32_t end = self.tables.chunk_end(start - granted, start + count)
        if self.tables.states.active and not self.queue.looks_past:
            end = self.tables.states.cut(slot, start - granted, end)
        count = max(end - start, 0)
        if self.seqs.of[slot].num_bi_spans:
            return self.seqs.whole(slot, start, count, most)
        return count

    cdef void take(self, int32_t count) noexcept nogil:
        """Take tokens for a prompt; a negative count returns them."""
        self.tokens_left = self.tokens_left - count
        self.room -= count

    cdef int32_t deal_leftovers(self, int32_t updates_left) noexcept nogil:
        """Lengthen chunks of running prompts, after waiting requests have started; take only idle blocks.

        updates_left: block-table changes for which the plan still has room; returns how many are left.
        """
        cdef int32_t i
        cdef int32_t end
        cdef int32_t more
        cdef int32_t reach
        cdef int32_t changed
        cdef slot_t slot
        for i in range(self.num_prompts):
            slot = self.prompts[i]
            if self.tokens_left - self.withheld(slot, True) <= 0:
                break
            if self.of[slot] == 0 or self.seqs.of[slot].span_at < self.seqs.of[slot].num_spans:
                continue
            end = self.seqs.of[slot].computed + self.of[slot]
            more = left_of(&self.seqs.of[slot]) - self.of[slot]
            more = min(more, self.tokens_left - self.withheld(slot, True)) if self.withheld(slot, True) else more
            more = self.fitting(slot, end, more, self.of[slot])
            if more > self.max_chunk - self.of[slot]:
                more = self.max_chunk - self.of[slot]
                more = self._cut(slot, end, more, self.of[slot], more)
            end += more
            reach = reach_of(&self.seqs.of[slot], end, 1)
            changed = max(self.tables.blocks_for(reach) - self.tables.size[slot], 0) * self.tables.num_groups
            if more <= 0 or changed > updates_left or not self.tables.grow_idle(slot, end, reach):
                continue
            updates_left -= changed
            self.of[slot] += more
            self.take(more)
        return updates_left

    cdef bint _sooner(self, slot_t a, slot_t b) noexcept nogil:
        """Whether prompt a, which is after b among the running rows, is served before b."""
        if self.seqs.of[a].priority != self.seqs.of[b].priority and (
            self.running.by_priority or self.seqs.of[a].priority == IDLE_PRIORITY
        ):
            return False
        return left_of(&self.seqs.of[a]) < left_of(&self.seqs.of[b])

    cdef int32_t _waiting_shorter(self, slot_t slot, int32_t most) noexcept nogil:
        """Tokens of waiting prompts that precede a running one: shorter, not of lower priority; up to `most`.

        Their tokens in the prefix cache are not known yet; unused tokens finally go to running prompts.
        """
        cdef int32_t i
        cdef int32_t found = 0
        cdef bint idle = self.seqs.of[slot].priority == IDLE_PRIORITY
        cdef slot_t other
        for i in range(self.queue.size):
            other = self.queue.slots[i]
            if self.seqs.of[other].priority == IDLE_PRIORITY and not idle:
                continue
            if self.running.by_priority and self.seqs.of[other].priority > self.seqs.of[slot].priority:
                continue
            if self.seqs.of[other].num_tokens < left_of(&self.seqs.of[slot]) or (
                idle and self.seqs.of[other].priority != IDLE_PRIORITY
            ):
                found += min(self.seqs.of[other].num_tokens, most - found)
            if found >= most:
                break
        return found
