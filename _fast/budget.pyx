"""Budget: how many drafts a step verifies, over all rows and in a row, so that tokens come fastest.

Owner: the device thread, through Drafts. In: outcomes of settled steps, seconds of steps by size, measured at start.
Out: the number of drafts of the step that is planned, and the most drafts of a row (depth). The survival of a row's
draft j is the product of the row's estimates 1 .. j (estimates.pyx), each of how often this draft is right if all
before it are. With B drafts, D in a row at most, a step yields

    (rows + sum of the B largest survivals of drafts 1 .. D) / (seconds(tokens + B) + reading * contexts + passes(B, D))

tokens per second; B and D are where this is largest. A drafter that guesses draft after draft needs D passes over the
rows with drafts, any other a single pass, and copies of texts none. D rises from 1 while a further pass pays.

The drafts of a row that are among the B largest are its first ones, because survivals fall along a row. Which rows get
the B drafts is decided on the device, where the newest outcomes are (engine/kernels/deal_drafts). If B is 0, the
drafter rests (rest.pyx): steps are those of a server without drafts.
"""

from array import array

cimport cython
from libc.string cimport memset

from _fast.estimates cimport PLACES
from _fast.layout cimport ACCEPTANCE_ONE

cdef enum:
    RADIX = 256


cdef check_times(str name, const double[::1] times, bint is_step):
    """Raise ValueError unless the seconds are valid; is_step: none of them may be 0."""
    cdef Py_ssize_t k
    if times.shape[0] < 1 or not times[0] >= 0.0 or (is_step and times[0] <= 0.0):
        raise ValueError(f"{name}: at least one time in seconds is needed, above 0")
    for k in range(1, times.shape[0]):
        if not times[k] >= times[k - 1]:
            raise ValueError(f"{name}: {times[k]:g} s for {k} is less than for {k - 1}; more work takes longer")


@cython.final
cdef class StepTimes:
    """Seconds of steps and of a drafter's passes by size, measured at start."""

    def __init__(self):
        self.plain = self.mixed = self.choice = self.first = self.further = array("d")

    def set_steps(self, const double[::1] plain not None, const double[::1] mixed not None,
                  const double[::1] choice not None):
        """Take the seconds of steps; each array must not fall.

        plain: of a whole step in which all rows decode, by rows from 0 on. mixed: of the forward of other steps, by
        tokens. choice: of the choice of tokens in them, by places. The last value is that of all larger numbers.
        """
        check_times("plain", plain, True)
        check_times("mixed", mixed, True)
        check_times("choice", choice, False)
        self.plain, self.mixed, self.choice = plain, mixed, choice

    def set_reading(self, double seconds):
        """Take the seconds that a step takes longer for every token of its rows' contexts; the times have no contexts.
        """
        if not seconds >= 0.0:
            raise ValueError(f"reading={seconds:g}: seconds of a token, 0 or more")
        self.reading = seconds

    def set_passes(self, const double[::1] first not None, const double[::1] further not None, double reading=0.0):
        """Take the seconds of a drafter's passes, by rows with drafts from 0 on; each array must not fall.

        first: of the first pass; further: of each further pass, empty if there is only one. reading: seconds that a
        pass takes longer for every token of its rows' contexts.
        """
        check_times("first", first, False)
        if further.shape[0]:
            check_times("further", further, False)
        if not reading >= 0.0:
            raise ValueError(f"reading={reading:g}: seconds of a token, 0 or more")
        self.first, self.further, self.pass_reading = first, further, reading

    cdef double step(self, int32_t tokens, int32_t places) noexcept nogil:
        """Return the time of a step that is not plain: its forward, and the choice of tokens for so many places."""
        cdef int32_t longest = <int32_t>self.mixed.shape[0] - 1
        return self.mixed[min(tokens, longest)] + self.choice[min(places, <int32_t>self.choice.shape[0] - 1)]

    cdef double plain_step(self, int32_t rows) noexcept nogil:
        """Return the time of a step in which so many rows decode, without their contexts."""
        return self.plain[min(rows, <int32_t>self.plain.shape[0] - 1)]

    cdef double passes(self, int32_t rows, int32_t depth, double context) noexcept nogil:
        """Return the time of a drafter's passes over so many rows, which guess so many drafts of a row.

        context: tokens of a row's context.
        """
        cdef int32_t further = depth - 1 if self.further.shape[0] else 0
        cdef double reading = self.pass_reading * context * <double>rows
        cdef double found = self.first[min(rows, <int32_t>self.first.shape[0] - 1)] + reading
        if further:
            found += <double>further * (self.further[min(rows, <int32_t>self.further.shape[0] - 1)] + reading)
        return found


