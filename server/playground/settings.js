// The settings: sampling, a schema for answers, tools, the key. Each field is checked as it is written, and a field with a
// mistake keeps its last good value. Fields that the server would refuse are not shown.

import { saveKey, savedKey } from "./api.js";
import { byId, fill, h, say } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

// name, label, lowest, highest, step
const SLIDERS = [
  ["temperature", "Temperature", 0, 2, 0.05],
  ["top_p", "Top p", 0.01, 1, 0.01],
  ["min_p", "Min p", 0, 1, 0.01],
];
const FIELDS = [
  ["top_k", "Top k", -1, 1000000, 1],
  ["max_tokens", "Most tokens", 1, 10000000, 1],
  ["seed", "Seed", 0, 2147483647, 1],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["repetition_penalty", "Repetition penalty", 0.01, 2, 0.01],
];

export class Settings {
  /** `conversation()` is the open one, `prompted()` is called when its system prompt changed; `keyed()`, when another key
   * was entered. */
  constructor(about, conversation, prompted, keyed) {
    this.about = about;
    this.conversation = conversation;
    this.prompted = prompted;
    this.values = loadSettings();
    this.keyed = keyed;
  }

  show() {
    const { about } = this;
    fill(
      byId("settings"),
      about.models.length > 1 && this.models(about.models),
      about.task === "chat" && this.systemPrompt(),
      ...[...SLIDERS, ...FIELDS].map((field) => this.number(...field)),
      this.area("stop", "Stop strings, one per line", 2, (text) => text.split("\n").filter(Boolean)),
      about.thinking_switch && this.thinking(),
      about.task === "chat" && about.max_logprobs !== 0 && this.check("logprobs", "Record the tokens' probabilities"),
      about.task === "chat" &&
        about.structured_outputs &&
        this.area("schema", "JSON Schema that answers match", 5, object),
      about.tool_calls && this.area("tools", "Tools (a JSON list, as in the API)", 4, list),
      this.area("extra", "More fields of the request (JSON)", 2, object),
      h("button", { type: "button", onclick: () => this.reset() }, "Back to the model's own settings"),
      this.key(),
    );
  }

  /** Of the open conversation; new ones begin with the one that was made theirs. */
  systemPrompt() {
    const field = h("textarea", { rows: 3, id: "system", placeholder: "none" });
    field.value = this.conversation().system ?? "";
    field.oninput = () => {
      this.conversation().system = field.value;
      this.prompted();
    };
    const onclick = () => {
      this.set("system", field.value.trim() ? field.value : undefined);
      say(this.values.system ? "New conversations begin with it." : "New conversations begin without one.", true);
    };
    return [
      h("label", { class: "field" }, "System prompt of this conversation", field),
      h("button", { type: "button", onclick }, "Make it the default"),
    ];
  }

  /** Shows the system prompt of the conversation that is open now. */
  showSystemPrompt() {
    const field = byId("system");
    if (field) field.value = this.conversation().system ?? "";
  }

  set(name, value) {
    if (value === undefined || value === "" || value?.length === 0) delete this.values[name];
    else this.values[name] = value;
    saveSettings(this.values);
  }

  reset() {
    this.values = {};
    saveSettings(this.values);
    this.show();
  }

  models(names) {
    const choice = h(
      "select",
      { onchange: (event) => this.set("model", event.target.value) },
      names.map((name) => h("option", { value: name, selected: name === this.values.model }, name)),
    );
    return h("label", { class: "field" }, "Model", choice);
  }

  /** Empty means: the model's own default, which the placeholder tells. */
  number(name, label, low, high, step) {
    const usual = this.about.defaults[name === "max_tokens" ? "max_new_tokens" : name];
    const field = h("input", {
      type: "number",
      min: low,
      max: high,
      step,
      value: this.values[name],
      placeholder: usual ?? "default",
      inputmode: "decimal",
    });
    const failure = h("span", { class: "failure" });
    field.oninput = () => {
      const value = field.value === "" ? undefined : Number(field.value);
      const wrong = field.validity.badInput || (value !== undefined && !(value >= low && value <= high));
      failure.textContent = wrong ? `from ${low} to ${high}` : "";
      field.setAttribute("aria-invalid", String(wrong));
      if (!wrong) this.set(name, value);
    };
    return h("label", { class: "field beside" }, h("span", {}, label, " ", failure), field);
  }

  area(name, label, rows, read) {
    const value = this.values[name];
    const field = h("textarea", { rows, spellcheck: false });
    field.value =
      value === undefined
        ? ""
        : typeof value === "string"
          ? value
          : name === "stop"
            ? value.join("\n")
            : JSON.stringify(value, null, 2);
    const failure = h("span", { class: "failure", role: "status" });
    field.oninput = () => {
      try {
        this.set(name, field.value.trim() ? read(field.value) : undefined);
        failure.textContent = "";
      } catch (error) {
        failure.textContent = error.message;
      }
      field.setAttribute("aria-invalid", String(failure.textContent !== ""));
    };
    return h("label", { class: "field" }, label, field, failure);
  }

  check(name, label) {
    const box = h("input", {
      type: "checkbox",
      checked: this.values[name] === true,
      onchange: () => this.set(name, box.checked || undefined),
    });
    return h("label", { class: "field check" }, box, label);
  }

  thinking() {
    const choices = [
      ["", "as the model likes"],
      ["true", "yes"],
      ["false", "no"],
    ];
    const now = this.values.thinking === undefined ? "" : String(this.values.thinking);
    const onchange = (event) =>
      this.set("thinking", event.target.value === "" ? undefined : event.target.value === "true");
    return h(
      "label",
      { class: "field" },
      "Thinking",
      h(
        "select",
        { onchange },
        choices.map(([value, text]) => h("option", { value, selected: value === now }, text)),
      ),
    );
  }

  key() {
    return h("details", {}, h("summary", {}, "API key"), keyForm(this.keyed));
  }
}

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

function object(text) {
  const value = parsed(text);
  if (typeof value !== "object" || value === null || Array.isArray(value))
    throw new Error("must be a JSON object: {…}");
  return value;
}

function list(text) {
  const value = parsed(text);
  if (!Array.isArray(value)) throw new Error("must be a JSON list: […]");
  return value;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`is not JSON: ${error.message}`, { cause: error });
  }
}
