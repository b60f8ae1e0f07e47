"""base64_text writes the same JSON strings as Python's own base64 encoder."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from _fast import base64_text


@pytest.mark.parametrize("count", [*range(20), 4095, 4096, 4097, 4098])
def test_every_length_is_encoded_as_python_does(count):
    data = np.random.default_rng(count).integers(0, 256, count, np.uint8).tobytes()
    assert base64_text.quoted(data) == b'"' + base64.b64encode(data) + b'"'


def test_all_letters_are_written():
    data = bytes(range(256)) * 3
    assert base64_text.quoted(data) == b'"' + base64.b64encode(data) + b'"'


def test_an_array_of_other_numbers_than_bytes_is_refused():
    with pytest.raises((TypeError, ValueError)):
        base64_text.quoted(np.zeros(4, np.float32))  # the caller must pass view(np.uint8)
    with pytest.raises(TypeError):
        base64_text.quoted(None)
