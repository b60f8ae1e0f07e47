// Markdown to DOM nodes, block by block. A view keeps the nodes of blocks that have not changed, so a growing answer costs
// its last block only.

import { codeBlock } from "./code.js";
import { h } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 24; // lists and quotes inside each other; a model that repeats `> ` would fill the browser's stack
const MATH = /^ {0,3}(\$\$|\\\[)\s*(.*)$/;

/** The Markdown of one answer, as it grows. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  update(text) {
    const blocks = blocksOf(text.split("\n"));
    blocks.forEach((block, at) => {
      const source = `${block.kind}\n${block.lines.join("\n")}`;
      if (this.sources[at] === source) return;
      const node = render(block);
      const old = this.element.childNodes[at];
      if (old) old.replaceWith(node);
      else this.element.append(node);
      this.sources[at] = source;
    });
    while (this.element.childNodes.length > blocks.length) this.element.lastChild.remove();
    this.sources.length = blocks.length;
  }
}

/** Lines to blocks: {kind, lines} and what the kind needs. */
export function blocksOf(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    let end = at + 1;
    if (!line.trim()) {
      at = end;
      continue;
    } else if (fence) {
      const closing = new RegExp(`^ {0,3}${fence[2][0]}{${fence[2].length},}\\s*$`);
      while (end < lines.length && !closing.test(lines[end])) end++;
      const indent = new RegExp(`^ {0,${fence[1].length}}`);
      const inside = lines.slice(at + 1, end).map((text) => text.replace(indent, ""));
      blocks.push({ kind: "code", language: fence[3], lines: [fence[3], ...inside] });
      end++;
    } else if (MATH.test(line)) {
      const closing = line.includes("$$") ? "$$" : "\\]";
      const first = MATH.exec(line)[2];
      if (!first.includes(closing)) while (end < lines.length && !lines[end].includes(closing)) end++;
      else end--;
      blocks.push({ kind: "math", lines: lines.slice(at, end + 1) });
      end++;
    } else if (HEADING.test(line)) {
      blocks.push({ kind: "heading", lines: [line] });
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule", lines: [line] });
    } else if (QUOTE.test(line)) {
      while (end < lines.length && lines[end].trim()) end++;
      blocks.push({ kind: "quote", lines: lines.slice(at, end) });
    } else if (ITEM.test(line)) {
      end = endOfList(lines, at);
      blocks.push({ kind: "list", lines: lines.slice(at, end) });
    } else if (line.includes("|") && DIVIDER.test(lines[end] ?? "") && lines[end].includes("-")) {
      end++;
      while (end < lines.length && lines[end].includes("|")) end++;
      blocks.push({ kind: "table", lines: lines.slice(at, end) });
    } else {
      while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) end++;
      blocks.push({ kind: "paragraph", lines: lines.slice(at, end) });
    }
    at = end;
  }
  return blocks;
}

function interrupts(line) {
  return [FENCE, HEADING, RULE, QUOTE, MATH].some((form) => form.test(line)) || /^ {0,3}([-*+]|1[.)]) +\S/.test(line);
}

/** Where a list ends: at a line that is neither indented nor an item, behind an empty one. */
function endOfList(lines, at) {
  const [, spaces, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  let end = at + 1;
  for (; end < lines.length; end++) {
    const line = lines[end];
    const item = ITEM.exec(line);
    if (item && item[1].length <= spaces.length && /\d/.test(item[2]) !== ordered) break;
    if (item && !RULE.test(line)) continue;
    if (!line.trim()) {
      const next = lines.slice(end).find((other) => other.trim());
      const goesOn = next && (ITEM.test(next) || next.startsWith("  ".padEnd(spaces.length + 2)));
      if (!goesOn) break;
    } else if (!line.startsWith(" ") && (interrupts(line) || !lines[end - 1].trim())) break;
  }
  return end;
}

const RENDERERS = { code, math, heading, rule, quote, list, table, paragraph };

function render(block, depth = 0) {
  return RENDERERS[block.kind](block.lines, depth, block);
}

function code(lines, depth, block) {
  return codeBlock(lines.slice(1).join("\n"), block.language);
}

function math(lines) {
  const text = lines
    .join("\n")
    .replace(/^\s*(\$\$|\\\[)/, "")
    .replace(/(\$\$|\\\])\s*$/, "")
    .trim();
  return h("pre", { class: "math", tabindex: 0 }, h("code", {}, text));
}

/** Two levels down: the page's own headings stand above an answer's. */
function heading([line]) {
  const [, marks, text] = HEADING.exec(line);
  return h(`h${Math.min(6, marks.length + 2)}`, { class: `level${marks.length}` }, inline(text));
}

function rule() {
  return h("hr");
}

function quote(lines, depth) {
  return h("blockquote", {}, inside(lines.map((line) => QUOTE.exec(line)?.[1] ?? line), depth));
}

function paragraph(lines) {
  return h("p", {}, inline(lines.map((line) => line.replace(/^\s+/, "")).join("\n")));
}

function list(lines, depth) {
  const [, spaces, marker] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length < spaces.length + 2) items.push([item[4]]);
    else items.at(-1).push(line);
  }
  const loose = lines.some((line, at) => !line.trim() && at < lines.length - 1);
  const ordered = /\d/.test(marker);
  return h(
    ordered ? "ol" : "ul",
    { start: ordered && parseInt(marker, 10) !== 1 ? parseInt(marker, 10) : null },
    items.map(([first, ...rest]) => listItem(first, rest, loose, depth)),
  );
}

function listItem(first, rest, loose, depth) {
  const filled = rest.filter((line) => line.trim());
  const indent = Math.min(...filled.map((line) => /^ */.exec(line)[0].length), 8);
  const task = /^\[([ xX])\]\s+(.*)$/.exec(first);
  const body = inside([task ? task[2] : first, ...rest.map((line) => line.slice(filled.length ? indent : 0))], depth);
  const children = loose ? body : body.flatMap((node) => (node.tagName === "P" ? [...node.childNodes] : [node]));
  if (!task) return h("li", {}, children);
  const label = task[1] === " " ? "open" : "done";
  return h(
    "li",
    { class: "task" },
    h("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": label }),
    children,
  );
}

function inside(lines, depth) {
  if (depth === DEEPEST) return [paragraph(lines)];
  return blocksOf(lines).map((block) => render(block, depth + 1));
}

function table(lines) {
  const [head, divider, ...rows] = lines.map(cellsOf);
  const align = divider.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
  const row = (tag, cells) =>
    h(
      "tr",
      {},
      head.map((_, at) => h(tag, { class: align[at] }, inline(cells[at] ?? ""))),
    );
  return h(
    "div",
    { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" },
    h(
      "table",
      {},
      h("thead", {}, row("th", head)),
      h(
        "tbody",
        {},
        rows.map((cells) => row("td", cells)),
      ),
    ),
  );
}

function cellsOf(line) {
  const trimmed = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(^|[^\\])\|$/, "$1");
  return trimmed.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}
