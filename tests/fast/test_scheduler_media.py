"""Scheduler and media: towers run before their rows; budgets; a cache that requests share; the effects of failures."""

import numpy as np
import pytest

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler

SAMPLE, LENGTH, ERROR = 1, 3, 5


def make(**changes):
    values = {"max_slots": 8, "max_rows": 4, "max_tokens": 32, "max_model_len": 256, "num_blocks": 64, "block_size": 4}
    return Scheduler(**{**values, **changes})


def plan_for(scheduler):
    return StepPlan(scheduler.max_rows, scheduler.max_tokens, 4 * scheduler.max_model_len)


def add(scheduler, number, length, *spans, keys=None, **rules):
    """Adds a request whose spans are (start, length, entry, entry_row_start)."""
    tokens = np.arange(length, dtype=np.int32) + 100 * number
    media = np.array(spans, np.int32).reshape(-1, 4)
    return scheduler.add(number, tokens, **{"max_tokens": 4, **rules}, media=media, keys=keys)


def step(scheduler):
    plan = plan_for(scheduler)
    scheduler.schedule(plan)
    scheduler.commit(plan, np.full(max(1, plan.num_rows), 7, np.int32))
    return plan


def encodes(plan):
    return list(zip(*[list(a[: plan.num_encodes]) for a in (plan.encode_slot, plan.encode_item, plan.encode_entry)]))


def runs(plan):
    arrays = (plan.media_start, plan.media_length, plan.media_entry, plan.media_row)
    return list(zip(*[list(a[: plan.num_media]) for a in arrays]))


def lens(plan):
    return {int(plan.row_slot[r]): int(plan.row_len[r]) for r in range(plan.num_rows)}


def test_a_tower_runs_in_the_step_that_reads_its_first_row():
    scheduler = make(max_chunk=6)
    entry = scheduler.add_entry(7)
    slot = add(scheduler, 1, 20, (8, 7, entry, 0))
    first, second, third = step(scheduler), step(scheduler), step(scheduler)
    assert (encodes(first), runs(first)) == ([], [])
    assert (encodes(second), runs(second)) == ([(slot, 0, entry)], [(2, 4, entry, 0)])
    assert (encodes(third), runs(third)) == ([], [(0, 3, entry, 4)])


def test_an_entry_is_encoded_once_for_all_requests():
    scheduler = make()
    entry = scheduler.add_entry(4)
    add(scheduler, 1, 8, (2, 4, entry, 0))
    add(scheduler, 2, 8, (1, 4, entry, 0))
    plan = step(scheduler)
    assert len(encodes(plan)) == 1
    assert runs(plan) == [(2, 4, entry, 0), (9, 4, entry, 0)]
    assert scheduler.ledger()["encoder_in_use"] == 1


def test_towers_stay_below_the_budget_of_a_step():
    scheduler = make(encoder_budget=6)
    entries = [scheduler.add_entry(4) for _ in range(3)]
    slot = add(scheduler, 1, 16, *[(1 + 5 * k, 4, entry, 0) for k, entry in enumerate(entries)])
    cuts = [step(scheduler) for _ in range(3)]
    assert [encodes(plan) for plan in cuts] == [[(slot, k, entry)] for k, entry in enumerate(entries)]
    assert [lens(plan)[slot] for plan in cuts] == [6, 5, 5]


def test_an_entry_larger_than_the_budget_runs_alone():
    scheduler = make(encoder_budget=6)
    large, small = scheduler.add_entry(9), scheduler.add_entry(2)
    add(scheduler, 1, 4, (0, 2, small, 0), max_tokens=1)
    slot = add(scheduler, 2, 12, (1, 9, large, 0))
    assert [entry for _, _, entry in encodes(step(scheduler))] == [small]
    plan = step(scheduler)
    assert encodes(plan) == [(slot, 0, large)]


def test_an_entry_that_can_never_fit_is_refused():
    scheduler = make(encoder_capacity=8)
    assert scheduler.add_entry(9) == -3
    one, two = scheduler.add_entry(5), scheduler.add_entry(5)
    # Interleaved runs need both entries at once, which do not fit; one after the other they fit.
    assert add(scheduler, 1, 20, (0, 2, one, 0), (2, 2, two, 0), (4, 2, one, 2), (6, 2, two, 2)) == -3
    assert add(scheduler, 1, 20, (0, 2, one, 0), (4, 2, one, 2), (6, 2, two, 0), (8, 2, two, 2)) >= 0


