"""Lane: a fast path for a plain token from its row of a step to its client's socket; one call handles many rows.

Owner: the loop. In: the columns of a step's news, and the engine's routes. Out: chunks of HTTP/1.1 in the sockets, with
the same bytes as the slow path (Delta, Choice, frames, transport), and the number of rows that were handled.

    row -> route -> lane: text of the token -> JSON string -> frame -> chunk       for each row, then
    send send send ...                                                             without the GIL

A lane is for text between two constant pieces and for a client that reads fast enough. Everything else takes the slow
path, and so do all later tokens until the stream opens the lane again, when no earlier bytes are pending anywhere.
"""

cimport cython
from libc.stdint cimport int32_t, uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <sys/socket.h>
    #include <time.h>
    #ifndef MSG_NOSIGNAL
    #define MSG_NOSIGNAL 0 /* a system without the flag: Python makes the process ignore SIGPIPE */
    #endif
    #define omniloop_send(fd, data, size) send(fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
    static double omniloop_clock(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec + now.tv_nsec * 1e-9;
    }
    """
    ssize_t send "omniloop_send"(int fd, const void* data, size_t size) noexcept nogil
    double clock "omniloop_clock"() noexcept nogil

cdef enum:
    MOST = 64  # rows per call: some hundred microseconds


cdef struct Piece:
    const uint8_t* data
    Py_ssize_t size
    Py_ssize_t sent
    int fd

cdef const char* HEX = b"0123456789abcdef"
cdef uint8_t[32] SHORT  # by control character: the letter after the backslash; 0: written as \u00..
SHORT[8], SHORT[9], SHORT[10], SHORT[12], SHORT[13] = b"btnfr"


@cython.final
cdef class Lane:
    """The lane of one streamed choice. `open`: all earlier bytes have left the transport; set by EventStream.

    `last_at` is when the newest token came, `written_at` when bytes were last sent, in seconds of time.monotonic().
    `failed` is called with the error if the transport raises.
    """

    def __cinit__(self, Detokenizer machine not None, Histogram gaps not None, bytes before not None,
                  bytes behind not None, transport, int fd, failed, double last_at):
        if machine._stops is not None or machine._first is not None:
            raise ValueError("a lane's text ends by the engine's word only, and has no first token apart")
        self._machine = machine
        self._gaps = gaps
        self._before = before + b'"'
        self._behind = b'"' + behind + b"\r\n"
        self._begin.data, self._begin.size = self._before, len(self._before)
        self._end.data, self._end.size = self._behind, len(self._behind)
        self._transport = transport
        self._is_closing = transport.is_closing
        self._waiting = transport.get_write_buffer_size
        self._failed = failed
        self._fd = fd
        self.last_at = last_at

    def __dealloc__(self):
        free(self._frames.data)

    def close(self):
        """Stop writing, because the answer has ended or takes the slow path, and drop all references."""
        self.open = False
        self._transport = self._is_closing = self._waiting = self._failed = None

    cdef bint take(self, int32_t token):
        """Append the token's chunk for `send`; False: nothing was done, and the token takes the slow path."""
        cdef double now
        cdef Py_ssize_t size
        if not self.open:
            return False
        size = self.frame(token) if self.ready() else -1
        if size < 0:
            self.open = False
            return False
        now = clock()
        self._gaps.add(now - self.last_at)
        self.last_at = now
        if size:
            self.written_at = now
        return True

    cdef bint ready(self):
        """Whether the file descriptor may be written to.

        The transport owns the descriptor and closes it only after it has begun to close; nothing else runs on the loop
        between this check and the send in the same call. An empty buffer means that no earlier bytes are pending:
        uvicorn buffers nothing itself, and the transport's buffer includes bytes that the kernel refused (uv_write).
        """
        if self._transport is None:
            return False
        try:
            return not self._is_closing() and self._waiting() == 0
        except Exception:  # the slow path meets any such error again and reports it
            return False

    cdef Py_ssize_t frame(self, int32_t token) noexcept nogil:
        """Append the chunk and return its size; 0: the token completes no character; -1: nothing was done."""
        cdef const uint8_t* text
        cdef Py_ssize_t length = self._machine.plain(token)
        cdef Py_ssize_t body, room, begun = self._frames.size
        cdef int shift = 0
        cdef uint8_t* grown
        if length <= 0:
            return length
        room = begun + self._begin.size + 6 * length + self._end.size + 24
        if room > self._frames.room:
            grown = <uint8_t*>realloc(self._frames.data, room + 64)
            if grown == NULL:
                return 0  # the text stays in the detokenizer and is sent with the next token
            self._frames.data = grown
            self._frames.room = room + 64
        text = self._machine._text
        body = self._begin.size + escaped_len(text, length) + self._end.size - 2
        while body >> (shift + 4):
            shift += 4
        while shift >= 0:
            self._frames.data[self._frames.size] = HEX[(body >> shift) & 15]
            self._frames.size += 1
            shift -= 4
        self.append(<const uint8_t*>b"\r\n", 2)
        self.append(self._begin.data, self._begin.size)
        self.append_escaped(text, length)
        self.append(self._end.data, self._end.size)
        self._machine._len = 0
        return self._frames.size - begun

    cdef void append(self, const uint8_t* data, Py_ssize_t size) noexcept nogil:
        memcpy(self._frames.data + self._frames.size, data, size)
        self._frames.size += size

    cdef void append_escaped(self, const uint8_t* text, Py_ssize_t size) noexcept nogil:
        """Escape like orjson: only the characters that JSON requires."""
        cdef uint8_t* out = self._frames.data
        cdef Py_ssize_t at = self._frames.size
        cdef Py_ssize_t k
        cdef uint8_t byte
        for k in range(size):
            byte = text[k]
            if byte >= 32 and byte != c'"' and byte != c"\\":
                out[at] = byte
                at += 1
            elif byte >= 32 or SHORT[byte]:
                out[at] = c"\\"
                out[at + 1] = byte if byte >= 32 else SHORT[byte]
                at += 2
            else:
                memcpy(out + at, b"\\u00", 4)
                out[at + 4] = HEX[byte >> 4]
                out[at + 5] = HEX[byte & 15]
                at += 6
        self._frames.size = at

    cdef sent(self, Py_ssize_t size):
        """After `size` bytes were sent, give the rest to the transport, which meets any error again."""
        rest, failed = self._frames.data[max(size, 0):self._frames.size], self._failed
        self._frames.size = 0
        if self._transport is not None:
            try:
                self._transport.write(rest)
            except Exception as error:
                failed(error)