@cython.final
cdef class Offers:
    """How probable the drafts are that rows offer to the step that is being planned."""

    def __init__(self, int32_t max_rows):
        self.max_rows = max_rows
        self.survivals = array("i", bytes(4 * max_rows * PLACES))
        self.sorted = array("i", bytes(4 * max_rows * PLACES))
        self.room = array("i", bytes(4 * max_rows * PLACES))

    cdef void clear(self) noexcept nogil:
        self.count = self.rows = self.deepest = 0
        memset(self.rows_at, 0, sizeof(self.rows_at))

    cdef void count_row(self, int32_t drafts) noexcept nogil:
        """Count a row's drafts."""
        self.count += drafts
        self.rows += drafts > 0
        self.deepest = max(self.deepest, drafts)

    cdef void add(self, const int32_t* own, int32_t drafts) noexcept nogil:
        """Take the survivals of a row's drafts, and count the drafts."""
        cdef int32_t k
        for k in range(drafts):
            self.survivals[k * self.max_rows + self.rows_at[k]] = own[k]
            self.rows_at[k] += 1
        self.count_row(drafts)

    cdef int32_t gather(self, int32_t gathered, int32_t depth, int32_t most) noexcept nogil:
        """Sort the `most` largest survivals of a row's first drafts; return their number.

        gathered: how many are sorted, those of one draft less; 0: none.
        """
        cdef int32_t place
        cdef int32_t k
        for place in range(depth - 1 if gathered else 0, depth):
            for k in range(self.rows_at[place]):
                self.sorted[gathered] = self.survivals[place * self.max_rows + k]
                gathered += 1
        most = min(gathered, most)
        self._sort(gathered, most)
        return most

    cdef void _sort(self, int32_t gathered, int32_t most) noexcept nogil:
        """Sort the `most` largest of the gathered survivals, largest first; the others, mostly small, are dropped.

        Those whose high byte is large enough are sorted by their low bytes, then by their high bytes.
        """
        cdef int32_t starts[2][RADIX]
        cdef int32_t* source = &self.sorted[0]
        cdef int32_t* target = &self.room[0]
        cdef int32_t least = RADIX
        cdef int32_t count = 0
        cdef int32_t low = 0
        cdef int32_t high = 0
        cdef int32_t digit
        cdef int32_t size
        cdef int32_t i
        memset(starts, 0, sizeof(starts))
        for i in range(gathered):
            starts[1][source[i] >> 8] += 1
        while count < most:
            least -= 1
            count += starts[1][least]
        count = 0
        for i in range(gathered):
            if source[i] >> 8 >= least:
                source[count] = source[i]
                count += 1
        for i in range(count):
            starts[0][source[i] & 255] += 1
        for digit in range(RADIX - 1, -1, -1):
            size = starts[0][digit]
            starts[0][digit] = low
            low += size
            size = starts[1][digit]
            starts[1][digit] = high
            high += size
        for i in range(count):
            digit = source[i] & 255
            target[starts[0][digit]] = source[i]
            starts[0][digit] += 1
        for i in range(count):
            digit = target[i] >> 8
            source[starts[1][digit]] = target[i]
            starts[1][digit] += 1


