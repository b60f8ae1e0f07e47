// Markdown on the page: a view of one answer as it grows. Tokens become nodes here, by dom.js alone, so nothing that a model
// writes is markup. A growing answer costs its last two blocks; a long one is drawn in slices.

import { h } from "./dom.js";
import { decoded } from "./entities.js";
import { formula } from "./formula.js";
import { codeBlock } from "./highlight.js";
import { later } from "./later.js";
import { AnswerLexer } from "./lexer.js";

const SAFE = /^(https?:|mailto:)/i;
const BUDGET_MS = 40; // of drawing, after which the rest waits
const SILENT = ["space", "def"]; // blocks that nothing is drawn for

export class ProseView {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.blocks = []; // {token, node}; node is null where nothing is drawn (yet)
    this.links = {};
    this.drawn = 0; // blocks
    this.waits = false;
  }

  update(given) {
    const text = given.replace(/\r\n?/g, "\n");
    if (text === this.text) return;
    this.read(text, text.startsWith(this.text) ? this.unfinished() : 0);
    this.text = text;
    this.draw();
  }

  /** From which block on a longer text may read otherwise: the last one may become part of that before it. */
  unfinished() {
    let at = this.blocks.length;
    for (let found = 0; at > 0 && found < 2;) if (!SILENT.includes(this.blocks[--at].token.type)) found++;
    return at;
  }

  /** The blocks of a text whose first `from` ones are known. */
  read(text, from) {
    const known = this.blocks.slice(0, from);
    const start = known.reduce((sum, { token }) => sum + token.raw.length, 0);
    const lexer = new AnswerLexer(merged(known.map(({ links }) => links)));
    const found = lexer.blocks(text.slice(start));
    const links = { ...lexer.tokens.links };
    const same = JSON.stringify(links) === JSON.stringify(this.links);
    this.links = links;
    if (!same && from) {
      this.clear(); // what a name leads to may stand at the end
      return this.read(text, 0);
    }
    const added = found.map((token) => ({ token, lexer, links: linksOf(token), node: null }));
    let at = from;
    const old = this.blocks;
    const isOld = (block) => block && old[at]?.token.type === block.token.type && old[at].token.raw === block.token.raw;
    while (same && isOld(added[at - from])) known.push(old[at++]);
    for (const { node } of old.slice(at)) node?.remove();
    this.drawn = Math.min(this.drawn, at);
    this.blocks = [...known, ...added.slice(at - from)];
  }

  clear() {
    this.element.replaceChildren();
    this.blocks = [];
    this.drawn = 0;
  }

  /** Draws what is not drawn yet; goes on later when that takes long. */
  draw() {
    const until = performance.now() + BUDGET_MS;
    while (this.drawn < this.blocks.length) {
      if (performance.now() > until) {
        if (!this.waits) later(() => ((this.waits = false), this.draw()));
        this.waits = true;
        return;
      }
      const block = this.blocks[this.drawn++];
      const { lexer, token } = block;
      block.lexer = null;
      if (SILENT.includes(token.type)) continue;
      const [node] = blocksOf([token], lexer);
      if (node) this.element.append((block.node = node));
    }
  }
}

/** Addresses that a block names, or null. */
function linksOf(token) {
  if (token.type === "def") return { [token.tag]: { href: token.href, title: token.title } };
  const inside = token.items?.flatMap((item) => item.tokens) ?? (token.type === "blockquote" ? token.tokens : []);
  const found = inside.map(linksOf).filter(Boolean);
  return found.length ? merged(found) : null;
}

/** The first of those that have the same name. */
const merged = (links) => Object.assign({}, ...links.reverse());

const blocksOf = (tokens, lexer) => tokens.flatMap((token) => BLOCKS[token.type]?.(token, lexer) ?? []);
const wordsOf = (tokens, lexer) => lexer.words(tokens).map((token) => WORDS[token.type]?.(token, lexer) ?? token.raw);

const BLOCKS = {
  heading: ({ depth, tokens }, lexer) =>
    h(`h${Math.min(6, depth + 2)}`, { class: `level${depth}` }, wordsOf(tokens, lexer)), // below the page's own
  paragraph: ({ tokens }, lexer) => h("p", {}, wordsOf(tokens, lexer)),
  text: ({ tokens, text }, lexer) => (tokens ? wordsOf(tokens, lexer) : [text]),
  checkbox: (token) => checkbox(token),
  code: ({ text, lang }) => codeBlock(text, lang ?? ""),
  hr: () => h("hr"),
  formula: (token) => formula(token),
  blockquote: ({ tokens }, lexer) => h("blockquote", {}, blocksOf(tokens, lexer)),
  list: ({ ordered, start, items }, lexer) =>
    h(
      ordered ? "ol" : "ul",
      { start: ordered && start !== 1 ? start : null },
      items.map((item) => h("li", { class: item.task ? "task" : null }, blocksOf(item.tokens, lexer))),
    ),
  table,
};

function table({ header, align, rows }, lexer) {
  const row = (tag, cells) =>
    h(
      "tr",
      {},
      cells.map((cell, at) => h(tag, { class: align[at] }, wordsOf(cell.tokens, lexer))),
    );
  return h(
    "div",
    { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" },
    h(
      "table",
      {},
      h("thead", {}, row("th", header)),
      h(
        "tbody",
        {},
        rows.map((cells) => row("td", cells)),
      ),
    ),
  );
}

const mark = (name) => (token, lexer) => h(name, {}, wordsOf(token.tokens, lexer));

const WORDS = {
  text: ({ text }) => decoded(text),
  escape: ({ text }) => text,
  strong: mark("strong"),
  em: mark("em"),
  del: mark("del"),
  sub: mark("sub"),
  sup: mark("sup"),
  codespan: ({ text }) => h("code", {}, text),
  br: () => h("br"),
  formula: (token) => formula(token),
  checkbox: (token) => checkbox(token),
  link,
  image: link, // the page fetches nothing from elsewhere
};

function checkbox({ checked }) {
  return h("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "open" });
}

/** Links lead to http, https and mailto only. */
function link({ href, tokens, text }, lexer) {
  const address = decoded(href);
  const words = tokens?.length ? wordsOf(tokens, lexer) : [text || address];
  if (!SAFE.test(address)) return h("span", {}, words);
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, words);
}
