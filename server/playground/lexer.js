// Markdown to tokens, by marked's lexer: blocks at once, the words of a block when somebody reads them. Formulas are tokens
// of their own. HTML is text, but for <br>, <sub> and <sup>. What a model may write without end is bounded: depth, and the
// search for the end of marks that have none.

import { getDefaults, Lexer, Tokenizer } from "./vendor/marked-18.2.1/marked.esm.js";

const DEEPEST = 24; // lists, quotes and marks inside each other; `> ` a thousand times would fill the browser's stack
const LONGEST_FORMULA = 20000;
const LONGEST_WORDS = 100000; // of one paragraph; a longer one is text
const MOST_CELLS = 20000;
const LONGEST_LINK = 4000;
const SEARCH = 8; // lengths of a text that vain searches in it may cost together
const SEARCH_MOST = 100000;

/** Ends of formulas that open so. */
const CLOSING = { "\\(": "\\)", "\\[": "\\]", $$: "$$" };
const DOLLAR = /\$(?![\s$])((?:\\.|[^$\\\n])*)\$(?!\d)/y;

/** Looks for formulas from the start of a text to its end: an end that is not there is looked for once. */
class Formulas {
  constructor(source) {
    this.source = source;
    this.ends = {};
  }

  endOf(closing, from) {
    if (!(this.ends[closing] >= from)) {
      const end = this.source.indexOf(closing, from);
      this.ends[closing] = end < 0 ? Infinity : end;
    }
    return this.ends[closing];
  }

  /** {type, raw, text, display} of the formula that begins here, or null. */
  at(start) {
    const { source } = this;
    const closing = CLOSING[source.slice(start, start + 2)];
    if (closing) {
      const end = this.endOf(closing, start + 2);
      if (end - start > LONGEST_FORMULA || !source.slice(start + 2, end).trim()) return null;
      const text = source.slice(start + 2, end).trim();
      return { type: "formula", raw: source.slice(start, end + 2), text, display: closing !== "\\)" };
    }
    if (source[start] !== "$" || /[\w$]/.test(source[start - 1] ?? "")) return null;
    DOLLAR.lastIndex = start;
    const found = DOLLAR.exec(source);
    return found && /\S$/.test(found[1]) ? { type: "formula", raw: found[0], text: found[1], display: false } : null;
  }

  /** All of them by where they begin. */
  all() {
    const found = new Map();
    for (let at = 0; ; at++) {
      const next = this.source.slice(at).search(/[$\\]/);
      if (next < 0) return found;
      at += next;
      const formula = this.at(at);
      if (formula) {
        found.set(at, formula);
        at += formula.raw.length - 1;
      } else if (this.source[at] === "\\") at++; // what is escaped begins nothing
    }
  }
}

