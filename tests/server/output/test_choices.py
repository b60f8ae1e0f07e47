"""Choices: finish reasons, stop strings against the engine's own ends, log-probabilities, and usage in answers."""

import math
from pathlib import Path

import numpy as np
import orjson
import pytest

from engine.base.request import Delta, FinishReason, TokenLogprob
from server.output import choices, logprobs
from server.output.choices import ChoiceStream, Piece
from server.output.text import StopStrings
from server.render.load_tokenizer import load_tokenizer
from server.render.prompt import Prompt

EMBEDDED = Path(__file__).parents[3] / "server" / "embedded"
NONE, STOP, STOP_TOKEN, LENGTH = FinishReason.NONE, FinishReason.STOP, FinishReason.STOP_TOKEN, FinishReason.LENGTH


class GatheredChoice:
    """Joins the pieces of one choice to an answer in one body."""

    __slots__ = ("finish_reason", "logprobs", "stop_reason", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        if piece.logprobs:
            self.logprobs.extend(piece.logprobs)
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EMBEDDED)


@pytest.fixture(scope="module")
def end(tokenizer):
    return tokenizer.id_of("<|im_end|>")


class Gathered:
    """Joins the pieces of one choice."""

    def __init__(self):
        self.text, self.token_ids, self.logprobs = "", [], []
        self.finish_reason = self.stop_reason = None

    def add(self, piece: Piece):
        self.text += piece.text
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs or ())
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


def gather(stream, deltas):
    gathered, pieces = Gathered(), []
    for delta in deltas:
        pieces.append(stream.take(delta))
        gathered.add(pieces[-1])
    return gathered, pieces


def entry(token_id, logprob=-1.0, rank=1, top=()):
    return TokenLogprob(token_id, logprob, rank, [i for i, _ in top], [value for _, value in top])


# -- reasons


def test_the_end_token_counts_and_has_no_text(tokenizer, end):
    ids = tokenizer.encode("Hello world")
    stream = ChoiceStream(tokenizer, skip_special_tokens=False)
    gathered, pieces = gather(stream, [Delta(0, ids[:1]), Delta(0, [*ids[1:], end], STOP)])
    assert (gathered.text, gathered.finish_reason, gathered.stop_reason) == ("Hello world", "stop", None)
    assert stream.num_tokens == len(ids) + 1 == len(gathered.token_ids)
    assert not any(piece.stop_engine for piece in pieces)


def test_a_stop_token_is_named_and_in_the_text_only_on_request(tokenizer):
    ids = tokenizer.encode("one two")
    for include, text in ((False, tokenizer.decode(ids[:-1])), (True, "one two")):
        stream = ChoiceStream(tokenizer, include_stop=include)
        gathered, _ = gather(stream, [Delta(0, ids, STOP_TOKEN, stop_token_id=ids[-1])])
        assert (gathered.text, gathered.finish_reason, gathered.stop_reason) == (text, "stop", ids[-1])


def test_an_end_token_can_be_part_of_the_text(tokenizer, end):
    stream = ChoiceStream(tokenizer, include_stop=True, skip_special_tokens=False)
    assert stream.take(Delta(0, [end], STOP)).text == "<|im_end|>"


def test_a_stop_string_ends_the_choice_and_stops_the_engine(tokenizer):
    ids = tokenizer.encode("one two three four")
    stream = ChoiceStream(tokenizer, 3, ["o th", "zzz"])
    entries = [entry(token_id) for token_id in ids]
    gathered, pieces = gather(stream, [Delta(3, ids, logprobs=entries), Delta(3, ids), Delta(3, [5], LENGTH)])
    assert (gathered.text, gathered.finish_reason, gathered.stop_reason) == ("one tw", "stop", "o th")
    assert [piece.stop_engine for piece in pieces] == [True, False, False]
    assert stream.num_tokens == len(gathered.token_ids) == len(gathered.logprobs) < len(ids)
    assert tokenizer.decode(gathered.token_ids).startswith("one two th")


def test_a_stop_string_in_the_last_delta_wins_over_its_reason(tokenizer, end):
    ids = tokenizer.encode("say END now")
    for delta in (Delta(0, ids, LENGTH), Delta(0, [*ids, end], STOP)):
        stream = ChoiceStream(tokenizer, 0, StopStrings(["END"]))
        piece = stream.take(delta)
        assert (piece.text, piece.finish_reason, piece.stop_reason, piece.stop_engine) == ("say ", "stop", "END", False)
        assert stream.num_tokens < len(ids)


def test_text_held_for_a_stop_string_comes_with_the_end(tokenizer):
    ids = tokenizer.encode("a EN")
    stream = ChoiceStream(tokenizer, 0, ["END"])
    gathered, pieces = gather(stream, [Delta(0, ids), Delta(0, [], LENGTH)])
    assert (pieces[0].text, pieces[1].text, gathered.finish_reason) == ("a ", "EN", "length")


def test_half_a_character_at_the_end_is_replaced(tokenizer):
    ids = tokenizer.encode("😀")[:-1]
    stream = ChoiceStream(tokenizer)
    gathered, pieces = gather(stream, [Delta(0, ids), Delta(0, [], FinishReason.ABORT)])
    assert (pieces[0].text, gathered.text, gathered.finish_reason) == ("", "�", "abort")


