"""Drafts in the interpreter: their verification, the rules at their places, and what follows an n-gram, against the
references."""

import copy
import random
from dataclasses import fields

import pytest
import torch
import triton  # noqa: F401  (must precede the import of any kernel file; TRITON_INTERPRET sets the mode)

from _fast.layout import Header, RowColumn, RowFlag, RunEnd, SlotWord, column_at, tail_at
from engine.kernels.deal_drafts import launch_deal_drafts
from engine.kernels.sampling import ngram, suffix
from engine.kernels.sampling.append import append_reference, launch_append
from engine.kernels.sampling.bits import unpack
from engine.kernels.sampling.choose import choose_reference, choose_room, launch_choose
from engine.kernels.sampling.ngram import launch_ngram, ngram_reference
from engine.kernels.sampling.replay import launch_replay, replay_reference
from engine.kernels.sampling.rules import ALLOWED, ALONG, COUNTED, SEEN, rule_tables
from engine.kernels.sampling.suffix import empty_matches, launch_suffix, suffix_reference
from engine.kernels.sampling.verify import launch_verify, verify_reference
from engine.kernels.step_tensors import empty_slots
from engine.kernels.survivals import Survivals, refresh_reference
from tests.kernels.drafts import END, chosen_runs, drawn, written_texts
from tests.kernels.sampling import KINDS, rows_of, with_rules

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|divide by zero|invalid value|All-NaN slice) encountered:RuntimeWarning"
)


@pytest.mark.parametrize("number", [1, 3, 7])
def test_the_run_is_what_its_drafts_and_the_next_token_are(number):
    runs, slots, tables, inputs = chosen_runs(40, number)
    slots.drafts[::5, number // 2] = END  # a drafter's logits were invalid
    mine, theirs = ([copy.deepcopy(each) for each in (runs, slots, tables)] for _ in range(2))
    launch_verify(*mine, inputs)
    verify_reference(*theirs, inputs)
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1].words, theirs[1].words)
    assert torch.equal(mine[2].counts, theirs[2].counts)
    assert torch.equal(mine[2].seen, theirs[2].seen)
    for field in fields(Survivals):
        assert torch.equal(getattr(mine[1].survivals, field.name), getattr(theirs[1].survivals, field.name))
    assert (theirs[1].survivals.survivals.diff(dim=1) <= 0).all()
    lengths = set()
    for row, (run, verified) in enumerate(zip(theirs[0].tolist(), inputs.row_drafts.tolist())):
        slot = int(inputs.row_slot[row])
        tokens = [token for token in run if token >= 0]
        end = END - RunEnd.INVALID * (slot % 5 == 0 and verified > number // 2)
        assert run[len(tokens) :] in ([end] * (number + 2 - len(tokens)), [-1] + [end] * (number + 1))
        if verified < 0:
            assert run == [END] * (number + 2)
            continue
        assert tokens == runs[row, : len(tokens)].tolist()
        assert tokens[:-1] == slots.drafts[slot, : max(len(tokens) - 1, 0)].tolist()
        assert int(theirs[1].word(SlotWord.LENGTH)[slot]) == int(inputs.context_len[row]) - verified + len(tokens)
        lengths.add(len(tokens))
    assert lengths >= {0, 1, min(number + 1, 3)}


@pytest.mark.parametrize("number", [1, 3, 7])
def test_drafts_count_as_often_as_is_set(number):
    runs, slots, tables, inputs = chosen_runs(40, number)
    slots.drafts[::5, number // 2] = END
    slots.seed[:] = 77 * torch.arange(41) - (1 << 62)
    survivals = torch.tensor([0.75**place for place in range(number)])
    mine, theirs = ([copy.deepcopy(each) for each in (runs, slots, tables)] for _ in range(2))
    launch_verify(*mine, inputs, survivals)
    verify_reference(*theirs, inputs, survivals)
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1].words, theirs[1].words)
    assert torch.equal(mine[2].counts, theirs[2].counts)
    for field in fields(Survivals):
        assert torch.equal(getattr(mine[1].survivals, field.name), getattr(theirs[1].survivals, field.name))
    accepted = 0
    for run, slot, verified in zip(theirs[0].tolist(), inputs.row_slot.tolist(), inputs.row_drafts.tolist()):
        count = sum(token >= 0 for token in run)
        if count > 1:
            assert run[: count - 1] == slots.drafts[slot, : count - 1].tolist()
            accepted += count - 1
        assert count <= max(verified, -1) + 1
    assert accepted > 5


