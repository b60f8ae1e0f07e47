"""Detokenizing: text in pieces equals the whole text; stop strings match across token borders; linear cost (R4)."""

import array
import random
import time

import pytest

from _fast.detok import Detokenizer, StopSet, TokenTable
from tests.fast.oracles.detok import detokenize

ALPHABET = ["a", "b", "ab", "é", "漢", "😀", "\n", " ", "�"]


def table_of(pieces, special=(), each_byte=False):
    offsets = array.array("i", [0])
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    flags = bytes(k in special for k in range(len(pieces)))
    return TokenTable(b"".join(pieces), offsets, flags, each_byte)


def random_pieces(rng):
    """Tokens that may end inside a character: slices of a text's bytes, and bytes that are not valid UTF-8."""
    text = "".join(rng.choice(ALPHABET) for _ in range(40)).encode()
    cuts = sorted(rng.sample(range(1, len(text)), 12))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    pieces += [bytes([rng.randrange(256)]) for _ in range(6)]
    pieces += [char.encode() for char in ALPHABET] + [b"", b"<s>", b"</s>"]
    return pieces, {len(pieces) - 2, len(pieces) - 1}


def random_stops(rng):
    count = rng.choice([0, 1, 1, 2, 3, 8])
    return ["".join(rng.choice(ALPHABET) for _ in range(rng.choice([1, 2, 2, 3, 5]))) for _ in range(count)]


def cut(rng, ids):
    start = 0
    while start < len(ids):
        size = rng.choice([1, 1, 1, 2, 3, 7, 30])
        yield ids[start : start + size]
        start += size


def run(table, pieces_of_ids, stops, **options):
    compiled = StopSet([stop.encode() for stop in stops]) if stops else None
    machine = Detokenizer(table, compiled, **options)
    texts = [machine.feed(ids) for ids in pieces_of_ids]
    texts.append(machine.finish())
    return "".join(texts), machine.matched, machine.num_tokens, texts


def test_any_cut_equals_the_oracle():
    rng = random.Random(4)
    for _ in range(1500):
        pieces, special = random_pieces(rng)
        table = table_of(pieces, special)
        ids = [rng.randrange(-1, len(pieces) + 1) for _ in range(rng.randrange(1, 60))]
        stops = random_stops(rng)
        options = {
            "include_stop": rng.random() < 0.3,
            "skip_special": rng.random() < 0.7,
            "min_tokens": rng.choice([0, 0, 5, 20]),
        }
        expected = detokenize(pieces, ids, stops, special=special, **options)
        for _ in range(4):
            text, matched, taken, _ = run(table, cut(rng, ids), stops, **options)
            assert (text, matched, taken) == expected


def test_buffered_text_is_emitted_as_soon_as_no_stop_string_can_come():
    table = table_of([b"he", b"llo", b" wor", b"ld", b"END"])
    machine = Detokenizer(table, StopSet([b"hello END", b"ld!"]))
    assert [machine.feed([k]) for k in (0, 1, 2, 3)] == ["", "", "hello wor", ""]
    assert machine.finish() == "ld"


def test_a_paused_stop_string_counts_from_the_text_that_is_given_back():
    """As for reasoning and the answer after it: the text is that of the parts, and only the second part is matched."""
    rng = random.Random(9)
    for _ in range(400):
        pieces, special = random_pieces(rng)
        table = table_of(pieces, special)
        ids = [rng.randrange(len(pieces)) for _ in range(rng.randrange(2, 40))]
        stops = random_stops(rng) or ["a"]
        compiled = StopSet([stop.encode() for stop in stops])
        machine = Detokenizer(table, compiled)
        at = rng.randrange(len(ids))
        assert machine.pause() == ""
        before = "".join(machine.feed([token_id]) for token_id in ids[:at])
        assert before == "".join(Detokenizer(table).feed(ids[:at]))
        back = rng.randrange(len(before) + 1)
        texts = [machine.resume(before[back:], compiled)]
        texts += [machine.feed(part) for part in cut(rng, ids[at:])]
        text = "".join(texts) + machine.finish()
        whole, _, _ = detokenize(pieces, ids, special=special)
        expected, matched, _ = detokenize([whole[back:].encode()], [0], stops)
        assert (text, machine.matched) == (expected, matched)
    assert Detokenizer(table_of([b"a"]), StopSet([b"ab"])).pause() == ""
    compiled = StopSet([b"ab"])
    machine = Detokenizer(table_of([b"a"]), compiled)
    assert (machine.feed([0]), machine.pause(), machine.feed([0])) == ("", "a", "a")
    texts = machine.resume("xa", compiled), machine.finish(), machine.resume("ab", compiled)
    assert (*texts, machine.matched) == ("x", "a", "", 0)


