"""Layout of a step's record and of a slot's row, and kinds of graphs: the one definition for Cython, kernels and tests.

Owner: none, the module has no state. setup.py writes `layout.pxd` from this file: each member becomes a C constant,
named after the first word of its class and the member (`Header.NUM_ROWS` is HEADER_NUM_ROWS). A kernel uses a member as
a constant (kernels/step_tensors). To add a number to slots, add a member of SlotWord: the record contains it, and prep
writes it.

All data of a step for the device are in one int32 record:

    header | slot | start | len | computed | flags | token ids | (to a multiple of ALIGNED) tail
    tail:   updates [num_updates][UPDATE_WORDS] | params [num_params][SLOT_WORDS] | positions [1 to AXES][num_tokens]

For a model with states the record continues after the room for the longest tail:

    states [STATE_COLUMNS][max_rows] | (to a multiple of ALIGNED) new runs [num_runs][1 + blocks of a run]
"""

from enum import IntEnum, IntFlag

ALIGNED = 16  # int32 values: a record, its tail and a slot's row begin at multiples of this, for wide loads
AXES = 4  # most positions per token


class Header(IntEnum):
    """Places in the header of a record; places without a name are 0."""

    NUM_ROWS = 0
    NUM_TOKENS = 1
    NUM_DECODE_ROWS = 2
    NUM_UPDATES = 3
    STEP_LOW = 4  # the low 31 bits of the step's number
    STEP_HIGH = 5  # the other bits
    NUM_SAMPLED = 6
    NUM_PARAMS = 7  # slots whose words are sent with the step
    POSITIONS_AT = 8  # start of the positions (M-RoPE's, or each token's last visible key); 0: there are none
    USED_LEN = 9  # number of values of the record that are used
    HOME = 10  # the plan's number, and the number of the host buffer for the step's tokens
    NUM_RUNS = 11  # runs of states and tails whose blocks are sent with this record
    RESTING = 12  # 1: no row has drafts, and the drafter is left out
    VARIANT = 13  # of the graphs that the whole step needs


class RowColumn(IntEnum):
    """Columns of max_rows + 1 values each, after the header; only START uses the last value."""

    SLOT = 0
    START = 1  # start of the row's tokens in the step; after the last row: the step's token count
    LEN = 2
    COMPUTED = 3  # tokens of the row that earlier steps compute
    FLAGS = 4


class StateColumn(IntEnum):
    """Columns of max_rows values each, for models with states; runs are given by id, 0 is none.

    A row's state consists of the state after BASE tokens in BASE_RUN and the inputs of later tokens in TAIL_RUN, by
    position. The step writes the state after NEW_BASE tokens to WRITE_RUN (0: it writes none), and states after
    CHECKPOINT_AT tokens, BASE < CHECKPOINT_AT < NEW_BASE, to CHECKPOINT_RUN; both have CHECKPOINTS columns.
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
    # The row begins at the slot's newest token, which the device has: COMPUTED is only a minimum. The tokens after it
    # are the slot's drafts, at most LEN - 1; how many they are the device knows.
    FEED = 2
    EXACT = 4  # COMPUTED of a row with FEED is exact: no step in flight verifies drafts for it


class TokenCode(IntEnum):
    """Values in a row's run of tokens at places without a token."""

    INVALID = -1  # the row's logits are not finite
    OUTSIDE = -2  # one of the slot's token ids was outside of the embedding
    # The run ends before this place; at the first place: the row yields no token. END - n - RunEnd.VERIFIED * v -
    # RunEnd.INVALID * d: the device has n drafts for the tokens after the run, this step has verified v, and for d of
    # these the drafter's logits were invalid.
    END = -3


class RunEnd(IntEnum):
    """Units of the number that ends a run; a row has less than 128 drafts."""

    VERIFIED = 1 << 7
    INVALID = 1 << 14


class Acceptance(IntEnum):
    """Numbers of the estimates of how often a draft is right if all drafts before it are (engine/kernels/survivals)."""

    ONE = 1 << 15  # an estimate of 1
    LEAST = 1 << 9  # the least estimate
    WEIGHT = 4  # a new outcome changes a row's estimate by the 2 ** WEIGHT-th part of the difference
    HOPE = 6  # all drafts were right: the same part for the place behind them
    FIRST_RIGHT = 12  # right drafts per place with which a server begins
    FIRST_TRIED = 16  # verified drafts
    MANY = 4096  # verified drafts of a place after which both counts are halved


class UpdateWord(IntEnum):
    """A change of a block table."""

    SLOT = 0
    INDEX = 1
    BLOCK = 2
    GROUP = 3


