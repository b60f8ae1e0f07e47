r"""Texts for the page's tests: forty formulas, sixty texts that a hostile or broken model might write, and longer ones.

A hostile text tries to become an element, an address or a style, or to keep the page busy: marks that never end, deep
nesting, expansions. LONG has the same attacks in the size of a whole answer.
"""

# ruff: noqa: E501 - a text stays on one line
from __future__ import annotations

OPENINGS = [("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")]
TEXTS = [
    r"x", r"a^2 + b^2 = c^2", r"\frac{a}{b}", r"\sqrt{x^2 + 1}", r"\sqrt[3]{2}", r"\sum_{i=1}^n i", r"\int_0^\infty e^{-x}\,dx",
    r"\prod_{k} p_k", r"\lim_{x \to 0} \frac{\sin x}{x}", r"\alpha + \beta \cdot \Gamma", r"\mathbf{W} x + \mathbf{b}",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{cases} 1 & x > 0 \\ 0 & \text{else} \end{cases}",
    r"\left( \frac{1}{2} \right)", r"\overline{z} \cdot \hat{x} \vec{v}", r"\underbrace{a + b}_{c}", r"\overbrace{x}^{y}",
    r"\binom{n}{k}", r"P(A \mid B) = \frac{P(B \mid A) P(A)}{P(B)}", r"\nabla \times \mathbf{E} = -\frac{\partial B}{\partial t}",
    r"f: \mathbb{R} \to \mathbb{R}", r"\mathcal{L}(\theta)", r"\mathfrak{g} \in \mathscr{A}", r"\operatorname{softmax}(z)_i",
    r"\begin{aligned} a &= b \\ &= c \end{aligned}", r"x_{1,2}^{(3)}", r"\forall x \exists y : x < y", r"A \cup B \subseteq C",
    r"\text{if } x \ge 0", r"\color{red} x", r"\textcolor{#228B22}{y}", r"\cancel{x} + \boxed{y}", r"\xrightarrow[a]{b}",
    r"\dfrac{1}{1 + \dfrac{1}{x}}", r"\lVert x \rVert_2 \le \lvert y \rvert", r"\oint \vec F \cdot d\vec r", r"\mathrm{H_2O}",
    r"a \equiv b \pmod{n}", r"\def\foo{x^2} \foo + \foo", r"\tag{1} E = mc^2",
]  # fmt: skip
# A tag is valid only in a display formula.
FORMULAS = [
    [opening, text, closing]
    for at, text in enumerate(TEXTS)
    for opening, closing in [OPENINGS[1 if "tag" in text else at % 4]]
]
FRAMED = (r"\fcolorbox{red}{blue}{x}", r"\pmb{x}")


