"""The scan that runs before any JSON is decoded: equal to its oracle, linear in time, exact at its limits."""

from __future__ import annotations

import json
import random
import time

import pytest

from _fast import json_scan
from tests.fast.oracles import json_scan as oracle


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"", json_scan.OK),
        (b'{"a":[1,2.5,-3e7,"x",true,null]}', json_scan.OK),
        (b"[18446744073709551615]", json_scan.OK),
        (b"[18446744073709551616]", json_scan.INTEGER_TOO_LARGE),
        (b"[-9223372036854775808]", json_scan.OK),
        (b"[-9223372036854775809]", json_scan.INTEGER_TOO_LARGE),
        (b"[123456789012345678901234567890.0]", json_scan.OK),
        (b"[1e400]", json_scan.OK),
        (b"[NaN]", json_scan.NOT_FINITE),
        (b"[-Infinity]", json_scan.NOT_FINITE),
        (b'["NaN Infinity"]', json_scan.OK),
        (rb'["\ud83d\ude00"]', json_scan.OK),
        (rb'["\ud83d"]', json_scan.LONE_SURROGATE),
        (rb'["\ude00"]', json_scan.LONE_SURROGATE),
        (rb'["\ud83d\u0041"]', json_scan.LONE_SURROGATE),
        (rb'["\\ud83d"]', json_scan.OK),
        (rb'["\"NaN"]', json_scan.OK),
        (b'"never closed', json_scan.OK),
        (b'"ends in \\', json_scan.OK),
    ],
)
def test_values_at_the_edge(text, code):
    assert json_scan.scan(text, 10, 100)[0] == code == oracle.scan(text, 10, 100)


def test_depth_and_nodes_count_what_is_there():
    assert json_scan.scan(b"[[[]]]", 3, 100)[0] == json_scan.OK
    assert json_scan.scan(b"[[[]]]", 2, 100) == (json_scan.TOO_DEEP, 2, [])
    assert json_scan.scan(b"[1,2,3]", 2, 4)[0] == json_scan.OK
    assert json_scan.scan(b"[1,2,3]", 2, 3)[0] == json_scan.TOO_MANY_NODES
    with pytest.raises(ValueError, match="at least 1"):
        json_scan.scan(b"", 0, 1)


@pytest.mark.parametrize("seed", range(20))
def test_random_texts_agree_with_the_oracle(seed):
    random_ = random.Random(seed)
    pieces = [*(bytes([char]) for char in b'{}[],:"-0.e \\'), b"\\u", b"d83d", b"\\ude00", b"NaN", b"Infinity"]
    pieces += [b"12", b"99999999999999999999", b"true", "é".encode()]
    for _ in range(500):
        text = b"".join(random_.choices(pieces, k=random_.randrange(1, 30)))
        assert json_scan.scan(text, 5, 20)[0] == oracle.scan(text, 5, 20), text


@pytest.mark.parametrize(
    ("text", "members"),
    [
        (b'{"a":{"b":[1,{"c":2}]},"d":"x,}\\"",  "e" : [ "f" , 3 ] , "g":null}', None),
        (b' { "a\\u0062" : -1.5e3 }', None),
        (b"{}", []),
        (b"", []),
        (b'["a", {"b": 1}, "c"]', []),
        (b'"a"', []),
        (b'{"a"', [(b"a", b"")]),
        (b'{"a":1}{"b":2}', [(b"a", b"1")]),
    ],
)
def test_members_are_those_of_the_outermost_object(text, members):
    if members is None:
        members = [(name.encode(), value) for name, value in json.loads(text.replace(b"\\u", b"\\\\u")).items()]
        found = [(name, json.loads(text[start:end])) for name, start, end in json_scan.members(text)]
    else:
        found = [(name, text[start:end]) for name, start, end in json_scan.members(text)]
    assert found == members
    assert json_scan.scan(text, 10, 100)[2] == [name for name, _ in members]


def test_a_body_of_many_names_is_reported_as_one():
    def text(count: int) -> bytes:
        return json.dumps({f"n{at}": [at] for at in range(count)}).encode()

    most = json_scan.MOST_NAMES
    assert json_scan.scan(text(most), 9, 9999)[2] == [b"n%d" % at for at in range(most)]
    names = json_scan.scan(text(most + 1), 9, 9999)[2]
    assert (len(names), names[-2:]) == (most, [b"n%d" % (most - 2), b""])
    most = json_scan.MOST_MEMBERS
    assert len(json_scan.members(text(most))) == most
    assert json_scan.members(text(most + 1)) is None


@pytest.mark.parametrize("seed", range(10))
def test_random_objects_have_the_members_that_a_decoder_finds(seed):
    random_ = random.Random(seed)

    def value(depth: int) -> object:
        if depth == 3 or random_.random() < 0.4:
            return random_.choice([1, -2.5, None, True, "", "a", 'x"},{', "\\", "[]", "é"])
        values = [value(depth + 1) for _ in range(random_.randrange(4))]
        return values if random_.random() < 0.5 else {f"k{at}": each for at, each in enumerate(values)}

    for _ in range(50):
        made = {f"n{at}": value(1) for at in range(random_.randrange(6))}
        text = json.dumps(
            made, indent=random_.choice([None, 1]), separators=random_.choice([None, (",", ":")])
        ).encode()
        assert {name.decode(): json.loads(text[start:end]) for name, start, end in json_scan.members(text)} == made


def test_real_bodies_pass():
    body = {
        "messages": [{"role": "user", "content": 'é😀 " \\ \u2028 ' * 50}] * 20,
        "x": [1.5, -2, None, True, {}] * 100,
    }
    for ascii_ in (True, False):
        assert json_scan.scan(json.dumps(body, ensure_ascii=ascii_).encode(), 10, 10_000)[0] == json_scan.OK


@pytest.mark.parametrize("unit", [b"[", b"\\n", b'\\"', b"a", b'"",', b"1,", b"\\ud83d\\ude00"])
def test_time_is_linear(unit):
    def seconds(count: int) -> float:
        text = b'"' * (unit.startswith(b"\\") or unit == b"a") + unit * (count // len(unit))
        best = 9.0
        for _ in range(5):
            begun = time.thread_time()
            json_scan.scan(text, 1 << 40, 1 << 40)
            best = min(best, time.thread_time() - begun)
        return best

    assert any(seconds(4 << 20) < 8 * seconds(1 << 20) + 0.002 for _ in range(4))  # quadratic time: 16 times
