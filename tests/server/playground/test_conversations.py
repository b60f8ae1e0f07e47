"""Conversations on the page: answers in the background, context length, refusals, keys, failures."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any

import pytest

from tests.server.playground.browser import CHROMIUM, DROP, MEDIA, NO_CHROMIUM, answer, ask, opened, words
from tests.server.playground.scripted import Reply, Scripted, delta, finish, refused, said

pytestmark = pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)
TOO_LONG = "This model's maximum context length is 1000 tokens."


def begin(page: Any) -> None:
    page.get_by_role("button", name="New conversation").click()


def gated(text: str, rest: str, gate: threading.Event) -> Reply:
    return Reply([delta(content=text), delta(content=rest), *finish("stop")], gate=gate)


def roles(body: dict[str, Any]) -> list[str]:
    return [message["role"] for message in body["messages"]]


def growing(page: Any, text: str) -> None:
    """Waits for an answer that contains this text."""
    page.locator(".assistant > .words", has_text=text).wait_for()


def note(page: Any, text: str) -> None:
    """Waits for a note, which the page displays for some seconds."""
    page.locator("#notes .note", has_text=text).first.wait_for()


def question(page: Any) -> Any:
    return page.get_by_role("textbox", name="Question")


def talk(page: Any, script: Scripted, *totals: int) -> None:
    """A conversation whose answers end with these total numbers of tokens."""
    for number, total in enumerate(totals):
        script.replies.append(said(f"answer {number}", prompt=total - 10, completion=10))
        ask(page, f"question {number}")
        answer(page, number)


def test_an_answer_goes_on_while_another_conversation_is_open(still, script):
    gate = threading.Event()
    script.replies += [gated("first ", "and last", gate), said("other")]
    ask(still, "long one")
    growing(still, "first")
    begin(still)
    assert still.locator("#send").is_visible()
    still.get_by_role("img", name="answering").wait_for()
    ask(still, "short one")
    assert words(answer(still)) == "other"
    gate.set()
    note(still, "long one: is answered")
    still.get_by_role("img", name="answered").wait_for()
    still.get_by_role("button", name="long one").first.click()
    growing(still, "first and last")
    assert words(answer(still)) == "first and last"
    still.get_by_role("img", name="answered").wait_for(state="detached")
    still.reload()
    assert words(answer(still)) == "first and last"
    assert still.complaints == []


def test_coming_back_shows_the_answer_as_it_grows_and_stop_ends_only_that(still, script):
    gates = [threading.Event(), threading.Event()]
    replies = [gated("one ", "rest", gates[0]), gated("two ", "rest", gates[1])]
    script.replies += replies
    ask(still, "first")
    growing(still, "one")
    begin(still)
    ask(still, "second")
    growing(still, "two")
    still.get_by_role("button", name="first", exact=False).first.click()
    growing(still, "one")
    still.get_by_role("button", name="Stop").click()
    still.get_by_text("stopped").wait_for()
    assert replies[0].left.wait(20)
    gates[1].set()
    still.get_by_role("button", name="second", exact=False).first.click()
    growing(still, "two rest")
    assert words(answer(still)) == "two rest"
    assert not replies[1].left.is_set()


def test_what_is_removed_while_it_is_answered_stays_removed(still, script):
    gate = threading.Event()
    reply = gated("half", " rest", gate)
    script.replies.append(reply)
    ask(still, "gone")
    growing(still, "half")
    begin(still)
    still.locator("#conversations li").hover()
    still.get_by_role("button", name="Remove gone").click()
    assert reply.left.wait(20)
    still.get_by_text("Conversations stay in this browser.").wait_for()
    still.reload()
    still.get_by_text("Conversations stay in this browser.").wait_for()


def test_the_meter_shows_the_room_and_the_oldest_turns_are_dropped_and_taken_back(still, script):
    talk(still, script, 200, 400, 600, 800)
    assert still.locator("#context").inner_text().startswith("800 of 1,000 tokens")
    assert still.get_by_role("meter").get_attribute("value") == "800"
    still.get_by_role("button", name="Shorten").click()
    still.get_by_text("The 6 messages above are not sent to the model.").wait_for()
    assert still.locator("#context").inner_text().startswith("200 of")
    assert still.locator(".message.unsent").count() == 6
    still.reload()
    still.get_by_text("The 6 messages above").wait_for()
    script.replies.append(said("more", prompt=250, completion=10))
    ask(still, "question 4")
    answer(still, 4)
    assert [message["content"] for message in script.bodies[-1]["messages"]] == ["question 3", "answer 3", "question 4"]
    assert still.locator("#context").inner_text().startswith("260 of")
    still.get_by_role("button", name="Send all again").click()
    assert still.locator(".message.unsent").count() == 0
    talk_again = said("all", prompt=860, completion=10)
    script.replies.append(talk_again)
    ask(still, "question 5")
    answer(still, 5)
    assert len(script.bodies[-1]["messages"]) == 11
    still.get_by_role("button", name="Shorten").click()
    still.get_by_role("button", name="Undo").last.click()
    assert still.locator(".border").count() == 0


def test_a_conversation_that_is_too_long_offers_to_drop_its_oldest_turns(still, script):
    talk(still, script, 400, 800)
    script.replies.append(refused(400, TOO_LONG, "context_length_exceeded"))
    ask(still, "one more")
    still.locator("#refused", has_text=TOO_LONG).wait_for()
    assert question(still).input_value() == "one more"
    still.get_by_role("button", name="Drop the oldest turns").click()
    still.get_by_text("The 2 messages above").wait_for()
    script.replies.append(said("fits"))
    question(still).press("Enter")
    assert words(answer(still, 2)) == "fits"
    assert roles(script.bodies[-1]) == ["user", "assistant", "user"]


def test_a_refused_question_returns_to_the_form_with_its_files_and_leaves_no_trace(still, script):
    script.replies += [refused(429, "the wait queue is full; try again later"), said("now")]
    picture = base64.b64encode((MEDIA / "picture.png").read_bytes()).decode()
    still.evaluate(DROP, ["picture.png", "image/png", picture])
    still.get_by_role("button", name="Remove picture.png").wait_for()
    ask(still, "What is it?")
    still.locator("#refused", has_text="the wait queue is full").wait_for()
    assert question(still).input_value() == "What is it?"
    still.get_by_role("button", name="Remove picture.png").wait_for()
    assert still.get_by_role("article").count() == 0
    assert still.locator("#conversations li").count() == 0
    question(still).press("Enter")
    assert words(answer(still)) == "now"
    assert still.locator("#refused").is_hidden()
    assert [part["type"] for part in script.bodies[-1]["messages"][0]["content"]] == ["image_url", "text"]


def test_a_refused_question_stays_where_something_else_is_written_already(still, script):
    script.replies.append(refused(500, "it failed"))
    still.route("**/v1/chat/completions", lambda route: (question(still).fill("the next one"), route.continue_()))
    ask(still, "first")
    answer(still).get_by_text("it failed").wait_for()
    assert question(still).input_value() == "the next one"
    assert still.get_by_role("article", name="You").inner_text().startswith("first")


def test_a_wrong_key_reads_otherwise_than_a_missing_one(browser, script):
    script.key = "right"
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(script.url)
        page.get_by_text("This server needs an API key.").wait_for()
        page.get_by_role("textbox", name="API key").first.fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("The server refuses the API key that is saved here.").wait_for()
        page.get_by_role("textbox", name="API key").first.fill("right")
        page.keyboard.press("Enter")
        page.locator("body.ready").wait_for()
        script.key = "changed"
        ask(page, "Hello")
        page.locator("#refused", has_text="refuses the API key").wait_for()
        assert question(page).input_value() == "Hello"
        page.get_by_role("button", name="Enter a key").click()
        field = page.locator("#settings .key input[type=password]")
        assert field.evaluate("(field) => field === document.activeElement")
        field.fill("changed")
        page.keyboard.press("Enter")
        script.replies.append(said("let in"))
        question(page).press("Enter")
        assert words(answer(page)) == "let in"


def test_a_cut_answer_is_continued_in_its_place(still, script):
    script.replies += [said("one two", "length", 20, 2), said(" three", "stop", 22, 1)]
    ask(still, "Count")
    answer(still).get_by_role("button", name="Continue").click()
    growing(still, "one two three")
    found = answer(still)
    assert found.get_by_role("button", name="Continue").count() == 0
    assert "3 tokens" in found.locator(".numbers").inner_text()
    body = script.bodies[-1]
    assert body["messages"][-1] == {"role": "assistant", "content": "one two"}
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False
    assert still.locator("#context").inner_text().startswith("23 of")


def test_an_answer_that_broke_off_is_continued_too(still, script):
    half = f"data: {json.dumps(delta(content='half '))}\n\n"
    events = {"content-type": "text/event-stream"}
    still.route("**/v1/chat/completions", lambda route: route.fulfill(headers=events, body=half), times=1)
    script.replies.append(said("whole"))
    ask(still, "Hello")
    answer(still).get_by_text("The answer broke off").wait_for()
    still.get_by_role("button", name="Continue").click()
    growing(still, "half whole")
    assert answer(still).get_by_text("broke off").count() == 0


def test_each_conversation_has_its_system_prompt(still, script):
    still.locator("#show-panel").click()
    field = still.get_by_label("System prompt of this conversation")
    field.fill("Be brief.")
    script.replies += [said("a"), said("b"), said("c")]
    ask(still, "first")
    answer(still)
    assert script.bodies[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    still.get_by_text("System prompt", exact=True).click()
    assert still.locator("details.system p").inner_text() == "Be brief."
    begin(still)
    assert field.input_value() == ""
    ask(still, "second")
    answer(still)
    assert roles(script.bodies[-1]) == ["user"]
    field.fill("Be long.")
    still.get_by_role("button", name="Make it the default").click()
    begin(still)
    assert field.input_value() == "Be long."
    still.get_by_role("button", name="first", exact=False).first.click()
    still.locator("details.system").wait_for()
    assert field.input_value() == "Be brief."
    still.reload()
    still.locator("details.system").wait_for()
    ask(still, "again")
    answer(still, 1)
    assert script.bodies[-1]["messages"][0]["content"] == "Be brief."


def test_a_server_that_restarts_is_asked_anew(still, script):
    still.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"), times=1)
    script.replies.append(said("back"))
    ask(still, "Hello")
    still.locator("#refused", has_text="Is it still running?").wait_for()
    assert question(still).input_value() == "Hello"
    script.about["models"] = ["another"]
    question(still).press("Enter")
    assert words(answer(still)) == "back"
    assert script.bodies[-1]["model"] == "another"
    assert still.locator("#model").inner_text().startswith("another")


def test_a_page_of_the_last_version_goes_on_and_says_so(browser, script):
    """Files that the page has not fetched yet are gone, so formulas and code stay text."""
    script.digest = "another"
    script.missing = ("vendor/katex-0.19.1/katex.min.js", "vendor/highlight.js-11.12.0/highlight.min.js")
    with opened(browser, script.url) as page:
        note(page, "The server has another version now: load this page again.")
        script.replies.append(said("so \\(a^2\\)\n\n```python\nx = 1\n```"))
        with page.expect_response("**/katex.min.js") as missing:
            ask(page, "Hello")
        assert missing.value.status == 404
        assert answer(page).locator(".formula").inner_text() == "\\(a^2\\)"
        assert answer(page).locator("pre code").inner_text() == "x = 1"


FULL = """() => {
    const full = () => { throw new DOMException("full", "QuotaExceededError"); };
    IDBObjectStore.prototype.put = full;
    Storage.prototype.setItem = full;
}"""


def test_a_full_storage_costs_no_answer(still, script):
    still.evaluate(FULL)
    script.replies.append(said("still here"))
    ask(still, "Hello")
    assert words(answer(still)) == "still here"
    note(still, "storage is full: the conversation is lost when the page closes")
    still.locator("#show-panel").click()
    still.get_by_label("Temperature").fill("0.5")
    note(still, "storage is full: remove old conversations")
    assert still.complaints == []
