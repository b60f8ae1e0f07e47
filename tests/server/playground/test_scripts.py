"""The page's scripts, run by node with stand-ins for elements: their results, and that they terminate."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.routes import playground

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="node is not on this machine")
PAGE = Path(playground.__file__).parents[1] / "playground"
ELEMENTS = """
class Made {
  constructor(tag) {
    this.tagName = tag.toUpperCase();
    this.childNodes = [];
    this.listeners = {};
    this.classList = { toggle() {} };
  }
  append(...nodes) {
    this.childNodes.push(...nodes);
    for (const node of nodes) if (node instanceof Made) node.parent = this;
  }
  replaceChildren(...nodes) { this.childNodes = []; this.append(...nodes); }
  replaceWith(node) { this.parent.childNodes[this.parent.childNodes.indexOf(this)] = node; node.parent = this.parent; }
  get firstChild() { return this.childNodes[0]; }
  setAttribute() {}
  addEventListener(name, call) { this.listeners[name] = call; }
  dispatchEvent() {}
  focus() {}
  toString() { return `<${this.tagName.toLowerCase()}>${this.childNodes.join("")}</>`; }
}
const made = (tag) => new Made(tag);
const createElementNS = (space, tag) => made(tag);
globalThis.document = { baseURI: "http://x/", createElement: made, createElementNS, getElementById: () => made("div") };
let text = "";
for await (const piece of process.stdin) text += piece;
const given = JSON.parse(text);
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str, Any], Any]:
    """A function that runs a script which imports the page's files and reads `given`; it returns the script's value."""
    shutil.copytree(PAGE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def ran(script: str, given: Any) -> Any:
        (tmp_path / "run.js").write_text(f"{ELEMENTS}{script}")
        sent = json.dumps(given).encode()
        done = subprocess.run(
            ["node", "run.js"], cwd=tmp_path, input=sent, capture_output=True, timeout=30, check=False
        )
        assert not done.returncode, done.stderr.decode()[-1000:]
        return json.loads(done.stdout)

    return ran


MARKDOWN = """
globalThis.HTMLElement = Made;
const { ProseView } = await import("./prose.js");
const { settled } = await import("./later.js");
const shown = [];
for (const source of given) {
  const element = made("div");
  const view = new ProseView(element);
  for (let at = 0; at < source.length; at += STEP) view.update(source.slice(0, at + STEP));
  await settled();
  shown.push(element.childNodes.join(""));
}
console.log(JSON.stringify(shown));
"""
WHOLE = MARKDOWN.replace("STEP", "source.length")


def test_marks_within_marks_are_read_and_marks_without_an_end_are_text(run):
    assert run(WHOLE, ["*a **b** c*", "***a***", "__a _b_ c__", "**a **b", "> - a\n> - b"]) == [
        "<p><em>a <strong>b</> c</></>",
        "<p><em><strong>a</></></>",
        "<p><strong>a <em>b</> c</></>",
        "<p>**a **b</>",
        "<blockquote><ul><li>a</><li>b</></></>",
    ]


def test_an_answer_that_repeats_itself_is_rendered(run):
    """Models in a loop write such texts. Before, searching a mark's end took forever, and nesting filled the stack."""
    repeated = [f"{piece * 2000}the end" for piece in ("**a ", "*a_", "__b ", "> ", ">", "- ", "* ", "1. ", "[a](")]
    assert all("the end" in made for made in run(WHOLE, repeated))


def test_settings_that_this_server_does_not_take_are_not_sent(run):
    """The browser has such settings from another server at this address, and the page has no field to clear them."""
    about = {"task": "chat", "models": ["m"], "max_logprobs": 20, "structured_outputs": True, "tool_calls": True}
    settings = {"schema": {"type": "object"}, "tools": [{"type": "function"}], "logprobs": True, "model": "other"}
    script = """
const { requestOf } = await import("./answer.js");
const path = [{ role: "user", text: "hi", files: [] }];
console.log(JSON.stringify(given.map(([settings, about]) => Object.keys(requestOf(path, "", settings, about).body))));
"""
    less = {**about, "structured_outputs": False, "tool_calls": False, "max_logprobs": 0}
    takes, takes_less = run(script, [(settings, about), (settings, less)])
    assert {"response_format", "tools", "logprobs"} <= {*takes}
    assert takes_less == ["model", "messages"]


def test_a_question_that_was_edited_shows_its_own_words_again(run):
    """The question's view stays in the page, so that the user can return to this version."""
    script = """
globalThis.Event = class {};
const { MessageView } = await import("./message.js");
const sent = [];
const node = { role: "user", text: given, files: [] };
const view = new MessageView(node, { edit: (_, text) => sent.push(text), siblings: () => [node] });
view.words.textContent = given;
view.edit();
const form = view.element.childNodes.find((child) => child.tagName === "FORM");
form.childNodes[0].value = "other";
form.listeners.submit({ preventDefault() {} });
console.log(JSON.stringify([sent, view.element.childNodes.includes(view.words), view.foot.hidden]));
"""
    assert run(script, "first") == [["other"], True, False]


def test_the_open_conversation_is_renamed_without_being_opened_again(run):
    """Opening would end an answer in progress, and the answer would be stored with the old title."""
    script = """
globalThis.indexedDB = { open() { const asked = {}; queueMicrotask(() => asked.onerror()); return asked; } };
Object.assign(Made.prototype, { value: "", select() {} });
const { Sidebar } = await import("./sidebar.js");
const conversation = { id: "1", title: "", nodes: [], updated: 1 };
const opened = [];
const chat = { conversation, live: () => conversation, stateOf: () => "" };
const sidebar = new Sidebar(chat, (other) => opened.push(other), () => {});
const row = made("li"), title = made("button");
row.append(title);
sidebar.rename({ id: "1", title: "old" }, title);
row.childNodes[0].value = given;
await row.childNodes[0].onblur();
console.log(JSON.stringify([conversation.title, opened.length]));
"""
    assert run(script, "new name") == ["new name", 0]
