// An answer token by token: colour tells how likely each was, hovering or the arrow keys tell the others that were likely.

import { h } from "./dom.js";

const SHOWN = 4000; // tokens; more would make the page slow

/** `tokens`: [{text, logprob, others: [[text, logprob], …]}]. */
export function tokenView(tokens) {
  const told = h("div", { class: "likely", "aria-live": "polite" }, "Hover over a token, or move with the arrow keys.");
  const spans = tokens
    .slice(0, SHOWN)
    .map((token, at) =>
      h(
        "span",
        { class: `token p${Math.min(9, Math.floor(10 * Math.exp(token.logprob)))}`, onmouseenter: () => select(at) },
        token.text,
      ),
    );
  let chosen = -1;
  const select = (at) => {
    if (at < 0 || at >= spans.length) return;
    spans[chosen]?.classList.remove("chosen");
    chosen = at;
    spans[at].classList.add("chosen");
    told.replaceChildren(...likely(tokens[at]));
  };
  const keys = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
  const onkeydown = (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    select(Math.max(0, Math.min(spans.length - 1, chosen + keys[event.key])));
  };
  return h(
    "div",
    { class: "tokens" },
    h("div", { class: "run", tabindex: 0, role: "group", "aria-label": "The answer's tokens", onkeydown }, spans),
    told,
  );
}

function likely(token) {
  const others = token.others.some(([text]) => text === token.text)
    ? token.others
    : [[token.text, token.logprob], ...token.others];
  return others.map(([text, logprob]) =>
    h(
      "span",
      { class: text === token.text ? "this" : null },
      h("code", {}, JSON.stringify(text).slice(1, -1)),
      ` ${percent(logprob)}`,
    ),
  );
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share < 0.01 ? "<0.01 %" : `${share.toFixed(share < 10 ? 2 : 1)} %`;
}
