"""Layouts of the detokenizer's objects; see detok.pyx."""

from libc.stdint cimport int32_t, uint8_t


cdef class TokenTable:
    cdef bytes _blob
    cdef bytes _special
    cdef const uint8_t* _data
    cdef const uint8_t* _flags
    cdef const int32_t[::1] _offsets
    cdef readonly int32_t num_tokens
    cdef readonly bint each_byte


cdef class StopSet:
    cdef readonly tuple stops
    cdef int32_t _num_nodes
    cdef int32_t _root[256]
    cdef int32_t* _child
    cdef int32_t* _sibling
    cdef int32_t* _fail
    cdef int32_t* _depth
    cdef int32_t* _match
    cdef int32_t* _size
    cdef uint8_t* _label

    cdef int32_t _find(self, int32_t node, uint8_t byte) noexcept nogil
    cdef int32_t _step(self, int32_t node, uint8_t byte) noexcept nogil


cdef struct Carry:  # first bytes of an incomplete character
    uint8_t bytes[4]
    int count
    int need  # bytes that are missing
    uint8_t low  # the next byte must be between low and high
    uint8_t high


cdef class Detokenizer:
    cdef TokenTable _table
    cdef StopSet _stops
    cdef object _first
    cdef uint8_t* _text
    cdef Py_ssize_t _len
    cdef Py_ssize_t _room
    cdef Carry _carry
    cdef int32_t _node
    cdef int32_t _strip
    cdef bint _include_stop
    cdef bint _skip_special
    cdef bint _ended
    cdef readonly Py_ssize_t num_tokens
    cdef readonly Py_ssize_t min_tokens
    cdef readonly int32_t matched

    cdef int _reserve(self, Py_ssize_t extra) noexcept nogil
    cdef bint _emit(self, uint8_t byte) noexcept nogil
    cdef bint _replace(self) noexcept nogil
    cdef bint _push(self, uint8_t byte) noexcept nogil
    cdef int _token(self, const uint8_t* data, Py_ssize_t size) noexcept nogil
    cdef Py_ssize_t _held(self) noexcept nogil
    cdef str _take(self, Py_ssize_t size)
    cdef Py_ssize_t plain(self, int32_t token_id) noexcept nogil
