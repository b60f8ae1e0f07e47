// The page's start: who answers here, what it takes, and the parts put together.

import { aboutKey, getJson, wasLost } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { byId, h, icon, remember, say } from "./dom.js";
import { examplesFor, fileOf } from "./examples.js";
import { listed } from "./media.js";
import { Panel } from "./panel.js";
import { keyForm, Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { loadConversation } from "./store.js";
import { newConversation } from "./tree.js";

const OPEN = "omniloop.open"; // the conversation that this tab shows
const THEME = "omniloop.theme";
const DRAWINGS = { text: "file", image: "picture", audio: "microphone", video: "film" };

const WELCOMES = {
  chat: ({ models, modalities }) => `${models[0]} takes ${listed(modalities)}.`,
  completion: ({ models }) => `${models[0]} has no chat template: it continues the text that you write.`,
  pooling: ({ models }) => `${models[0]} makes vectors and scores for programs; there is nothing to talk about.`,
  transcription: ({ models }) => `${models[0]} writes down what it hears: attach or record a sound.`,
};

const OWN = new URL(".", import.meta.url).pathname.split("/").at(-2); // the digest of the page's files

let about = null;
let settings = null;

const panel = new Panel();
const chat = new Chat({
  settings: () => settings.values,
  about: () => about,
  changed: () => sidebar.show(),
  opened: () => settings?.showSystemPrompt(),
  giveBack: (text, files) => composer.giveBack(text, files),
  renew,
});
const sidebar = new Sidebar(chat, open, begin);
const composer = new Composer(
  () => about,
  (text, files) => ask(text, files),
  () => chat.stop(),
);

function ask(text, files) {
  remember(sessionStorage, OPEN, chat.conversation.id);
  return chat.ask(text, files);
}

function open(conversation) {
  remember(sessionStorage, OPEN, conversation.id);
  conversation.system ??= settings.values.system ?? ""; // of a version that had one prompt for all
  chat.open(conversation);
  close("with-sidebar");
}

function begin() {
  sessionStorage.removeItem(OPEN);
  chat.open(newConversation(settings?.values.system));
  sidebar.show();
  close("with-sidebar");
  byId("question").focus();
}

/** On a telephone a drawer closes when it has done its work. */
function close(drawer) {
  if (window.matchMedia("(max-width: 60rem)").matches) setDrawer(drawer, false);
}

function setDrawer(drawer, is) {
  document.body.classList.toggle(drawer, is);
  byId(drawer === "with-panel" ? "show-panel" : "show-sidebar").setAttribute("aria-expanded", String(is));
  if (is && window.matchMedia("(max-width: 60rem)").matches) {
    setDrawer(drawer === "with-panel" ? "with-sidebar" : "with-panel", false);
  }
  panel.turn();
}

function greet() {
  byId("model").replaceChildren(
    h("strong", {}, about.models[0]),
    h("span", { class: "facts" }, `${about.family}, ${about.max_model_len.toLocaleString("en")} tokens`),
    h(
      "span",
      { class: "modalities", role: "img", "aria-label": `takes ${listed(about.modalities)}` },
      about.modalities.map((name) => icon(DRAWINGS[name])),
    ),
  );
  document.title = `${about.models[0]} · omniloop`;
  byId("welcome-words").textContent = about.embedded
    ? "This small model comes with the server. It sees, hears and watches a little: try it, then start the server with a model of your own."
    : WELCOMES[about.task](about);
  byId("examples").replaceChildren(...examplesFor(about).map(exampleButton));
  byId("version").textContent = `omniloop ${about.version}`;
}

function exampleButton(example) {
  const onclick = async () => {
    const files = example.file ? [await fileOf(example)] : [];
    await composer.attach(files);
    const attached = composer.files;
    composer.clear();
    ask(example.words, attached);
  };
  return h(
    "button",
    { type: "button", class: "example", onclick },
    icon(DRAWINGS[example.kind ?? "text"]),
    h("span", {}, example.label ?? example.words),
  );
}

/** Asks who is there; a refused key opens the form, anything else is told with a button to try again. */
async function meet() {
  const trouble = byId("trouble");
  try {
    await learn();
    trouble.hidden = true;
    document.body.classList.add("ready");
  } catch (error) {
    const again = h("button", { type: "button", class: "strong", onclick: meet }, "Try again");
    trouble.replaceChildren(h("p", {}, aboutKey(error)), error.status === 401 ? keyForm(meet) : again);
    trouble.hidden = false;
    if (error.status === 401) trouble.querySelector("input").focus();
    return;
  }
  composer.offer();
  const last = sessionStorage.getItem(OPEN);
  const conversation = !chat.conversation.nodes.length && last && (await loadConversation(last));
  if (conversation) open(conversation);
  else if (!chat.conversation.nodes.length) chat.open(newConversation(settings.values.system));
  else chat.show();
  await sidebar.show();
  byId("asking").disabled = false; // what is asked depends on who answers
  byId("question").focus();
}

/** The server's facts, and all on the page that follows from them. */
async function learn() {
  about = await getJson("about");
  settings = new Settings(
    about,
    () => chat.conversation,
    () => chat.keep(),
    meet,
  );
  settings.show();
  greet();
  if (about.page && about.page !== OWN) say("The server has another version now: load this page again.", true);
}

/** After a request that got no answer: another server may be here now. */
async function renew() {
  if (!wasLost()) return;
  try {
    await learn();
  } catch {
    // the question itself will say so
  }
}

const THEMES = ["light dark", "light", "dark"];
const THEME_NAMES = ["as the system is", "light", "dark"];

function setTheme(at) {
  document.documentElement.style.colorScheme = THEMES[at];
  remember(localStorage, THEME, String(at));
  const label = `Colours: ${THEME_NAMES[at]}`;
  byId("theme").title = label;
  byId("theme").setAttribute("aria-label", label);
}

const themeNow = () => Number(localStorage.getItem(THEME)) % THEMES.length || 0;

setTheme(themeNow());
byId("theme").addEventListener("click", () => setTheme((themeNow() + 1) % THEMES.length));
byId("new").addEventListener("click", begin);
byId("keys").addEventListener("click", () => byId("help").showModal());
for (const [button, drawer] of [
  ["show-sidebar", "with-sidebar"],
  ["show-panel", "with-panel"],
]) {
  byId(button).addEventListener("click", () => setDrawer(drawer, !document.body.classList.contains(drawer)));
}
byId("shade").addEventListener("click", () =>
  ["with-sidebar", "with-panel"].forEach((drawer) => setDrawer(drawer, false)),
);

document.addEventListener("keydown", (event) => {
  const command = event.ctrlKey || event.metaKey;
  if (event.key === "Escape" && !document.querySelector("dialog[open]"))
    (chat.stop(), close("with-sidebar"), close("with-panel"));
  else if (command && event.shiftKey && event.key.toLowerCase() === "o") (event.preventDefault(), begin());
  else if (command && event.key === ".") (event.preventDefault(), byId("show-panel").click());
  else if (command && event.key.toLowerCase() === "k") {
    event.preventDefault();
    setDrawer("with-sidebar", true);
    byId("search").focus();
  } else if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName))
    (event.preventDefault(), byId("question").focus());
});

window.addEventListener("pagehide", () => chat.keepAll()); // with what an unfinished answer has so far

if (window.matchMedia("(min-width: 60rem)").matches) setDrawer("with-sidebar", true);
meet();
