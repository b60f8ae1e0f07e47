"""The page's Markdown, run by node with elements that only know their names: what it makes, and that it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from server.routes import playground

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="node is not on this machine")
PAGE = Path(playground.__file__).parents[1] / "playground"
RUN = """
class Made {
  constructor(tag) { this.tagName = tag.toUpperCase(); this.childNodes = []; }
  append(...nodes) { this.childNodes.push(...nodes); }
  setAttribute() {}
  addEventListener() {}
  toString() { return `<${this.tagName.toLowerCase()}>${this.childNodes.join("")}</>`; }
}
const made = (tag) => new Made(tag);
globalThis.document = { createElement: made, createElementNS: (space, tag) => made(tag) };
const { MarkdownView } = await import("./markdown.js");
let text = "";
for await (const piece of process.stdin) text += piece;
const shown = JSON.parse(text).map((source) => {
  const element = made("div");
  new MarkdownView(element).update(source);
  return element.childNodes.join("");
});
console.log(JSON.stringify(shown));
"""


def shown(folder: Path, *sources: str) -> list[str]:
    """What each text becomes."""
    for file in PAGE.glob("*.js"):
        shutil.copy(file, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "run.js").write_text(RUN)
    run = ["node", "run.js"]
    done = subprocess.run(run, cwd=folder, input=json.dumps(sources).encode(), capture_output=True, timeout=30)
    assert not done.returncode, done.stderr.decode()[-1000:]
    return json.loads(done.stdout)


def test_marks_within_marks_are_read_and_marks_without_an_end_are_text(tmp_path):
    assert shown(tmp_path, "*a **b** c*", "***a***", "__a _b_ c__", "**a **b", "> - a\n> - b") == [
        "<p><em>a <strong>b</> c</></>",
        "<p><strong><em>a</></></>",
        "<p><strong>a <em>b</> c</></>",
        "<p>**a **b</>",
        "<blockquote><ul><li>a</><li>b</></></>",
    ]


def test_an_answer_that_repeats_itself_is_shown(tmp_path):
    """Models that loop write such texts; searching for a mark's end took forever, and depth filled the stack."""
    repeated = [f"{piece * 2000}the end" for piece in ("**a ", "*a_", "__b ", "> ", ">", "- ", "* ", "1. ", "[a](")]
    assert all("the end" in made for made in shown(tmp_path, *repeated))
