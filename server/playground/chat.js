// The conversation on the page: what is asked, answered, stopped, edited and asked again.

import { answerInto, requestOf } from "./answer.js";
import { byId, say } from "./dom.js";
import { MessageView } from "./message.js";
import { removeConversation, saveConversation } from "./store.js";
import { addNode, choose, newConversation, pathOf, removeNode, siblingsOf } from "./tree.js";

export class Chat {
  /** `settings()` and `about()` give what holds now; `changed()` is called when the list of conversations must be renewed. */
  constructor(settings, about, changed) {
    this.settings = settings;
    this.about = about;
    this.changed = changed;
    this.conversation = newConversation();
    this.views = new Map();
    this.running = null; // the AbortController of the answer that is being written
    this.following = true; // whether the page scrolls along
    this.log = byId("log");
    this.log.addEventListener("grown", () => this.follow());
    this.log.addEventListener("scroll", () => {
      this.following = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    });
  }

  /** Shows another conversation, and ends the answer that was being written in this one. */
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.views.clear();
    this.following = true;
    this.show();
  }

  /** The nodes of the path, each by the view it has. */
  show() {
    const shown = pathOf(this.conversation).map((node) => this.viewOf(node));
    byId("messages").replaceChildren(...shown.map((view) => view.element));
    shown.forEach((view) => view.show());
    document.body.classList.toggle("empty", !shown.length);
    this.follow();
  }

  viewOf(node) {
    if (!this.views.has(node.id)) this.views.set(node.id, new MessageView(node, this.actions()));
    return this.views.get(node.id);
  }

  follow() {
    if (this.following) this.log.scrollTop = this.log.scrollHeight;
  }

  actions() {
    return {
      again: (node) => this.answer(node.parent),
      edit: (node, text) => this.ask(text, node.files, node.parent),
      remove: (node) => this.remove(node),
      siblings: (node) => siblingsOf(this.conversation, node),
      isLast: (node) => this.conversation.head === node.id,
      choose: (node) => {
        this.stop();
        choose(this.conversation, node);
        this.keep();
        this.show();
      },
      answerCall: (node, call, text) => this.answerCall(node, call, text),
    };
  }

  /** A question behind the head, or beside others behind `parent`. */
  async ask(text, files, parent = this.conversation.head) {
    this.stop();
    const node = addNode(this.conversation, parent, { role: "user", text, files });
    await this.answer(node.id);
  }

  /** One result; the model answers when every call of the node has its own. */
  async answerCall(node, call, text) {
    const results = (node.results ??= {});
    results[call.id] = text;
    if (node.calls.some((other) => !(other.id in results)))
      return say(`${call.name} has its result; the others are missing.`, true);
    let parent = node.id;
    for (const other of node.calls) {
      parent = addNode(this.conversation, parent, { role: "tool", callId: other.id, text: results[other.id] }).id;
    }
    await this.answer(parent);
  }

  /** A new answer behind this node. */
  async answer(parent) {
    this.stop();
    this.conversation.head = parent;
    let request;
    try {
      request = requestOf(pathOf(this.conversation), this.settings(), this.about());
    } catch (error) {
      this.show();
      return say(error.message, true);
    }
    const node = addNode(this.conversation, parent, { role: "assistant" });
    const { conversation } = this;
    const running = (this.running = new AbortController());
    const view = this.viewOf(node);
    view.streaming = this.following = true;
    this.show();
    this.busy(true);
    say("Answering");
    this.keep();
    await answerInto(node, request, running.signal, () => view.update());
    view.streaming = false;
    if (this.running === running) {
      this.running = null;
      this.busy(false);
    }
    say(node.error || node.text || "The answer has ended");
    await this.keep(conversation); // what is shown as ended survives a reload
    view.show();
  }

  stop() {
    this.running?.abort();
    this.running = null;
    this.busy(false);
  }

  busy(is) {
    document.body.classList.toggle("busy", is);
    byId("send").hidden = is;
    byId("stop").hidden = !is;
  }

  remove(node) {
    this.stop();
    const { conversation } = this;
    const { nodes, head } = conversation;
    removeNode(conversation, node);
    this.keep();
    this.show();
    byId("question").focus();
    say("Removed", true, () => {
      conversation.nodes = [...nodes, ...conversation.nodes.filter((later) => !nodes.includes(later))];
      conversation.head = head;
      this.keep(conversation);
      if (conversation === this.conversation) this.show();
    });
  }

  /** Stores the conversation; an empty one is not stored. */
  async keep(conversation = this.conversation) {
    conversation.updated = Date.now();
    try {
      if (conversation.nodes.length) await saveConversation(conversation);
      else await removeConversation(conversation.id);
    } catch {
      say("This browser has no room for the conversation; it is gone when the page is closed.", true);
    }
    this.changed();
  }
}
