"""A family's text in front of a media item is tokenized together with the text before it."""

from __future__ import annotations

import numpy as np
import pytest

from mm.client_rows import ClientRows
from server.render.hf_tokenizer import HfTokenizer
from server.render.preambles import with_preambles
from server.render.prompt import Prompt, PromptRows
from tests.server.render import vocab

MARK, PREAMBLE = "<start_of_image>", "Here is the original image "


@pytest.fixture(scope="module", params=["bytes", "gemma"])
def tokenizer(request):
    core = vocab.byte_level() if request.param == "bytes" else vocab.byte_fallback(llama=False)
    core.add_special_tokens([MARK, "<turn>"])
    return HfTokenizer(core, {}, {})


def prompt_of(tokenizer, text: str, rows: tuple[PromptRows, ...] = ()) -> Prompt:
    ids = np.array(tokenizer.encode(text), np.int32)
    return Prompt(ids, (), tuple(np.flatnonzero(ids == tokenizer.id_of(MARK)).tolist()), text, rows)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<turn>user\n", "the whole"),
        ("<turn>user\nWhat is th", "is?<turn>model\n"),
        ("", " behind"),
        (" " * 3, "\n"),
    ],
)
@pytest.mark.parametrize("preambles", [(PREAMBLE, ""), ("", PREAMBLE), (PREAMBLE, PREAMBLE)])
def test_a_led_prompt_has_the_tokens_of_its_whole_text(tokenizer, before, after, preambles):
    places = [f"\n\n{MARK}\n\n"] * 2
    prompt = prompt_of(tokenizer, before.join(["", *places]) + after)
    found = with_preambles(prompt, preambles, tokenizer)
    whole = before.join(["", *(preamble + place for preamble, place in zip(preambles, places))]) + after
    assert found.token_ids.tolist() == tokenizer.encode(whole)
    assert found.token_ids[list(found.slots)].tolist() == [tokenizer.id_of(MARK)] * 2
    assert found.token_ids.dtype == np.int32


def test_what_a_client_spelled_stays_letters(tokenizer):
    """If a client's text spells special tokens, retokenizing it with the preamble does not make them special."""
    ids = tokenizer.encode_segments([("<turn>user ", False), ("<turn>", True), (f"\n\n{MARK}\n\n", False)])
    prompt = Prompt(np.array(ids, np.int32), (), (ids.index(tokenizer.id_of(MARK)),), "as rendered")
    found = with_preambles(prompt, [PREAMBLE], tokenizer).token_ids.tolist()
    assert tokenizer.decode(found) == f"<turn>user <turn>{PREAMBLE}\n\n{MARK}\n\n"
    assert found.count(tokenizer.id_of("<turn>")) == 1


def test_rows_of_a_client_move_and_are_no_text(tokenizer):
    rows = ClientRows(np.zeros((3, 4), np.float32), bytes(16))
    around = tokenizer.encode("<turn>a"), tokenizer.encode(f"b\n\n{MARK}\n\n"), tokenizer.encode(f"c\n\n{MARK}\n\n")
    ids = [*around[0], 7, 7, 7, *around[1], 7, 7, 7, *around[2]]
    starts = len(around[0]), len(around[0]) + 3 + len(around[1])
    slots = tuple(np.flatnonzero(np.array(ids) == tokenizer.id_of(MARK)).tolist())
    given = tuple(PromptRows(start, rows) for start in starts)
    found = with_preambles(Prompt(np.array(ids, np.int32), (), slots, "", given), [PREAMBLE, PREAMBLE], tokenizer)
    led = [tokenizer.encode(f"{text}{PREAMBLE}\n\n{MARK}\n\n") for text in "bc"]
    assert found.token_ids.tolist() == [*around[0], 7, 7, 7, *led[0], 7, 7, 7, *led[1]]
    assert [item.start for item in found.rows] == [starts[0], len(around[0]) + 3 + len(led[0])]


def test_tokens_that_are_no_text_stay(tokenizer):
    """Half a character, as truncation leaves it, keeps its token; the item's text follows."""
    half = tokenizer.encode("é")[:1] if len(tokenizer.encode("é")) > 1 else [tokenizer.id_of("Ã")]
    ids = [*half, *tokenizer.encode(f"\n\n{MARK}")]
    prompt = Prompt(np.array(ids, np.int32), (), (len(ids) - 1,), "é")
    found = with_preambles(prompt, [PREAMBLE], tokenizer)
    assert found.token_ids.tolist() == [*ids[:-1], *tokenizer.encode(f"{PREAMBLE}\n\n"), ids[-1]]


def test_in_a_prompt_of_ids_an_items_text_stands_in_front_of_the_placeholder(tokenizer):
    ids = tokenizer.encode(f"What is\n\n{MARK}\n\n")
    at = ids.index(tokenizer.id_of(MARK))
    found = with_preambles(Prompt(np.array(ids, np.int32), (), (at,)), [PREAMBLE], tokenizer)
    assert found.token_ids.tolist() == [*ids[:at], *tokenizer.encode(PREAMBLE), *ids[at:]]
    assert found.token_ids[list(found.slots)].tolist() == [tokenizer.id_of(MARK)]
