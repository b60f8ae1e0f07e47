"""GapClock: measures how long the device is idle between two steps, after one step in `every`.

Owner: the device thread. In: calls when the launcher launches a step's forward and when it has launched the choice of
its tokens, and the newest step that has been waited for. Out: the seconds from the last kernel of a step to the forward
of the next step, by two timed events; this includes prep, which takes some microseconds.

    step N      ... forward, choice | begin
    step N + 1                              prep | end | forward ...

To place an event there, the next step is launched in parts, so other steps' gaps are smaller by one boundary. A newly
recorded event counts as not reached, so the next gap begins only after the previous gap has been read.
"""

cimport cython


@cython.final
@cython.no_gc_clear  # `calls` destroys the events
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
        """Measure the gap after one step in `every`."""
        if every < 1:
            raise ValueError(f"every={every}: one step in at least 1 is measured")
        self.every = every

    cdef bint ends(self, int64_t step, int64_t waited_step) noexcept nogil:
        """Whether a gap ends with this step: the previous step's end was marked, and it is still in flight."""
        return self.after >= 0 and self.after == step - 1 and self.after > waited_step

    cdef bint mark_begin(self, int64_t step, int64_t waited_step) noexcept nogil:
        """Mark the beginning of the step's forward if a gap ends with it. False: a call failed."""
        if not self.ends(step, waited_step):
            return True
        self.before = step
        return self.calls.mark(self.end)

    cdef bint mark_end(self, int64_t step, int64_t waited_step) noexcept nogil:
        """Mark the beginning of a gap after the choice of tokens, if it is measured. False: a call failed."""
        if (step + 1) % self.every or self.before > waited_step:
            return True
        self.after = step
        return self.calls.mark(self.begin)

    cdef bint measure(self, int64_t step, double* seconds) noexcept nogil:
        """Read the gap before a step that has been waited for; 0: not measured. False: a call failed."""
        seconds[0] = 0.0
        return step != self.before or self.calls.elapsed(self.begin, self.end, seconds)
