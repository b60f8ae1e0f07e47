// The open conversation, and the answers that are being written: in it, and in others that were left. An answer belongs to its
// conversation and goes on when another one is opened.

import { answerInto, canContinue, requestOf } from "./answer.js";
import { showMeter, startFor } from "./context.js";
import { byId, h, say } from "./dom.js";
import { MessageView } from "./message.js";
import { showRefusal } from "./refusal.js";
import { removeConversation, saveConversation } from "./store.js";
import { addNode, choose, newConversation, pathOf, removeNode, sentOf, siblingsOf, titleOf } from "./tree.js";

export class Chat {
  /** `page`: settings() and about() as they are now; changed(), when the list of conversations must be renewed; opened(),
   * when another one is open; renew(), before a request to a server that was lost; giveBack(text, files), into the form. */
  constructor(page) {
    this.page = page;
    this.conversation = newConversation();
    this.views = new Map();
    this.answers = new Map(); // id of a conversation -> {conversation, node, ending: AbortController}
    this.unseen = new Set(); // ids of conversations that were answered while another one was open
    this.following = true; // whether the page scrolls along
    this.log = byId("log");
    this.log.addEventListener("grown", () => this.follow());
    this.log.addEventListener("scroll", () => {
      this.following = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    });
  }

  /** The conversation with this id, if an answer is being written in it or it is open. */
  live(id) {
    return id === this.conversation.id ? this.conversation : (this.answers.get(id)?.conversation ?? null);
  }

  /** The mark of a title in the list of conversations. */
  stateOf(id) {
    return this.answers.has(id) ? "answering" : this.unseen.has(id) ? "answered" : "";
  }

  open(conversation) {
    this.conversation = conversation;
    this.unseen.delete(conversation.id);
    this.views.clear();
    this.following = true;
    showRefusal(null);
    this.page.opened();
    this.show();
  }

  /** The nodes of the path, each by the view it has; what is not sent any more stands above a line that says so. */
  show() {
    const path = pathOf(this.conversation);
    const unsent = path.length - sentOf(path).length;
    const shown = path.map((node, at) => {
      const view = this.viewOf(node);
      view.streaming = this.answers.get(this.conversation.id)?.node === node;
      view.element.classList.toggle("unsent", at < unsent);
      return view;
    });
    const elements = shown.map((view) => view.element);
    if (unsent) elements.splice(unsent, 0, this.border(unsent));
    byId("messages").replaceChildren(...this.systemPrompt(path), ...elements);
    shown.forEach((view) => view.show());
    document.body.classList.toggle("empty", !shown.length);
    this.showState();
    this.follow();
  }

  systemPrompt(path) {
    const { system } = this.conversation;
    if (!system?.trim() || !path.length) return [];
    return [h("details", { class: "system" }, h("summary", {}, "System prompt"), h("p", {}, system))];
  }

  border(unsent) {
    const words = `The ${unsent} message${unsent === 1 ? "" : "s"} above ${unsent === 1 ? "is" : "are"} not sent to the model.`;
    const onclick = () => this.sendAll();
    return h(
      "div",
      { class: "border" },
      words,
      h("button", { type: "button", class: "quiet", onclick }, "Send all again"),
    );
  }