@pytest.mark.covering(1)
@pytest.mark.parametrize(("rows", "number"), [(1, 1), (5, 7), (40, 4), (300, 3)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 2.0])
def test_the_most_probable_drafts_are_dealt(rows, number, share):
    """A prompt's rows, rows of one token, then rows with drafts; some of their places the host knows."""
    max_rows, max_slots, most = rows + 3, rows + 5, 9
    slots, draw = empty_slots(max_slots, 1, 1, "cpu", number), random.Random(rows)
    own = draw.sample(range(max_slots), rows)
    kinds = sorted(draw.choice([0, 0, 1, 2, 2, 2, 2]) for _ in range(rows))
    lens = [(5, 1, 1 + draw.randint(1, number))[kind] for kind in kinds]
    flags = [(0, RowFlag.FEED, RowFlag.FEED | draw.choice([0, RowFlag.EXACT]))[kind] for kind in kinds]
    places = int(share * sum(length - 1 for length, kind in zip(lens, kinds) if kind == 2))
    record = torch.zeros(tail_at(max_rows, 6 * max_rows * number) + 16, dtype=torch.int32)
    record[Header.NUM_ROWS] = rows
    record[Header.NUM_TOKENS] = sum(1 if kind else 5 for kind in kinds) + places
    columns = {RowColumn.SLOT: own, RowColumn.LEN: lens, RowColumn.FLAGS: flags, RowColumn.COMPUTED: [20] * rows}
    for column, values in columns.items():
        record[column_at(column, max_rows) :][:rows] = torch.tensor(values, dtype=torch.int32)
    slots.word(SlotWord.LENGTH)[:] = 21
    slots.word(SlotWord.LAST_PLACE).copy_(drawn(3, max_slots + 1, low=19, high=22 + 2 * number))
    had = drawn(4, max_slots + 1, low=-1, high=number + most)
    slots.word(SlotWord.NUM_DRAFTS).copy_(had)
    state = slots.survivals
    state.survivals.copy_(drawn(5, max_slots + 1, number, low=1, high=40).sort(1, descending=True).values)
    state.tried.copy_(drawn(6, number, low=1, high=5000))
    state.right.copy_(state.tried // 3)
    refreshed = copy.deepcopy(state)
    launch_deal_drafts(slots, record, max_rows, 6 * max_rows * number)
    refresh_reference(refreshed)
    for name in ("right", "tried", "model"):
        assert torch.equal(getattr(state, name), getattr(refreshed, name))
    offered = []
    for slot, length, kind in zip(own, lens, kinds):
        room = min(int(had[slot]), length - 1, int(slots.word(SlotWord.LAST_PLACE)[slot]) - 21)
        offered.append(max(room, 0) if kind == 2 else 0)
    values = [(-int(state.survivals[slot, j]), row, j) for row, slot in enumerate(own) for j in range(offered[row])]
    wanted = [0] * rows
    for _, row, _ in sorted(values)[:places]:
        wanted[row] += 1
    found = slots.word(SlotWord.NUM_DRAFTS)
    drafted = [row for row, kind in enumerate(kinds) if kind == 2]
    assert [int(found[own[row]]) for row in drafted] == [wanted[row] for row in drafted]
    others = sorted(set(range(max_slots + 1)) - {own[row] for row in drafted})
    assert torch.equal(found[others], had[others])


@pytest.mark.parametrize("count", [1, 40, 300])
def test_tokens_without_drafts_are_appended_to_their_texts(count):
    slots, texts = empty_slots(count, 1, 1, "cpu", 3), drawn(1, count + 1, 50)
    slots.word(SlotWord.PROMPT_LEN).copy_(drawn(2, count + 1, low=1, high=48))
    runs, order = drawn(3, count, 5, low=-1, high=99), torch.randperm(count)
    lines = torch.where(drawn(4, count) > 0, order.int() * 5, -1), order.int(), drawn(5, count, high=9)
    mine, theirs = texts.clone(), texts.clone()
    launch_append(mine, slots, runs, lines)
    append_reference(theirs, slots, runs, lines)
    assert torch.equal(mine, theirs)
    for target, slot, number in zip(*(each.tolist() for each in lines)):
        place = int(slots.word(SlotWord.PROMPT_LEN)[slot]) + number
        if place < 50:
            token = int(runs.flatten()[target]) if target >= 0 else -1
            assert int(mine[slot, place]) == (token if token >= 0 else int(texts[slot, place]))


@pytest.mark.parametrize("number", [1, 4])
def test_rules_at_a_place_count_the_drafts_before(number):
    vocab, width = 200, number + 2
    count = 7  # one row more than there are kinds of rules
    rows = with_rules(rows_of(count, KINDS, vocab=vocab), vocab, every=1)
    slots = empty_slots(count, 1, 1, "cpu", number)
    slots.words.copy_(rows.slots.words)
    slots.drafts.copy_(drawn(5, count + 1, number, high=vocab))
    slot = rows.slot.repeat_interleave(number + 1)
    place = torch.arange(number + 1, dtype=torch.int32).repeat(count)
    target = slot * width + place
    logits = torch.randn(len(slot), vocab, generator=torch.Generator().manual_seed(3))
    found = []
    for run in (launch_choose, choose_reference):
        room, tokens = choose_room(len(slot), vocab, "cpu"), torch.full((count * width,), -7, dtype=torch.int32)
        before = copy.deepcopy((slots, rows.tables))
        run(tokens, slots, rows.tables, room, logits, target, slot, rows.place[slot.long()] + place, False, width)
        assert torch.equal(slots.words, before[0].words), "verification writes them"
        assert torch.equal(rows.tables.counts, before[1].counts)
        found.append((tokens, room.work.clone()))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    # The same numbers as rules that have counted the drafts one by one.
    for line in range(len(slot)):
        one = copy.deepcopy((slots, rows.tables))
        words, tables = one[0].words, one[1]
        rule, kinds = int(words[slot[line], SlotWord.RULE_LINE]) - 1, int(words[slot[line], SlotWord.RULE_KINDS])
        for token in slots.drafts[slot[line], : place[line]].tolist():
            tables.counts[rule, token] += bool(kinds & COUNTED)
            if kinds & SEEN:
                tables.seen[rule, token >> 5] |= torch.tensor(1 << (token & 31)).to(torch.int32)
        room, token = choose_room(1, vocab, "cpu"), torch.full((1,), -7, dtype=torch.int32)
        parts = (
            torch.zeros(1, dtype=torch.int32),
            slot[line : line + 1],
            (rows.place[slot.long()] + place)[line : line + 1],
        )
        choose_reference(token, one[0], tables, room, logits[line : line + 1], *parts)
        assert token[0] == found[1][0][target[line]]


@pytest.mark.parametrize("guesses", [False, True])
def test_masks_behind_drafts_are_those_of_the_line_of_logits(guesses):
    """Slot 0 has such masks, slot 1 the same mask at every place, slot 2 no rules."""
    vocab, number = 200, 3
    width, lines, count = number + 2, number + 1, 3
    slots, tables = empty_slots(count, 1, 1, "cpu", number), rule_tables(2, vocab, "cpu", places=count * (number + 1))
    slots.word(SlotWord.RULE_LINE)[:2] = torch.tensor([2, 1])
    slots.word(SlotWord.RULE_KINDS)[:2] = torch.tensor([ALLOWED | ALONG, ALLOWED])
    tables.allowed.copy_(torch.randint(0, 2**31, tables.allowed.shape, generator=torch.Generator().manual_seed(2)))
    tables.allowed[2 + lines - 1] = 0
    slot = torch.arange(count, dtype=torch.int32).repeat_interleave(lines)
    place = torch.arange(lines, dtype=torch.int32).repeat(count)
    logits = torch.randn(len(slot), vocab, generator=torch.Generator().manual_seed(3))
    found = []
    for run in (launch_choose, choose_reference):
        room, tokens = choose_room(len(slot), vocab, "cpu"), torch.full((count * width,), -7, dtype=torch.int32)
        run(tokens, slots, tables, room, logits, slot * width + place, slot, place, False, width, guesses)
        found.append(tokens.view(count, width)[:, :lines])
    assert torch.equal(found[0], found[1])
    for row in range(count):
        for k in range(lines):
            mask = [None if guesses else 2 + k if k else 1, 0, None][row]
            x = logits[row * lines + k]
            if mask is not None:
                x = torch.where(unpack(tables.allowed[mask], vocab), x, float("-inf"))
            assert int(found[0][row, k]) == (int(x.argmax()) if x.max() > float("-inf") else -1)
    assert (int(found[0][0, -1]) == -1) != guesses, "a mask of zeros ends the run"


@pytest.mark.covering(1)
@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 5), (2, 3), (3, 8)])
@pytest.mark.parametrize("number", [1, 4, 9])
def test_what_followed_the_longest_newest_match_is_drafted(number, least, most, monkeypatch):
    monkeypatch.setattr(ngram, "BLOCK", 128)  # up to four programs read a text
    slots, texts, runs, row_slot = written_texts(30, number, 2100)
    mine, theirs = (copy.deepcopy((slots, texts)) for _ in range(2))
    launch_ngram(*mine, runs, row_slot, least, most)
    ngram_reference(*theirs, runs, row_slot, least, most)
    for name in ("words", "drafts"):
        assert torch.equal(getattr(mine[0], name), getattr(theirs[0], name))
    for name in ("tokens", "best", "arrived"):
        assert torch.equal(getattr(mine[1], name), getattr(theirs[1], name))
    for row, slot in enumerate(row_slot.tolist()):
        length, count = int(slots.word(SlotWord.LENGTH)[slot]), row % (number + 2)
        text = mine[1].tokens[slot].tolist()[:length]
        if not count:
            assert int(mine[0].word(SlotWord.NUM_DRAFTS)[slot]) == 0
            continue
        assert text[length - count :] == runs[row, :count].tolist()
        found = (0, 0)
        for end in range(1, length):
            alike = 0
            while alike < min(most, end) and text[end - 1 - alike] == text[length - 1 - alike]:
                alike += 1
            found = max(found, (alike, end)) if alike >= least else found
        assert int(mine[0].word(SlotWord.NUM_DRAFTS)[slot]) == (number if found[0] else 0)
        if found[0]:
            known = list(text)
            for k in range(number):
                known.append(known[found[1] + k])
            assert mine[0].drafts[slot].tolist() == known[length:]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("depth", "factor", "least"), [(1, 1.0, 0.1), (24, 1.0, 0.1), (6, 2.5, 0.5), (24, 0.4, 0.0)])
