"""Base64 of requests: accepted exactly where the strict decoder of the standard library accepts it."""

import base64
import binascii
import random

import pytest

from mm.errors import MediaError
from mm.sources import decode_base64, parse_base64

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
STRANGE = '=\\"\n \t-_é\x00\ud800/u0'


def strictly(text: str) -> bytes | None:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return None


def ours(text: str) -> bytes | None:
    try:
        return decode_base64(parse_base64(text))
    except MediaError:
        return None


def test_random_text_is_taken_as_the_standard_library_does():
    draw = random.Random(1)
    taken = 0
    for _ in range(20_000):
        length = draw.choice((4, 4, 8, 8, 12, 16))
        text = "".join(draw.choice(ALPHABET if draw.random() < 0.97 else STRANGE) for _ in range(length))
        text = draw.choice((text, text[:-1] + "=", text[:-2] + "=="))
        expected = strictly(text)
        assert ours(text) == expected, repr(text)
        taken += expected is not None
    assert taken > 10_000


@pytest.mark.parametrize("size", [1, 2, 3, 196_607, 196_608, 196_609, 500_000])
def test_every_length_comes_back_whole(size):
    data = random.Random(size).randbytes(size)
    assert ours(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize("text", ["AA\\/", "\\u0041", 'AA"A', "A\\nB", "AA==" * 70_000])
def test_s17_nothing_hides_behind_an_escape_or_in_a_later_piece(text):
    assert ours(text) is None


def test_an_error_names_line_breaks():
    """The command `base64` breaks lines unless its options ask for one line."""
    with pytest.raises(MediaError, match="one line"):
        parse_base64(base64.encodebytes(b"a" * 100).decode())