def test_idle_embeddings_stay_cached_until_their_room_is_needed():
    scheduler = make(encoder_capacity=8)
    old, new = scheduler.add_entry(5), scheduler.add_entry(5)
    add(scheduler, 1, 8, (1, 5, old, 0), max_tokens=1)
    step(scheduler)
    assert scheduler.ledger()["encoder_rows"] == 5
    assert scheduler.ledger()["encoder_in_use"] == 0
    assert scheduler.take_evicted() == []
    add(scheduler, 2, 8, (1, 5, old, 0), max_tokens=1)
    assert encodes(step(scheduler)) == [], "it is still there"
    add(scheduler, 3, 8, (1, 5, new, 0), max_tokens=1)
    assert [entry for _, _, entry in encodes(step(scheduler))] == [new]
    assert scheduler.take_evicted() == [(old, True)]
    assert scheduler.add_entry(3) == old, "a dead entry's number is free again"


def test_an_embedding_is_not_evicted_while_a_step_in_flight_reads_it():
    scheduler = make(encoder_capacity=8)
    old, new = scheduler.add_entry(5), scheduler.add_entry(5)
    add(scheduler, 1, 8, (1, 5, old, 0))
    one, two = plan_for(scheduler), plan_for(scheduler)
    scheduler.schedule(one)
    scheduler.abort(1)
    waiting = add(scheduler, 2, 8, (3, 5, new, 0))
    scheduler.schedule(two)
    assert lens(two) == {waiting: 3}, "its tokens before the picture can go, the picture waits"
    scheduler.commit(one, np.zeros(1, np.int32))
    assert scheduler.take_evicted() == []
    three = plan_for(scheduler)
    scheduler.schedule(three)
    assert [entry for _, _, entry in encodes(three)] == [new]
    assert scheduler.take_evicted() == [(old, True)]


def test_a_cached_prefix_needs_no_tower():
    scheduler = make()
    keys = np.arange(24, dtype=np.int64).reshape(2, 12) - (1 << 62)
    entry = scheduler.add_entry(6)
    add(scheduler, 1, 12, (1, 6, entry, 0), keys=keys, max_tokens=1)
    step(scheduler)
    other = scheduler.add_entry(6)
    slot = add(scheduler, 1, 12, (1, 6, other, 0), keys=keys, max_tokens=1)
    plan = step(scheduler)
    assert scheduler.num_freed == 1
    assert (lens(plan), encodes(plan), runs(plan)) == ({slot: 4}, [], [])
    assert scheduler.take_evicted() == [(other, True)], "it was never encoded and nobody names it"


def test_rows_that_wait_for_each_others_room_do_not_wait_forever():
    scheduler = make(encoder_capacity=8, max_chunk=4)
    a, b, c, d = (scheduler.add_entry(4) for _ in range(4))
    # Both requests hold one entry until they end, and each needs a second entry before its end.
    one = add(scheduler, 1, 20, (0, 2, a, 0), (4, 4, b, 0), (12, 2, a, 2))
    two = add(scheduler, 2, 20, (0, 2, c, 0), (4, 4, d, 0), (12, 2, c, 2))
    finished = 0
    for _ in range(40):
        plan = step(scheduler)
        finished += sum(plan.out_finish[r] > 0 for r in range(plan.num_rows))
        scheduler.take_evicted()
    assert {one, two} == {0, 1}
    assert finished == 2
    assert scheduler.num_preemptions > 0


def test_readers_of_an_entry_that_a_failed_step_should_have_encoded_end_too():
    scheduler = make(max_rows=3)
    shared = scheduler.add_entry(4)
    add(scheduler, 1, 8, (1, 4, shared, 0))
    one, two = plan_for(scheduler), plan_for(scheduler)
    scheduler.schedule(one)
    reader = add(scheduler, 2, 8, (1, 4, shared, 0))
    other = add(scheduler, 3, 8)
    scheduler.schedule(two)
    assert set(lens(two)) == {0, reader, other}
    scheduler.fail(one)
    scheduler.commit(two, np.full(3, 7, np.int32))
    ends = {int(two.row_slot[r]): (int(two.out_token[r]), int(two.out_finish[r])) for r in range(3)}
    assert ends == {0: (-1, 0), reader: (-1, ERROR), other: (7, 0)}
    assert scheduler.take_evicted() == [(shared, True)]
    assert scheduler.ledger()["encoder_rows"] == 0