def test_half_a_character_waits_and_ends_as_a_replacement():
    table = table_of(["漢".encode()[:2], "漢".encode()[2:], b"x"])
    machine = Detokenizer(table)
    assert [machine.feed([0]), machine.feed([1]), machine.feed([0])] == ["", "漢", ""]
    assert machine.finish() == "�"
    assert machine.feed([2]) == ""


@pytest.mark.parametrize(("each_byte", "expected"), [(False, "�x"), (True, "��x")])
def test_broken_sequences_count_as_their_decoder_counts_them(each_byte, expected):
    table = table_of([b"\xe6\xbc", b"x"], each_byte=each_byte)
    machine = Detokenizer(table)
    assert machine.feed([0, 1]) + machine.finish() == expected


def test_the_first_listed_of_stop_strings_that_end_together_wins():
    table = table_of([b"ab", b"c"])
    for stops, text in ((["c", "bc"], "ab"), (["bc", "c"], "a")):
        assert run(table, [[0], [1]], stops)[:2] == (text, 0)


def test_tokens_after_the_stop_are_not_taken():
    table = table_of([b"a", b"STOP", b"z"])
    assert run(table, [[0, 1, 2, 2, 2], [2]], ["TO"])[:3] == ("aS", 0, 2)


def test_32_stop_strings_of_256_bytes():
    rng = random.Random(7)
    stops = ["a" * 200 + "".join(rng.choice("ab") for _ in range(56)) for _ in range(32)]
    text = "a" * 500 + stops[17][150:] + "b" * 10 + stops[9] + "tail"
    pieces = [char.encode() for char in sorted(set(text))]
    ids = [pieces.index(char.encode()) for char in text]
    expected = detokenize(pieces, ids, stops)
    assert run(table_of(pieces), cut(rng, ids), stops)[:3] == expected
    assert expected[1] >= 0


def test_leading_spaces_are_dropped_only_at_the_start():
    table = table_of([b" ", b" a"])
    assert run(table, [[0], [1], [1]], (), strip=1)[0] == " a a"


def test_bad_tables_and_stop_strings_are_refused():
    with pytest.raises(ValueError, match="offsets"):
        TokenTable(b"abc", array.array("i", [0, 2]), b"\0")
    with pytest.raises(ValueError, match="fall"):
        TokenTable(b"abc", array.array("i", [0, 4, 3]), b"\0\0")
    with pytest.raises(ValueError, match="one more"):
        TokenTable(b"abc", array.array("i", [0, 3]), b"\0\0")
    with pytest.raises(ValueError, match="empty"):
        StopSet([b""])


@pytest.mark.parametrize("stops", [[], ["a" * 255 + "b"], ["ab" * 127 + "c", "b" * 200]], ids=["none", "worst", "two"])
def test_cost_is_linear(stops):
    table = table_of([b"a", b"ba"])

    def seconds(count):
        ids = [0, 0, 1, 0] * (count // 4)
        best = 1e9
        for _ in range(5):
            machine = Detokenizer(table, StopSet([s.encode() for s in stops]) if stops else None)
            start = time.thread_time()
            for token_id in ids:
                machine.feed((token_id,))
            best = min(best, time.thread_time() - start)
        return best

    # Another process that displaces the caches can spoil one measurement; a quadratic cost would spoil all of them.
    assert any(seconds(1 << 18) / seconds(1 << 17) <= 2.5 for _ in range(4))
    assert any(seconds(1 << 16) / (1 << 16) < 5e-6 for _ in range(4))  # seconds per token; 0.2 µs alone on a core


def test_tokens_that_hold_a_text_are_marked():
    draw = random.Random(0)
    for _ in range(200):
        pieces = [bytes(draw.choices(b"ab\n", k=draw.randrange(4))) for _ in range(draw.randrange(1, 40))]
        made, wanted = table_of(pieces), bytes(draw.choices(b"ab\n", k=draw.randrange(1, 4)))
        for count in (len(pieces), 8):  # the bits may end before the table
            bits = bytearray(-(-count // 8))
            made.mark_holding(wanted, bits)
            marked = {token for token in range(8 * len(bits)) if bits[token // 8] >> token % 8 & 1}
            assert marked == {token for token, piece in enumerate(pieces) if wanted in piece and token < 8 * len(bits)}
    for wrong in (b"", b"x" * 65):
        with pytest.raises(ValueError, match="need 1 to 64"):
            made.mark_holding(wrong, bytearray(8))
