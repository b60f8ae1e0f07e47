"""Long integer lists in a request body: find() and read() agree with json, wherever in the body the lists are."""

from __future__ import annotations

import json
import random

import pytest

from _fast import id_lists

LEAST = 3


def read_all(data: bytes, start: int, end: int) -> list[int]:
    found = []
    while start < end:
        piece, start = id_lists.read(data, start, end)
        assert 1 <= len(piece) <= 4096
        found += piece
    return found


def whole(data: bytes):
    """The body as json reads it, reassembled from the short body and the lists."""
    lists = id_lists.find(data, LEAST)
    short = bytearray(data)
    for *_, start, end in reversed(lists):
        del short[start:end]
    body = json.loads(short)
    for key, index, start, end in lists:
        ids = body[key.decode()] if index < 0 else body[key.decode()][index]
        assert len(ids) == 1
        ids += read_all(data, start, end)
    return body, len(lists)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('{"prompt":[1,2,3]}', 1),
        ('{"prompt":[1,2]}', 0),
        ('{ "prompt" : [ 1 , -2,\t3 ] , "n": 1 }', 1),
        ('{"prompt":[[1,2,3],[4],[5,6,7]],"tokens":[8,9,10]}', 3),
        ('{"prompt":["a",[1,2,3],{"b":[1,2,3]},[4,5,6]]}', 2),
        ('{"a":{"b":[1,2,3]},"c":[[[1,2,3]]],"d":["]",[1,2,3]]}', 1),
        ('{"mixed":[1,2,3,"a"],"floats":[1,2,3.5],"large":[1,2,1234567890123456789]}', 0),
        ('{"largest":[0,-0,999999999999999999,-999999999999999999]}', 1),
        ('{"empty":[],"none":null,"text":"[1,2,3]"}', 0),
        ("[[1,2,3]]", 0),
    ],
)
def test_lists_are_found_under_a_key_and_in_a_list_there(text, count):
    assert whole(text.encode()) == (json.loads(text), count)


@pytest.mark.parametrize(
    "text", ['{"a":[1,2,3', '{"a":[01,2,3]}', '{"a":[1,2,3,]}', '{"a":[1,,3]}', '{"a', '{"a":[1 2 3]}', ""]
)
def test_a_malformed_list_is_left_to_the_decoder(text):
    assert id_lists.find(text.encode(), LEAST) == []


def test_a_key_with_escapes_is_given_as_it_stands():
    """No field has such a name, so the value is ignored."""
    text = b'{"say \\"a\\":[1,2":["\\\\",[1,2,3]]}'
    assert [key for key, *_ in id_lists.find(text, LEAST)] == [b'say \\"a\\":[1,2']


def test_a_long_list_comes_in_pieces():
    ids = [random.Random(0).randrange(-9, 200_000) for _ in range(10_000)]
    assert whole(json.dumps({"prompt": ids}).encode()) == ({"prompt": ids}, 1)
    with pytest.raises(ValueError, match="the body has 9"):
        id_lists.read(b'{"a":[1]}', 3, 10)


@pytest.mark.parametrize("seed", range(10))
def test_random_bodies_are_what_json_reads(seed):
    random_ = random.Random(seed)

    def value(depth: int):
        kind = random_.randrange(6 if depth < 4 else 3)
        if kind < 2:
            return random_.choice([7, -3, 1.5, None, "a,[1,2,3]", '"', "\\"])
        if kind < 4:
            return [random_.randrange(-50, 50) for _ in range(random_.randrange(6))]
        if kind == 4:
            return [value(depth + 1) for _ in range(random_.randrange(4))]
        return {f"k{k}": value(depth + 1) for k in range(random_.randrange(4))}

    for _ in range(200):
        body = {f"key{k}": value(1) for k in range(random_.randrange(5))}
        text = json.dumps(body, indent=random_.choice([None, 1]))
        assert whole(text.encode())[0] == body


@pytest.mark.parametrize("seed", range(10))
def test_random_texts_are_refused_or_read_as_json_reads_them(seed):
    random_ = random.Random(seed)
    pieces = ['"a"', '"b":', "[", "]", "[1,2,3]", "[1,2,3", ",", "4", "-", "{", "}", " ", '"\\"', "1.5"]
    for _ in range(2000):
        text = '{"a":' + "".join(random_.choices(pieces, k=random_.randrange(1, 12))) + "}"
        try:
            expected = json.loads(text)
        except ValueError:
            with pytest.raises(ValueError):
                whole(text.encode())
        else:
            if text.count('"a"') == text.count('"b":') == 1:
                assert whole(text.encode())[0] == expected
