"""GapClock: how long the device stands idle between two steps, measured behind one step in `every`.

Owner: the device thread. In: when a step's forward begins and when its tokens are chosen, as the launcher launches
them, and up to which step has been waited for. Out: the seconds from the last kernel of a step to the forward of the
step behind it, by two timed events; prep, which takes some microseconds, lies in between.

    step N      ... forward, choice | begin
    step N + 1                              prep | end | forward ...

For an event to lie there, the step behind is launched in its parts: the gaps of others are smaller by a boundary. An
event that is recorded again has not been reached, so the next gap begins when the one before has been read.
"""

cimport cython


@cython.final
@cython.no_gc_clear  # the events go by `calls`
cdef class GapClock:
    """Two events of one device."""

    def __init__(self, DeviceCalls calls not None, int32_t every):
        self.calls = calls
        self.after = self.before = -1
        self.set_every(every)
        calls.create(&self.begin, 0)
        calls.create(&self.end, 0)

    def __dealloc__(self):
        if self.calls is not None:
            self.calls.destroy(self.begin)
            self.calls.destroy(self.end)

    def set_every(self, int32_t every):
        """One step in so many is measured."""
        if every < 1:
            raise ValueError(f"every={every}: one step in at least 1 is measured")
        self.every = every

    cdef bint ends(self, int64_t step, int64_t waited_step) noexcept nogil:
        """Whether a gap ends with this step: the end of the step before was marked, and that is still in flight."""
        return self.after >= 0 and self.after == step - 1 and self.after > waited_step

    cdef bint mark_begin(self, int64_t step, int64_t waited_step) noexcept nogil:
        """The step's forward begins: the end of a gap, maybe. False: a call failed."""
        if not self.ends(step, waited_step):
            return True
        self.before = step
        return self.calls.mark(self.end)

    cdef bint mark_end(self, int64_t step, int64_t waited_step) noexcept nogil:
        """The step's tokens are chosen: the beginning of a gap, for some steps. False: a call failed."""
        if (step + 1) % self.every or self.before > waited_step:
            return True
        self.after = step
        return self.calls.mark(self.begin)

    cdef bint measure(self, int64_t step, double* seconds) noexcept nogil:
        """The gap before a step that has been waited for; 0: not measured. False: a call failed."""
        seconds[0] = 0.0
        return step != self.before or self.calls.elapsed(self.begin, self.end, seconds)
