"""Lane: the short way of a plain token, from its row of a step to its client's socket; one call for many rows.

Owner: the loop. In: the columns of a step's news, and the engine's routes. Out: chunks of HTTP/1.1 in the sockets, byte
for byte what the long way (Delta, Choice, frames, transport) would have written, and how many rows were dealt with.

    row -> route -> lane: text of the token -> JSON string -> frame -> chunk       for each row, then
    send send send ...                                                             without the GIL

A lane is for text between two constant pieces and for a client that keeps up. Anything else goes the long way, and so
does what follows it, until the stream opens the lane again: then nothing is held anywhere that would be overtaken.
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
    MOST = 64  # rows of one call: some hundred microseconds


cdef struct Piece:
    const uint8_t* data
    Py_ssize_t size
    Py_ssize_t sent
    int fd

cdef const char* HEX = b"0123456789abcdef"
cdef uint8_t[32] SHORT  # what stands behind the backslash, by control character; 0: it is written \u00..
SHORT[8], SHORT[9], SHORT[10], SHORT[12], SHORT[13] = b"btnfr"


@cython.final
cdef class Lane:
    """The lane of one streamed choice. `open`: all earlier bytes have left the transport; set by EventStream.

    `last_at` is when its newest token came, `written_at` when bytes last went out, in seconds of time.monotonic().
    `failed` is called with the error of a transport that raises.
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
        """The answer has ended or gone another way: nothing is written any more. Lets go of what it holds."""
        self.open = False
        self._transport = self._is_closing = self._waiting = self._failed = None

    cdef bint take(self, int32_t token):
        """Whether the token's chunk waits for `send`; False: nothing was done, it goes the long way."""
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
        """Whether the descriptor may be written to.

        It is the transport's, who gives it back only after it has begun to close; nothing else runs on the loop between
        this question and the send in the same call. An empty buffer means that nothing would be overtaken: uvicorn has
        no bytes of its own, and the transport counts the kernel's refusals (uv_write) among those that wait.
        """
        if self._transport is None:
            return False
        try:
            return not self._is_closing() and self._waiting() == 0
        except Exception:  # whatever the error is, the long way meets it again and reports it
            return False

    cdef Py_ssize_t frame(self, int32_t token) noexcept nogil:
        """Appends the chunk and returns its size: 0 where the token completes no character, -1: nothing was done."""
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
                return 0  # the text stays in the detokenizer and is sent with the next token's
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
        """As orjson does it: only what JSON demands."""
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
        """So much has gone out; the transport carries the rest, and meets the error if there was one."""
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
    """Sends what rows from `start` on say, as long as lanes take them; the first row that goes the long way, or `stop`.

    The lists are parallel; -1 is no token, 0 no finish. Routes: id -> (stream with an attribute `lane`, choice).
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
    """Whether the row is done with, but for sending the lanes in `taken`."""
    cdef Lane lane
    cdef Py_ssize_t waiting
    if route is None or token < 0:  # no client reads the choice any more, or there is no token
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
