"""Pages for users: Markdown files in this folder, which travel in the wheel with the version that they describe.

Thread: any; files are read on each call. In: the name of a page. Out: its text, or its HTML. `omniloop docs NAME`
prints the text, /docs/NAME serves both (server/routes/pages), and GitHub shows the files by their relative links.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
# In the order of the listing; a test compares the names with the folder.
NAMES = (
    *("models", "hardware", "flags", "quantisation", "clients", "ollama", "llama_cpp", "sglang", "fields"),
    *("sampling", "media", "speech", "tools", "decisions", "batches", "embeddings", "adapters", "page", "deployment"),
    *("operation", "metrics", "security", "measuring", "hosting", "offline", "ray"),
)
PICTURES = ("page.png",)
MARK = re.compile(r"<!--.*?-->\n?", re.S)


def text(name: str) -> str:
    """The Markdown of a page; `name` is one of NAMES."""
    return MARK.sub("", (FOLDER / f"{name}.md").read_text(encoding="utf-8"))


def title(name: str) -> str:
    """The heading of a page."""
    return text(name).partition("\n")[0].removeprefix("# ")


def listing() -> list[str]:
    """The output of `omniloop docs`: a line for each page."""
    return [f"  {name:14} {title(name)}" for name in NAMES]


def html(name: str) -> str:
    """The page as HTML; links to other pages become addresses below /docs/."""
    from markdown_it import MarkdownIt

    made = MarkdownIt("commonmark", {"html": False}).enable("table").render(text(name))
    # Wide code and tables scroll within the page; the focus lets a keyboard scroll them.
    made = made.replace("<pre>", '<pre tabindex="0">').replace("</table>", "</table></div>")
    made = made.replace("<table>", '<div class="wide" tabindex="0"><table>')
    return re.sub(r'href="(\w+)\.md(#[\w-]+)?"', r'href="\1\2"', made)