@pytest.mark.parametrize("number", [1, 9])
def test_the_path_of_most_places_is_drafted(number, depth, factor, least, monkeypatch):
    monkeypatch.setattr(suffix, "BLOCK", 128)  # several programs read a text
    monkeypatch.setattr(suffix, "SCANNED", 256)
    slots, texts, runs, row_slot = written_texts(14, number, 1500)
    texts.tokens[3:8] %= 2  # more places match than are read
    texts.tokens[8:10] = 1
    room = empty_matches(14, 1500, depth, factor, number, "cpu")
    mine, theirs = (copy.deepcopy((slots, texts.tokens, room)) for _ in range(2))
    launch_suffix(*mine, runs, row_slot, least)
    suffix_reference(*theirs, runs, row_slot, least)
    counts = mine[0].word(SlotWord.NUM_DRAFTS)
    assert torch.equal(mine[0].words, theirs[0].words)
    for slot, count in enumerate(counts.tolist()):
        assert torch.equal(mine[0].drafts[slot, :count], theirs[0].drafts[slot, :count])
    assert torch.equal(mine[1], theirs[1])
    assert not mine[2].counts.any()
    assert counts.any()


@pytest.mark.parametrize("number", [1, 4])
def test_recorded_tokens_are_drafted_with_their_survivals(number):
    rows, longest, vocab = 40, 120, 4
    slots, texts, runs, row_slot = written_texts(rows, number, longest)
    slots.seed[:] = 77 * torch.arange(rows + 1) - (1 << 62)
    slots.word(SlotWord.PROMPT_LEN)[:] = 2
    ends = drawn(21, rows + 1, low=1, high=longest)
    texts.tokens[torch.arange(longest) >= ends[:, None]] = -1
    survivals = torch.tensor([0.7 * 0.75**place for place in range(number)])
    mine, theirs = (copy.deepcopy(slots) for _ in range(2))
    launch_replay(mine, texts.tokens, runs, row_slot, survivals, vocab)
    replay_reference(theirs, texts.tokens, runs, row_slot, survivals, vocab)
    assert torch.equal(mine.words, theirs.words)
    assert torch.equal(mine.drafts, theirs.drafts)
    right = wrong = 0
    for row, slot in enumerate(row_slot.tolist()):
        if row % (number + 2):
            length, count = int(slots.word(SlotWord.LENGTH)[slot]), int(mine.word(SlotWord.NUM_DRAFTS)[slot])
            assert count == max(min(number, int(ends[slot]) - length), 0)
            same = (mine.drafts[slot, :count] == texts.tokens[slot, length : length + count]).tolist()
            assert same == sorted(same, reverse=True)
            right, wrong = right + sum(same), wrong + same.count(False)
    assert min(right, wrong) > 0