class SlotWord(IntEnum):
    """The device's data of a slot, int32 or the bits of a float32. The host sends a slot's row once, as a whole."""

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
    RULE_KINDS = 10  # bits: which tables are used
    NUM_EDITS = 11  # edits in the line's list
    TOP_LOGPROBS = 12  # 1 + how many of the most likely tokens are reported; 0: no log-probabilities
    PRESENCE = 13  # float, as are the next two
    FREQUENCY = 14
    REPETITION = 15
    # Written by the device; 0 when the slot's row arrives.
    LAST_TOKEN = 16  # the newest sampled token
    OUTSIDE = 17  # 1: one of the slot's token ids was outside of the embedding
    # Written by the host.
    SECOND_START = 18  # where the second text of a pair begins among the slot's tokens; 0: there is one text
    POOL_START = 19  # the first of the slot's tokens that counts in its pooled row
    ADAPTER = 20  # the number of the adapter with which the slot's tokens are computed; 0: none
    LAST_PLACE = 28  # most tokens of prompt and answer that steps compute: later places have no block
    # Written by the device for servers with drafts. The places before are for further words of samplers.
    LENGTH = 29  # tokens of the slot, its newest included
    NUM_DRAFTS = 30  # drafts that follow the newest token


class SamplerWord(IntEnum):
    """More of a slot's row: the numbers of samplers that few requests use."""

    TOP_N_SIGMA = 21  # float; 0: off
    XTC_PROBABILITY = 22  # float, as is the next; 0: off
    XTC_THRESHOLD = 23
    DRY_MULTIPLIER = 24  # float, as is the next
    DRY_BASE = 25
    DRY_ALLOWED = 26  # tokens of a repetition without penalty
    DRY_WINDOW = 27  # last tokens of the text in which repetitions are found


class GraphKind(IntEnum):
    """Contents of a recorded graph; Launcher holds graphs by kind, variant and size."""

    DECODE = 0  # the forward of rows with one token each; the size counts tokens, as for MIXED
    MIXED = 1  # the forward of any rows
    SAMPLE = 2  # the choice of tokens; the size counts sampled rows
    STEP = 3  # prep, DECODE and SAMPLE, if all rows sample
    PREP = 4  # record to inputs; size 1
    DRAFT = 5  # the first pass of a drafter, between prep and forward; the size counts rows with drafts
    FURTHER = 6  # a further pass over the same rows


def padded(count: int) -> int:
    """Round up to a multiple of ALIGNED."""
    return -(-count // ALIGNED) * ALIGNED


KINDS = (
    Header,
    RowColumn,
    StateColumn,
    RowFlag,
    TokenCode,
    RunEnd,
    Acceptance,
    UpdateWord,
    SlotWord,
    SamplerWord,
    GraphKind,
)
CHECKPOINTS = 4  # most intermediate states that a step writes for a row
STATE_COLUMNS = StateColumn.CHECKPOINT_AT + CHECKPOINTS
HEADER_LEN = padded(len(Header))
UPDATE_WORDS = len(UpdateWord)
SLOT_WORDS = padded(len(SlotWord) + len(SamplerWord))  # int32 values of a slot's row


def column_at(column: RowColumn, max_rows: int) -> int:
    """Return the start of a column in a record."""
    return HEADER_LEN + column * (max_rows + 1)


def tokens_at(max_rows: int) -> int:
    """Return the start of the token ids in a record."""
    return HEADER_LEN + len(RowColumn) * (max_rows + 1)


def tail_at(max_rows: int, max_tokens: int) -> int:
    """Return the start of the updates in a record."""
    return padded(tokens_at(max_rows) + max_tokens)


def record_len(max_rows: int, max_tokens: int, max_updates: int, run_width: int = 0) -> int:
    """Return the int32 length of the record of a plan of these sizes; run_width: blocks of the longest run."""
    if run_width:
        return runs_at(max_rows, max_tokens, max_updates) + padded(new_runs(max_rows) * (1 + run_width))
    tail = UPDATE_WORDS * max_updates + SLOT_WORDS * max_rows + AXES * max_tokens
    return tail_at(max_rows, max_tokens) + padded(tail)


def states_at(max_rows: int, max_tokens: int, max_updates: int) -> int:
    """Return the start of the columns of states."""
    return record_len(max_rows, max_tokens, max_updates)


def runs_at(max_rows: int, max_tokens: int, max_updates: int) -> int:
    """Return the start of the new runs."""
    return states_at(max_rows, max_tokens, max_updates) + padded(STATE_COLUMNS * max_rows)


def new_runs(max_rows: int) -> int:
    """Return the most new runs of a step: a state and a tail for each row, and some checkpoints."""
    return 2 * max_rows + 8


def declarations() -> str:
    """Return the text of layout.pxd."""
    lines = ["# Written by setup.py from layout.py, which says what these are.", ""]
    for kind in KINDS:
        first = "".join(letter if letter.islower() or not k else " " for k, letter in enumerate(kind.__name__))
        prefix = first.split()[0].upper()
        lines += [f"cdef enum:  # {kind.__name__}", *(f"    {prefix}_{one.name} = {one.value}" for one in kind), ""]
    lines += ["cdef enum:", f"    ALIGNED = {ALIGNED}", f"    HEADER_LEN = {HEADER_LEN}"]
    lines += [f"    CHECKPOINTS = {CHECKPOINTS}", f"    STATE_COLUMNS = {STATE_COLUMNS}"]
    lines += [f"    UPDATE_WORDS = {UPDATE_WORDS}", f"    SLOT_WORDS = {SLOT_WORDS}"]
    lines += [f"    NUM_GRAPH_KINDS = {len(GraphKind)}", ""]
    return "\n".join(lines)
