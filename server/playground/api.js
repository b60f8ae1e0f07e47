// The server: its addresses beside this page, the key, errors in the server's own words, and streams of events.

import { remember } from "./dom.js";

const BASE = new URL(".", document.baseURI);
const KEY = "omniloop.key";

/** The key that was entered, for this tab or for this browser. */
export function savedKey() {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
}

export function saveKey(key, keep) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (key) remember(keep ? localStorage : sessionStorage, KEY, key);
}

/** A refusal: `status` (0: there was no answer), the server's text as the message, and its short name of the cause. */
export class Refusal extends Error {
  constructor(status, message, reason = "") {
    super(message);
    this.status = status;
    this.reason = reason;
  }
}

let lost = false; // whether the last request got no answer, or one of a server that does not serve yet

/** Whether the server was away since this was last asked. */
export function wasLost() {
  const was = lost;
  lost = false;
  return was;
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  const key = savedKey();
  if (key) headers.authorization = `Bearer ${key}`;
  let reply;
  try {
    reply = await fetch(new URL(path, BASE), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    lost = true;
    throw new Refusal(0, "The server does not answer. Is it still running?");
  }
  if (reply.status === 503 || reply.status === 404) lost = true;
  if (!reply.ok) throw await refusalOf(reply);
  return reply;
}

async function refusalOf(reply) {
  try {
    const { message, reason } = (await reply.json()).error;
    return new Refusal(reply.status, message, reason);
  } catch {
    return new Refusal(reply.status, `The server answered ${reply.status}.`);
  }
}

/** What a refused key means to whoever reads it. */
export function aboutKey(error) {
  if (error.status !== 401) return error.message;
  return savedKey()
    ? "The server refuses the API key that is saved here. Enter another one."
    : "This server needs an API key.";
}

export const getJson = async (path) => (await call(path)).json();
export const getText = async (path, signal) => (await call(path, { signal })).text();

const CUT = "The answer broke off: the server or the network went away. Answer again when it is back.";

/** The chunks of a streamed completion; the signal ends it. */
export async function* stream(route, body, signal) {
  const reply = await call(route, {
    method: "POST",
    ...(body instanceof FormData
      ? uploaded(body)
      : sent({ ...body, stream: true, stream_options: { include_usage: true } })),
    signal,
  });
  try {
    for await (const data of events(reply.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(chunk.error.code, chunk.error.message, chunk.error.reason);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Refusal || error.name === "AbortError") throw error;
  }
  lost = true;
  throw new Refusal(0, CUT);
}

const sent = (body) => ({ headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

/** A form; the browser names its boundary. */
function uploaded(form) {
  form.append("stream", "true");
  return { body: form };
}

/** The `data:` lines of an event stream. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Numbers of a Prometheus text by name, the samples of one name added up; buckets are left out. */
export function readMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#" || line.includes("_bucket{")) continue;
    const at = line.lastIndexOf(" ");
    const name = line.slice(0, at).split("{", 1)[0];
    found.set(name, (found.get(name) ?? 0) + Number(line.slice(at + 1)));
  }
  return found;
}
