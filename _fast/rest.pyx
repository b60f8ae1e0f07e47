"""Rest: steps without drafts while drafts cost more than they save, and the probes that find out when this has changed.

Owner: the device thread, through Budget. A probe is a step in which every row tries its first draft. A rest ends with a
probe; it is twice as long as the rest before if no step between them had useful drafts. While drafts are used, rows
whose drafts lose against those of other rows get a probe from time to time.

    drafts | rest: 16 steps | probe: wrong | rest: 32 steps | probe: right | probe: right | drafts ...
"""

cimport cython

cdef enum:
    SHORTEST = 16
    LONGEST = 512
    AGAIN = 8  # probes in a row, while at least half of their drafts are right
    EVERY = 128  # steps with drafts
    SETTLED_AFTER = 2  # plans after a step's plan until its outcome is known, with two steps in flight


@cython.final
cdef class Rest:
    """Counts steps in which rows could have drafts."""

    def __init__(self):
        self.active = True
        self.length = SHORTEST >> 1

    cdef bint goes_on(self, int32_t rows) noexcept nogil:
        """Whether the rest includes the step that is planned, in which so many rows could have drafts."""
        self.rested += 1
        if 2 * rows <= self.rows:  # drafts of fewer rows cost less
            self.length = SHORTEST >> 1
        elif self.rested <= self.length:
            return True
        self.active = self.probing = True
        self.wait = self.probes = 0
        return False

    cdef bint waits(self) noexcept nogil:
        """Whether the outcome of the newest probe is still unknown."""
        self.wait -= self.wait > 0
        return self.wait > 0

    cdef bint tries_again(self) noexcept nogil:
        """Whether another probe follows those since the rest, because the one before was right."""
        return self.probes < AGAIN and 2 * self.right >= self.seen

    cdef bint is_due(self) noexcept nogil:
        """Count a step with drafts; return whether it may be a probe."""
        self.length = SHORTEST >> 1
        self.since_probe += 1
        if self.since_probe < EVERY:
            return False
        self.since_probe = 0
        return True

    cdef void begin(self, int32_t rows) noexcept nogil:
        """Begin a rest."""
        self.active = False
        self.length = min(2 * self.length, <int32_t>LONGEST)
        self.rested, self.rows = 0, rows
        self.since_probe = 0

    cdef void probe(self) noexcept nogil:
        """Make the step that is planned a probe."""
        self.wait = SETTLED_AFTER
        self.num_probes += 1
        self.probes += 1
        self.right = self.seen = 0
