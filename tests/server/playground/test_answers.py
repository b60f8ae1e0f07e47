"""An answer's text as the page renders it, in a real browser: documents, formulas, and texts of a hostile model.

The page's own scripts render into an open page; `settled()` returns when formulas and colours are rendered.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from server.routes.playground import FOLDER, pages
from tests.server.playground.browser import CHROMIUM, NO_CHROMIUM, answer, ask, opened
from tests.server.playground.hostile import FORMULAS, FRAMED, HOSTILE, LONG
from tests.server.playground.scripted import Reply, delta, finish, said

pytestmark = pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)
DOCUMENTS = sorted((Path(__file__).parent / "documents").glob("*.md"))
KATEX = "vendor/katex-0.19.1"

# Returns an outline: tags with their texts, formulas as {text}, code with its language.
DRAW = """async ([folder, texts, piece]) => {
    const { ProseView } = await import(folder + "prose.js");
    const { settled } = await import(folder + "later.js");
    const text = (node, part) => node.querySelector(part).textContent;
    const outline = (node) => {
        if (node.nodeType === 3) return node.data;
        if (node.matches("figure.code"))
            return `<code ${text(node, "figcaption span")}>${text(node, "code")}</>`;
        if (node.matches(".formula"))
            return `{${node.querySelector("annotation")?.textContent ?? "TEXT " + node.textContent}}`;
        if (node.matches(".wide")) return outline(node.firstChild);
        const facts = [node.getAttribute("href"), node.getAttribute("start"), node.className, node.checked && "x"];
        const parts = facts.filter(Boolean).map((fact) => " " + fact).join("");
        return `<${node.localName}${parts}>${[...node.childNodes].map(outline).join("")}</>`;
    };
    const found = [];
    for (const text of texts) {
        const element = document.createElement("div");
        const view = new ProseView(element);
        for (let end = piece; ; end += piece) {
            view.update(text.slice(0, end));
            if (end >= text.length) break;
        }
        await settled();
        found.push([...element.childNodes].map(outline).join("\\n"));
    }
    return found;
}"""


@pytest.fixture(scope="module")
def drawing(browser: Any, script_server: Any) -> Any:
    """A page that stays open for several tests, into which tests render."""
    with opened(browser, script_server.url) as page:
        yield page
        assert page.complaints == []


def folder(page: Any) -> str:
    return f"{page.url}playground/{pages().digest}/"


def test_ten_documents_have_their_outlines(drawing):
    texts = [path.read_text("utf-8") for path in DOCUMENTS]
    outlines = drawing.evaluate(DRAW, [folder(drawing), texts, 1 << 20])
    assert len(outlines) == 10
    for path, found in zip(DOCUMENTS, outlines, strict=True):
        assert found + "\n" == path.with_suffix(".txt").read_text("utf-8"), path.name


def test_a_document_that_comes_in_pieces_ends_as_the_whole(drawing):
    texts = [path.read_text("utf-8") for path in DOCUMENTS]
    whole = drawing.evaluate(DRAW, [folder(drawing), texts, 1 << 20])
    assert drawing.evaluate(DRAW, [folder(drawing), texts, 3]) == whole


PLACED = """async ([folder, formulas]) => {
    const { ProseView } = await import(folder + "prose.js");
    const { settled } = await import(folder + "later.js");
    const places = [(t) => t, (t) => `so ${t}, and`, (t) => `- a\\n- ${t}`, (t) => `# ${t}`, (t) => `> ${t} b`,
                    (t) => `**a ${t}**`];
    const found = [];
    for (const [at, [open, text, close]] of formulas.entries()) {
        const element = document.createElement("div");
        new ProseView(element).update(places[at % places.length](open + text + close));
        await settled();
        found.push(element.querySelector(".formula")?.innerHTML);
    }
    return found;
}"""
ALONE = """(formulas) => formulas.map(([open, text]) => {
    const element = document.createElement("div");
    katex.render(text, element, { displayMode: ["$$", "\\\\["].includes(open), strict: "ignore" });
    return element.innerHTML;
})"""


def written(markup: str) -> list[tuple[str, dict[str, str]]]:
    """Tags, attributes (which have no order) and texts; styles without the blanks that browsers add."""
    found = []
    for tag, attributes, text in re.findall(r"<(/?\w+)([^>]*)>([^<]*)", markup):
        named = dict(re.findall(r'([\w-]+)="([^"]*)"', attributes))
        named["style"] = re.sub(r";?\s*$|(?<=[:;])\s+", "", named.get("style", ""))
        found.append((f"{tag} {text}", named))
    return found


def test_forty_formulas_are_drawn_as_katex_draws_them_alone(drawing, browser):
    assert len(FORMULAS) == 40
    drawn = drawing.evaluate(PLACED, [folder(drawing), FORMULAS])
    with browser.new_context() as context:
        plain = context.new_page()  # KaTeX without a content security policy
        plain.set_content("<!doctype html>")
        plain.add_script_tag(path=FOLDER / KATEX / "katex.min.js")
        alone = plain.evaluate(ALONE, FORMULAS)
    for formula, found, right in zip(FORMULAS, drawn, alone, strict=True):
        assert written(found) == written(right), formula


def test_frames_and_shadows_break_no_policy(drawing):
    """KaTeX writes some styles as attributes, which the browser would report and ignore under the policy."""
    outlines = drawing.evaluate(DRAW, [folder(drawing), [f"${text}$" for text in FRAMED], 99])
    assert [outline.removeprefix("<p>{").removesuffix("}</>") for outline in outlines] == list(FRAMED)


def test_the_library_for_formulas_comes_with_the_first_formula(still, script):
    asked: list[str] = []
    still.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    script.replies += [said("no formula, and $5"), said("a formula: $x^2$")]
    ask(still, "first")
    answer(still)
    assert not [name for name in asked if "katex" in name.lower()]
    ask(still, "second")
    answer(still, 1).locator(".katex").wait_for()
    assert {"katex.min.js", "katex.min.css"} <= set(asked)
    assert not [name for name in asked if "highlight" in name]
    assert still.complaints == []


# Elements and attributes that an answer may contain; styles are KaTeX's own lengths and colours.
INSPECT = """async ([folder, texts]) => {
    const { ProseView } = await import(folder + "prose.js");
    const { settled } = await import(folder + "later.js");
    const TAGS = new Set(("p h3 h4 h5 h6 ul ol li blockquote pre code figure figcaption button svg use span div " +
        "table thead tbody tr th td strong em del sub sup br hr a input").split(" "));
    const OUTSIDE = /^(script|iframe|img|a|style|link|object|embed|form)$/i;
    const isSafe = (address) => /^(https?:|mailto:)/i.test(address);
    const NAMES = /^(class|tabindex|role|aria-[a-z]+|start|type|disabled|checked|href|target|rel|title)$/;
    const violations = [];
    const note = (event) => violations.push(event.violatedDirective);
    document.addEventListener("securitypolicyviolation", note);
    let last = performance.now();
    let longest = 0;
    const beat = setInterval(() => {
        longest = Math.max(longest, performance.now() - last);
        last = performance.now();
    }, 20);
    const found = [];
    for (const text of texts) {
        const element = document.createElement("div");
        element.className = "words";
        document.getElementById("messages").append(element);
        const wrong = [];
        longest = 0;
        const begun = performance.now();
        try {
            new ProseView(element).update(text);
            await settled();
        } catch (error) {
            wrong.push(String(error));
        }
        await new Promise((resolve) => setTimeout(resolve, 25));
        for (const node of element.querySelectorAll("*")) {
            if (node.closest(".katex")) {
                if (OUTSIDE.test(node.localName)) wrong.push(node.outerHTML);
                for (const { name, value } of node.attributes) {
                    const isStyle = name === "style" && /url|position: fixed/.test(value);
                    if (name.startsWith("on") || /href|src/.test(name) || isStyle) wrong.push(name + "=" + value);
                }
                continue;
            }
            if (!TAGS.has(node.localName)) wrong.push(node.localName);
            for (const { name, value } of node.attributes) {
                if (!NAMES.test(name)) wrong.push(name);
                const isIcon = node.localName === "use" && value.startsWith("#i-");
                if (name === "href" && !isIcon && !(isSafe(value) && isSafe(node.protocol))) wrong.push(value);
            }
        }
        if (!element.textContent.includes("END")) wrong.push("the end is not shown");
        found.push({ wrong, longest: Math.max(longest, 0), took: performance.now() - begun });
        element.remove();
    }
    clearInterval(beat);
    document.removeEventListener("securitypolicyviolation", note);
    return { found, violations, hacked: window.hacked ?? null, title: document.title };
}"""


def inspect(page: Any, texts: dict[str, str]) -> dict[str, Any]:
    reply = page.evaluate(INSPECT, [folder(page), [f"{text}\n\nEND" for text in texts.values()]])
    assert reply["violations"] == []
    assert reply["hacked"] is None
    assert reply["title"] == "scripted · omniloop"
    wrong = {name: one["wrong"] for name, one in zip(texts, reply["found"], strict=True) if one["wrong"]}
    assert wrong == {}
    return dict(zip(texts, reply["found"], strict=True))


def test_sixty_hostile_texts_become_neither_element_nor_address_nor_style(drawing):
    assert len(HOSTILE) == 60
    found = inspect(drawing, HOSTILE)
    slow = {name: round(one["longest"]) for name, one in found.items() if one["longest"] > 2000}
    assert slow == {}, "the page did not answer for so many milliseconds"


@pytest.mark.full
def test_long_hostile_texts_leave_the_page_responsive(drawing):
    found = inspect(drawing, LONG)
    slow = {name: round(one["longest"]) for name, one in found.items() if one["longest"] > 3000}
    assert slow == {}, "the page did not answer for so many milliseconds"


def test_a_table_that_grows_without_end_leaves_the_page_usable(still, script):
    """200 kB in events: rendering takes longer each time, so it runs less often, and keys are read in between."""
    row = f"| {'cell | ' * 20}\n"
    table = "| a |" + " b |" * 19 + "\n" + "|---" * 20 + "|\n" + row * 1500
    pieces = [table[at : at + 2000] for at in range(0, len(table), 2000)]
    script.replies.append(Reply([*(delta(content=piece) for piece in pieces), *finish("stop")]))
    ask(still, "A long table")
    still.get_by_role("textbox", name="Question").press_sequentially("typed while it grows")
    assert answer(still).locator("pre code, table").count() == 1
    assert still.get_by_role("textbox", name="Question").input_value() == "typed while it grows"
    assert still.complaints == []
