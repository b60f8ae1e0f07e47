// Markdown within a paragraph: text to DOM nodes. Links lead to http, https and mailto only; pictures become links, since
// the page fetches nothing from elsewhere.

import { h } from "./dom.js";

const SAFE = /^(https?:|mailto:)/i;

// What may begin at a place, tried in this order.
const FORMS = [
  [/^\\([\\`*_{}[\]()#+\-.!|~>$])/, (match) => match[1]],
  [/^(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, (match) => h("code", {}, match[2].replace(/^ (.*) $/s, "$1"))],
  [/^!?\[((?:[^[\]\\]|\\.|\[[^\]]*\])*)\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/, link],
  [/^<((?:https?:\/\/|mailto:)[^\s<>]+)>/, (match) => anchor(match[1], [match[1].replace(/^mailto:/, "")])],
  [/^\*\*\*(?=\S)([\s\S]*?\S)\*\*\*/, (match) => h("strong", {}, h("em", {}, inline(match[1])))],
  [/^(\*\*|__)(?=\S)([\s\S]*?\S)\1(?![*_])/, (match, before) => emphasis("strong", match, before)],
  [
    // What is strong within ends at its first mark: a text of many marks must have one reading, or the search never ends.
    /^([*_])(?=\S)((?:[^*_]|\*\*(?:(?!\*\*)[\s\S])*\*\*|__(?:(?!__)[\s\S])*__)*?\S)\1(?!\w)/,
    (match, before) => emphasis("em", match, before),
  ],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (match) => h("del", {}, inline(match[1]))],
  [/^\$\$?(?=\S)([^$\n]*[^$\s\\])\$\$?(?!\d)/, (match) => h("code", { class: "math" }, match[1])],
  [/^\\\(([\s\S]+?)\\\)/, (match) => h("code", { class: "math" }, match[1].trim())],
  [/^( {2,}|\\)\n/, () => h("br")],
];
const STARTS = /[\\`!\[<*_~$]| {2,}\n|https?:\/\//g;

/** Nodes and strings; adjacent to `before`, underscores inside a word stay as they are. */
export function inline(text) {
  const found = [];
  let plain = 0;
  STARTS.lastIndex = 0;
  for (let start = STARTS.exec(text); start; start = STARTS.exec(text)) {
    const at = start.index;
    const [length, node] = read(text.slice(at), text[at - 1] ?? " ");
    if (!length) {
      STARTS.lastIndex = at + 1;
      continue;
    }
    if (at > plain) found.push(text.slice(plain, at));
    found.push(node);
    plain = STARTS.lastIndex = at + length;
  }
  if (plain < text.length) found.push(text.slice(plain));
  return found;
}

/** (length, node) of what begins here; length 0: nothing does. */
function read(text, before) {
  const bare = /^https?:\/\/[^\s<>"`]*[^\s<>"`.,;:!?)\]'*_]/.exec(text);
  if (bare) return /\w/.test(before) ? [0, null] : [bare[0].length, anchor(bare[0], [bare[0]])];
  for (const [pattern, make] of FORMS) {
    const match = pattern.exec(text);
    const node = match && make(match, before);
    if (node !== null && node !== undefined) return [match[0].length, node];
  }
  return [0, null];
}

function emphasis(tag, match, before) {
  return match[1][0] === "_" && /\w/.test(before) ? null : h(tag, {}, inline(match[2]));
}

function link(match) {
  const words = match[1] ? inline(match[1]) : [match[2]];
  return SAFE.test(match[2]) ? anchor(match[2], words) : h("span", {}, words);
}

function anchor(address, words) {
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, words);
}
