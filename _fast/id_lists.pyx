"""Long lists of integers in a JSON body: found without the GIL, read in pieces.

Owner: none, pure functions; the pool calls them. In: the bytes of a body that is one object. Out: the places of long
lists of plain integers directly under its keys (`{"prompt": [1, 2, ...]}`) or in a list (`{"prompt": [[1, ...]]}`).
Reason: a decoder makes all values of a body in one call that holds the GIL, which takes 60 ms for 10^6 integers.
"""

from libc.stdint cimport int64_t, uint8_t

cdef enum:
    MAX_DIGITS = 18  # always fit 64 bits; the decoder handles a list with a longer integer
    PIECE = 4096  # integers


cdef struct Walk:
    Py_ssize_t at, depth
    Py_ssize_t key_start, key_end  # the newest key of the body
    Py_ssize_t index  # index of the current value in the list under this key
    bint in_list  # the value under this key is a list


cdef struct Found:
    Py_ssize_t first_end  # just after the list's first integer
    Py_ssize_t end  # the closing bracket
    Py_ssize_t count  # number of integers
    Py_ssize_t index  # index of the list in the list under the key; -1: directly under the key


cdef inline Py_ssize_t skip_space(const uint8_t* p, Py_ssize_t at, Py_ssize_t n) noexcept nogil:
    while at < n and (p[at] == 32 or p[at] == 10 or p[at] == 13 or p[at] == 9):
        at += 1
    return at


cdef inline Py_ssize_t skip_text(const uint8_t* p, Py_ssize_t at, Py_ssize_t n) noexcept nogil:
    """Skip from just after the opening quote to just after the closing quote, or n."""
    while at < n and p[at] != 34:
        at += 2 if p[at] == 92 else 1
    return min(at + 1, n)


cdef inline Py_ssize_t skip_integer(const uint8_t* p, Py_ssize_t at, Py_ssize_t n) noexcept nogil:
    """Return the place just after a JSON integer; -1: there is none, or it is too long."""
    cdef Py_ssize_t start
    if at < n and p[at] == 45:
        at += 1
    start = at
    while at < n and 48 <= p[at] <= 57:
        at += 1
    if at == start or at - start > MAX_DIGITS or (p[start] == 48 and at - start > 1):
        return -1
    return at


cdef bint read_list(const uint8_t* p, Py_ssize_t at, Py_ssize_t n, Found* found) noexcept nogil:
    """Whether a list of only integers begins after the bracket before `at`."""
    found.count = 0
    while True:
        at = skip_integer(p, skip_space(p, at, n), n)
        if at < 0:
            return False
        found.count += 1
        if found.count == 1:
            found.first_end = at
        at = skip_space(p, at, n)
        if at < n and p[at] == 44:
            at += 1
        elif at < n and p[at] == 93:
            found.end = at
            return True
        else:
            return False


cdef bint next_list(const uint8_t* p, Py_ssize_t n, Walk* walk, Found* found) noexcept nogil:
    """Find the next list of integers directly under a key or in a list there; False: there is none."""
    cdef Py_ssize_t text_start, behind
    while walk.at < n:
        if p[walk.at] == 34:
            text_start = walk.at + 1
            walk.at = skip_text(p, text_start, n)
            behind = skip_space(p, walk.at, n)
            if walk.depth == 1 and behind < n and p[behind] == 58:  # a colon: the text is a key
                walk.key_start, walk.key_end = text_start, walk.at - 1
            continue
        if p[walk.at] == 44 and walk.depth == 2:
            walk.index += 1
        elif p[walk.at] == 123 or p[walk.at] == 91:
            walk.depth += 1
            if p[walk.at] == 91 and walk.key_end and (walk.depth == 2 or (walk.depth == 3 and walk.in_list)):
                if read_list(p, walk.at + 1, n, found):
                    found.index = walk.index if walk.depth == 3 else -1
                    walk.at = found.end + 1
                    walk.depth -= 1
                    return True
            if walk.depth == 2:
                walk.index = 0
                walk.in_list = p[walk.at] == 91
        elif p[walk.at] == 125 or p[walk.at] == 93:
            walk.depth -= 1
        walk.at += 1
    return False


def find(const uint8_t[::1] data not None, Py_ssize_t least):
    """Return [(key, index, start, end)]: bytes start to end hold the integers after the first, with commas.

    `index` is the list's index in the list under the key; -1: the list is directly under the key. Lists with fewer
    than `least` integers are omitted. The body may be malformed: results are valid only if a decoder accepts the rest.
    """
    cdef Py_ssize_t n = data.shape[0]
    cdef Walk walk = Walk(0, 0, 0, 0, 0, False)
    cdef Found found = Found(0, 0, 0, 0)
    cdef bint is_found = n > 0
    lists = []
    while is_found:
        with nogil:
            is_found = next_list(&data[0], n, &walk, &found)
            while is_found and found.count < least:
                is_found = next_list(&data[0], n, &walk, &found)
        if is_found:
            lists.append((bytes(data[walk.key_start:walk.key_end]), found.index, found.first_end, found.end))
    return lists


cdef Py_ssize_t read_integers(const uint8_t* p, Py_ssize_t* at, Py_ssize_t end, int64_t* into) noexcept nogil:
    """Read up to PIECE integers from at[0] on, move at[0] to the next integer, and return the count."""
    cdef Py_ssize_t count = 0, here = at[0]
    cdef int64_t value
    cdef bint negative
    while here < end and count < PIECE:
        value = 0
        negative = False
        while here < end and not 48 <= p[here] <= 57:
            negative = p[here] == 45
            here += 1
        while here < end and 48 <= p[here] <= 57:
            value = 10 * value + p[here] - 48
            here += 1
        into[count] = -value if negative else value
        count += 1
        while here < end and p[here] != 44:
            here += 1
    at[0] = here
    return count


def read(const uint8_t[::1] data not None, Py_ssize_t start, Py_ssize_t end):
    """Return (the first integers between `start` and `end` from find(), the place of the next integer).

    The result is a piece of a long list: creating it takes 0.1 ms under the GIL.
    """
    cdef int64_t piece[PIECE]
    cdef Py_ssize_t at = start, count = 0
    if not 0 <= start < end <= data.shape[0]:
        raise ValueError(f"bytes {start} to {end}: the body has {data.shape[0]}")
    with nogil:
        count = read_integers(&data[0], &at, end, piece)
    return [piece[i] for i in range(count)], at
