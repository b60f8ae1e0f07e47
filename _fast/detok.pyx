"""Incremental detokenizing: converts token ids to text that may be emitted, and matches stop strings.

Owner: TokenTable and StopSet never change and may be shared; a Detokenizer belongs to the loop, one per choice.
In: token ids (lists). Out: str, never cut inside a character or inside a possible beginning of a stop string.

    ids -> bytes of the table -> UTF-8 machine (whole characters only) -> buffered text -> emitted
                                 incomplete bytes wait in the carry       while a stop string may still be completed

Each byte is processed once (stop strings form one Aho-Corasick automaton), so the cost is linear in the output.
"""

cimport cython
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memchr, memcmp, memmove

cdef enum:
    MOST_HELD = 64  # bytes of a text in TokenTable.mark_holding


@cython.final
cdef class TokenTable:
    """Bytes of every token id: one blob, offsets, and a flag for special tokens. each_byte: an invalid UTF-8
    sequence becomes one U+FFFD per byte (byte-fallback decoders) instead of one in total."""

    def __init__(self, bytes blob, offsets, bytes special, bint each_byte=False):
        cdef Py_ssize_t k
        self._offsets = offsets
        self._blob = blob
        self._special = special
        if self._offsets.shape[0] < 1 or self._offsets.shape[0] - 1 != len(special):
            count = self._offsets.shape[0]
            raise ValueError(f"{count} offsets for {len(special)} tokens; one more than tokens is needed")
        if self._offsets[0] != 0 or self._offsets[self._offsets.shape[0] - 1] != len(blob):
            raise ValueError("offsets must run from 0 to the length of the blob")
        for k in range(self._offsets.shape[0] - 1):
            if self._offsets[k] > self._offsets[k + 1]:
                raise ValueError(f"offsets fall at token {k}")
        self._data = <const uint8_t*>(<char*>blob)
        self._flags = <const uint8_t*>(<char*>special)
        self.num_tokens = <int32_t>len(special)
        self.each_byte = each_byte

    def token_bytes(self, Py_ssize_t token_id):
        """Return the bytes of one token; empty for an id outside the table."""
        if token_id < 0 or token_id >= self.num_tokens:
            return b""
        return self._blob[self._offsets[token_id]:self._offsets[token_id + 1]]

    def is_special(self, Py_ssize_t token_id):
        """Whether `skip_special` omits this token."""
        return 0 <= token_id < self.num_tokens and self._flags[token_id] != 0

    def mark_holding(self, bytes text not None, uint8_t[::1] bits not None):
        """Set the bit of every token whose bytes contain `text`: token t is bit t % 8 of bits[t // 8]. Ids beyond the
        bits are left out. The time is linear in the table for every text."""
        cdef Py_ssize_t count = min(<Py_ssize_t>self.num_tokens, 8 * bits.shape[0])
        cdef Py_ssize_t size = len(text), at, token = 0, end
        cdef const uint8_t* wanted = <const uint8_t*>(<char*>text)
        cdef const uint8_t* found
        if not 1 <= size <= MOST_HELD:
            raise ValueError(f"a text of {size} bytes; need 1 to {MOST_HELD}")
        with nogil:
            at, end = 0, self._offsets[count]
            while at + size <= end:
                found = <const uint8_t*>memchr(self._data + at, wanted[0], end - size + 1 - at)
                if found == NULL:
                    break
                at = found - self._data
                while self._offsets[token + 1] <= at:
                    token += 1
                if at + size <= self._offsets[token + 1] and memcmp(found, wanted, size) == 0:
                    bits[token >> 3] |= <uint8_t>(1 << (token & 7))
                    at = self._offsets[token + 1]
                else:
                    at += 1

    def join(self, token_ids, bint skip_special=False):
        """Return the concatenated bytes of several tokens."""
        cdef list parts = []
        cdef Py_ssize_t k
        for k in token_ids:
            if not 0 <= k < self.num_tokens or (skip_special and self._flags[k]):
                continue
            parts.append(self._blob[self._offsets[k]:self._offsets[k + 1]])
        return b"".join(parts)


