"""Verification of drafts: the leading drafts that equal the tokens chosen at their places count.

    accepted = number of leading k with token[k] == draft[k];    run = token[0] .. token[accepted]

Each place was chosen by the row's own sampling, so a run has the tokens that steps without drafts choose one by one.
What depends on the number of tokens is written here, for emitted tokens only: the slot's newest token and length, the
counts of its rules, and the estimates of how often its drafts are right (kernels/survivals). A run ends before a place
whose logits are not finite, unless this is the first place. A draft below 0 has no valid logits of its drafter; it is
never accepted, and the run's end counts it (RunEnd.INVALID). Users: engine/step/backend/device, in steps with runs.

For measurements an operator may set how many drafts count (kernels/sampling/surviving): then these stand in the run in
place of the chosen tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from _fast.layout import RunEnd, SlotWord, TokenCode
from engine.kernels.sampling.rules import RuleTables, line_of, record_reference, record_token
from engine.kernels.sampling.surviving import surviving, surviving_reference
from engine.kernels.step_tensors import SlotTensors, StepInputs, word
from engine.kernels.survivals import learn, learn_reference
from engine.kernels.target import tl, triton

LAST_TOKEN = tl.constexpr(int(SlotWord.LAST_TOKEN))
LENGTH = tl.constexpr(int(SlotWord.LENGTH))
PROMPT_LEN = tl.constexpr(int(SlotWord.PROMPT_LEN))
END = tl.constexpr(int(TokenCode.END))
INVALID = tl.constexpr(int(RunEnd.INVALID))


@triton.jit
def verify_kernel(
    runs,  # [max_rows, WIDTH] int32
    words,  # [slots, SLOT_WORDS] int32
    counts,  # [lines, vocab], as the next in RuleTables
    seen,
    repeats,
    breakers,
    drafts,  # [slots, NUM] int32
    estimates,  # up to `model`: fields of Survivals
    survivals,
    right,
    tried,
    model,
    row_drafts,  # [max_rows] int32, as the next two
    row_slot,
    context_len,
    survivals_set,  # [NUM] float32, or None
    vocab,
    NUM: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= WIDTH
    HISTORY: tl.constexpr,
):
    """A program handles one row; a row that does not sample gets an empty run."""
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    verified = tl.load(row_drafts + row)
    count, first, invalid = 0, 0, 0
    if verified >= 0:
        slot = tl.load(row_slot + row)
        token = tl.load(runs + row * WIDTH + lane, mask=lane <= verified, other=-1)
        guess = tl.load(drafts + slot * NUM + lane, mask=lane < verified, other=-1)
        invalid = tl.sum(((lane < verified) & (guess < 0)).to(tl.int32), 0)
        before = tl.load(context_len + row) - verified  # tokens before the run
        same = (token == guess) & (guess >= 0)
        if survivals_set is not None:
            number = tl.maximum(before - tl.load(word(words, slot, PROMPT_LEN)), 0)
            same = (lane < surviving(words, slot, number, survivals_set, NUM, LANES)) & (guess >= 0) & (token >= 0)
        accepted = tl.min(tl.where((lane >= verified) | ~same, lane, LANES), 0)
        if survivals_set is not None:
            token = tl.where(lane < accepted, guess, token)
            tl.store(runs + row * WIDTH + lane, token, mask=lane < accepted)
        last = tl.sum(tl.where(lane == accepted, token, 0), 0)
        count = accepted + (last >= 0).to(tl.int32)
        first = 1  # an invalid first token stays
        newest = tl.sum(tl.where(lane == count - 1, token, 0), 0)
        tl.store(word(words, slot, LAST_TOKEN), tl.maximum(newest, 0))
        begins = tl.load(word(words, slot, LENGTH)) == 0
        tl.debug_barrier()
        tl.store(word(words, slot, LENGTH), before + count)
        good = tl.minimum(accepted, verified)
        learn(estimates, survivals, right, tried, model, slot, verified, good, begins, NUM, LANES)
        rules = line_of(words, slot)
        if rules >= 0:
            for k in range(count):
                emitted = tl.sum(tl.where(lane == k, token, 0), 0)
                place = tl.maximum(before - tl.load(word(words, slot, PROMPT_LEN)) + k, 0)
                record_token(emitted, vocab, words, slot, rules, place, counts, seen, repeats, breakers, HISTORY)
    tl.store(
        runs + row * WIDTH + lane,
        tl.zeros([LANES], tl.int32) + END - INVALID * invalid,
        mask=(lane < WIDTH) & (lane >= tl.maximum(count, first)),
    )


def verify(
    runs: Tensor, slots: SlotTensors, tables: RuleTables, inputs: StepInputs, survivals: Tensor | None = None
) -> None:
    """Cut runs int32 [max_rows, width] of chosen tokens to what is emitted; update the slots and the rules' counts.

    inputs: with row_drafts. survivals: float32 [K], how often drafts count whatever was chosen; None: if chosen.
    """
    run = launch_verify if runs.is_cuda else verify_reference
    run(runs, slots, tables, inputs, survivals)


def launch_verify(
    runs: Tensor, slots: SlotTensors, tables: RuleTables, inputs: StepInputs, survivals: Tensor | None = None
) -> None:
    """Launch the kernel on a grid that depends only on shapes."""
    (rows, width), state = runs.shape, slots.survivals
    assert runs.is_contiguous()
    assert inputs.row_drafts is not None
    assert len(inputs.row_drafts) == rows
    verify_kernel[(rows,)](
        runs, slots.words, tables.counts, tables.seen, tables.repeats, tables.breakers, slots.drafts, state.estimates,
        state.survivals, state.right, state.tried, state.model, inputs.row_drafts, inputs.row_slot, inputs.context_len,
        survivals, tables.counts.shape[1], NUM=slots.drafts.shape[1], WIDTH=width,
        LANES=triton.next_power_of_2(width), HISTORY=tables.history, num_warps=1,
    )  # fmt: skip


def verify_reference(
    runs: Tensor, slots: SlotTensors, tables: RuleTables, inputs: StepInputs, survivals: Tensor | None = None
) -> None:
    assert inputs.row_drafts is not None
    rows = zip(inputs.row_drafts.tolist(), inputs.row_slot.tolist(), inputs.context_len.tolist())
    outcomes = []
    for row, (verified, slot, context) in enumerate(rows):
        if verified < 0:
            runs[row] = TokenCode.END
            continue
        tokens, guesses = runs[row, : verified + 1].tolist(), slots.drafts[slot, :verified].tolist()
        same = [token == guess >= 0 for token, guess in zip(tokens, guesses)]
        if survivals is not None:
            number = torch.tensor([context - verified - int(slots.word(SlotWord.PROMPT_LEN)[slot])]).clamp(min=0)
            forced = int(surviving_reference(slots, torch.tensor([slot]), number, survivals))
            same = [k < forced and min(pair) >= 0 for k, pair in enumerate(zip(tokens, guesses))]
        accepted = next((k for k, each in enumerate(same) if not each), verified)
        tokens[:accepted] = guesses[:accepted]
        runs[row, :accepted] = torch.tensor(guesses[:accepted], dtype=torch.int32)
        count = accepted + (tokens[accepted] >= 0)
        runs[row, max(count, 1) :] = TokenCode.END - RunEnd.INVALID * sum(guess < 0 for guess in guesses)
        slots.word(SlotWord.LAST_TOKEN)[slot] = max(tokens[count - 1], 0) if count else 0
        outcomes.append((slot, verified, accepted, int(slots.word(SlotWord.LENGTH)[slot]) == 0))
        slots.word(SlotWord.LENGTH)[slot] = context - verified + count
        if int(slots.word(SlotWord.RULE_LINE)[slot]):
            first = context - verified - int(slots.word(SlotWord.PROMPT_LEN)[slot])
            for place, token in enumerate(tokens[:count], first):
                record_reference(token, tables, slots, slot, max(place, 0))
    own, drafts, right, begins = torch.tensor(outcomes, dtype=torch.int64).view(-1, 4).unbind(1)
    learn_reference(slots.survivals, own, drafts, right, begins > 0)
