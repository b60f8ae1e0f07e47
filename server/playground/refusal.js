// Why a question was not answered, above the form that it returned to, with what can be done about it.

import { aboutKey } from "./api.js";
import { byId, h, iconButton } from "./dom.js";

const TOO_LONG = "context_length_exceeded";

/** Shows a refusal, or none. `shorten()` drops the oldest turns, where there are any. */
export function showRefusal(refusal, shorten = null) {
  const place = byId("refused");
  place.hidden = !refusal;
  if (!refusal) return place.replaceChildren();
  const offers = [];
  if (refusal.reason === TOO_LONG && shorten)
    offers.push(h("button", { type: "button", class: "strong", onclick: shorten }, "Drop the oldest turns"));
  if (refusal.status === 401)
    offers.push(h("button", { type: "button", class: "strong", onclick: showKey }, "Enter a key"));
  const close = iconButton("close", "Close", () => showRefusal(null));
  place.replaceChildren(h("p", {}, aboutKey(refusal)), ...offers, close);
}

function showKey() {
  if (!document.body.classList.contains("with-panel")) byId("show-panel").click();
  const details = byId("settings").querySelector("details:has(.key)");
  details.open = true;
  details.querySelector("input").focus();
}