@cython.final
cdef class StopSet:
    """Up to a few dozen byte strings as one automaton. If several end at the same byte, the first in the list wins."""

    def __cinit__(self):
        self._num_nodes = 0

    def __init__(self, stops):
        cdef bytes stop
        cdef Py_ssize_t total = 1
        cdef int32_t index
        if self._num_nodes:
            raise ValueError("a StopSet is built once")
        self.stops = tuple(stops)
        for stop in self.stops:
            if not stop:
                raise ValueError("an empty stop string matches everywhere")
            total += len(stop)
        if total > 1 << 24:
            raise ValueError(f"{total} bytes of stop strings are too many")
        self._child = <int32_t*>calloc(total, sizeof(int32_t))
        self._sibling = <int32_t*>calloc(total, sizeof(int32_t))
        self._fail = <int32_t*>calloc(total, sizeof(int32_t))
        self._depth = <int32_t*>calloc(total, sizeof(int32_t))
        self._match = <int32_t*>calloc(total, sizeof(int32_t))
        self._size = <int32_t*>calloc(len(self.stops) + 1, sizeof(int32_t))
        self._label = <uint8_t*>calloc(total, sizeof(uint8_t))
        if not (self._child and self._sibling and self._fail and self._depth and self._match and self._size
                and self._label):
            raise MemoryError
        for index in range(256):
            self._root[index] = 0
        self._num_nodes = 1
        self._match[0] = -1
        for index, stop in enumerate(self.stops):
            self._size[index] = <int32_t>len(stop)
            self._insert(stop, index)
        self._link()

    def __dealloc__(self):
        free(self._child)
        free(self._sibling)
        free(self._fail)
        free(self._depth)
        free(self._match)
        free(self._size)
        free(self._label)

    def _insert(self, bytes stop, int32_t index):
        cdef int32_t node = 0, found
        cdef uint8_t byte
        for byte in stop:
            found = self._find(node, byte)
            if not found:
                found = self._num_nodes
                self._num_nodes += 1
                self._label[found] = byte
                self._depth[found] = self._depth[node] + 1
                self._match[found] = -1
                self._sibling[found] = self._child[node]
                self._child[node] = found
                if node == 0:
                    self._root[byte] = found
            node = found
        if self._match[node] < 0:
            self._match[node] = index

    def _link(self):
        # Breadth first: a node's longest proper suffix is shorter, so its own links are already final.
        cdef list level = [0], below
        cdef int32_t node, child, fall
        while level:
            below = []
            for node in level:
                child = self._child[node]
                while child:
                    fall = 0 if node == 0 else self._step(self._fail[node], self._label[child])
                    self._fail[child] = fall
                    if self._match[fall] >= 0 and (self._match[child] < 0 or self._match[fall] < self._match[child]):
                        self._match[child] = self._match[fall]
                    below.append(child)
                    child = self._sibling[child]
            level = below

    cdef int32_t _find(self, int32_t node, uint8_t byte) noexcept nogil:
        cdef int32_t child
        if node == 0:
            return self._root[byte]
        child = self._child[node]
        while child and self._label[child] != byte:
            child = self._sibling[child]
        return child

    cdef int32_t _step(self, int32_t node, uint8_t byte) noexcept nogil:
        cdef int32_t child = self._find(node, byte)
        while node and not child:
            node = self._fail[node]
            child = self._find(node, byte)
        return child


