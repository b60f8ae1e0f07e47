"""Layout of Lane; see lane.pyx."""

from libc.stdint cimport int32_t, uint8_t

from _fast.detok cimport Detokenizer
from _fast.histogram cimport Histogram


cdef struct Bytes:  # contents of a bytes object, to which the lane also holds a reference
    const uint8_t* data
    Py_ssize_t size


cdef struct Frames:  # bytes that wait to be sent
    uint8_t* data
    Py_ssize_t size
    Py_ssize_t room


cdef class Lane:
    cdef Detokenizer _machine
    cdef Histogram _gaps
    cdef bytes _before
    cdef bytes _behind
    cdef Bytes _begin  # contents of _before
    cdef Bytes _end  # contents of _behind
    cdef object _transport
    cdef object _is_closing
    cdef object _waiting
    cdef object _failed
    cdef int _fd
    cdef Frames _frames
    cdef public bint open
    cdef public double last_at
    cdef readonly double written_at

    cdef bint take(self, int32_t token)
    cdef bint ready(self)
    cdef Py_ssize_t frame(self, int32_t token) noexcept nogil
    cdef void append(self, const uint8_t* data, Py_ssize_t size) noexcept nogil
    cdef void append_escaped(self, const uint8_t* text, Py_ssize_t size) noexcept nogil
    cdef sent(self, Py_ssize_t size)
