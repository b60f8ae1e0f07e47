"""Where each number of a step lies, and the kinds of graphs: the one list that Cython, kernels and tests read.

Owner: none, the module has no state. setup.py writes `layout.pxd` from this file: each member is a C constant named
after the first word of its class and itself (`Header.NUM_ROWS` is HEADER_NUM_ROWS). A kernel names a member as a
constant (kernels/step_tensors). A new number of a slot is one member of SlotWord: the record carries it, prep
writes it.

What the device needs of a step is one int32 record:

    header | slot | start | len | computed | flags | token ids | (to a multiple of ALIGNED) tail
    tail:   updates [num_updates][UPDATE_WORDS] | params [num_params][SLOT_WORDS] | positions [1 to AXES][num_tokens]

Of a model with states the record goes on, behind the room of the longest tail:

    states [STATE_COLUMNS][max_rows] | (to a multiple of ALIGNED) new runs [num_runs][1 + blocks of a run]
"""

from enum import IntEnum, IntFlag

ALIGNED = 16  # int32 values: a record, its tail and a slot's row begin at multiples of it, as wide loads need it
AXES = 4  # the most rows of positions that a token has


class Header(IntEnum):
    """Places in the head of a record; those without a name are 0."""

    NUM_ROWS = 0
    NUM_TOKENS = 1
    NUM_DECODE_ROWS = 2
    NUM_UPDATES = 3
    STEP_LOW = 4  # the low 31 bits of the step's number
    STEP_HIGH = 5  # and the others
    NUM_SAMPLED = 6
    NUM_PARAMS = 7  # slots whose words travel with the step
    POSITIONS_AT = 8  # where positions begin (M-RoPE's, or the last keys that tokens see); 0: there are none
    USED_LEN = 9  # only so many values of the record count
    HOME = 10  # the plan's number: which buffer on the host the step's tokens go to
    NUM_RUNS = 11  # runs of states and tails whose blocks the device does not know yet


class RowColumn(IntEnum):
    """Columns of max_rows + 1 values each, behind the header; START alone uses the last value."""

    SLOT = 0
    START = 1  # of the row's tokens in the step; behind the last row: the step's token count
    LEN = 2
    COMPUTED = 3  # tokens of the row that earlier steps compute
    FLAGS = 4


class StateColumn(IntEnum):
    """Columns of max_rows values each, of models with states; runs by id, 0 is none.

    A row's state is that of BASE_RUN behind BASE tokens, and the inputs of later tokens in TAIL_RUN, by position. The
    step writes the state behind NEW_BASE tokens to WRITE_RUN (0: it writes none), and states behind CHECKPOINT_AT
    tokens, BASE < CHECKPOINT_AT < NEW_BASE, to CHECKPOINT_RUN: CHECKPOINTS columns of each.
    """

    BASE_RUN = 0
    WRITE_RUN = 1
    TAIL_RUN = 2
    BASE = 3
    NEW_BASE = 4
    CHECKPOINT_RUN = 5
    CHECKPOINT_AT = 9


class RowFlag(IntFlag):
    """Bits of a row's flags."""

    SAMPLE = 1  # the row's last token yields a sample
    FEED = 2  # the row's first token is the slot's last sample, still on the device


class TokenCode(IntEnum):
    """What stands in a row's run of tokens where no token is."""

    INVALID = -1  # the row's logits are not finite
    OUTSIDE = -2  # one of the slot's token ids was not a row of the embedding
    END = -3  # the run ends before this place; at the first place: the row yields no token


class UpdateWord(IntEnum):
    """A change of a block table."""

    SLOT = 0
    INDEX = 1
    BLOCK = 2
    GROUP = 3


