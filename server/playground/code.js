// A block of code: its language, a copy button, and colours from one small lexer for most languages.

import { copyText, h, icon } from "./dom.js";

const WORDS = new Set(
  `abstract and as assert async await bool boolean break case catch char class const continue def default defer del delete do
  double elif else end enum except export extends extern False false final finally float fn for from func function global go
  if impl implements import in include instanceof int interface is lambda let long loop match mod module mut namespace new
  nil None nonlocal not null NULL operator or package pass private protected pub public raise return self Self short sizeof
  static string struct super switch then this throw trait True true try type typedef typeof undefined union unsigned use using
  var virtual void volatile while with yield select SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE JOIN LEFT RIGHT ON
  GROUP BY ORDER LIMIT AND OR NOT AS CREATE TABLE echo fi done esac local`.split(/\s+/),
);
const HASH_COMMENTS =
  /^(py|python|sh|bash|shell|zsh|rb|ruby|yaml|yml|toml|r|perl|pl|make|makefile|dockerfile|ini|elixir|julia|nix)$/i;
const DASH_COMMENTS = /^(sql|lua|haskell|hs|ada)$/i;
const PLAIN = /^(text|txt|plain|output|console|log|md|markdown|)$/i;

const STRING = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'|${"`"}(?:[^${"`"}\\]|\\.)*${"`"}?`;
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
const NAME = String.raw`[A-Za-z_$][\w$]*`;

function lexer(language) {
  const comment = HASH_COMMENTS.test(language)
    ? "#[^\\n]*"
    : DASH_COMMENTS.test(language)
      ? "--[^\\n]*"
      : /^(html|xml|svg|vue)$/i.test(language)
        ? "<!--[\\s\\S]*?(?:-->|$)"
        : String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
  return new RegExp(`(${comment})|(${STRING})|(${NUMBER})|(${NAME})(?=(\\s*\\()?)`, "g");
}

/** Spans and strings of a program's text. */
export function coloured(text, language) {
  if (PLAIN.test(language) || text.length > 100000) return [text];
  const found = [];
  let last = 0;
  for (const match of text.matchAll(lexer(language))) {
    const kind = match[1]
      ? "comment"
      : match[2]
        ? "string"
        : match[3]
          ? "number"
          : WORDS.has(match[4])
            ? "word"
            : match[5]
              ? "call"
              : "";
    if (!kind) continue;
    if (match.index > last) found.push(text.slice(last, match.index));
    found.push(h("span", { class: `code-${kind}` }, match[0]));
    last = match.index + match[0].length;
  }
  found.push(text.slice(last));
  return found;
}

export function codeBlock(text, language) {
  const copy = h("button", { type: "button", class: "quiet", onclick: () => copyText(text) }, icon("copy"), "Copy");
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), copy),
    h("pre", { tabindex: 0 }, h("code", {}, coloured(text, language))),
  );
}
