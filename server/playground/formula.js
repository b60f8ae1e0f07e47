// Formulas, drawn by KaTeX: it is fetched with the first one. A drawing is made once for a text, since a growing answer is
// shown again and again; a formula that KaTeX refuses stays text.

import { h } from "./dom.js";
import { later } from "./later.js";

const FOLDER = "./vendor/katex-0.19.1";
const KEPT = 2000; // drawings
const drawings = new Map();
let library = null;

const OPTIONS = {
  throwOnError: true,
  trust: false, // no addresses, no styles of a model's choice
  strict: "ignore",
  maxExpand: 1000,
  maxSize: 20,
};

function katex() {
  library ??= (async () => {
    const style = h("link", { rel: "stylesheet", href: new URL(`${FOLDER}/katex.min.css`, import.meta.url) });
    document.head.append(style);
    await import(`${FOLDER}/katex.min.js`); // as it is distributed, it names itself for all
    return globalThis.katex;
  })();
  library.catch(() => (library = null)); // the next one tries again
  return library;
}

/** The element of a formula: its text, and soon its drawing. */
export function formula({ raw, text, display }) {
  const element = h(display ? "div" : "span", { class: display ? "formula display" : "formula" });
  const name = `${display ? "[" : "("}${text}`;
  const drawing = drawings.get(name);
  if (drawing) {
    fit(element, drawing.cloneNode(true));
    return element;
  }
  element.textContent = raw.trim();
  later((made) => {
    try {
      if (!drawings.has(name)) keep(name, draw(made, text, display));
      fit(element, drawings.get(name).cloneNode(true));
    } catch (error) {
      element.classList.add("wrong");
      element.title = error.message; // of KaTeX: what it did not understand, and where; or of the full stack
    }
  }, katex());
  return element;
}

function fit(element, drawing) {
  element.replaceChildren(drawing);
  if (element.classList.contains("display")) element.tabIndex = 0; // it may be wider than the page
}

function keep(name, drawing) {
  if (drawings.size === KEPT) drawings.delete(drawings.keys().next().value);
  drawings.set(name, drawing);
}

/** KaTeX's nodes. Most of its styles are set as properties; the few that it writes as attributes (widths of arrows, frames in
 * the copy for screen readers) are set as properties here, since the policy forbids such attributes. */
function draw(made, text, display) {
  const tree = made.__renderToDomTree(text, { ...OPTIONS, displayMode: display });
  const nodes = [tree];
  for (const node of nodes) {
    if (node.attributes?.style) setStyle(node);
    if (node.children) nodes.push(...node.children);
  }
  return tree.toNode();
}

function setStyle(node) {
  const { style } = node.attributes;
  delete node.attributes.style;
  const make = node.toNode.bind(node);
  node.toNode = () => {
    const element = make();
    element.style.cssText = style;
    return element;
  };
}
