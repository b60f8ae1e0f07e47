// The form for an API key.

import { saveKey, savedKey } from "./api.js";
import { h } from "./dom.js";

/** Where a key is entered; `keyed()` is called with it saved. */
export function keyForm(keyed) {
  const field = h("input", {
    type: "password",
    autocomplete: "off",
    "aria-label": "API key",
    placeholder: savedKey() ? "a key is saved" : "none is saved",
  });
  const keep = h("input", { type: "checkbox", checked: Boolean(localStorage.getItem("omniloop.key")) });
  const onsubmit = (event) => {
    event.preventDefault();
    saveKey(field.value.trim(), keep.checked);
    keyed();
  };
  return h(
    "form",
    { class: "key", onsubmit },
    field,
    h("label", { class: "check" }, keep, "Keep it in this browser, not only in this tab"),
    h("button", { type: "submit", class: "strong" }, "Use this key"),
  );
}
