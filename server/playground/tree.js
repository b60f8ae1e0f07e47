// A conversation is a tree: an edited question and another answer are siblings of the first ones, and none is lost.
//
// node: {id, parent, role, text, files, reasoning, calls, callId, numbers, tokens, finish, error, start}; `parent` is null
// for a first question; `start`: what comes before this question is not sent. `head` is the last node of the path that is
// shown; `system` is the conversation's system prompt.

import { newId } from "./dom.js";

export function newConversation(system = "") {
  return { id: newId(), title: "", created: Date.now(), updated: Date.now(), nodes: [], head: null, system };
}

export function find(conversation, id) {
  return conversation.nodes.find((node) => node.id === id) ?? null;
}

/** The nodes that are shown, from the first question on. */
export function pathOf(conversation) {
  const path = [];
  for (let node = find(conversation, conversation.head); node; node = find(conversation, node.parent))
    path.unshift(node);
  return path;
}

/** What of a path is sent: all, or from the last question on that was made a start. */
export function sentOf(path) {
  return path.slice(
    Math.max(
      0,
      path.findLastIndex((node) => node.start),
    ),
  );
}

export function siblingsOf(conversation, node) {
  return conversation.nodes.filter((other) => other.parent === node.parent);
}

/** A new node behind `parent`, which becomes the head. */
export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent, role: "user", text: "", files: [], ...fields };
  conversation.nodes.push(node);
  conversation.head = node.id;
  conversation.updated = Date.now();
  return node;
}

/** Shows the path through this node, down to its latest descendant. */
export function choose(conversation, node) {
  let last = node;
  for (;;) {
    const next = conversation.nodes.findLast((other) => other.parent === last.id);
    if (!next) break;
    last = next;
  }
  conversation.head = last.id;
}

/** Takes the node and all behind it away; the head moves to a sibling or to the parent. */
export function removeNode(conversation, node) {
  const gone = new Set([node.id]);
  for (const other of conversation.nodes) if (gone.has(other.parent)) gone.add(other.id);
  conversation.nodes = conversation.nodes.filter((other) => !gone.has(other.id));
  const left = conversation.nodes.findLast((other) => other.parent === node.parent);
  if (left) choose(conversation, left);
  else conversation.head = node.parent;
}

/** The first words of the first question. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.nodes[0];
  if (!first) return "New conversation";
  const words = first.text.trim().replace(/\s+/g, " ") || first.files.map((file) => file.name).join(", ");
  return words.length > 60 ? `${words.slice(0, 57)}…` : words || "New conversation";
}