def test_an_entry_of_a_failed_step_is_encoded_again_for_later_requests():
    scheduler = make()
    entry = scheduler.add_entry(4)
    add(scheduler, 1, 8, (1, 4, entry, 0))
    plan = plan_for(scheduler)
    scheduler.schedule(plan)
    slot = add(scheduler, 2, 8, (1, 4, entry, 0))
    scheduler.fail(plan)
    assert scheduler.take_evicted() == []
    assert encodes(step(scheduler)) == [(slot, 0, entry)]


def test_an_entry_that_no_request_named_can_be_taken_back():
    scheduler = make()
    entry = scheduler.add_entry(4)
    assert scheduler.discard_entry(entry)
    assert not scheduler.discard_entry(entry)
    entry = scheduler.add_entry(4)
    add(scheduler, 1, 8, (1, 4, entry, 0))
    assert not scheduler.discard_entry(entry)


def test_an_entry_named_again_before_its_eviction_was_reported_lives_on():
    scheduler = make()
    entry = scheduler.add_entry(4)
    add(scheduler, 1, 8, (1, 4, entry, 0))
    scheduler.abort(1)
    slot = add(scheduler, 2, 8, (1, 4, entry, 0))
    assert encodes(step(scheduler)) == [(slot, 0, entry)]
    assert scheduler.take_evicted() == []


def test_entries_beyond_the_first_allocation_are_found():
    scheduler = make()
    entries = [scheduler.add_entry(1) for _ in range(300)]
    assert len(set(entries)) == 300
    assert scheduler.ledger()["encoder_entries"] == 300


@pytest.mark.parametrize(
    ("span", "words"),
    [((4, 2, 1, 0), "spans ascend"), ((6, 0, 1, 0), "spans ascend"), ((6, 2, 1, 3), "past the 4 rows")],
)
def test_spans_that_make_no_sense_are_refused_in_words(span, words):
    scheduler = make()
    assert scheduler.add_entry(4) == 1
    with pytest.raises(ValueError, match=words):
        add(scheduler, 1, 20, (2, 4, 1, 0), span)


def span_rows(*pairs):
    return np.array(pairs, np.int32).reshape(-1, 2)


def chunks(scheduler, slot, steps):
    return [lens(step(scheduler)).get(slot, 0) for _ in range(steps)]


def test_no_chunk_ends_inside_a_bidirectional_span():
    scheduler = make(max_chunk=8)
    slot = add(scheduler, 1, 30, bi_spans=span_rows((3, 9), (9, 17), (20, 22)))
    assert chunks(scheduler, slot, 5) == [3, 6, 8, 8, 5]


def test_a_bidirectional_span_takes_more_than_the_budget_and_waits_for_room():
    scheduler = make(max_tokens=16, max_rows=4)
    scheduler.shares.prompt_budget = 2
    slot = add(scheduler, 1, 16, bi_spans=span_rows((2, 15)))
    assert chunks(scheduler, slot, 3) == [2, 13, 1]
    for number in (2, 3, 4):
        add(scheduler, number, 1, max_tokens=40)
    step(scheduler)
    last = add(scheduler, 5, 14, bi_spans=span_rows((0, 13)))
    assert chunks(scheduler, last, 2) == [0, 0], "a row of four is free when the first request has ended"
    scheduler.shares.prompt_budget = 16
    scheduler.abort(1)
    assert chunks(scheduler, last, 2) == [13, 1], "beside three rows that decode"


