// Where people write: the question, its attachments (chosen, dropped, pasted, recorded), sending and stopping.

import { byId, h, iconButton, say } from "./dom.js";
import { attachmentOf, preview } from "./media.js";
import { canRecord, record } from "./record.js";

const RECORDINGS = [
  ["image", "camera", "Take a picture"],
  ["audio", "microphone", "Record a sound"],
  ["video", "film", "Record a film"],
];

export class Composer {
  /** `about()` gives the server's facts; `send(text, files)` asks, `stop()` ends the answer. */
  constructor(about, send, stop) {
    this.about = about;
    this.send = send;
    this.files = [];
    this.field = byId("question");
    this.field.addEventListener("input", () => this.fit());
    this.field.addEventListener("keydown", (event) => this.onKey(event));
    this.field.addEventListener("paste", (event) => this.onPaste(event));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    byId("stop").addEventListener("click", stop);
    byId("attach").addEventListener("click", () => byId("chosen").click());
    byId("chosen").addEventListener("change", (event) => {
      this.attach([...event.target.files]);
      event.target.value = "";
    });
    this.listenForDrops();
  }

  /** The buttons that fit the model. */
  offer() {
    const { modalities } = this.about();
    const fitting = RECORDINGS.filter(([kind]) => modalities.includes(kind));
    byId("recordings").replaceChildren(
      ...(canRecord() ? fitting : []).map(([kind, drawing, label]) =>
        iconButton(drawing, label, () => this.record(kind)),
      ),
    );
    byId("chosen").accept = [
      ...modalities.filter((name) => name !== "text").map((name) => `${name}/*`),
      "text/*",
      ".md,.json,.py,.js,.csv",
    ].join();
  }

  onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit();
  }

  onPaste(event) {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    this.attach(files);
  }

  listenForDrops() {
    const holds = (event) => event.dataTransfer?.types.includes("Files");
    let depth = 0;
    const mark = (by) => {
      depth = Math.max(0, depth + by);
      document.body.classList.toggle("dropping", depth > 0);
    };
    window.addEventListener("dragenter", (event) => holds(event) && mark(1));
    window.addEventListener("dragleave", (event) => holds(event) && mark(-1));
    window.addEventListener("dragover", (event) => holds(event) && event.preventDefault());
    window.addEventListener("drop", (event) => {
      if (!holds(event)) return;
      event.preventDefault();
      mark(-depth);
      this.attach([...event.dataTransfer.files]);
    });
  }

  async attach(files) {
    for (const file of files) {
      try {
        this.files.push(await attachmentOf(file, this.about()));
        say(`${file.name} is attached`);
      } catch (error) {
        say(error.message, true);
      }
    }
    this.show();
    this.field.focus();
  }

  async record(kind) {
    try {
      const file = await record(kind);
      if (file) await this.attach([file]);
    } catch (error) {
      say(error.message, true);
    }
  }

  show() {
    byId("attached").replaceChildren(
      ...this.files.map((file) =>
        h(
          "div",
          { class: "attachment" },
          preview(file),
          iconButton("close", `Remove ${file.name}`, () => this.drop(file)),
        ),
      ),
    );
  }

  drop(file) {
    this.files = this.files.filter((other) => other !== file);
    this.show();
    this.field.focus();
  }

  submit() {
    const text = this.field.value.trim();
    if (!text && !this.files.length) return;
    const { files } = this;
    this.clear();
    this.send(text, files);
  }

  /** Puts a refused question back; false, where something else is written here already. */
  giveBack(text, files) {
    if (this.field.value || this.files.length) return false;
    this.field.value = text;
    this.files = files;
    this.show();
    this.fit();
    this.field.focus();
    return true;
  }

  clear() {
    this.field.value = "";
    this.files = [];
    this.show();
    this.fit();
  }

  /** As high as its lines, up to a third of the window. */
  fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, window.innerHeight / 3)}px`;
  }
}
