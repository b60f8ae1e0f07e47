# Types and constants shared by the scheduler's modules: slots, blocks, tokens, and the host's small enums.
#
# Owner: none, this file has no state. The finish numbers equal engine.base.request.FinishReason; tests read the states.
# Constants that the device also reads are in layout.py. Block 0 is the dummy block: it is never handed out, and means
# "none" in results and arguments.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

ctypedef int32_t slot_t
ctypedef int32_t block_t
ctypedef int32_t token_t

cdef enum SlotState:
    FREE = 0
    WAITING = 1  # in the queue, new or preempted
    RUNNING = 2  # holds blocks, planned when it has tokens to compute
    FINISHING = 3  # ended, but a step in flight still includes the slot

cdef enum Finish:
    FINISH_NONE = 0
    FINISH_STOP = 1
    FINISH_STOP_TOKEN = 2
    FINISH_LENGTH = 3
    FINISH_ABORT = 4
    FINISH_ERROR = 5

cdef enum Refusal:
    NO_SLOT = -1
    NEVER_FITS = -2
    MEDIA_TOO_LARGE = -3

cdef enum Class:
    IDLE_PRIORITY = 0x7FFFFFFF  # the priority of idle rows, which yield to all others under every policy

cdef enum Limits:
    MAX_IN_FLIGHT = 2  # plans scheduled and not yet committed