def test_towers_do_not_cut_a_bidirectional_span():
    scheduler = make(encoder_capacity=8)
    one, two = scheduler.add_entry(4), scheduler.add_entry(4)
    slot = add(scheduler, 1, 16, (2, 4, one, 0), (8, 4, two, 0), bi_spans=span_rows((0, 16)))
    other = scheduler.add_entry(5)
    first = add(scheduler, 2, 9, (1, 5, other, 0), priority=-1)
    plans = [step(scheduler) for _ in range(2)]
    assert [lens(plan).get(slot, 0) for plan in plans] in ([16, 1], [0, 16])
    assert [lens(plan).get(first, 0) for plan in plans] in ([9, 1], [0, 9], [1, 8])


def test_cached_blocks_end_inside_a_bidirectional_span_and_the_rest_of_it_is_one_chunk():
    scheduler = make()
    add(scheduler, 1, 20, max_tokens=1, bi_spans=span_rows((2, 14)))
    step(scheduler)
    scheduler.shares.prompt_budget = 3
    prompt = np.concatenate([np.arange(10), np.arange(100, 110)]).astype(np.int32) + 100
    again = scheduler.add(9, prompt, max_tokens=2, bi_spans=span_rows((2, 14)))
    assert chunks(scheduler, again, 3) == [6, 3, 3]
    assert scheduler.cached_tokens(again) == 8


@pytest.mark.parametrize("bi_spans", [[(3, 3)], [(5, 9), (8, 12)], [(8, 31)], [(0, 30)]])
def test_bidirectional_spans_that_no_step_could_compute_are_refused(bi_spans):
    with pytest.raises(ValueError, match=r"spans are ascending|span of 30 tokens: a step has room for 29"):
        add(make(), 1, 30, bi_spans=span_rows(*bi_spans))


def test_rows_decode_in_every_step_while_pictures_wait_for_their_tower():
    """32 rows decode, eight pictures wait: a step encodes up to the budget, or a part of one larger picture."""
    budget, sizes = 64, (40, 40, 20, 20, 20, 90, 40, 40)
    scheduler = make(max_slots=48, max_rows=40, max_tokens=128, num_blocks=512, encoder_budget=budget)
    decoding = {add(scheduler, number, 4, max_tokens=64) for number in range(1, 33)}
    assert dict.fromkeys(decoding, 1) in [lens(step(scheduler)) for _ in range(4)]
    rows = {}
    for number, size in enumerate(sizes, 33):
        entry = scheduler.add_entry(size)
        rows[entry] = size
        add(scheduler, number, size + 4, (2, size, entry, 0), max_tokens=1)
    encoded = []
    while sum(map(len, encoded)) < len(sizes) + 1:  # one picture runs in two parts
        plan = step(scheduler)
        assert lens(plan).items() >= dict.fromkeys(decoding, 1).items(), "all that decode go on"
        encoded.append([entry for _, _, entry in encodes(plan)])
        assert sum(rows[entry] for entry in encoded[-1]) <= budget or len(encoded[-1]) == 1
    assert max(map(len, encoded)) > 1, "small ones share a step"


def with_a_row_that_decodes(**changes):
    """A scheduler with an encoder budget of 6, in which slot 0 decodes."""
    scheduler = make(encoder_budget=6, **changes)
    add(scheduler, 1, 2, max_tokens=64)
    step(scheduler)
    return scheduler


def test_a_large_tower_runs_in_pieces_while_rows_decode():
    scheduler = with_a_row_that_decodes()
    entry = scheduler.add_entry(7, work=20)
    slot = add(scheduler, 2, 12, (3, 7, entry, 0))
    steps = [step(scheduler) for _ in range(5)]
    piece = [(-1, 6, entry)]
    assert [encodes(plan) for plan in steps] == [piece, piece, piece, piece, []], "20 of work are four pieces of 6"
    assert [lens(plan) for plan in steps] == [{0: 1, slot: 3}, {0: 1}, {0: 1}, {0: 1, slot: 9}, {0: 1, slot: 1}]
    assert runs(steps[3]) == [(1, 7, entry, 0)]
    assert scheduler.ledger()["encoder_rows"] == 7


def test_what_is_left_of_a_large_tower_runs_when_nothing_decodes():
    scheduler = with_a_row_that_decodes()
    entry = scheduler.add_entry(7, work=60)
    slot = add(scheduler, 2, 12, (3, 7, entry, 0))
    assert [lens(step(scheduler)) for _ in range(2)] == [{0: 1, slot: 3}, {0: 1}]
    scheduler.abort(1)
    plan = step(scheduler)
    assert (encodes(plan), lens(plan)) == ([(slot, 0, entry)], {slot: 9})
    assert runs(plan) == [(0, 7, entry, 0)]