class SlotWord(IntEnum):
    """What the device keeps of a slot, int32 or the bits of a float32. The host sends a slot's row once, as a whole."""

    SLOT = 0  # the slot's own number
    PROMPT_LEN = 1
    POSITION_DELTA = 2  # position of token i is i + delta (M-RoPE: beyond the prompt)
    TEMPERATURE = 3  # float; 0 is greedy
    TOP_K = 4
    TOP_P = 5  # float
    SEED_LOW = 6  # the seed's int64 begins at an even place
    SEED_HIGH = 7
    MIN_P = 8  # float
    RULE_LINE = 9  # 1 + the slot's line of the tables of rules (kernels/sampling/rules); 0: the slot has no rules
    RULE_KINDS = 10  # bits: which of the tables count
    NUM_EDITS = 11  # of the line's list
    TOP_LOGPROBS = 12  # 1 + how many of the most likely tokens are reported; 0: no log-probabilities
    PRESENCE = 13  # float, as are the next two
    FREQUENCY = 14
    REPETITION = 15
    # The device's own; 0 when the slot's row arrives.
    LAST_TOKEN = 16  # the newest sampled token
    OUTSIDE = 17  # 1: one of the slot's token ids was not a row of the embedding
    # The host's again.
    SECOND_START = 18  # where the second text of a pair begins among the slot's tokens; 0: there is one text
    POOL_START = 19  # the first of the slot's tokens that counts in its pooled row
    ADAPTER = 20  # the number of the adapter with which the slot's tokens are computed; 0: none


class GraphKind(IntEnum):
    """What a recorded graph runs; Launcher holds graphs by kind, variant and size."""

    DECODE = 0  # the forward of rows with one token each; its size counts tokens, as does MIXED's
    MIXED = 1  # the forward of any rows
    SAMPLE = 2  # the choice of tokens; its size counts sampled rows
    STEP = 3  # prep, DECODE and SAMPLE of rows that all sample
    PREP = 4  # record to inputs; of size 1


def padded(count: int) -> int:
    """The next multiple of ALIGNED."""
    return -(-count // ALIGNED) * ALIGNED


CHECKPOINTS = 4  # states that a row's step writes in passing, at most
STATE_COLUMNS = StateColumn.CHECKPOINT_AT + CHECKPOINTS
HEADER_LEN = padded(len(Header))
UPDATE_WORDS = len(UpdateWord)
SLOT_WORDS = padded(len(SlotWord))  # int32 values of a slot's row


def column_at(column: RowColumn, max_rows: int) -> int:
    """Where a column of a record begins."""
    return HEADER_LEN + column * (max_rows + 1)


def tokens_at(max_rows: int) -> int:
    """Where the token ids of a record begin."""
    return HEADER_LEN + len(RowColumn) * (max_rows + 1)


def tail_at(max_rows: int, max_tokens: int) -> int:
    """Where the updates of a record begin."""
    return padded(tokens_at(max_rows) + max_tokens)


def record_len(max_rows: int, max_tokens: int, max_updates: int, run_width: int = 0) -> int:
    """How many int32 values the record of a plan of these sizes takes; `run_width`: blocks of the longest run."""
    if run_width:
        return runs_at(max_rows, max_tokens, max_updates) + padded(new_runs(max_rows) * (1 + run_width))
    tail = UPDATE_WORDS * max_updates + SLOT_WORDS * max_rows + AXES * max_tokens
    return tail_at(max_rows, max_tokens) + padded(tail)


def states_at(max_rows: int, max_tokens: int, max_updates: int) -> int:
    """Where the columns of states begin."""
    return record_len(max_rows, max_tokens, max_updates)


def runs_at(max_rows: int, max_tokens: int, max_updates: int) -> int:
    """Where the new runs begin."""
    return states_at(max_rows, max_tokens, max_updates) + padded(STATE_COLUMNS * max_rows)


def new_runs(max_rows: int) -> int:
    """New runs that a step takes at most: a state and a tail of each row, and some checkpoints."""
    return 2 * max_rows + 8


def declarations() -> str:
    """The text of layout.pxd."""
    lines = ["# Written by setup.py from layout.py, which says what these are.", ""]
    for kind in (Header, RowColumn, StateColumn, RowFlag, TokenCode, UpdateWord, SlotWord, GraphKind):
        first = "".join(letter if letter.islower() or not k else " " for k, letter in enumerate(kind.__name__))
        prefix = first.split()[0].upper()
        lines += [f"cdef enum:  # {kind.__name__}", *(f"    {prefix}_{one.name} = {one.value}" for one in kind), ""]
    lines += ["cdef enum:", f"    ALIGNED = {ALIGNED}", f"    HEADER_LEN = {HEADER_LEN}"]
    lines += [f"    CHECKPOINTS = {CHECKPOINTS}", f"    STATE_COLUMNS = {STATE_COLUMNS}"]
    lines += [f"    UPDATE_WORDS = {UPDATE_WORDS}", f"    SLOT_WORDS = {SLOT_WORDS}"]
    lines += [f"    NUM_GRAPH_KINDS = {len(GraphKind)}", ""]
    return "\n".join(lines)