@cython.final
cdef class Budget:
    """Limits, and the number of drafts of the step that is being planned."""

    def __init__(self, int32_t num_slots, int32_t max_rows):
        self.estimates, self.rest = Estimates(num_slots), Rest()
        self.most = array("i", [PLACES - 1] * (max_rows + 1))
        self.times, self.offers = StepTimes(), Offers(max_rows)

    def set_times(self, plain, mixed, choice):
        """Take the seconds of steps (StepTimes.set_steps), and size steps by them from now on."""
        self.times.set_steps(plain, mixed, choice)
        self.adaptive = True

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
        """Return the number of drafts for a step of so many sampled rows and tokens, and the most of a row (for tests
        and benchmarks).

        survivals: by row with drafts, of its drafts, in units of 1 / 32768; most: room for drafts; decodes: without
        drafts every row has one token; contexts: tokens of all rows' contexts, as if all rows had drafts.
        """
        cdef int32_t own[PLACES]
        cdef int32_t count
        cdef int32_t k
        cdef int32_t room = self.offers.max_rows
        if len(survivals) > room or max(map(len, survivals), default=0) > PLACES:
            raise ValueError(f"{len(survivals)} rows with drafts: there is room for {room} of {PLACES} drafts")
        self.begin()
        self.contexts = self.drafted = contexts
        for row in survivals:
            count = <int32_t>len(row)
            for k in range(count):
                own[k] = row[k]
            self.offers.add(own, count)
        count = self.best(rows, tokens, most, decodes)
        return count, self.depth if count else 0

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
        self.offers.clear()
        self.eligible = 0
        self.contexts = self.drafted = 0
        self.depth = PLACES

    cdef void offer(self, slot_t slot, int32_t drafts, int64_t context) noexcept nogil:
        """Offer the drafts of a row for verification; context: its tokens."""
        cdef int32_t own[PLACES]
        if self.adaptive:
            self.estimates.survive(slot, drafts, own)
            self.offers.add(own, drafts)
        else:
            self.offers.count_row(drafts)
        self.drafted += context

    cdef int32_t decide(self, int32_t rows, int32_t tokens, int32_t most, bint decodes) noexcept nogil:
        """Return how many of the offered drafts the step verifies, `most` at most.

        rows, tokens: that sample, and in all, without drafts; decodes: every row has one token then.
        """
        cdef int32_t found
        if not self.adaptive:
            return min(self.offers.count, most)
        if self.eligible == 0 or (not self.rest.active and self.rest.goes_on(self.eligible)):
            return 0
        if self.rest.waits() and self.rest.probing:
            return 0
        if self.offers.count == 0 or most <= 0:
            return 0
        found = self.best(rows, tokens, most, decodes)
        if self.rest.probing:
            if self.rest.probes == 0 or (found == 0 and self.rest.tries_again()):
                return self._probe(most)
            self.rest.probing = False
        if found == 0:
            self.rest.begin(self.eligible)
            return 0
        if self.rest.is_due() and found < self.offers.rows:
            return self._probe(most)
        return found

    cdef int32_t _probe(self, int32_t most) noexcept nogil:
        """Let every row verify its first draft."""
        self.rest.probe()
        self.depth = 1
        return min(self.offers.rows, most)

    cdef int32_t best(self, int32_t rows, int32_t tokens, int32_t most, bint decodes) noexcept nogil:
        """Return the number of drafts with the most tokens per second, and set the depth."""
        cdef double seconds = self.times.plain_step(tokens) if decodes else self.times.step(tokens, rows)
        cdef double fastest = <double>rows * ACCEPTANCE_ONE / (seconds + self.times.reading * <double>self.contexts)
        cdef double before = 0.0
        cdef double speed
        cdef int32_t found = 0
        cdef int32_t gathered = 0
        cdef int32_t deepest = self.offers.deepest
        cdef int32_t depth = min(1, deepest) if self.times.further.shape[0] else deepest
        while True:
            gathered = self.offers.gather(gathered, depth, most)
            speed = self._speed(rows, tokens, gathered, depth)
            if speed > fastest:
                fastest = speed
                found = self.verified
                self.depth = depth
            if speed <= before or depth >= deepest:
                return found
            before = speed
            depth += 1

    cdef double _speed(self, int32_t rows, int32_t tokens, int32_t most, int32_t depth) noexcept nogil:
        """Return the most tokens per second with 1 to `most` drafts (0: none can be verified); note their number."""
        cdef const double* mixed = &self.times.mixed[0]
        cdef const double* choice = &self.times.choice[0]
        cdef const int32_t* sorted = &self.offers.sorted[0]
        cdef int32_t longest = <int32_t>self.times.mixed.shape[0] - 1
        cdef int32_t places = <int32_t>self.times.choice.shape[0] - 1
        cdef int32_t guessing = self.offers.rows if self.times.first.shape[0] else 0
        cdef double context = <double>self.drafted / <double>max(self.offers.rows, 1)
        cdef double yielded = <double>rows * ACCEPTANCE_ONE
        cdef double reading = self.times.reading * <double>self.contexts
        cdef double fixed = reading
        cdef double best_yielded = 0.0
        cdef double best_seconds = 1.0
        cdef double seconds
        cdef int32_t k
        for k in range(most):
            yielded += sorted[k]
            if k < guessing:
                fixed = reading + self.times.passes(k + 1, depth, context)
            seconds = fixed + mixed[min(tokens + k + 1, longest)] + choice[min(rows + k + 1, places)]
            if yielded * best_seconds > best_yielded * seconds:  # more per second
                best_yielded = yielded
                best_seconds = seconds
                self.verified = k + 1
        return best_yielded / best_seconds