def test_a_large_tower_under_way_holds_up_no_request_once_nothing_decodes():
    """Else the first waiting request would wait for ever: the large picture leaves no room for another one."""
    scheduler = with_a_row_that_decodes(encoder_capacity=10)
    large, small = scheduler.add_entry(7, work=60), scheduler.add_entry(6, work=6)
    slot = add(scheduler, 2, 12, (3, 7, large, 0))
    assert [lens(step(scheduler)) for _ in range(2)] == [{0: 1, slot: 3}, {0: 1}]
    first = add(scheduler, 3, 6, (0, 6, small, 0), max_tokens=1)
    scheduler.abort(2)
    again = add(scheduler, 4, 7, (0, 7, large, 0), max_tokens=1)
    scheduler.abort(1)
    assert lens(step(scheduler)) == {first: 6}
    assert lens(step(scheduler)) == {again: 7}


def test_large_towers_take_turns_and_others_wait_for_none_but_the_one_under_way():
    scheduler = with_a_row_that_decodes(max_slots=12, max_rows=8)
    first, second, small = (scheduler.add_entry(4, work) for work in (12, 13, 3))
    for number, entry in enumerate((first, second, small), 2):
        add(scheduler, number, 6, (1, 4, entry, 0), max_tokens=64)
    entries = [[entry for _, _, entry in encodes(step(scheduler))] for _ in range(7)]
    assert entries == [[small], [first], [first], [second], [second], [second], []]


def test_a_large_tower_that_no_request_waits_for_any_more_stops():
    scheduler = with_a_row_that_decodes(encoder_capacity=8)
    entry = scheduler.add_entry(7, work=60)
    add(scheduler, 2, 12, (3, 7, entry, 0))
    step(scheduler), step(scheduler)
    assert scheduler.encoder.under_way == entry
    scheduler.abort(2)
    plan = step(scheduler)
    assert (encodes(plan), scheduler.take_evicted()) == ([], [(entry, True)])
    assert (scheduler.encoder.under_way, scheduler.encoder.num_large, scheduler.ledger()["encoder_rows"]) == (0, 0, 0)


def test_a_large_tower_that_a_new_request_names_goes_on():
    scheduler = with_a_row_that_decodes()
    entry = scheduler.add_entry(7, work=18)
    add(scheduler, 2, 12, (3, 7, entry, 0))
    step(scheduler)
    add(scheduler, 3, 12, (3, 7, entry, 0))
    scheduler.abort(2)
    assert [[each for _, _, each in encodes(step(scheduler))] for _ in range(3)] == [[entry], [entry], []]
    assert scheduler.ledger()["encoder_in_use"] == 1


def test_rows_behind_the_prompt_are_read_by_tokens_of_the_answer_which_ends_with_them():
    scheduler = make()
    entry = scheduler.add_entry(9)
    add(scheduler, 1, 6, (0, 9, entry, 0), max_tokens=50, ignore_eos=True)
    plans = [step(scheduler) for _ in range(3)]
    assert [runs(plan) for plan in plans] == [[(0, 6, entry, 0)], [(0, 1, entry, 6)], [(0, 1, entry, 7)]]
    assert list(plans[-1].out_finish[:1]) == [LENGTH], "nine positions have a token each"
    assert scheduler.ledger()["slots"] == scheduler.ledger()["encoder_in_use"] == 0


def test_a_row_that_starts_over_reads_the_rows_of_its_answer_again():
    scheduler = make(prefix_caching=False)
    entry = scheduler.add_entry(30)
    add(scheduler, 1, 6, (0, 30, entry, 0), max_tokens=50, ignore_eos=True)
    for _ in range(5):
        step(scheduler)
    failing = plan_for(scheduler)
    scheduler.schedule(failing)
    scheduler.fail(failing, np.ones(8, np.uint8))
    assert runs(step(scheduler)) == [(0, 11, entry, 0)], "the prompt and five tokens"
