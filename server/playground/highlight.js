// Blocks of code: language, a copy button, and colours by the tokens of highlight.js. The library is fetched with the first
// block, rare languages each by itself; its HTML is never used.

import { copyText, h, icon } from "./dom.js";
import { later } from "./later.js";

const FOLDER = "./vendor/highlight.js-11.12.0";
const PLAIN = /^(text|txt|plain|plaintext|output|console|log|)$/i;
const LONGEST = 50000; // characters that are coloured
const AT_ONCE = 5000; // characters that are coloured before they are shown, so that a growing block does not flicker
const RARE = {
  ...{ dart: "dart", docker: "dockerfile", dockerfile: "dockerfile", elixir: "elixir", ex: "elixir", exs: "elixir" },
  ...{ haskell: "haskell", hs: "haskell", jl: "julia", julia: "julia", latex: "latex", tex: "latex", nginx: "nginx" },
  ...{ powershell: "powershell", proto: "protobuf", protobuf: "protobuf", ps: "powershell", ps1: "powershell" },
  scala: "scala",
};
const SCOPES = [
  [/^(comment|quote|meta)/, "comment"],
  [/^(string|regexp|char|addition|link|symbol)/, "string"],
  [/^(number|literal|bullet)/, "number"],
  [/^(keyword|built_in|type|tag|name|selector|doctag|deletion|operator)/, "word"],
  [/^(title|attr|section|property)/, "call"],
];

let library = null;
let loaded = null;
const rare = new Map();

/** highlight.js, with this language where it is a rare one. */
function highlighter(language) {
  library ??= import(`${FOLDER}/highlight.min.js`).then((made) => (loaded = made.default));
  library.catch(() => (library = null));
  const name = RARE[language];
  if (!name) return library;
  if (!rare.has(name)) {
    const read = Promise.all([library, import(`${FOLDER}/languages/${name}.min.js`)]);
    rare.set(
      name,
      read.then(([made, grammar]) => (made.registerLanguage(name, grammar.default), made)),
    );
    rare.get(name).catch(() => rare.delete(name));
  }
  return rare.get(name);
}

/** A block of code as a figure. */
export function codeBlock(text, info) {
  const language = /^[\w#+.-]*/.exec(info.trim())[0].toLowerCase();
  const copy = h("button", { type: "button", class: "quiet", onclick: () => copyText(text) }, icon("copy"), "Copy");
  const code = h("code", {}, text);
  const figure = h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), copy),
    h("pre", { tabindex: 0 }, code),
  );
  if (PLAIN.test(language) || text.length > LONGEST) return figure;
  const colour = (made) => made.getLanguage(language) && code.replaceChildren(...coloured(made, text, language));
  if (loaded?.getLanguage(language) && text.length <= AT_ONCE) colour(loaded);
  else later((made) => figure.parentNode && colour(made), highlighter(language)); // unless a longer one took its place
  return figure;
}

function coloured(made, text, language) {
  return nodesOf(made.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode.children);
}

const nodesOf = (children) =>
  children.map((child) =>
    typeof child === "string" ? child : h("span", { class: classOf(child) }, nodesOf(child.children)),
  );

function classOf({ scope = "" }) {
  const found = SCOPES.find(([pattern]) => pattern.test(scope));
  return found ? `code-${found[1]}` : null;
}
