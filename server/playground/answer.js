// From messages to a request, and from a stream of chunks to a node: words, thinking, calls, probabilities, numbers.

import { stream } from "./api.js";
import { blobOf, partOf } from "./media.js";

/** {route, body} of a request for this path: a conversation, a text for models without a chat template, or a sound. The
 * path's last answer is continued where it ends with one. */
export function requestOf(path, system, settings, about) {
  const body = { model: settings.model && about.models.includes(settings.model) ? settings.model : about.models[0] };
  for (const name of NUMBERS) if (typeof settings[name] === "number") body[name] = settings[name];
  if (settings.stop?.length) body.stop = settings.stop;
  if (about.task === "pooling")
    throw new Error("This model writes nothing: it makes vectors and scores (/v1/embeddings, /rerank).");
  if (about.task === "transcription") return { route: "v1/audio/transcriptions", body: formOf(path, body) };
  if (about.task === "completion") {
    const prompt = path.map((node) => node.text).join("");
    return {
      route: "v1/completions",
      body: { ...body, prompt, max_tokens: body.max_tokens ?? CONTINUED, ...settings.extra },
    };
  }
  body.messages = path.filter((node) => node.role !== "assistant" || node.text || node.calls?.length).map(messageOf);
  if (path.at(-1)?.role === "assistant") Object.assign(body, CONTINUING);
  if (system?.trim()) body.messages.unshift({ role: "system", content: system });
  if (settings.logprobs && about.max_logprobs !== 0) {
    body.logprobs = true;
    body.top_logprobs = about.max_logprobs < 0 ? 5 : Math.min(5, about.max_logprobs);
  }
  // What was set beside another server may be nothing to this one, whose page does not show the field.
  if (settings.schema && about.structured_outputs)
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: settings.schema } };
  if (settings.tools && about.tool_calls) body.tools = settings.tools;
  if (about.thinking_switch && settings.thinking !== undefined)
    body.chat_template_kwargs = { enable_thinking: settings.thinking };
  return { route: "v1/chat/completions", body: { ...body, ...settings.extra } };
}

/** The last sound as an upload, for models that do nothing but hear. */
function formOf(path, body) {
  const sound = path.flatMap((node) => node.files).findLast((file) => file.kind === "audio");
  if (!sound) throw new Error("This model writes down what it hears: attach or record a sound.");
  const form = new FormData();
  form.append("file", blobOf(sound), sound.name);
  for (const [name, value] of Object.entries({ model: body.model, temperature: body.temperature })) {
    if (value !== undefined) form.append(name, value);
  }
  return form;
}

/** Whether a cut answer can go on: it has words, and no grammar that would begin anew. */
export function canContinue(node, settings, about) {
  const isCut = node.finish === "length" || node.finish === "stopped" || node.error;
  const isPlain = !node.calls?.length && (about.task === "completion" || !settings.schema);
  return Boolean(isCut && node.text && isPlain && about.task !== "transcription");
}

const CONTINUING = { continue_final_message: true, add_generation_prompt: false };
const CONTINUED = 256; // tokens by which a text is continued, where nothing else is asked for
const NUMBERS = [
  ...["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"],
  ...["presence_penalty", "frequency_penalty", "repetition_penalty"],
];

function messageOf(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.text };
  if (node.role === "assistant") {
    const calls = node.calls?.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
    return { role: "assistant", content: node.text || null, ...(calls?.length && { tool_calls: calls }) };
  }
  if (!node.files.length) return { role: "user", content: node.text };
  const parts = node.files.map(partOf);
  if (node.text) parts.push({ type: "text", text: node.text });
  return { role: "user", content: parts };
}

/** Fills `node` from the server's stream and calls `changed` after each chunk; a refusal becomes `node.error`, and is given
 * back. `from` is the first message that was sent. */
export async function answerInto(node, { route, body }, from, signal, changed) {
  const run = new Run(node.numbers?.tokens ?? 0);
  node.numbers = { ...node.numbers, from };
  let refusal = null;
  try {
    for await (const chunk of stream(route, body, signal)) {
      take(node, chunk, run);
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else {
      node.error = error.message;
      refusal = error;
    }
  }
  changed();
  return refusal;
}

/** One request of an answer, which may have `before` tokens of others: times are seconds since it was sent. */
class Run {
  constructor(before) {
    this.before = before;
    this.begun = performance.now();
    this.tokens = 0; // pieces that held words, until the server tells its own count
    this.first = undefined;
    this.last = undefined;
  }

  piece() {
    this.tokens++;
    this.last = (performance.now() - this.begun) / 1000;
    this.first ??= this.last;
  }
}

const SHORTEST_S = 0.01; // what comes faster has waited somewhere, and tells nothing of the server's speed

function take(node, chunk, run) {
  const { numbers } = node;
  const choice = chunk.choices[0];
  const delta = choice?.delta ?? {};
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) node.reasoning = (node.reasoning ?? "") + thought;
  const words = delta.content ?? choice?.text;
  if (words) node.text += words;
  for (const piece of delta.tool_calls ?? []) takeCall(node, piece);
  if (thought || words || delta.tool_calls) {
    run.piece();
    numbers.first ??= run.first;
    if (node.reasoning && !thought) numbers.thought ??= run.last - run.first;
  }
  if (choice?.logprobs?.content) (node.tokens ??= []).push(...choice.logprobs.content.map(tokenOf));
  if (choice?.finish_reason) node.finish = choice.finish_reason;
  if (chunk.usage) {
    run.tokens = chunk.usage.completion_tokens ?? run.tokens;
    numbers.prompt = chunk.usage.prompt_tokens;
    numbers.total = numbers.prompt + run.tokens;
    numbers.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  if (run.tokens) numbers.tokens = run.before + run.tokens;
  const span = run.last - run.first;
  if (run.tokens > 1 && span > SHORTEST_S) numbers.rate = (run.tokens - 1) / span;
}

function takeCall(node, piece) {
  const calls = (node.calls ??= []);
  const call = (calls[piece.index] ??= { id: "", name: "", arguments: "" });
  call.id ||= piece.id ?? "";
  call.name += piece.function?.name ?? "";
  call.arguments += piece.function?.arguments ?? "";
}

const tokenOf = (entry) => ({
  text: entry.token,
  logprob: entry.logprob,
  others: entry.top_logprobs.map((other) => [other.token, other.logprob]),
});
