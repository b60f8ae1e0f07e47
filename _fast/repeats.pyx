"""Repeats: how far the end of a text repeats at each distance, for DRY (engine/sampling/dry.py).

Owner: none, a pure function; the device thread calls it when a request is admitted. In: the last tokens of a prompt.
Out: for each distance d the number of the last tokens that equal the tokens d places before them:

    tokens  a b c a b        lengths[3] = 2 (a b), all other lengths are 0

One pass over the reversed text (the Z-function, Gusfield 1997), so no pattern takes longer than linear time.
"""

from libc.stdint cimport int32_t


def repeats(const int32_t[::1] tokens not None, int32_t[::1] lengths not None):
    """Write lengths[d] for 0 < d < len(tokens), and 0 to lengths[0]; both int32, of equal length."""
    if tokens.shape[0] != lengths.shape[0]:
        raise ValueError(f"{lengths.shape[0]} lengths for {tokens.shape[0]} tokens; need as many")
    with nogil:
        fill(tokens, lengths)


cdef void fill(const int32_t[::1] tokens, int32_t[::1] lengths) noexcept nogil:
    cdef Py_ssize_t n = tokens.shape[0], last = n - 1, d, length
    cdef Py_ssize_t left = 0, right = 0  # the match that reaches farthest: reversed places left .. right - 1
    if n == 0:
        return
    lengths[0] = 0
    for d in range(1, n):
        length = min(right - d, <Py_ssize_t>lengths[d - left]) if d < right else 0
        while d + length < n and tokens[last - length] == tokens[last - d - length]:
            length += 1
        if d + length > right:
            left, right = d, d + length
        lengths[d] = <int32_t>length
