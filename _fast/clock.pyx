"""StepClock: when the step in flight will end, and when to plan the step behind it.

Owner: the device thread. Python's turn (engine/run/pace) and the GIL-free loop (_fast/steady) have a clock each, with
different margins. In: how long settled steps took, and how long the thread had to wait for them. Out: a moment.

    step     begun ......................................... expected end
    thread                        plan the next one at: margin before it

The kinds of steps are small numbers that the owner gives them; steps of one kind take about as long.
"""

from array import array

cimport cython

cdef double FIRST_MARGIN = 0.0005  # seconds
cdef double MOST_MARGIN = 0.002
# 99 launches in a hundred leave the step in flight SPARE seconds to run, in which what delays the thread has its room.
cdef double SPARE = 0.0001
cdef double RISE = 99e-6  # of the margin, when there was less to spare
cdef double FALL = 1e-6  # when there was as much
FOUND_DONE = 20e-6  # seconds; a wait shorter than this found its step done already
cdef double AT_ONCE = FOUND_DONE
cdef double SLOWLY = 0.05  # of a longer step that is believed


cpdef double believe(double known, double took, bint at_once) noexcept nogil:
    """What is known of a time after one more: a longer one counts slowly, a shorter one fully if `at_once`."""
    if known <= 0.0 or (at_once and took < known):
        return took
    return known + SLOWLY * (took - known)


@cython.final
cdef class StepClock:
    """Seconds by kind of step, and the margin."""

    def __init__(self, int32_t num_kinds, double least_margin):
        if num_kinds < 1 or not 0.0 < least_margin <= MOST_MARGIN:
            raise ValueError(f"{num_kinds} kinds, margin {least_margin}: at least one kind, up to {MOST_MARGIN} s")
        self.seconds = array("d", bytes(8 * num_kinds))
        self.periods = array("d", bytes(8 * num_kinds))
        self.least_margin = least_margin
        self.margin = max(FIRST_MARGIN, least_margin)

    cpdef double expected(self, int32_t kind) noexcept nogil:
        """Seconds that a step of this kind takes; 0: none has been seen."""
        return self.seconds[kind]

    def at_least(self, int32_t kind):
        """The same, or where none has been seen the most that a smaller kind takes."""
        cdef double most = self.seconds[kind]
        cdef int32_t smaller
        if most <= 0.0:
            for smaller in range(kind):
                most = max(most, self.seconds[smaller])
        return most

    cpdef double plan_at(self, double begun, double took) noexcept nogil:
        """Late enough for a request to arrive in time, early enough that the device does not wait; 0: at once."""
        return begun + took - min(self.margin, 0.5 * took) if took > 0.0 else 0.0

    cpdef void adapt(self, double expected, double waited) noexcept nogil:
        """The margin, by how long the step ran on when its successor had been launched; where the margin decided."""
        if expected < 2.0 * self.margin:
            return
        if waited < SPARE:
            self.margin = min(self.margin + RISE, MOST_MARGIN)
        else:
            self.margin = max(self.margin - FALL, self.least_margin)

    cpdef bint learn(self, int32_t kind, double took, bint begun_exact, double waited) noexcept nogil:
        """Takes what a step took; returns whether its end is known exactly, as it is where the thread had to wait.

        `begun_exact`: the step began at a known time; else `took` is too short.

        A step found done was expected too late, the device may be idle: the next one of its kind is expected in half
        the time. So a wrong number costs a few steps, not as many as it is times too large.

        Where steps are found done again and again, the host is what they take their time from: that is their period,
        of which no single one is believed at once, because one that is too long is followed by one that is too short.
        """
        cdef bint exact = waited > AT_ONCE
        cdef double known = self.seconds[kind]
        if not exact:
            self.seconds[kind] = 0.5 * min(known, took)
        elif took > known or begun_exact:
            self.seconds[kind] = believe(known, took, True)
        self.periods[kind] = believe(self.periods[kind], took, exact and begun_exact)
        return exact
