"""StepClock: estimates when the step in flight will end, and when to plan the next step.

Owner: the device thread. Python's loop (engine/run/pace) and the GIL-free loop (_fast/steady) each have a clock, with
different margins. In: the duration of settled steps, and how long the thread waited for them. Out: a point in time.

    step     begun ......................................... expected end
    thread                        plan the next one at: margin before it

Kinds of steps are small numbers that the owner assigns; steps of one kind take similar times.
"""

from array import array

cimport cython

cdef double FIRST_MARGIN = 0.0005  # seconds
cdef double MOST_MARGIN = 0.002
# For 99 of 100 launches the step in flight still runs for at least SPARE seconds, which absorbs delays of the thread.
cdef double SPARE = 0.0001
cdef double RISE = 99e-6  # increase of the margin if less than SPARE was left
cdef double FALL = 1e-6  # decrease of the margin otherwise
FOUND_DONE = 20e-6  # seconds; after a shorter wait the step counts as found done
cdef double AT_ONCE = FOUND_DONE
cdef double SLOWLY = 0.05  # weight of a longer step


cpdef double believe(double known, double took, bint at_once) noexcept nogil:
    """Update an estimate with a new time: a longer one has a small weight, a shorter one replaces it if `at_once`."""
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
        """Return the expected seconds of a step of this kind; 0: none was measured."""
        return self.seconds[kind]

    def at_least(self, int32_t kind):
        """Like `expected`, but if none was measured, return the maximum of the smaller kinds."""
        cdef double most = self.seconds[kind]
        cdef int32_t smaller
        if most <= 0.0:
            for smaller in range(kind):
                most = max(most, self.seconds[smaller])
        return most

    cpdef double plan_at(self, double begun, double took) noexcept nogil:
        """Return when to plan: late, so that requests can still arrive, but before the device is idle; 0: at once."""
        return begun + took - min(self.margin, 0.5 * took) if took > 0.0 else 0.0

    cpdef void adapt(self, double expected, double waited) noexcept nogil:
        """Adapt the margin to how long the step ran after the next step's launch, if the margin had an effect."""
        if expected < 2.0 * self.margin:
            return
        if waited < SPARE:
            self.margin = min(self.margin + RISE, MOST_MARGIN)
        else:
            self.margin = max(self.margin - FALL, self.least_margin)

    cpdef bint learn(self, int32_t kind, double took, bint begun_exact, double waited) noexcept nogil:
        """Learn from a step's duration; return whether its end is known exactly, which holds if the thread had to wait.

        begun_exact: the step began at a known time; else `took` is too short.

        If a step is found done, its expected end was too late and the device may be idle, so the next step of the kind
        is expected in half the time. So a wrong estimate costs only a logarithmic number of steps.

        If steps are found done repeatedly, the host limits the rate, and the time between steps is their period. No
        single period replaces the estimate, because a period that is too long is followed by one that is too short.
        """
        cdef bint exact = waited > AT_ONCE
        cdef double known = self.seconds[kind]
        if not exact:
            self.seconds[kind] = 0.5 * min(known, took)
        elif took > known or begun_exact:
            self.seconds[kind] = believe(known, took, True)
        self.periods[kind] = believe(self.periods[kind], took, exact and begun_exact)
        return exact
