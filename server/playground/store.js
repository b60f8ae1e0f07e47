// What stays in this browser: conversations with their media in IndexedDB, settings in localStorage. Nothing of it is sent
// anywhere but, as prompts, to this server. Where a browser gives no database (private windows), memory takes its place.

import { remember } from "./dom.js";
import { titleOf } from "./tree.js";

const SETTINGS = "omniloop.settings";
const inMemory = new Map();
let database;

function opened() {
  database ??= new Promise((resolve) => {
    const request = indexedDB.open("omniloop", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("titles", { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  });
  return database;
}

/** Runs `work(stores)` in one transaction; the value of the request that it gives back. */
async function within(mode, work) {
  const base = await opened();
  return new Promise((resolve, reject) => {
    const transaction = base.transaction(["conversations", "titles"], mode);
    const request = work(transaction.objectStore("conversations"), transaction.objectStore("titles"));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error);
  });
}

const entryOf = (conversation) => ({
  id: conversation.id,
  title: titleOf(conversation),
  updated: conversation.updated,
  words: conversation.nodes
    .map((node) => node.text)
    .join("\n")
    .slice(0, 20000),
});

/** {id, title, updated, words} of every conversation, the latest first. */
export async function listConversations() {
  const entries = (await opened())
    ? await within("readonly", (_, titles) => titles.getAll())
    : [...inMemory.values()].map(entryOf);
  return entries.sort((one, other) => other.updated - one.updated);
}

export async function loadConversation(id) {
  return (await opened()) ? within("readonly", (conversations) => conversations.get(id)) : inMemory.get(id);
}

export async function saveConversation(conversation) {
  if (!(await opened())) return void inMemory.set(conversation.id, conversation);
  await within("readwrite", (conversations, titles) => {
    conversations.put(conversation);
    titles.put(entryOf(conversation));
  });
}

export async function removeConversation(id) {
  inMemory.delete(id);
  if (!(await opened())) return;
  await within("readwrite", (conversations, titles) => {
    conversations.delete(id);
    titles.delete(id);
  });
}

export async function allConversations() {
  return (await opened()) ? within("readonly", (conversations) => conversations.getAll()) : [...inMemory.values()];
}

export function loadSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

export function saveSettings(settings) {
  remember(localStorage, SETTINGS, JSON.stringify(settings));
}
