// The room that a conversation takes in the model's context: a meter in the question's form, and shortening, by which the
// oldest turns are no longer sent. Nothing is removed: the mark of a start on a question is all, and undo takes it away.

import { byId, h } from "./dom.js";
import { pathOf, sentOf } from "./tree.js";

const SHARE = 1 / 4; // of the context, that may be in use after shortening
const FULL = 3 / 4; // of it, from which on shortening is offered
const LETTERS = 4; // of a token, where the server has not counted

/** Tokens of the prompt and the answer behind it, as the server counted them; 0: it has not. */
function countOf({ numbers }) {
  return numbers?.prompt === undefined ? 0 : (numbers.total ?? numbers.prompt + numbers.tokens);
}

/** Tokens of what is sent of a path. */
export function usedBy(path) {
  const sent = sentOf(path);
  const last = sent.findLast((node) => node.role === "assistant");
  if (last && countOf(last) && (last.numbers.from ?? path[0].id) === sent[0].id) return countOf(last);
  return turnsOf(path)
    .filter((turn) => sent.includes(turn.node))
    .reduce((sum, turn) => sum + turn.size, 0);
}

/** Questions with their answers: {node, size}. A turn is what the server's counts grew by, or else an estimate. */
function turnsOf(path) {
  const turns = [];
  let last = { count: 0, from: path[0]?.id };
  for (const node of path) {
    if (node.role === "user" || !turns.length) turns.push({ node, size: 0, letters: 0 });
    const turn = turns.at(-1);
    turn.letters += node.text.length;
    const count = countOf(node);
    if (!count) continue;
    const from = node.numbers.from ?? path[0].id;
    if (from === last.from) turn.size += Math.max(0, count - last.count);
    last = { count, from };
  }
  for (const turn of turns) turn.size ||= Math.ceil(turn.letters / LETTERS);
  return turns;
}

/** The question from which on turns are sent so that three quarters of the context are free; null: none can be dropped. */
export function startFor(path, limit) {
  const sent = sentOf(path);
  const turns = turnsOf(path).filter((turn) => sent.includes(turn.node));
  let size = 0;
  let at = turns.length;
  while (at > 0 && size + turns[at - 1].size <= limit * SHARE) size += turns[--at].size;
  at = Math.min(at, turns.length - 1); // the last turn stays, however long it is
  return at > 0 ? turns[at].node : null;
}

/** Shows the meter for the open conversation; `shorten()` is called by its button. */
export function showMeter(conversation, limit, shorten) {
  const path = pathOf(conversation);
  const used = path.length && limit ? usedBy(path) : 0;
  const place = byId("context");
  place.hidden = !used;
  if (!used) return place.replaceChildren();
  const words = `${used.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens`;
  place.replaceChildren(
    h("meter", { min: 0, max: limit, high: limit * FULL, value: used, "aria-label": "Context in use", title: words }),
    h("span", { class: "numbers" }, words),
    ...(used > limit * FULL && startFor(path, limit)
      ? [h("button", { type: "button", class: "quiet", onclick: shorten }, "Shorten")]
      : []),
  );
}
