// Elements without HTML text: every string becomes a text node, so nothing a model writes is ever markup.

/** An element with attributes, listeners (`onclick`) and children; null, undefined and false children are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

const present = (children) =>
  children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

/** Puts these children in the place of all others, by the rule of `h`. */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
}

/** One of the drawings of index.html, for the eye only. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button that shows a drawing and is called by its label. */
export function iconButton(name, label, onclick, attributes = {}) {
  return h(
    "button",
    { type: "button", class: "quiet", "aria-label": label, title: label, onclick, ...attributes },
    icon(name),
  );
}

export const byId = (id) => document.getElementById(id);

/** Sixteen random hex characters; crypto.randomUUID needs https, which a server in a local network seldom has. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Tells a screen reader what happened, and the eye for some seconds where `seen`; `undo` takes it back. */
export function say(text, seen = false, undo = null) {
  byId("said").textContent = text;
  if (!seen) return;
  const note = h("div", { class: "note" }, text);
  if (undo) note.append(h("button", { type: "button", onclick: () => (note.remove(), undo()) }, "Undo"));
  byId("notes").append(note);
  setTimeout(() => note.remove(), 6000);
}

/** Puts a text into localStorage or sessionStorage, which may be full. */
export function remember(storage, name, text) {
  try {
    storage.setItem(name, text);
  } catch {
    say("This browser's storage is full: remove old conversations, or this setting is lost with the page.", true);
  }
}

/** Copies where https allows it, and by a selection where it does not. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say("Copied");
}

/** Saves a text as a file. */
export function download(name, text, mime = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type: mime }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
