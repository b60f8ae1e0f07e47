"""Fill in the middle: prompts of a text before a gap and a text after it, in the format of the model's family.

Owner: any thread; one FillIn per tokenizer. In: the tokenizer's added tokens; then texts. Out: token ids. Markers are
written by id, and texts as plain text: a marker that a client spells stays text. Formats and their order are those of
the families' own documentation; a tokenizer with other markers has none.

    PREFIX before SUFFIX after MIDDLE | answer       or, for Codestral:  SUFFIX after PREFIX before | answer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from server.render.frames import place_of
from server.render.tokenizer import PlainTexts, Tokenizer


@dataclass(frozen=True, slots=True)
class Markers:
    """The spellings of a format's tokens."""

    prefix: str
    suffix: str
    middle: str  # "": the answer follows the text before the gap, and the text after the gap comes first
    pieces: bool = False  # the tokens belong to the vocabulary of pieces, not to the added tokens


FORMATS = (
    Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder, V2, V3
    Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4
    Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder 1 and 2, Granite Code
    Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Markers("▁<PRE>", "▁<SUF>", "▁<MID>", pieces=True),  # CodeLlama
    Markers("[PREFIX]", "[SUFFIX]", ""),  # Codestral, as mistral-common writes it
)
REPOSITORY = ("<|repo_name|>", "<reponame>")  # before the name of a repository
FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>")  # before the name of a file
ENDS = (*REPOSITORY, *FILE, "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|endoftext|>", "▁<EOT>")
PROJECT, CURRENT = "project\n", "current\n"  # names that requests do not contain
NO_TOKENS = "this model's tokenizer has no tokens for filling in the middle"


class File(NamedTuple):
    """Text of another file."""

    name: str
    text: str


class FillIn:
    """The format of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, markers: Markers, ids: dict[str, int]) -> None:
        """`ids`: ids of the format's markers, and of those of `ENDS` that the tokenizer has."""
        self._tokenizer = tokenizer
        self._spellings = tuple(ids)
        self._repository = next(([ids[name]] for name in REPOSITORY if name in ids), [])
        self._file = next(([ids[name]] for name in FILE if name in ids), [])
        self._pieces = markers.pieces
        self.prefix, self.suffix = ids[markers.prefix], ids[markers.suffix]
        self.middle = ids[markers.middle] if markers.middle else None
        self.ends = tuple(dict.fromkeys(ids.values()))  # tokens that end an answer, in addition to the model's own
        bare, framed = tokenizer.encode("x"), tokenizer.encode("x", True)
        self._begin = framed[: place_of(bare, framed)]  # BOS, where the tokenizer adds it

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FillIn | None:
        """The format of a tokenizer; None if it has no known markers."""
        added = tokenizer.added_tokens
        for markers in FORMATS:
            names = [name for name in (markers.prefix, markers.suffix, markers.middle) if name]
            pieces = {name: token for name in names if (token := tokenizer.id_of(name)) is not None}
            known = pieces if markers.pieces else added
            if all(name in known for name in names):
                more = {name: added[name] for name in ENDS if name in added}
                if markers.pieces and (end := tokenizer.id_of("▁<EOT>")) is not None:
                    more["▁<EOT>"] = end
                return cls(tokenizer, markers, {**{name: known[name] for name in names}, **more})
        return None

    @cached_property
    def _plain(self) -> PlainTexts:
        """Encodes texts in which no marker becomes a token; made at the first use, in the pool."""
        return self._tokenizer.plain_texts(self._spellings)

    def around(self, before: str, after: str, begun: str, files: Sequence[File], most: int) -> list[int]:
        """The prompt of a gap in a file among others, with at most `most` ids; `begun`: text in the gap that the answer
        continues.

        What does not fit is left out: files from the front, then the beginning of `before` and the end of `after`,
        which keeps a quarter of the space.
        """
        plain, start = self._plain, self._begin
        first = plain.inside(" " + before) if self._pieces else plain.first(before)
        last, middle = plain.inside(after), plain.inside(begun) if begun else []
        room = max(most - len(middle) - len(self.joined([], [], start)), 0)
        kept = min(len(last), max(room // 4, room - len(first)))
        last, first = last[:kept], first[max(len(first) - (room - kept), 0) :]
        room -= len(first) + len(last)
        others: list[int] = []
        start_of, end_of = self._frame() if files else ([], [])
        for file in reversed(files):
            ids = [*self._file, *plain.inside(f"{file.name}\n{file.text}\n")]
            if len(start_of) + len(others) + len(ids) + len(end_of) > room:
                break
            others = [*ids, *others]
        if others:
            others = [*start_of, *others, *end_of]
        return [*self.joined(first, last, [*start, *others]), *middle]

    def _frame(self) -> tuple[list[int], list[int]]:
        """The tokens before the first of other files, and after the last one, where the tokenizer has them."""
        start_of = [*self._repository, *self._plain.inside(PROJECT)] if self._repository else []
        return start_of, [*self._file, *self._plain.inside(CURRENT)] if self._file else []

    def encode(self, before: str, after: str, special: bool = True) -> list[int]:
        """The prompt; `special`: with BOS, where the tokenizer adds it."""
        plain = self._plain
        first = plain.inside(" " + before) if self._pieces else plain.first(before)  # CodeLlama: also before ""
        return self.joined(first, plain.inside(after), self._begin if special else ())

    def joined(self, before: Sequence[int], after: Sequence[int], begin: Sequence[int]) -> list[int]:
        """The prompt of encoded texts."""
        if self.middle is None:
            return [*begin, self.suffix, *after, self.prefix, *before]
        return [*begin, self.prefix, *before, self.suffix, *after, self.middle]
