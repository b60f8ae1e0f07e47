"""A linear scan of a JSON body before it is decoded.

Owner: none, a pure function; the loop calls it for small bodies, the pool for large ones (the GIL is released).
In: the bytes and two limits. Out: a code, an offset, the names of the outermost object. It counts depth and nodes,
including ignored fields, and finds values that decoders accept or handle differently: NaN and Infinity, lone
surrogates, integers beyond 64 bits. It is no validator: the decoder checks brackets and commas. One pass, no recursion,
no allocation.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t
from libc.string cimport memchr, memcmp

OK = 0
TOO_DEEP = 1
TOO_MANY_NODES = 2
NOT_FINITE = 3
LONE_SURROGATE = 4
INTEGER_TOO_LARGE = 5
MOST_NAMES = 64  # names that `scan` returns
MOST_MEMBERS = 1024  # members that `members` returns

cdef enum:
    NAMES = 64
    MEMBERS = 1024

    CODE_OK = 0
    CODE_TOO_DEEP = 1
    CODE_TOO_MANY_NODES = 2
    CODE_NOT_FINITE = 3
    CODE_LONE_SURROGATE = 4
    CODE_INTEGER_TOO_LARGE = 5


cdef struct Member:
    Py_ssize_t name  # the first byte of the name
    Py_ssize_t quote  # the quote after the name
    Py_ssize_t end  # the comma or brace after the value


cdef struct Outer:
    # The members of the outermost object: the first `most` of them are stored, all are counted.
    Member* members
    Py_ssize_t most
    Py_ssize_t count


cdef inline int hex_digit(uint8_t c) noexcept nogil:
    if 48 <= c <= 57:
        return c - 48
    c |= 32
    if 97 <= c <= 102:
        return c - 87
    return -1


cdef int code_unit(const uint8_t* p, Py_ssize_t left) noexcept nogil:
    """Return the value of four hex digits at p, or -1 (the decoder will report the error)."""
    cdef int value = 0, digit, i
    if left < 4:
        return -1
    for i in range(4):
        digit = hex_digit(p[i])
        if digit < 0:
            return -1
        value = value * 16 + digit
    return value


cdef Py_ssize_t skip_string(const uint8_t* p, Py_ssize_t at, Py_ssize_t n, int* code) noexcept nogil:
    """Skip from just after the opening quote to just after the closing quote; set `code` on a lone surrogate.

    Both searches only move forward: the search for the quote is repeated only if the found quote was escaped.
    """
    cdef const uint8_t* hit
    cdef Py_ssize_t quote = -1, escape
    cdef int unit, low
    while True:
        if quote < at:
            hit = <const uint8_t*> memchr(p + at, 34, n - at)
            quote = hit - p if hit != NULL else n
        hit = <const uint8_t*> memchr(p + at, 92, quote - at)
        if hit == NULL:
            return quote + 1 if quote < n else n
        escape = hit - p
        at = escape + 2
        if at > n:
            return n
        if p[escape + 1] != 117:  # not \u
            continue
        unit = code_unit(p + at, n - at)
        if unit < 0xD800 or unit > 0xDFFF:
            continue
        low = -1
        if unit < 0xDC00 and n - at >= 10 and p[at + 4] == 92 and p[at + 5] == 117:
            low = code_unit(p + at + 6, n - at - 6)
        if low < 0xDC00 or low > 0xDFFF:
            code[0] = CODE_LONE_SURROGATE
            return escape
        at += 10


cdef Py_ssize_t skip_number(const uint8_t* p, Py_ssize_t at, Py_ssize_t n, int* code) noexcept nogil:
    """Skip a number; an integer must be in -2**63 .. 2**64-1."""
    cdef Py_ssize_t start = at, digits
    cdef bint negative = p[at] == 45
    cdef bint integer = True
    cdef const char* limit
    if negative:
        at += 1
    start = at
    while at < n and 48 <= p[at] <= 57:
        at += 1
    digits = at - start
    if at < n and p[at] == 73:  # -Infinity
        code[0] = CODE_NOT_FINITE
        return at
    while at < n and (p[at] == 46 or p[at] == 43 or p[at] == 45 or (p[at] | 32) == 101 or 48 <= p[at] <= 57):
        integer = False
        at += 1
    if integer:
        limit = b"9223372036854775808" if negative else b"18446744073709551615"
        while digits > 1 and p[start] == 48:  # leading zeros are malformed, but the decoder reports this
            start += 1
            digits -= 1
        if digits > (19 if negative else 20) or (
            digits == (19 if negative else 20) and memcmp(p + start, limit, digits) > 0
        ):
            code[0] = CODE_INTEGER_TOO_LARGE
            return start
    return at


cdef Py_ssize_t walk(
    const uint8_t* p, Py_ssize_t n, Py_ssize_t max_depth, Py_ssize_t max_nodes, Outer* outer, int* code
) noexcept nogil:
    cdef Py_ssize_t at = 0, depth = 0, nodes = 1, start
    cdef bint in_object = False, is_name = False  # whether the outermost value is an object; whether a name comes next
    cdef uint8_t c
    while at < n:
        c = p[at]
        if c == 34:
            start = at + 1
            at = skip_string(p, start, n, code)
            if is_name:
                is_name = False
                if outer.count < outer.most:
                    outer.members[outer.count] = Member(start, at - 1, n)
                outer.count += 1
        elif c == 45 or 48 <= c <= 57:
            at = skip_number(p, at, n, code)
        else:
            if c == 123 or c == 91:
                depth += 1
                nodes += 1
                if depth == 1 and outer.count == 0:
                    in_object = is_name = c == 123
                if depth > max_depth:
                    code[0] = CODE_TOO_DEEP
            elif c == 125 or c == 93:
                if depth == 1 and in_object:
                    end_member(outer, at)
                    in_object = is_name = False
                depth -= 1
            elif c == 44:
                nodes += 1
                if depth == 1 and in_object:
                    end_member(outer, at)
                    is_name = True
            elif c == 78 or c == 73:  # NaN, Infinity
                code[0] = CODE_NOT_FINITE
            if nodes > max_nodes:
                code[0] = CODE_TOO_MANY_NODES
            if code[0] == CODE_OK:
                at += 1
        if code[0] != CODE_OK:
            return at
    return n


cdef inline void end_member(Outer* outer, Py_ssize_t at) noexcept nogil:
    if 0 < outer.count <= outer.most:
        outer.members[outer.count - 1].end = at


def scan(const uint8_t[::1] data not None, Py_ssize_t max_depth, Py_ssize_t max_nodes):
    """Return (code, offset, names): OK and the length, or the first error and its place.

    names: those of the outermost object as they are written, MOST_NAMES at most; if it has more, the last one is b"".
    """
    cdef Member[NAMES] members
    cdef Outer outer
    cdef int code = CODE_OK
    cdef Py_ssize_t at = 0, n = data.shape[0], i
    outer.members, outer.most, outer.count = members, NAMES, 0
    if max_depth < 1 or max_nodes < 1:
        raise ValueError(f"max_depth={max_depth}, max_nodes={max_nodes}: both limits must be at least 1")
    if n:
        with nogil:
            at = walk(&data[0], n, max_depth, max_nodes, &outer, &code)
    names = [name_of(&data[0], members[i]) for i in range(min(outer.count, <Py_ssize_t> NAMES))]
    if outer.count > NAMES:
        names[NAMES - 1] = b""
    return code, at, names


def members(const uint8_t[::1] data not None):
    """Return (name, start, end) for each member of the outermost object of a scanned body: the name as it is written,
    and the place of the value's text. Returns None if there are more than MOST_MEMBERS.
    """
    cdef Member[MEMBERS] found
    cdef Outer outer
    cdef int code = CODE_OK
    cdef Py_ssize_t n = data.shape[0], i
    outer.members, outer.most, outer.count = found, MEMBERS, 0
    if n:
        with nogil:
            walk(&data[0], n, n + 1, n + 1, &outer, &code)
    if outer.count > MEMBERS:
        return None
    return [(name_of(&data[0], found[i]), value_of(&data[0], found[i]), found[i].end) for i in range(outer.count)]


cdef inline bytes name_of(const uint8_t* p, Member member):
    return PyBytes_FromStringAndSize(<const char*> p + member.name, max(0, member.quote - member.name))


cdef inline Py_ssize_t value_of(const uint8_t* p, Member member) noexcept nogil:
    """The place after the colon."""
    cdef Py_ssize_t at = member.quote + 1
    while at < member.end and (p[at] == 32 or 9 <= p[at] <= 13 or p[at] == 58):
        at += 1
    return at
