"""TextStream: the text of one choice as its tokens arrive, ended by the first stop string.

Owner: the loop, one per choice. In: token ids of a Delta. Out: text that can be sent now. The work is done by
`_fast/detok.pyx` over the tokenizer's table of token bytes; a request's stop strings are compiled once for its choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from _fast.detok import Detokenizer, StopSet, TokenTable
from server.render.tokenizer import Tokenizer


class StopStrings:
    """A request's stop strings, compiled; shared by its choices. `markers`: character of each marker token in
    the text.
    """

    __slots__ = ("compiled", "forms", "texts")

    def __init__(self, texts: Sequence[str], markers: Mapping[str, str] | None = None) -> None:
        self.texts = tuple(texts)
        forms = [*self.texts, *(spelled(text, markers) for text in self.texts)] if markers else self.texts
        self.forms = frozenset(forms)
        self.compiled = StopSet([text.encode() for text in forms]) if forms else None


def spelled(text: str, markers: Mapping[str, str]) -> str:
    """A text in which each marker token is replaced by its character (output/markers.py)."""
    for marker in sorted(markers, key=len, reverse=True):
        text = text.replace(marker, markers[marker])
    return text


class TextStream:
    """Text of one choice.

    `skip_special_tokens` leaves special tokens out. Stop strings that are complete within the first `min_tokens` tokens
    do not count. The text continues a prompt, so it may begin with a space. With `at_start` the text begins at its
    first token: all pieces together equal `Tokenizer.decode` of all ids.
    """

    __slots__ = ("feed", "finish", "machine", "paused", "skip", "stops")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] | StopStrings = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        at_start: bool = False,
        table: TokenTable | None = None,
    ) -> None:
        self.stops = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self.machine = Detokenizer(
            table or tokenizer.table,
            self.stops.compiled,
            include_stop,
            skip_special_tokens,
            min_tokens,
            tokenizer.strip if at_start else 0,
            tokenizer.first_bytes if at_start and tokenizer.decodes_first_apart else None,
        )
        self.paused = False
        self.feed = self.machine.feed  # (token ids) -> new text to send; "" after a stop string
        self.skip = self.machine.skip  # (count): count tokens without text, such as the last one
        self.finish = self.machine.finish  # () -> the text that was held back; invalid bytes become U+FFFD

    def pause(self) -> str:
        """Match no stop strings from here on; returns the text that was held back for one."""
        self.paused = True
        return self.machine.pause()

    def resume(self, text: str) -> str:
        """Match stop strings again, first in a text that has been returned before; returns what they leave of it."""
        assert self.stops.compiled is not None
        self.paused = False
        return self.machine.resume(text, self.stops.compiled)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        matched = self.machine.matched
        return None if matched < 0 else self.stops.texts[matched % len(self.stops.texts)]