cdef Py_ssize_t escaped_len(const uint8_t* text, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t k, found = size
    for k in range(size):
        if text[k] < 32:
            found += 1 if SHORT[text[k]] else 5
        else:
            found += text[k] == c'"' or text[k] == c"\\"
    return found


def deliver(dict routes not None, list ids not None, list tokens not None, list finishes not None, Py_ssize_t start,
            Py_ssize_t stop):
    """Send the tokens of rows from `start` on while lanes accept them; return the first other row, or `stop`.

    The lists are parallel; token -1: none, finish 0: none. Routes: id -> (stream with an attribute `lane`, choice).
    """
    cdef list taken = []
    cdef Py_ssize_t row = start
    stop = min(stop, len(ids), start + MOST)
    while row < stop and finishes[row] == 0 and passed(routes.get(ids[row]), tokens[row], taken):
        row += 1
    if taken:
        send_all(taken)
    return row


cdef bint passed(tuple route, int32_t token, list taken) except -1:
    """Whether the row is finished, except for sending the lanes in `taken`."""
    cdef Lane lane
    cdef Py_ssize_t waiting
    if route is None or token < 0:  # no client reads the choice, or there is no token
        return True
    lane = route[0].lane
    if lane is None:
        return False
    waiting = lane._frames.size
    if not lane.take(token):
        return False
    if lane._frames.size and not waiting:  # two tokens of a choice in one step share a send
        taken.append(lane)
    return True


cdef int send_all(list taken) except -1:
    cdef Piece[MOST] pieces
    cdef Py_ssize_t count = len(taken)
    cdef Py_ssize_t at
    cdef Lane lane
    for at in range(count):
        lane = taken[at]
        pieces[at].fd = lane._fd
        pieces[at].data = lane._frames.data
        pieces[at].size = lane._frames.size
    with nogil:
        for at in range(count):
            pieces[at].sent = send(pieces[at].fd, pieces[at].data, pieces[at].size)
    for at in range(count):
        lane = taken[at]
        if pieces[at].sent == pieces[at].size:
            lane._frames.size = 0
        else:
            lane.sent(pieces[at].sent)
    return 0
