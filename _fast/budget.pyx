"""Budget: how many drafts a step verifies over all rows, so that tokens come fastest.

Owner: the device thread, through Drafts. In: outcomes of settled steps, seconds of steps by size, measured at start.
Out: the number of drafts of the step that is planned. The survival of a row's draft j is the product of the row's
estimates 1 .. j (estimates.pyx), each of how often this draft is right if all before it are. With B drafts a step
yields

    (rows + sum of the B largest survivals) / (seconds(tokens + B) + reading * contexts)

tokens per second; B is where this is largest.

The drafts of a row that are among the B largest are its first ones, because survivals fall along a row. Which rows get
the B drafts is decided on the device, where the newest outcomes are (engine/kernels/deal_drafts). If B is 0, the
drafter rests (rest.pyx): steps are those of a server without drafts.
"""

from array import array

cimport cython

from _fast.estimates cimport PLACES
from _fast.layout cimport ACCEPTANCE_ONE

cdef enum:
    RADIX = 256


@cython.final
cdef class Budget:
    """Times of steps, limits, and the drafts of the step that is being planned."""

    def __init__(self, int32_t num_slots, int32_t max_rows):
        self.estimates, self.rest = Estimates(num_slots), Rest()
        self.most = array("i", [PLACES - 1] * (max_rows + 1))
        self.plain = self.mixed = self.choice = array("d")
        self.survivals = array("i", bytes(4 * max_rows * PLACES))
        self.room = array("i", bytes(4 * max_rows * PLACES))

    def set_times(self, const double[::1] plain not None, const double[::1] mixed not None,
                  const double[::1] choice not None):
        """Take the seconds of steps, and size steps by them from now on; each array must not fall.

        plain: of a whole step in which all rows decode, by rows from 0 on. mixed: of the forward of other steps, by
        tokens. choice: of the choice of tokens in them, by places. The last value is that of all larger numbers.
        """
        for name, times in (("plain", plain), ("mixed", mixed), ("choice", choice)):
            if times.shape[0] < 1 or not times[0] >= 0.0 or (name != "choice" and times[0] <= 0.0):
                raise ValueError(f"{name}: at least one time in seconds is needed, above 0")
            for k in range(1, times.shape[0]):
                if not times[k] >= times[k - 1]:
                    raise ValueError(f"{name}: {times[k]:g} s for {k} is less than for {k - 1}; more work takes longer")
        self.plain, self.mixed, self.choice = plain, mixed, choice
        self.adaptive = True

    def set_reading(self, double seconds):
        """Take the seconds that a step takes longer for every token of its rows' contexts; the times have no contexts.
        """
        if not seconds >= 0.0:
            raise ValueError(f"reading={seconds:g}: seconds of a token, 0 or more")
        self.reading = seconds

    def set_most(self, ranges):
        """Limit a row's drafts by the number of running rows: [(least rows, most rows, drafts)]."""
        cdef int32_t rows
        for low, high, drafts in ranges:
            if not 0 <= drafts < PLACES or not 0 < low <= high:
                raise ValueError(f"({low}, {high}, {drafts}): 1 row or more, and 0 to {PLACES - 1} drafts of a row")
            for rows in range(low, min(high + 1, <int32_t>self.most.shape[0])):
                self.most[rows] = drafts

    def let_rest(self, int32_t variant):
        """Let the drafter rest in steps without drafts; `variant`: the bit of the graphs in which it does not."""
        self.variant = variant

    def sized(self, survivals, int32_t rows, int32_t tokens, int32_t most, bint decodes, int64_t contexts=0):
        """Return the number of drafts for a step of so many sampled rows and tokens (for tests and benchmarks).

        survivals: of the drafts, in units of 1 / 32768, in any order; most: room for drafts; decodes: without drafts
        every row has one token; contexts: tokens of all rows' contexts.
        """
        cdef int32_t k
        if len(survivals) > self.survivals.shape[0]:
            raise ValueError(f"{len(survivals)} drafts: there is room for {self.survivals.shape[0]}")
        self.begin()
        self.contexts = contexts
        for k in range(<int32_t>len(survivals)):
            self.survivals[k] = survivals[k]
        self.count = <int32_t>len(survivals)
        return self.best(rows, tokens, most, decodes)

    cdef void learn(self, slot_t slot, int32_t verified, int32_t right) noexcept nogil:
        """Take over that the first `right` of a row's `verified` drafts were right."""
        self.estimates.learn(slot, verified, right)
        self.rest.right += right
        self.rest.seen += verified

    cdef int32_t cap(self, int32_t rows) noexcept nogil:
        """Return the most drafts of a row while so many run."""
        return self.most[min(rows, <int32_t>self.most.shape[0] - 1)]

    cdef void begin(self) noexcept nogil:
        """Begin a plan: no drafts are offered."""
        self.count = self.rows_with = self.eligible = 0
        self.contexts = 0
        self.rest.first_only = False

    cdef void offer(self, slot_t slot, int32_t drafts) noexcept nogil:
        """Offer the drafts of a row for verification."""
        if self.adaptive:
            self.estimates.survive(slot, drafts, &self.survivals[self.count])
        self.count += drafts
        self.rows_with += 1

    cdef int32_t decide(self, int32_t rows, int32_t tokens, int32_t most, bint decodes) noexcept nogil:
        """Return how many of the offered drafts the step verifies, `most` at most.

        rows, tokens: that sample, and in all, without drafts; decodes: every row has one token then.
        """
        cdef int32_t found
        if not self.adaptive:
            return min(self.count, most)
        if self.eligible == 0 or (not self.rest.active and self.rest.goes_on(self.eligible)):
            return 0
        if self.rest.waits() and self.rest.probing:
            return 0
        if self.count == 0 or most <= 0:
            return 0
        found = self.best(rows, tokens, most, decodes)
        if self.rest.probing:
            if self.rest.probes == 0 or (found == 0 and self.rest.tries_again()):
                return self._probe(most)
            self.rest.probing = False
        if found == 0:
            self.rest.begin(self.eligible)
            return 0
        if self.rest.is_due() and found < self.rows_with:
            return self._probe(most)
        return found

    cdef int32_t _probe(self, int32_t most) noexcept nogil:
        """Let every row verify its first draft."""
        self.rest.probe()
        return min(self.rows_with, most)

    cdef int32_t best(self, int32_t rows, int32_t tokens, int32_t most, bint decodes) noexcept nogil:
        """Return the number of drafts with the most tokens per second."""
        cdef const double* mixed = &self.mixed[0]
        cdef const double* choice = &self.choice[0]
        cdef int32_t longest = <int32_t>self.mixed.shape[0] - 1
        cdef int32_t places = <int32_t>self.choice.shape[0] - 1
        cdef int64_t yielded = <int64_t>rows * ACCEPTANCE_ONE
        cdef double fixed = self.reading * <double>self.contexts
        cdef double seconds = mixed[min(tokens, longest)] + choice[min(rows, places)]
        cdef double fastest
        cdef double speed
        cdef int32_t found = 0
        cdef int32_t k
        if decodes:
            seconds = self.plain[min(tokens, <int32_t>self.plain.shape[0] - 1)]
        fastest = <double>yielded / (seconds + fixed)
        self._sort()
        for k in range(min(self.count, most)):
            yielded += self.survivals[k]
            seconds = mixed[min(tokens + k + 1, longest)] + choice[min(rows + k + 1, places)]
            speed = <double>yielded / (seconds + fixed)
            if speed > fastest:
                fastest = speed
                found = k + 1
        return found

    cdef void _sort(self) noexcept nogil:
        """Sort the survivals, largest first: by their low bytes, then by their high bytes."""
        cdef int32_t starts[2][RADIX]
        cdef int32_t* source = &self.survivals[0]
        cdef int32_t* target = &self.room[0]
        cdef int32_t digit
        cdef int32_t i
        cdef int32_t low = 0
        cdef int32_t high = 0
        cdef int32_t size
        for digit in range(RADIX):
            starts[0][digit] = starts[1][digit] = 0
        for i in range(self.count):
            starts[0][source[i] & 255] += 1
            starts[1][source[i] >> 8] += 1
        for digit in range(RADIX - 1, -1, -1):
            size = starts[0][digit]
            starts[0][digit] = low
            low += size
            size = starts[1][digit]
            starts[1][digit] = high
            high += size
        for i in range(self.count):
            digit = source[i] & 255
            target[starts[0][digit]] = source[i]
            starts[0][digit] += 1
        for i in range(self.count):
            digit = target[i] >> 8
            source[starts[1][digit]] = target[i]
            starts[1][digit] += 1
