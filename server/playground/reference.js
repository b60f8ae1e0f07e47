// /docs/api: what /openapi.json says, to read, and each route with a form to try it. A part is drawn when it is opened.

import { aboutKey, getJson } from "./api.js";
import { byId, h } from "./dom.js";
import { keyForm } from "./keyform.js";
import { fieldsOf, nameOf, typeOf } from "./schema.js";
import { tryForm } from "./tryit.js";

/** Asks for the description, and for a key where one is needed. */
async function read() {
  const trouble = byId("trouble");
  try {
    show(await getJson("openapi.json"));
    trouble.hidden = true;
  } catch (error) {
    const again = h("button", { type: "button", onclick: read }, "Try again");
    trouble.replaceChildren(h("p", {}, aboutKey(error)), error.status === 401 ? keyForm(read) : again);
    trouble.hidden = false;
  }
}

function show(description) {
  const operations = Object.entries(description.paths).flatMap(([path, entry]) =>
    Object.entries(entry).map(([method, operation]) => ({ method, path, ...operation })),
  );
  byId("about").prepend(`omniloop ${description.info.version}. `);
  byId("routes").replaceChildren(
    ...description.tags.map((tag) =>
      h(
        "section",
        {},
        h("h2", {}, tag.name, h("small", {}, tag.description)),
        operations
          .filter((operation) => operation.tags[0] === tag.name)
          .map((operation) => routeOf(operation, description)),
      ),
    ),
  );
  byId("types").replaceChildren(
    h("h2", {}, "Types"),
    ...Object.entries(description.components.schemas).map(([name, schema]) => typeSection(name, schema)),
  );
  document.body.classList.add("ready");
  reveal();
}

function routeOf(operation, description) {
  const title = [
    h("b", { class: "method" }, operation.method.toUpperCase()),
    h("code", {}, operation.path),
    h("span", {}, operation.summary),
  ];
  return folded(operation.operationId, title, () => [
    h("p", {}, "operationId ", h("code", {}, operation.operationId)),
    ...parametersOf(operation),
    ...bodyOf(operation, description),
    ...answersOf(operation),
    tryForm(operation),
  ]);
}

function parametersOf({ parameters }) {
  if (!parameters) return [];
  const rows = parameters.map((one) =>
    h("tr", {}, h("th", { scope: "row" }, h("code", {}, one.name)), h("td", {}, one.in), h("td", {}, one.description)),
  );
  return [h("h3", {}, "In the address"), scrolled("Parameters", h("table", {}, h("tbody", {}, rows)))];
}

function bodyOf({ requestBody }, description) {
  if (!requestBody) return [];
  const [[media, { schema }]] = Object.entries(requestBody.content);
  const parts = schema.allOf ?? [schema];
  return [
    h("h3", {}, "Body ", h("small", {}, media)),
    ...parts.map((part) => fieldsOf(part.$ref ? description.components.schemas[nameOf(part)] : part)),
  ];
}

function answersOf({ responses }) {
  const rows = Object.entries(responses).flatMap(([status, answer]) =>
    Object.entries(answer.content).map(([media, { schema }]) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, status),
        h("td", {}, media),
        h("td", {}, typeOf(schema)),
        h("td", {}, answer.description),
      ),
    ),
  );
  return [h("h3", {}, "Answers"), scrolled("Answers", h("table", {}, h("tbody", {}, rows)))];
}

const scrolled = (name, table) => h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": name }, table);

function typeSection(name, schema) {
  const title = [h("code", {}, name), h("span", {}, schema.description ?? "")];
  return folded(name, title, () => [fieldsOf(schema)]);
}

/** A part that is drawn when it is opened first. */
function folded(id, title, content) {
  const part = h("details", { id }, h("summary", {}, title));
  part.addEventListener("toggle", () => {
    if (part.open && part.children.length === 1) part.append(h("div", { class: "inside" }, content()));
  });
  return part;
}

/** Opens what the address names. */
function reveal() {
  const part = byId(decodeURIComponent(location.hash.slice(1)));
  if (part?.localName !== "details") return;
  part.open = true;
  part.scrollIntoView();
}

function find() {
  const wanted = byId("find").value.trim().toLowerCase();
  for (const part of document.querySelectorAll("details"))
    part.hidden =
      !part.firstChild.textContent.toLowerCase().includes(wanted) && !part.id.toLowerCase().includes(wanted);
}

byId("find").addEventListener("input", find);
window.addEventListener("hashchange", reveal);
read();