const BLOCK_FORMULA = /^ {0,3}(?=\$\$|\\\[)/;
const BLANK = /^[ \t]*(?:\n|$)/;

/** A formula on lines of its own, which may hold what looks like a list. `page` is the text that `source` ends. */
function formulaBlock(page, source) {
  const indent = BLOCK_FORMULA.exec(source)?.[0].length;
  if (indent === undefined) return null;
  const found = page.at(page.source.length - source.length + indent);
  const end = found && BLANK.exec(source.slice(indent + found.raw.length));
  return end ? { ...found, raw: source.slice(0, indent + found.raw.length + end[0].length) } : null;
}

function blockFormula(source) {
  return formulaBlock(this.lexer.page, source);
}

function inlineFormula(source) {
  return this.lexer.formulas.get(this.lexer.source.length - source.length);
}

const TAG = /^<(?:br\s*\/?>|(su[bp])>([\s\S]{0,1000}?)<\/\1>)/i;
const DIVIDER = /^ {0,3}(?:\| *)?:?-+:? *(?:\| *:?-+:? *)*(?:\| *)?$/;
const INTERRUPTS = new RegExp(
  [
    "^ {0,3}(?:",
    [
      ...["(?:-[\\t ]*){3,}$", "(?:_[\\t ]*){3,}$", "(?:\\*[\\t ]*){3,}$", "#{1,6}(?:\\s|$)", ">"],
      ...["`{3,}[^`]*$", "~{3,}", "(?:[*+-]|1[.)])[ \\t]+[^ \\t]"],
    ].join("|"),
    ")",
  ].join(""),
);

/** Cells of a line of a table, with those that its outer bars leave empty. */
const bars = (line) =>
  line
    .trim()
    .replace(/^\||\|$/g, "")
    .replace(/\\./g, "")
    .split("|").length;

function beginsTable(first, second) {
  return /[:|]/.test(second) && DIVIDER.test(second) && bars(first) === bars(second);
}

/** A table of more cells than a page bears, as the text that it is. */
function tooLarge(source, columns) {
  let end = 0;
  let rows = 0;
  for (let line = lineAt(source, 0); line.includes("|"); line = lineAt(source, end)) {
    end += line.length + 1;
    rows++;
  }
  const raw = source.slice(0, end);
  return rows * columns > MOST_CELLS ? { type: "code", raw, text: raw.trimEnd(), lang: "" } : undefined;
}

function lineAt(source, at) {
  const end = source.indexOf("\n", at);
  return source.slice(at, end < 0 ? source.length : end);
}

/** What may end a text within a paragraph. */
const MARKS = /[\\<!\[`*_~]|https?:\/\/|(?<![^\s*_~(])www\.| {2,}\n/gi;

/** marked's rules, bounded, and without HTML. */
class Rules extends Tokenizer {
  depth = 0;

  html() {}

  tag(source) {
    const found = source[0] === "<" && TAG.exec(source);
    if (!found) return undefined;
    const [raw, name, text] = found;
    if (!name) return { type: "br", raw };
    return { type: name.toLowerCase(), raw, text, tokens: this.lexer.inlineTokens(text) };
  }

  blockquote(source) {
    return this.deeper(() => super.blockquote(source));
  }

  list(source) {
    return this.deeper(() => super.list(source));
  }

  deeper(read) {
    if (this.depth === DEEPEST) return undefined;
    this.depth++;
    try {
      return read();
    } finally {
      this.depth--;
    }
  }

  /** marked would read all that follows before it sees that the second line divides no columns. */
  table(source) {
    const first = lineAt(source, 0);
    if (!beginsTable(first, lineAt(source, first.length + 1))) return undefined;
    return tooLarge(source, bars(first)) ?? super.table(source);
  }

  /** Up to an empty line, or to one that begins another block. */
  paragraph(source) {
    let end = lineAt(source, 0).length;
    while (end < source.length) {
      const line = lineAt(source, end + 1);
      if (!line.trim() || INTERRUPTS.test(line) || formulaBlock(this.lexer.page, source.slice(end + 1))) break;
      if (beginsTable(line, lineAt(source, end + line.length + 2))) break;
      end += 1 + line.length;
    }
    const text = source.slice(0, end);
    return { type: "paragraph", raw: text, text, tokens: this.lexer.inline(text) };
  }

  emStrong(source, masked, before) {
    if (source[0] === "_" && /\w/.test(before ?? "")) return undefined; // within_a_name
    return this.searched(/^[*_]+\S/, source, () => super.emStrong(source, masked, before));
  }

  del(source, masked, before) {
    return this.searched(/^~/, source, () => super.del(source, masked, before));
  }

  link(source) {
    return this.searched(/^!?\[/, source, () => super.link(source.slice(0, LONGEST_LINK)));
  }

  reflink(source, links) {
    return this.searched(/^!?\[/, source, () => super.reflink(source.slice(0, LONGEST_LINK), links));
  }

  codespan(source) {
    return this.searched(/^`/, source, () => super.codespan(source));
  }

  /** What begins so, unless too much was searched in vain. */
  searched(beginning, source, read) {
    if (this.lexer.patience < 0 || !beginning.test(source)) return undefined;
    const found = read();
    if (!found) this.lexer.patience -= source.length;
    return found;
  }

  /** Up to a quotation mark, since HTML is text here. Addresses of mail are no links: marked looks for their sign from each
   * letter of a word on. */
  url(source) {
    if (!/^(?:https?:\/\/|www\.)/i.test(source)) return undefined;
    return super.url(/^[^\s"<>`]*/.exec(source)[0]);
  }

  /** Ends where something else may begin. */
  inlineText(source) {
    const { lexer } = this;
    const at = lexer.source.length - source.length;
    while (lexer.starts.at(-1) <= at) lexer.starts.pop();
    const text = lexer.starts.length ? source.slice(0, lexer.starts.at(-1) - at) : source;
    MARKS.lastIndex = 1;
    const raw = text.slice(0, MARKS.exec(text)?.index);
    return { type: "text", raw, text: raw, escaped: false };
  }
}

/** Formulas have no marks of emphasis in them. */
function withoutFormulas(masked) {
  const found = [];
  let last = 0;
  for (const [at, { raw }] of this.lexer.formulas) {
    found.push(masked.slice(last, at), "a".repeat(raw.length));
    last = at + raw.length;
  }
  return found.join("") + masked.slice(last);
}

/** The blocks of a text; `links` are the addresses that are named elsewhere in it. */
export class AnswerLexer extends Lexer {
  constructor(links = {}) {
    super({
      ...getDefaults(),
      tokenizer: new Rules(),
      hooks: { emStrongMask: withoutFormulas },
      extensions: { block: [blockFormula], inline: [inlineFormula] },
    });
    Object.assign(this.tokens.links, links);
    this.within = 0;
    this.patience = 0;
    this.source = ""; // what is lexed for its words now, its formulas, and where they begin
    this.formulas = new Map();
    this.starts = []; // the nearest one last
    this.page = new Formulas(""); // of the blocks that are lexed now
    this.unread = new Map();
  }

  blocks(text) {
    const found = this.blockTokens(text, []);
    for (const { src, tokens } of this.inlineQueue) this.unread.set(tokens, src);
    this.inlineQueue = [];
    return found;
  }

  blockTokens(text, tokens, clipped) {
    const { page } = this;
    this.page = new Formulas(text);
    try {
      return super.blockTokens(text, tokens, clipped);
    } finally {
      this.page = page;
    }
  }

  /** The words of a block: lexed when they are first asked for. */
  words(tokens) {
    const source = this.unread.get(tokens);
    if (source !== undefined) {
      this.unread.delete(tokens);
      this.patience = Math.min(SEARCH * source.length + 20000, SEARCH_MOST);
      this.inlineTokens(source, tokens);
    }
    return tokens;
  }

  inlineTokens(source, tokens = []) {
    if (this.within === DEEPEST || source.length > LONGEST_WORDS) {
      tokens.push({ type: "text", raw: source, text: source });
      return tokens;
    }
    const { formulas, starts } = this;
    const outer = this.source;
    this.within++;
    this.source = source;
    this.formulas = new Formulas(source).all();
    this.starts = [...this.formulas.keys()].reverse();
    try {
      return super.inlineTokens(source, tokens);
    } finally {
      Object.assign(this, { source: outer, formulas, starts });
      this.within--;
    }
  }
}
