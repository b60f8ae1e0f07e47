// The list of conversations: open, search, rename, remove; save all to a file, and read such a file.

import { byId, download, h, iconButton, say } from "./dom.js";
import {
  allConversations,
  listConversations,
  loadConversation,
  removeConversation,
  saveConversation,
} from "./store.js";

export class Sidebar {
  /** `chat` knows the live conversations; `open(conversation)` shows another; `begin()` shows a new one. */
  constructor(chat, open, begin) {
    this.chat = chat;
    this.open = open;
    this.begin = begin;
    byId("search").addEventListener("input", () => this.show());
    byId("export").addEventListener("click", () => this.save());
    byId("import").addEventListener("click", () => byId("imported").click());
    byId("imported").addEventListener("change", (event) => {
      this.read(event.target.files[0]);
      event.target.value = "";
    });
  }

  async show() {
    const wanted = byId("search").value.trim().toLowerCase();
    const entries = await listConversations();
    const found = entries.filter((entry) => !wanted || `${entry.title}\n${entry.words}`.toLowerCase().includes(wanted));
    byId("conversations").replaceChildren(...found.map((entry) => this.entry(entry)));
    byId("none").hidden = found.length > 0;
    byId("none").textContent = wanted ? "No conversation has these words." : "Conversations stay in this browser.";
  }

  entry(entry) {
    const isOpen = entry.id === this.chat.conversation.id;
    const state = this.chat.stateOf(entry.id);
    const title = h(
      "button",
      { type: "button", class: "title", "aria-current": isOpen && "true", onclick: () => this.choose(entry.id) },
      state && h("span", { class: `dot ${state}`, role: "img", "aria-label": state }),
      entry.title,
    );
    return h(
      "li",
      { class: isOpen ? "open" : null },
      title,
      h(
        "span",
        { class: "tools" },
        iconButton("edit", `Rename ${entry.title}`, () => this.rename(entry, title)),
        iconButton("trash", `Remove ${entry.title}`, () => this.remove(entry)),
      ),
    );
  }

  async choose(id) {
    const conversation = this.chat.live(id) ?? (await loadConversation(id));
    if (conversation) this.open(conversation);
    this.show();
  }

  rename(entry, title) {
    const field = h("input", { type: "text", "aria-label": "New title", value: entry.title });
    const done = async (keep) => {
      field.onblur = null;
      // An answer may be growing in it, so no copy takes its place.
      const conversation = keep && (this.chat.live(entry.id) ?? (await loadConversation(entry.id)));
      if (conversation) {
        conversation.title = field.value.trim();
        await saveConversation(conversation);
      }
      this.show();
    };
    field.onblur = () => done(true);
    field.onkeydown = (event) => {
      if (event.key === "Enter") done(true);
      else if (event.key === "Escape") done(false);
    };
    title.replaceWith(field);
    field.select();
  }

  async remove(entry) {
    const conversation = await loadConversation(entry.id);
    const isOpen = entry.id === this.chat.conversation.id;
    this.chat.forget(entry.id);
    await removeConversation(entry.id);
    if (isOpen) this.begin();
    this.show();
    say(`${entry.title} is removed`, true, async () => {
      await saveConversation(conversation);
      this.show();
    });
  }

  async save() {
    download("conversations.json", JSON.stringify(await allConversations()));
  }

  async read(file) {
    try {
      const conversations = JSON.parse(await file.text());
      if (!Array.isArray(conversations) || !conversations.every(isConversation)) throw new Error();
      for (const conversation of conversations) await saveConversation(conversation);
      say(`${conversations.length} conversations were read`, true);
    } catch {
      say(`${file.name}: holds no conversations that were saved here.`, true);
    }
    this.show();
  }
}

const isText = (value) => typeof value === "string";

function isConversation(value) {
  return (
    isText(value?.id) &&
    Array.isArray(value.nodes) &&
    value.nodes.every((node) => isText(node?.id) && isText(node.text) && Array.isArray(node.files))
  );
}
