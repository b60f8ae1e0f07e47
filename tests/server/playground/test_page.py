"""The chat page in a real browser, with a real server and the embedded model: what users do and see."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest

from tests.server.playground.browser import CHROMIUM, DROP, MEDIA, NO_CHROMIUM, answer, ask, opened, words
from tests.server.playground.scripted import delta

pytestmark = pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)
SERIOUS = ("serious", "critical")
ENDLESS = json.dumps({"ignore_eos": True, "max_tokens": 8000, "skip_special_tokens": False})


def setting(page: Any, label: str, text: str) -> None:
    if page.locator("#show-panel").get_attribute("aria-expanded") == "false":
        page.locator("#show-panel").click()
    page.get_by_label(label).fill(text)


def collected(page: Any, chunks: list[dict[str, Any]], end: str = "data: [DONE]\n\n") -> list[dict[str, Any]]:
    """Answers the page's requests with these chunks; returns the list of the requests' bodies."""
    bodies: list[dict[str, Any]] = []
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)

    def fulfil(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(headers={"content-type": "text/event-stream"}, body=lines + end)

    page.route("**/v1/chat/completions", fulfil)
    return bodies


def serious(run: Any) -> list[tuple[str, list[str]]]:
    """The serious violations that axe found: name and elements."""
    found = [item for item in run.response["violations"] if item["impact"] in SERIOUS]
    return [(item["id"], [node["html"] for node in item["nodes"]]) for item in found]


def test_text_picture_and_sound_are_answered_rightly_and_counted(page):
    ask(page, "What is 12 + 30?")
    first = answer(page)
    assert words(first) == "42"
    assert re.search(r"3 tokens · first after \d.* · prompt 20", first.locator(".numbers").inner_text())

    picture = base64.b64encode((MEDIA / "picture.png").read_bytes()).decode()
    page.evaluate(DROP, ["picture.png", "image/png", picture])
    page.get_by_role("button", name="Remove picture.png").wait_for()
    ask(page, "What is in the picture?")
    page.get_by_role("img", name="picture.png").wait_for()
    assert words(answer(page, 1)) == "A red circle."

    page.get_by_role("button", name="New conversation").click()
    page.locator("#chosen").set_input_files(MEDIA / "sound.wav")
    page.get_by_role("button", name="Remove sound.wav").wait_for()
    ask(page, "Which digits do you hear?")
    assert words(answer(page)) == "314"
    page.locator("#conversations li").nth(1).wait_for()


def test_examples_are_what_the_embedded_model_can_answer(page):
    page.get_by_role("button", name="Which way does it move?").click()
    assert words(answer(page)) == "Right."


def test_a_long_answer_is_stopped_on_the_page_and_on_the_server(page):
    setting(page, "More fields of the request", ENDLESS)
    ask(page, "Count from 3 to 7.")
    page.locator(".numbers", has_text=re.compile(r"\d\d tokens · first after \d.* m?s · \d+ tokens/s")).wait_for()
    running = page.locator("#numbers dd").first
    running.filter(has_text="1").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("· stopped").wait_for()
    running.filter(has_text="0").wait_for()
    assert page.locator("#send").is_visible()


def test_an_edited_question_is_another_version_and_a_reload_keeps_both(page):
    ask(page, "What is 2 + 3?")
    assert words(answer(page)) == "5"
    page.get_by_role("article", name="You").hover()
    page.get_by_role("button", name="Edit the message").click()
    page.get_by_role("textbox", name="Edit the message").fill("What is 2 + 4?")
    page.keyboard.press("Enter")
    page.locator(".assistant > .words", has_text="6").wait_for()
    answer(page)
    page.get_by_text("2 of 2").wait_for()
    page.reload()
    page.locator(".assistant > .words", has_text="6").wait_for()
    page.get_by_role("button", name="Version before").click()
    page.locator(".assistant > .words", has_text="5").wait_for()
    page.get_by_role("button", name="Answer again").click()
    page.locator(".assistant .versions", has_text="2 of 2").wait_for()
    assert words(answer(page)) == "5"


def test_what_is_removed_comes_back_by_undo_and_does_not_by_an_answer(page):
    ask(page, "What is 2 + 3?")
    answer(page).get_by_role("button", name="Remove the message").click()
    page.get_by_role("article", name="Answer").wait_for(state="detached")
    page.get_by_role("button", name="Undo").click()
    assert words(answer(page)) == "5"
    setting(page, "More fields of the request", ENDLESS)
    ask(page, "Count from 3 to 7.")
    page.get_by_role("article", name="Answer").nth(1).locator(".numbers", has_text="tokens/s").wait_for()
    page.locator("#conversations li").hover()
    page.get_by_role("button", name="Remove What is 2 + 3?").click()
    page.locator("#conversations li").wait_for(state="detached")
    page.reload()
    page.get_by_text("Conversations stay in this browser.").wait_for()
    assert page.locator("#conversations li").count() == 0


def test_an_answer_follows_its_schema_and_has_probabilities(page):
    schema = {"enum": ["left", "right"]}
    setting(page, "JSON Schema", json.dumps(schema))
    page.get_by_label("Record the tokens' probabilities").check()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is 12 + 30?")
    assert sent.value.post_data_json["response_format"]["json_schema"]["schema"] == schema
    found = answer(page)
    assert json.loads(words(found)) in ("left", "right")
    found.get_by_role("button", name="Show the tokens' probabilities").click()
    found.locator(".token").nth(1).hover()
    assert re.search(r"[\d.]+ %", found.locator(".likely .this").inner_text())
    found.locator(".run").focus()
    page.keyboard.press("ArrowRight")
    assert found.locator(".token").nth(2).get_attribute("class").endswith("chosen")


def test_a_setting_that_is_wrong_says_so_and_changes_nothing(page):
    setting(page, "JSON Schema", "{")
    page.get_by_text("is not JSON").wait_for()
    setting(page, "Temperature", "7")
    page.get_by_text("from 0 to 2").wait_for()
    assert page.evaluate("localStorage.getItem('omniloop.settings')") is None


def test_what_the_model_writes_is_never_markup(page):
    text = '<img src=x onerror="document.title=1"> [a](javascript:alert(1)) ![b](https://example.org/b.png)\n\n'
    collected(page, [delta(content=text + '```html\n<script>"x"</script>\n```\n| a | b |\n|--|--|\n| **c** | d |\n')])
    ask(page, "Hello")
    found = answer(page)
    assert "<img src=x" in words(found)
    assert found.locator("img, script").count() == 0
    assert found.locator("a").evaluate_all("(all) => all.map((one) => one.href)") == ["https://example.org/b.png"]
    assert found.locator("td strong").inner_text() == "c"
    found.get_by_role("button", name="Copy", exact=True).click()
    page.locator("#said", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == '<script>"x"</script>'


def test_thinking_is_folded_and_a_call_gets_its_result(page):
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Porto"}'}}
    bodies = collected(page, [delta(reasoning="I **look**."), delta(content="A moment."), delta(tool_calls=[call])])
    ask(page, "How is the weather?")
    found = answer(page)
    found.get_by_text(re.compile("Thought for")).click()
    assert found.locator(".thinking strong").inner_text() == "look"
    found.get_by_role("textbox", name="Result of weather").fill("sunny")
    page.keyboard.press("Enter")
    page.get_by_role("article", name="Result of a call").wait_for()
    answer(page, 1)
    asked, called, result = bodies[-1]["messages"]
    assert asked == {"role": "user", "content": "How is the weather?"}
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Porto"}'}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


@pytest.mark.parametrize("end", ["", "data: {"])
def test_an_answer_that_breaks_off_says_so_and_keeps_its_words(page, end):
    collected(page, [delta(content="Half an")], end)
    ask(page, "Hello")
    found = answer(page)
    found.get_by_text("The answer broke off").wait_for()
    assert "Half an" in words(found)


def test_a_model_without_a_chat_template_continues_texts(page):
    def without(route: Any) -> None:
        route.fulfill(json={**route.fetch().json(), "task": "completion", "modalities": ["text"], "embedded": False})

    page.route("**/about", without)
    page.reload()
    page.get_by_text("it continues the text").wait_for()
    with page.expect_request("**/v1/completions") as asked:
        ask(page, "1 2 3 4")
    assert asked.value.post_data_json["prompt"] == "1 2 3 4"
    assert words(answer(page))


def test_a_transcription_model_gets_the_sound_as_an_upload(page):
    def hearing(route: Any) -> None:
        route.fulfill(
            json={**route.fetch().json(), "task": "transcription", "modalities": ["audio"], "embedded": False}
        )

    page.route("**/about", hearing)
    page.reload()
    ask(page, "Which digits do you hear?")
    page.get_by_text("attach or record a sound.").nth(1).wait_for()
    page.locator("#chosen").set_input_files(MEDIA / "sound.wav")
    page.get_by_role("button", name="Remove sound.wav").wait_for()
    with page.expect_response("**/v1/audio/transcriptions") as heard:
        page.keyboard.press("Enter")
    assert heard.value.status == 200
    assert "3" in words(answer(page))


def test_nothing_is_asked_before_the_page_knows_who_answers(page):
    held: list[Any] = []
    page.route("**/about", lambda route: held.append(route))  # Playwright sets attributes on the function
    page.reload()
    while not held:
        page.wait_for_timeout(10)
    assert page.get_by_role("textbox", name="Question").is_disabled()
    assert page.get_by_role("button", name="Attach files").is_disabled()
    held.pop().continue_()
    ask(page, "What is 12 + 30?")
    assert "42" in words(answer(page))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, url, scheme):
    from axe_playwright_python.sync_playwright import Axe

    code = "```py\ndef f(): return 'x'  # y\n```"
    with opened(browser, url, color_scheme=scheme) as page:
        found = [Axe().run(page)] if scheme == "light" else []
        text = f"# A \\(x^2\\)\n- b `c`\n{code}\n|a|b|\n|-|-|\n|1|2|\n\n$$\\frac{{1}}{{2}}$$"
        usage = {"choices": [], "usage": {"prompt_tokens": 7000, "completion_tokens": 100}}
        collected(page, [delta(reasoning="So"), delta(content=text), usage])
        ask(page, "Hello")
        answer(page).locator(".katex").nth(1).wait_for()
        page.locator("#show-panel").click()
        page.locator("#numbers dd", has_text="GiB").wait_for()
        page.get_by_label("System prompt of this conversation").fill("Be brief.")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json={"error": {"message": "no"}}))
        ask(page, "Again")
        page.locator("#refused", has_text="no").wait_for()
        found.append(Axe().run(page))
        assert [text for text in page.complaints if "429" not in text] == []
    assert [fault for run in found for fault in serious(run)] == []


def test_axe_finds_nothing_serious_in_the_pages_for_users(browser, url):
    from axe_playwright_python.sync_playwright import Axe

    with browser.new_context(viewport={"width": 360, "height": 740}) as context:
        page = context.new_page()
        for name in ("", "clients", "page"):
            page.goto(f"{url}docs/{name}")
            assert serious(Axe().run(page)) == [], name
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, name


def test_the_api_is_read_and_tried(browser, url):
    from axe_playwright_python.sync_playwright import Axe

    with opened(browser, f"{url}docs/api") as page:
        page.get_by_role("searchbox", name="Find a route").fill("chat")
        assert page.locator("#get_health").is_hidden()
        route = page.locator("#create_chat_completion")
        route.locator("summary").click()
        route.get_by_text("Sampling takes this many of the likeliest tokens").wait_for()
        route.get_by_role("button", name="Send").click()
        route.get_by_role("status").filter(has_text=re.compile("^200, .*request [0-9a-f]{32}")).wait_for()
        assert '"content": "42"' in route.locator("pre").inner_text()
        route.get_by_role("textbox", name="Body").fill('{"messages": [], "stream": true}')
        route.get_by_role("button", name="Send").click()
        route.get_by_role("status").filter(has_text=re.compile("^400")).wait_for()
        assert "messages: is empty" in route.locator("pre").inner_text()
        route.get_by_role("link", name="ChatCompletionChunk").click()
        page.locator("#ChatCompletionChunk").get_by_text("an event of", exact=False).first.wait_for()
        page.get_by_role("searchbox", name="Find a route").fill("")
        assert [text for text in page.complaints if "400" not in text] == []
        assert serious(Axe().run(page)) == []


def test_the_api_page_asks_for_a_key_where_one_is_needed(browser, url):
    def guard(route: Any) -> None:
        right = route.request.headers.get("authorization") == "Bearer right"
        route.continue_() if right else route.fulfill(status=401, json={"error": {"message": "a key is needed"}})

    with browser.new_context() as context:
        page = context.new_page()
        page.route("**/openapi.json", guard)
        page.goto(f"{url}docs/api")
        page.get_by_text("This server needs an API key.").wait_for()
        page.get_by_role("textbox", name="API key").fill("right")
        page.keyboard.press("Enter")
        page.locator("#create_message summary").wait_for()
        assert page.locator("#trouble").is_hidden()


def test_nothing_scrolls_sideways_on_a_telephone(browser, url):
    with opened(browser, url, viewport={"width": 360, "height": 740}, has_touch=True) as page:
        table = f"{'|a' * 40}|\n{'|-' * 40}|\n"
        collected(page, [delta(content=f"`{'long' * 40}` {'word' * 60}\n```\n{'x' * 300}\n```\n{table}")])
        ask(page, f"https://example.org/{'path/' * 40}")
        answer(page)
        for button in (None, "#show-sidebar", "#show-panel"):
            if button:
                page.locator(button).click()
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            assert page.evaluate("document.getElementById('log').scrollWidth") <= 360
            if button:
                page.locator("#shade").click(position={"x": 350 if button == "#show-sidebar" else 5, "y": 400})
        assert page.complaints == []


@pytest.mark.full
@pytest.mark.parametrize(("label", "name"), [("Record a sound", "recording.wav"), ("Record a film", "recording.webm")])
def test_what_is_recorded_is_attached_and_answered(page, label, name):
    page.get_by_role("button", name=label).click()
    page.get_by_role("button", name="Start recording").click()
    page.get_by_role(
        "timer",
    ).filter(has_text="0:02").wait_for()
    page.get_by_role("button", name="Stop and attach").click()
    page.get_by_role("button", name=f"Remove {name}").wait_for()
    ask(page, "What is it?")
    assert words(answer(page))


@pytest.mark.full
def test_a_picture_is_taken(page):
    page.get_by_role("button", name="Take a picture").click()
    page.get_by_role("button", name="Take the picture").click()
    page.get_by_role("button", name="Remove picture.jpg").wait_for()