@cython.final
cdef class Detokenizer:
    """Builds the text of one choice as its tokens arrive.

    `matched` is the index of the stop string that ended the text, or -1. `num_tokens` counts tokens up to and including
    the token that completed the stop string. Stop strings completed within the first `min_tokens` tokens do not count.
    `strip` leading spaces are dropped. `first` returns the bytes of the first visible token if the decoder handles that
    token differently.
    """

    def __cinit__(self, TokenTable table not None, StopSet stops=None, bint include_stop=False, bint skip_special=True,
                  Py_ssize_t min_tokens=0, int32_t strip=0, first=None):
        self._table = table
        self._stops = stops
        self._include_stop = include_stop
        self._skip_special = skip_special
        self.min_tokens = min_tokens
        self._strip = strip
        self._first = first
        self.matched = -1

    def __dealloc__(self):
        free(self._text)

    def feed(self, token_ids):
        """Return new text that may be emitted. After a stop string, or `finish`, tokens are ignored."""
        cdef Py_ssize_t token_id
        cdef TokenTable table = self._table
        cdef bytes own
        cdef int code = 0
        if self._ended:
            return ""
        for token_id in token_ids:
            self.num_tokens += 1
            if token_id < 0 or token_id >= table.num_tokens or (self._skip_special and table._flags[token_id]):
                continue
            if self._first is not None:
                own = self._first(token_id)
                self._first = None
                code = self._token(<const uint8_t*>(<char*>own), len(own))
            else:
                code = self._token(table._data + table._offsets[token_id],
                                   table._offsets[token_id + 1] - table._offsets[token_id])
            if code:
                break
        if code < 0:
            raise MemoryError
        if code > 0:
            return self._close()
        return self._take(self._len - self._held())

    cdef Py_ssize_t plain(self, int32_t token_id) noexcept nogil:
        """Fast path of feed() for one token, without stop strings and `first`: return the size of the new text.

        The text is in `_text`; its reader sets `_len` to 0. -1: nothing was done, and feed() must be called.
        """
        cdef int32_t begin, end
        if self._ended:
            return -1
        if 0 <= token_id < self._table.num_tokens and not (self._skip_special and self._table._flags[token_id]):
            begin, end = self._table._offsets[token_id], self._table._offsets[token_id + 1]
            if self._token(self._table._data + begin, end - begin) < 0:
                return -1
        self.num_tokens += 1
        return self._len

    def skip(self, Py_ssize_t count):
        """Count tokens without visible text (an end token)."""
        if not self._ended:
            self.num_tokens += count

    def pause(self):
        """Match no stop strings from here on; return the text that was held back for one."""
        self._stops = None
        self._node = 0
        return self._take(self._len)

    def resume(self, str text, StopSet stops not None):
        """Match stop strings, first in `text`, which has been returned before; return what may be emitted of it.

        Bytes of a character that is still incomplete come after `text`. After `finish`, nothing is held back.
        """
        cdef bytes data = text.encode()
        cdef uint8_t byte
        self._stops = stops
        if self.matched >= 0:
            return ""
        if self._reserve(len(data) + 16) < 0:
            raise MemoryError
        for byte in data:
            if self._emit(byte):
                return self._close()
        return self._take(self._len - self._held())

    cdef Py_ssize_t _held(self) noexcept nogil:  # bytes at the end of the text that may become a stop string
        return self._stops._depth[self._node] if self._stops is not None else 0

    def finish(self):
        """Return the rest: the held text, with U+FFFD for bytes that did not complete a character."""
        cdef bint stopped
        if self._ended:
            return ""
        if self._reserve(16) < 0:
            raise MemoryError
        stopped = self._carry.count > 0 and self._replace()
        if stopped:
            return self._close()
        self._ended = True
        return self._take(self._len)

    def _close(self):
        cdef Py_ssize_t size = self._len
        if not self._include_stop:
            size -= self._stops._size[self.matched]
        self._ended = True
        self._carry.count = 0
        return self._take(size)

    cdef str _take(self, Py_ssize_t size):
        # The text contains only whole characters, and held suffixes start at a character, so this never fails.
        cdef str text
        if size <= 0:
            return ""
        text = PyUnicode_DecodeUTF8(<char*>self._text, size, "replace")
        self._len -= size
        if self._len:
            memmove(self._text, self._text + size, self._len)
        return text

    cdef int _reserve(self, Py_ssize_t extra) noexcept nogil:
        cdef Py_ssize_t room = self._room
        cdef uint8_t* grown
        if self._len + extra <= room:
            return 0
        while room < self._len + extra:
            room = 2 * room if room else 64
        grown = <uint8_t*>realloc(self._text, room)
        if grown == NULL:
            return -1
        self._text = grown
        self._room = room
        return 0

    cdef int _token(self, const uint8_t* data, Py_ssize_t size) noexcept nogil:
        # 1: a stop string is complete; -1: out of memory. A byte adds at most 3 bytes, the carry at most 9 more.
        cdef Py_ssize_t k
        if self._reserve(3 * size + 16) < 0:
            return -1
        for k in range(size):
            if self._push(data[k]):
                return 1
        return 0

    cdef bint _push(self, uint8_t byte) noexcept nogil:
        cdef Carry* carry = &self._carry
        cdef int k
        if carry.count:
            if carry.low <= byte <= carry.high:
                carry.bytes[carry.count] = byte
                carry.count += 1
                carry.need -= 1
                carry.low = 0x80
                carry.high = 0xBF
                if carry.need:
                    return False
                k = 0
                while k < carry.count:
                    if self._emit(carry.bytes[k]):
                        return True
                    k += 1
                carry.count = 0
                return False
            if self._replace():
                return True
        if byte < 0x80:
            return self._emit(byte)
        if byte < 0xC2 or byte > 0xF4:
            carry.count = 1
            return self._replace()
        # The second byte's range excludes overlong forms, surrogates and numbers beyond U+10FFFF.
        carry.low = 0xA0 if byte == 0xE0 else 0x90 if byte == 0xF0 else 0x80
        carry.high = 0x9F if byte == 0xED else 0x8F if byte == 0xF4 else 0xBF
        carry.need = 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
        carry.bytes[0] = byte
        carry.count = 1
        return False

    cdef bint _replace(self) noexcept nogil:
        cdef int times = self._carry.count if self._table.each_byte else 1
        self._carry.count = 0
        while times:
            times -= 1
            if self._emit(0xEF) or self._emit(0xBF) or self._emit(0xBD):
                return True
        return False

    cdef bint _emit(self, uint8_t byte) noexcept nogil:
        if self._strip:
            if byte == 0x20:
                self._strip -= 1
                return False
            self._strip = 0
        self._text[self._len] = byte
        self._len += 1
        if self._stops is None:
            return False
        self._node = self._stops._step(self._node, byte)
        if self._stops._match[self._node] < 0 or self.num_tokens <= self.min_tokens:
            return False
        self.matched = self._stops._match[self._node]
        return True
