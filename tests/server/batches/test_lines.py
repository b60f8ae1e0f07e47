"""The lines of a batch's file: every fault is named with its line; memory is bounded by the longest line."""

from __future__ import annotations

import orjson
import pytest

from server.batches import lines as module
from server.batches.lines import LineReader, Rules, check_lines

CHAT = "/v1/chat/completions"
RULES = Rules(CHAT, lambda name: "" if name in (None, "omniloop") else f"model {name} does not exist", 400)


def line(custom_id="a", /, **fields):
    body = {"model": "omniloop", "messages": []}
    return orjson.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | fields)


def checked(path, *written, rules=RULES):
    path.write_bytes(b"\n".join(written))
    return check_lines(path, rules)


def test_good_lines_are_counted_and_name_their_model(tmp_path):
    found = checked(tmp_path / "in", b"\xef\xbb\xbf" + line("a"), b"", line("b"), b"  ", line("c") + b"\n")
    assert (found.total, found.model, found.problems) == (3, "omniloop", [])


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'{"custom_id": "b"}', "invalid_json_line", None),
        (line("b", custom_id=7), "invalid_json_line", None),
        (line("b", body="text"), "invalid_json_line", None),
        (line("b", body={"model": 7}), "invalid_json_line", None),
        (b"[" * 390, "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (line("a"), "duplicate_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 257), "invalid_custom_id", "custom_id"),
        (line("b", method="GET"), "invalid_method", "method"),
        (line("b", url="/v1/embeddings"), "mismatched_url", "url"),
        (line("b", url="http://elsewhere/v1/chat/completions"), "mismatched_url", "url"),
        (line("b", body={"stream": True}), "invalid_body", "body.stream"),
        (line("b", body={"background": True}), "invalid_body", "body.background"),
        (line("b", body={"model": "other"}), "model_not_found", "body.model"),
        (line("b", body={"x": "y" * 400}), "line_too_long", None),
    ],
)
def test_a_wrong_line_is_named_with_its_number(tmp_path, wrong, code, param):
    found = checked(tmp_path / "in", line("a"), wrong, line("c"))
    (problem,) = found.problems
    assert (found.total, problem.code, problem.line, problem.param) == (3, code, 2, param)


def test_lines_without_an_endpoint_of_the_batch_have_a_known_one(tmp_path):
    rules = Rules("", RULES.unknown_model, 400)
    found = checked(tmp_path / "in", line("a", url="/v1/completions"), line("b", url="/metrics"), rules=rules)
    assert [problem.code for problem in found.problems] == ["mismatched_url"]


def test_the_first_hundred_problems_are_reported_and_lines_are_limited(tmp_path, monkeypatch):
    assert len(checked(tmp_path / "in", *[b"{"] * 150).problems) == 100
    monkeypatch.setattr(module, "MOST_LINES", 2)
    found = checked(tmp_path / "in", line("a"), line("b"), line("c"), b"{")
    assert [problem.code for problem in found.problems] == ["too_many_lines"]
    assert [problem.code for problem in checked(tmp_path / "in", b"\n\n").problems] == ["empty_file"]


def test_the_reader_skips_lines_that_have_an_answer(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"\n".join([line("a"), b"", line("b"), line("c")]))
    reader = LineReader(path, 400, {"b"})
    assert [each.custom_id for each in reader.next(1) + reader.next(5)] == ["a", "c"]
    assert reader.next(5) == []
    reader.close()
