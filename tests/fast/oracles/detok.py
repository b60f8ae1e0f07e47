"""Reference for `_fast/detok.pyx` in plain Python: character by character, without an automaton or a buffer of text."""

import codecs


def detokenize(pieces, ids, stops=(), *, special=(), include_stop=False, skip_special=True, min_tokens=0):
    """Returns (text, index of the stop string or -1, tokens consumed). `pieces` are the bytes of each token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    taken = 0

    def characters():
        nonlocal taken
        for token_id in ids:
            taken += 1
            if 0 <= token_id < len(pieces) and not (skip_special and token_id in special):
                for byte in pieces[token_id]:
                    yield from decoder.decode(bytes([byte]))
        yield from decoder.decode(b"", final=True)

    for char in characters():
        text += char
        found = next((k for k, stop in enumerate(stops) if text.endswith(stop)), -1)
        if found >= 0 and taken > min_tokens:
            return (text if include_stop else text[: len(text) - len(stops[found])]), found, taken
    return text, -1, taken
