// A form that sends a request to one route: its parameters, its body with the example in it, and what came back, as it comes.

import { addressOf, keyed } from "./api.js";
import { copyText, h } from "./dom.js";

const SHOWN = 200000; // characters of an answer

export function tryForm(operation) {
  const parameters = (operation.parameters ?? []).map((one) => ({
    ...one,
    field: h("input", { type: "text", required: one.required && true, spellcheck: "false" }),
  }));
  const body = bodyField(operation);
  const shown = h("pre", { tabindex: 0, "aria-label": "Answer", hidden: true }, h("code", {}));
  const status = h("p", { role: "status" });
  const stop = h("button", { type: "button", hidden: true }, "Stop");
  const copy = h(
    "button",
    { type: "button", onclick: () => copyText(curlOf(operation, parameters, body)) },
    "Copy as curl",
  );
  const form = h(
    "form",
    { class: "try" },
    h("h3", {}, "Try it"),
    parameters.map(({ name, field }) => h("label", {}, name, field)),
    body?.label,
    h("div", { class: "row" }, h("button", { type: "submit", class: "strong" }, "Send"), stop, copy),
    status,
    shown,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const ending = new AbortController();
    stop.onclick = () => ending.abort();
    send(operation, parameters, body, { shown, status, stop }, ending.signal);
  });
  return form;
}

/** What is sent: {label, value(), media}, or nothing. */
function bodyField(operation) {
  if (!operation.requestBody) return null;
  const [[media, { example }]] = Object.entries(operation.requestBody.content);
  if (media !== "application/json") {
    const file = h("input", { type: "file", required: true });
    return { media, label: h("label", {}, "file", file), value: () => formOf(file.files[0]), text: () => null };
  }
  const field = h("textarea", { rows: 8, spellcheck: "false" });
  field.value = JSON.stringify(example ?? {}, null, 2);
  return { media, label: h("label", {}, "Body", field), value: () => field.value, text: () => field.value };
}

function formOf(file) {
  const form = new FormData();
  form.append("file", file);
  return form;
}

/** The path with its parameters. */
function pathOf({ path }, parameters) {
  const query = new URLSearchParams();
  let made = path.slice(1);
  for (const { name, in: place, field } of parameters) {
    if (place === "path") made = made.replace(`{${name}}`, encodeURIComponent(field.value));
    else if (field.value) query.set(name, field.value);
  }
  return query.size ? `${made}?${query}` : made;
}

async function send(operation, parameters, body, { shown, status, stop }, signal) {
  const text = shown.firstChild;
  const headers = keyed(body?.text() === null || !body ? {} : { "content-type": body.media });
  text.textContent = "";
  shown.hidden = true;
  stop.hidden = false;
  status.textContent = "Waiting for the answer";
  const begun = performance.now();
  const took = () => `${Math.round(performance.now() - begun)} ms`;
  try {
    const options = { method: operation.method.toUpperCase(), headers, body: body?.value(), signal };
    const reply = await fetch(addressOf(pathOf(operation, parameters)), options);
    status.textContent = `${reply.status}, first byte after ${took()}`;
    shown.hidden = false;
    await readInto(text, reply);
    status.textContent = `${reply.status}, ${took()}, request ${reply.headers.get("x-request-id") ?? ""}`;
  } catch (error) {
    status.textContent = error.name === "AbortError" ? "Stopped" : "The server does not answer. Is it still running?";
  }
  stop.hidden = true;
}

/** The answer as it comes; JSON is laid out at its end. */
async function readInto(place, reply) {
  let whole = "";
  if (reply.body) {
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      whole += value;
      if (whole.length > SHOWN) {
        reader.cancel();
        whole = `${whole.slice(0, SHOWN)}\n…`;
        break;
      }
      place.textContent = whole;
    }
  }
  place.textContent = laidOut(whole) || "(empty)";
}

function laidOut(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** The same request for a shell; the key stays out of it. */
function curlOf(operation, parameters, body) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const words = ["curl", "-X", operation.method.toUpperCase(), quoted(addressOf(pathOf(operation, parameters)).href)];
  if (Object.keys(keyed({})).length) words.push("-H", '"Authorization: Bearer $KEY"');
  const text = body?.text();
  if (text) words.push("-H", quoted(`content-type: ${body.media}`), "-d", quoted(text));
  else if (body) words.push("-F", "file=@recording.wav");
  return words.join(" ");
}