  /** The stop button and the meter, as the open conversation is. */
  showState() {
    const isBusy = this.answers.has(this.conversation.id);
    document.body.classList.toggle("busy", isBusy);
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    showMeter(this.conversation, this.page.about()?.max_model_len, () => this.shorten());
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
      resume: (node) => this.resume(node),
      canResume: (node) =>
        this.conversation.head === node.id && canContinue(node, this.page.settings(), this.page.about()),
      edit: (node, text) => this.ask(text, node.files, node.parent, node.start),
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

  /** A question behind the head, or another version behind `parent`. A refused question at the head returns to the form. */
  async ask(text, files, parent = this.conversation.head, start = undefined) {
    this.stop();
    const { conversation } = this;
    const isLast = parent === conversation.head;
    const asked = addNode(conversation, parent, { role: "user", text, files, start });
    const answered = await this.answer(asked.id);
    if (answered?.refusal) this.refused(conversation, isLast ? asked : null, answered);
  }

  /** Shows why nothing was answered; gives the question back where it can be changed. */
  refused(conversation, asked, { node, refusal }) {
    if (conversation !== this.conversation || node.text || node.reasoning || node.calls?.length) return;
    const isFree = asked && siblingsOf(conversation, node).length === 1;
    if (!isFree || !this.page.giveBack(asked.text, asked.files)) return;
    removeNode(conversation, asked);
    this.keep();
    this.show();
    const canShorten = startFor(pathOf(conversation), this.page.about().max_model_len);
    showRefusal(refusal, canShorten && (() => this.shorten()));
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

  /** A new answer behind this node: {node, refusal}. */
  async answer(parent) {
    this.stop();
    const { conversation } = this; // another one may be open after each await
    conversation.head = parent;
    await this.page.renew();
    const request = this.requestOf(conversation);
    if (!request) return this.show();
    const node = addNode(conversation, parent, { role: "assistant" });
    return { node, refusal: await this.write(conversation, node, request) };
  }

  /** A cut answer goes on where it ended. */
  async resume(node) {
    const { conversation } = this;
    await this.page.renew();
    const request = this.requestOf(conversation);
    if (!request) return;
    delete node.finish;
    delete node.error;
    await this.write(conversation, node, request);
  }

  /** The request for a conversation as it is, or null where there can be none. */
  requestOf(conversation) {
    const { page } = this;
    const sent = sentOf(pathOf(conversation));
    try {
      return { ...requestOf(sent, conversation.system, page.settings(), page.about()), from: sent[0].id };
    } catch (error) {
      say(error.message, true);
      return null;
    }
  }

  /** Writes an answer into its node; the refusal, if it comes to one. */
  async write(conversation, node, request) {
    const ending = new AbortController();
    const running = { conversation, node, ending };
    this.answers.set(conversation.id, running);
    if (conversation === this.conversation) {
      this.following = true;
      showRefusal(null);
      this.show();
      say("Answering");
    }
    this.keep(conversation);
    const view = () => (conversation === this.conversation ? this.views.get(node.id) : null);
    const refusal = await answerInto(node, request, request.from, ending.signal, () => view()?.update());
    if (this.answers.get(conversation.id) === running) this.answers.delete(conversation.id);
    const isOpen = conversation === this.conversation;
    if (!isOpen && conversation.nodes.length) this.unseen.add(conversation.id);
    say(isOpen ? node.error || node.text || "The answer has ended" : `${titleOf(conversation)}: is answered`, !isOpen);
    await this.keep(conversation); // what is shown as ended survives a reload
    const shown = view();
    if (shown) shown.streaming = false;
    shown?.show();
    this.showState();
    return refusal;
  }

  /** Ends the answer of the open conversation, or of another one. */
  stop(id = this.conversation.id) {
    this.answers.get(id)?.ending.abort();
    this.answers.delete(id);
    this.showState();
  }

  /** Forgets a conversation; an answer that is still being written in it is not stored. */
  forget(id) {
    const conversation = this.live(id);
    this.stop(id);
    this.unseen.delete(id);
    if (conversation) conversation.nodes = [];
  }

  /** The oldest turns are no longer sent. */
  shorten() {
    const { conversation } = this;
    const path = pathOf(conversation);
    const node = startFor(path, this.page.about().max_model_len);
    showRefusal(null);
    if (!node) return say("There is one turn only: shorten the question, or begin a new conversation.", true);
    node.start = true;
    this.keep();
    this.show();
    const dropped = path.length - sentOf(path).length;
    say(`The ${dropped} oldest messages are no longer sent to the model.`, true, () => {
      delete node.start;
      this.keep(conversation);
      if (conversation === this.conversation) this.show();
    });
  }

  sendAll() {
    for (const node of pathOf(this.conversation)) delete node.start;
    this.keep();
    this.show();
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

  /** The page goes: what unfinished answers have so far is stored. */
  keepAll() {
    for (const conversation of new Set([
      this.conversation,
      ...[...this.answers.values()].map((one) => one.conversation),
    ]))
      this.keep(conversation);
  }

  /** Stores the conversation; an empty one is not stored. */
  async keep(conversation = this.conversation) {
    conversation.updated = Date.now();
    try {
      if (conversation.nodes.length) await saveConversation(conversation);
      else await removeConversation(conversation.id);
    } catch {
      say(
        "This browser's storage is full: the conversation is lost when the page closes. Remove old ones, or save all to a file.",
        true,
      );
    }
    this.page.changed();
  }
}
