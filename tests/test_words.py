"""Texts for users are plain English, and prose in code uses the terms of the field: tests of word lists and lengths."""

from __future__ import annotations

import statistics

import pytest

from server.bench.command import COMMANDS as BENCHES
from server.flags.command_line import GROUPS, all_flags, flags_of
from server.flags.help import COMMANDS, USAGE
from tests.code_words import private_lines
from tests.words import BANNED, LONGEST, MEAN, NOT_PROSE, pages, prose, sentences, split, strings

MOST_PRIVATE = 0


@pytest.mark.parametrize("name", pages())
def test_a_page_has_none_of_the_words_and_short_sentences(name):
    text = pages()[name]
    assert not [found[0] for found in BANNED.finditer(prose(text))]
    lengths = {sentence: len(sentence.split()) for sentence in sentences(text)}
    assert not [sentence for sentence, length in lengths.items() if length > LONGEST]
    whole = [length for sentence, length in lengths.items() if sentence.endswith(".")]
    assert statistics.mean(whole or [0]) <= MEAN


def test_help_has_none_of_the_words():
    flags = [*all_flags().values(), *(flag for each in BENCHES.values() for flag in flags_of(each.flags, "x").values())]
    texts = [flag.hints["help"] for flag in flags] + [each.text for each in BENCHES.values()]
    texts += [*GROUPS.values(), *COMMANDS.values(), *USAGE.values()]
    assert not [text for text in texts if BANNED.search(text)]
    assert not [text for text in texts for sentence in split(text) if len(sentence.split()) > LONGEST]


def test_error_texts_and_log_lines_have_none_of_the_words():
    found = [f"{place}: {match[0]!r} in {text!r}" for place, text in strings() if (match := BANNED.search(text))]
    assert not found, "\n".join(found)


def test_sentences_of_error_texts_and_log_lines_are_short():
    prose = [(place, text) for place, text in strings() if not place.startswith(NOT_PROSE)]
    found = [f"{place}: {part!r}" for place, text in prose for part in split(text) if len(part.split()) > LONGEST]
    assert not found, "\n".join(found)


def test_strings_are_found_where_they_are():
    assert len(strings()) > 1000
    assert any("must be at least" in text or "at least X" in text for _, text in strings())


def test_docstrings_comments_and_names_use_the_terms_of_the_field():
    found = private_lines()
    assert len(found) <= MOST_PRIVATE, "\n".join(found)