def attacks(many: int) -> dict[str, str]:
    """Sixty texts; texts that repeat one piece repeat it `many` times."""
    deep = 10 * many
    elements = {
        "script": "<script>window.hacked = 1</script>",
        "script in upper case": "<SCRIPT SRC=//example.org/x.js></SCRIPT>",
        "image with a handler": '<img src=x onerror="window.hacked = 1">',
        "svg": "<svg onload=window.hacked=1><animate onbegin=window.hacked=1></svg>",
        "frame": '<iframe srcdoc="<script>parent.hacked=1</script>"></iframe>',
        "style": "<style>body { display: none }</style><link rel=stylesheet href=//example.org/x.css>",
        "form": '<form action="https://example.org"><input name=key><button>Send</button></form>',
        "base and meta": '<base href="https://example.org/"><meta http-equiv=refresh content="0;url=//example.org">',
        "details with a handler": "<details open ontoggle=window.hacked=1>x</details>",
        "template and noscript": "<template><img src=x></template><noscript><p title='</noscript><img src=x>'></noscript>",
        "math and mtext": "<math><mtext><table><mglyph><style><img src=x onerror=window.hacked=1></style></mglyph></table></mtext></math>",
        "sub with attributes": '<sub onclick="window.hacked=1">a</sub> <sup style="color:red">b</sup>',
        "sub around script": "<sub><script>window.hacked=1</script></sub>",
        "comment that hides": "<!-- <img src=x onerror=window.hacked=1> -->",
        "cdata": "<![CDATA[<script>window.hacked=1</script>]]>",
        "null bytes": "<scr\x00ipt>window.hacked=1</scr\x00ipt>",
        "entities": "&lt;script&gt;window.hacked=1&lt;/script&gt; &#60;img src=x onerror=window.hacked=1&#62;",
    }
    addresses = {
        "javascript link": "[a](javascript:window.hacked=1)",
        "javascript in cases": "[a](JaVaScRiPt:window.hacked=1) [b](  javascript:window.hacked=1)",
        "javascript by entities": "[a](&#106;avascript:window.hacked=1) [b](javascript&colon;window.hacked=1)",
        "javascript by control characters": "[a](java\tscript:window.hacked=1) [b](\x01javascript:window.hacked=1)",
        "javascript by name": "[a][x] [x]\n\n[x]: javascript:window.hacked=1",
        "javascript autolink": "<javascript:window.hacked=1>",
        "data link": "[a](data:text/html;base64,PHNjcmlwdD4=)",
        "vbscript and file": "[a](vbscript:x) [b](file:///etc/passwd) [c](blob:https://example.org/x)",
        "relative link": "[a](/about) [b](//example.org) [c](../..) [d](#top)",
        "picture elsewhere": "![a](https://example.org/track.png) ![b](javascript:window.hacked=1)",
        "link that closes an attribute": '[a](https://example.org/"onmouseover="window.hacked=1)',
        "title that closes an attribute": "[a](https://example.org '\" onclick=window.hacked=1')",
        "link in a link": "[a [b](https://example.org) c](javascript:window.hacked=1)",
        "code language": '```"><img/src=x/onerror=window.hacked=1>\nx\n```',
        "user in an address": "https://user:secret@example.org/ http://[::1]/ www.example.org",
    }
    formulas = {
        "formula with javascript": r"$\href{javascript:window.hacked=1}{x}$ \(\url{javascript:window.hacked=1}\)",
        "formula with a picture": r"$\includegraphics{https://example.org/x.png}$",
        "formula with html": r"$\htmlStyle{position:fixed}{x} \htmlData{a=b}{y} \htmlId{messages}{z} \htmlClass{message}{w}$",
        "formula with a colour of more": r"$\textcolor{red;background:url(//example.org)}{x}$ $\color{javascript:1} y$",
        "formula with elements": r"$\text{<img src=x onerror=window.hacked=1>}$ $<script>window.hacked=1</script>$",
        "definition without end": r"$\def\a{\a\a}\a$ $\def\b{\c}\def\c{\b}\b$",
        "definition that doubles": "$"
        + "".join(rf"\def\{a}{{\{b}\{b}\{b}\{b}}}" for a, b in zip("abcdefgh", "bcdefghi"))
        + r"\def\i{x}\a$",
        "wide rule": r"$\rule{99999em}{99999em} \hspace{99999em} \kern{-99999em} \raisebox{9999em}{x}$",
        "nested braces": f"${'{' * deep}x{'}' * deep}$",
        "braces without end": f"$${'{' * deep}x$$",
        "nested roots": "\\(" + "\\sqrt{" * many + "x" + "}" * many + "\\)",
        "unfinished formulas": "\\( " * many + "$$ " * many,
        "formulas side by side": "$x$ " * (many // 4),
        "formula of one letter each": "".join(f"$x_{{{at}}}$ " for at in range(many // 8)),
        "not a command": r"$\notacommand{x}$ \[ \begin{nothing} x \end{nothing} \] $\frac{$",
    }
    endless = {
        "stars": "**a " * many,
        "stars and lines": "*a_" * many,
        "underscores": "__a_" * many,
        "quotes": "> " * many,
        "lists": "- " * many,
        "numbers": "1. " * many,
        "brackets": "[" * many + "]" * many,
        "links without end": "[a](b" * many,
        "backticks": "`a``" * many,
        "one word": "a_b" * many,
        "headings": "a\n-\n" * many,
        "tables that are none": "a|b\n-|-|-\n" * many,
        "wide table": "|a" * many + "|\n" + "|-" * many + "|\n" + "|b" * many + "|\n",
    }
    return {**elements, **addresses, **formulas, **endless}


HOSTILE = attacks(1000)
LONG = {name: text for name, text in attacks(20000).items() if len(text) > 10_000}
LONG["2 MB of table"] = "| a | b |\n|---|---|\n" + "| cell | another cell |\n" * 87_000
LONG["2 MB of one paragraph"] = "word *emphasis* `code` " * 90_000
LONG["2 MB of formulas"] = "".join(f"$\\frac{{x_{{{at}}}}}{{{at}}}$ " for at in range(80_000))
