// One message on the page: its words, media, thinking, calls, numbers and buttons. The view follows its node: `update()`
// shows what the node holds now, at most once per frame, and touches only what changed. What takes long to show is shown
// less often, so that most of the time is left for keys and clicks.

import { byId, copyText, fill, h, icon, iconButton } from "./dom.js";
import { preview } from "./media.js";
import { ProseView } from "./prose.js";
import { tokenView } from "./tokens.js";

const REST = 3; // times as long as showing took, until it is shown again

/** `actions`: again, resume, edit, remove, choose, sendAll, answerCall (all take the node), and what they need to know. */
export class MessageView {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.streaming = false;
    this.frame = 0;
    this.rested = 0; // when it may be shown again
    const mine = node.role !== "assistant";
    this.words = h("div", { class: "words" });
    this.markdown = mine ? null : new ProseView(this.words);
    this.thought = h("div", { class: "words" });
    this.thinking = new ProseView(this.thought);
    this.fold = h("details", { class: "thinking", hidden: true }, h("summary", {}, "Thinking"), this.thought);
    this.calls = h("div", { class: "calls" });
    this.failure = h("p", { class: "failure", role: "alert", hidden: true });
    this.foot = h("footer", {});
    this.element = h(
      "article",
      { class: `message ${node.role}`, "aria-label": { user: "You", tool: "Result of a call" }[node.role] ?? "Answer" },
      h("div", { class: "files" }, node.files.map(preview)),
      this.fold,
      this.words,
      this.calls,
      this.failure,
      this.foot,
    );
  }

  /** Shows the node at the next frame. */
  update() {
    this.frame ||= requestAnimationFrame((now) => {
      this.frame = 0;
      if (now < this.rested) return this.update();
      const begun = performance.now();
      this.show();
      this.rested = performance.now() + REST * (performance.now() - begun);
    });
  }

  show() {
    const { node } = this;
    if (this.markdown) this.markdown.update(node.text);
    else this.words.textContent = node.text;
    this.words.hidden = !node.text && !this.streaming;
    this.words.classList.toggle("growing", this.streaming);
    if (node.reasoning) {
      this.fold.hidden = false;
      this.thinking.update(node.reasoning);
      const busy = this.streaming && !node.text && !node.calls?.length;
      this.fold.firstChild.textContent = busy ? "Thinking…" : thinkingTitle(node);
    }
    this.showCalls();
    this.failure.hidden = !node.error;
    this.failure.textContent = node.error ?? "";
    if (!this.streaming) fill(this.foot, this.buttons());
    else this.foot.replaceChildren(numbersOf(node));
    byId("log").dispatchEvent(new Event("grown"));
  }

  showCalls() {
    const { node } = this;
    if (!node.calls?.length) return;
    this.calls.replaceChildren(
      ...node.calls.map((call) =>
        h(
          "section",
          { class: "call", "aria-label": `Call of ${call.name}` },
          h("h3", {}, icon("tool"), call.name || "…"),
          h("pre", { tabindex: 0 }, h("code", {}, pretty(call.arguments))),
          !this.streaming && this.actions.isLast(node) && this.resultForm(call),
        ),
      ),
    );
  }

  /** Where people give a call's result, which the model then reads. */
  resultForm(call) {
    const field = h("input", {
      type: "text",
      "aria-label": `Result of ${call.name}`,
      placeholder: "What the call gave back",
    });
    const send = (event) => {
      event.preventDefault();
      if (field.value.trim()) this.actions.answerCall(this.node, call, field.value);
    };
    return h("form", { class: "row", onsubmit: send }, field, h("button", { type: "submit" }, "Give the result"));
  }

  buttons() {
    const { node, actions } = this;
    const siblings = actions.siblings(node);
    const at = siblings.indexOf(node);
    const step = (by) => () => actions.choose(siblings[at + by]);
    const versions = siblings.length > 1 && [
      iconButton("left", "Version before", step(-1), { disabled: at === 0 }),
      h("span", { class: "versions" }, `${at + 1} of ${siblings.length}`),
      iconButton("right", "Version behind", step(1), { disabled: at === siblings.length - 1 }),
    ];
    const answer = node.role === "assistant";
    return [
      iconButton("copy", "Copy the message", () => copyText(node.text)),
      node.role === "user" && iconButton("edit", "Edit the message", () => this.edit()),
      answer && iconButton("again", "Answer again", () => actions.again(node)),
      answer &&
        actions.canResume(node) &&
        h("button", { type: "button", class: "quiet", onclick: () => actions.resume(node) }, "Continue"),
      answer &&
        node.tokens?.length > 0 &&
        iconButton("chances", "Show the tokens' probabilities", () => this.showTokens()),
      iconButton("trash", "Remove the message and all behind it", () => actions.remove(node)),
      versions,
      answer && numbersOf(node),
    ];
  }

  showTokens() {
    if (this.tokens) this.tokens.remove();
    this.tokens = this.tokens ? null : tokenView(this.node.tokens);
    if (this.tokens) this.foot.before(this.tokens);
    this.words.hidden = Boolean(this.tokens);
    byId("log").dispatchEvent(new Event("grown"));
  }

  /** The message becomes a field; sending it makes another version. */
  edit() {
    const field = h("textarea", {
      "aria-label": "Edit the message",
      rows: Math.min(12, this.node.text.split("\n").length + 1),
    });
    field.value = this.node.text;
    const close = () => {
      form.replaceWith(this.words);
      this.foot.hidden = false;
    };
    const send = (event) => {
      event.preventDefault();
      close(); // this version has its own words again
      this.actions.edit(this.node, field.value);
    };
    const keys = (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    };
    const form = h(
      "form",
      { class: "editing", onsubmit: send },
      field,
      h(
        "div",
        { class: "row" },
        h("button", { type: "submit", class: "strong" }, "Send"),
        h("button", { type: "button", onclick: close }, "Cancel"),
      ),
    );
    field.addEventListener("keydown", keys);
    this.words.replaceWith(form);
    this.foot.hidden = true;
    field.focus();
  }
}

function thinkingTitle(node) {
  const seconds = node.numbers?.thought;
  return seconds === undefined ? "Thinking" : `Thought for ${seconds.toFixed(1)} s`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const ENDS = {
  length: "ended at the token limit",
  abort: "ended by the server",
  repetition: "ended because it repeated itself",
  stopped: "stopped",
};

/** Tokens, time to the first one, tokens a second; what the prompt held. */
function numbersOf(node) {
  const { numbers } = node;
  if (!numbers) return h("span", { class: "numbers" });
  const told = [];
  if (numbers.tokens !== undefined) told.push(`${numbers.tokens} token${numbers.tokens === 1 ? "" : "s"}`);
  if (numbers.first !== undefined) told.push(`first after ${milliseconds(numbers.first)}`);
  if (numbers.rate) told.push(`${numbers.rate < 10 ? numbers.rate.toFixed(1) : Math.round(numbers.rate)} tokens/s`);
  if (numbers.prompt !== undefined)
    told.push(`prompt ${numbers.prompt}${numbers.cached ? `, ${numbers.cached} cached` : ""}`);
  if (ENDS[node.finish]) told.push(ENDS[node.finish]);
  return h("span", { class: "numbers" }, told.join(" · "));
}

function milliseconds(seconds) {
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`;
}