def test_stop_strings_wait_for_min_tokens(tokenizer):
    ids = tokenizer.encode("x x x x x x")
    text = ChoiceStream(tokenizer, 0, ["x"], min_tokens=len(ids) - 1).take(Delta(0, ids)).text
    assert text == "x x x x x "


# -- log-probabilities


def test_chat_logprobs_hold_exactly_the_top_and_json_numbers(tokenizer):
    half = tokenizer.encode("😀")[0]
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    given = [entry(a, -3.0, 7, [(b, -0.5), (half, -math.inf)]), entry(half, math.nan, 1, [(half, -0.1)])]
    body = logprobs.TokenNames(tokenizer).chat(given, 2)
    first, second = body["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -3.0, [97])
    assert [item["token"] for item in first["top_logprobs"]] == ["b", "�"]
    assert first["top_logprobs"][1]["logprob"] == -9999.0
    assert bytes(second["bytes"]) == tokenizer.token_bytes(half)
    assert second["logprob"] == -9999.0
    assert logprobs.TokenNames(tokenizer).chat(given, 0)["content"][0]["top_logprobs"] == []
    assert len(logprobs.TokenNames(tokenizer).chat(given, -1)["content"][0]["top_logprobs"]) == 2
    assert b"NaN" not in orjson.dumps(body)


def test_tokens_can_be_named_by_id(tokenizer):
    names = logprobs.TokenNames(tokenizer, as_ids=True)
    assert names.chat([entry(7, top=[(9, -1.0)])], 1)["content"][0]["token"] == "token_id:7"
    assert logprobs.CompletionLogprobs(names, 1).add([entry(7)])["tokens"] == ["token_id:7"]


def test_completion_logprobs_run_on_and_hold_the_chosen_token(tokenizer):
    text = "né 漢 😀 x"
    ids = tokenizer.encode(text)
    other = tokenizer.encode("q")[0]
    lp = logprobs.CompletionLogprobs(logprobs.TokenNames(tokenizer), 1)
    chunks = [lp.add([entry(token_id, -0.1234567 * k - 1, 2, [(other, -0.5)])]) for k, token_id in enumerate(ids)]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = logprobs.joined(whole, chunk)
    for token, value, top in zip(whole["tokens"], whole["token_logprobs"], whole["top_logprobs"]):
        assert top[token] == value
        assert len(top) == 2
    assert whole["text_offset"][0] == 0
    assert whole["text_offset"][-1] == text.rindex(tokenizer.token_text(ids[-1]))
    assert len(set(whole["tokens"])) == len(set(ids))


def test_echoed_logprobs_begin_with_null_and_cover_prompt_and_output(tokenizer, end):
    ids = [end, *tokenizer.encode("ab cd")]
    known = [None, *[entry(token_id, -2.0, 1, [(token_id, -2.0)]) for token_id in ids[1:]]]
    lp = logprobs.CompletionLogprobs(logprobs.TokenNames(tokenizer), 1)
    whole = logprobs.joined(lp.add_prompt(ids, known), lp.add([entry(ids[1])]))
    assert len(whole["tokens"]) == len(ids) + 1
    assert whole["token_logprobs"][0] is whole["top_logprobs"][0] is None
    assert whole["text_offset"][:2] == [0, 0]
    assert whole["text_offset"][-1] == len("ab cd")


def test_prompt_logprobs_are_keyed_by_id(tokenizer):
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    first, second = logprobs.TokenNames(tokenizer).prompt([None, entry(a, -4.0, 9, [(b, -0.5), (a, -4.0)])])
    assert first is None
    assert second == {
        str(a): {"logprob": -4.0, "rank": 9, "decoded_token": "a"},
        str(b): {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
    }


# -- bodies


def test_usage_always_has_both_details():
    assert choices.usage(10, 3, cached_tokens=10, multimodal_tokens={"image": 4}, reasoning_tokens=1) == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 9, "multimodal_tokens": {"image": 4}},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert choices.usage(1, 0)["prompt_tokens_details"] == {"cached_tokens": 0, "multimodal_tokens": None}


def test_messages_and_choices():
    message = choices.chat_message("hi", reasoning="because", tool_calls=[{"id": "x"}])
    assert message["reasoning"] == message["reasoning_content"] == "because"
    assert set(choices.chat_message(None, reasoning="r", reasoning_field="reasoning")) == {
        "role", "content", "refusal", "reasoning",
    }  # fmt: skip
    choice = choices.chat_choice(1, message, "stop", "END", token_ids=[1])
    assert (choice["index"], choice["stop_reason"], choice["logprobs"], choice["token_ids"]) == (1, "END", None, [1])
    choice = choices.completion_choice(0, "t", None)
    assert "token_ids" not in choice
    assert choice["prompt_logprobs"] is None


def test_echo_shows_the_clients_text_or_what_its_ids_say(tokenizer):
    ids = np.array(tokenizer.encode("a<|im_end|>b"), dtype=np.int32)
    assert choices.echo_text(tokenizer, Prompt(ids, text="as sent")) == "as sent"
    assert choices.echo_text(tokenizer, Prompt(ids)) == "a<|im_end|>b"
