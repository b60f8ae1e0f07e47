// The Vercel AI SDK talks to a server: `node talk_ai_sdk.mjs URL PICTURE` prints what it understood, as one JSON object.
// Copied beside node_modules by tests/end_to_end/test_clients.py.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText } from 'ai';

const [url, picture] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: 'omniloop', baseURL: `${url}/v1`, includeUsage: true });
const short = { maxOutputTokens: 6, temperature: 0, maxRetries: 0 };
const counts = (usage) => [usage.inputTokens, usage.outputTokens, usage.totalTokens];

async function whole(model, options) {
  const answer = await generateText({ model, ...short, ...options });
  return { text: answer.text, end: answer.finishReason, usage: counts(answer.usage), model: answer.response.modelId };
}

async function streamed(model, options) {
  const answer = streamText({ model, ...short, ...options, onError: ({ error }) => { throw error; } });
  let text = '';
  for await (const piece of answer.textStream) text += piece;
  return { text, end: await answer.finishReason, usage: counts(await answer.usage) };
}

async function refusal(model) {
  try {
    await generateText({ model, prompt: 'hi', maxRetries: 0 });
    return 'not refused';
  } catch (error) {
    return [error.name, error.statusCode, error.message];
  }
}

async function left() { // leaves after the first piece
  const leave = new AbortController();
  const answer = streamText({
    model: provider('omniloop'), prompt: 'tell me a long story', maxOutputTokens: 4000, maxRetries: 0,
    abortSignal: leave.signal, providerOptions: { omniloop: { ignore_eos: true } },
  });
  for await (const piece of answer.textStream) { leave.abort(); return piece.length > 0; }
}

const chat = provider('omniloop');
const system = { system: 'be brief', prompt: 'hi' };
const image = { messages: [{ role: 'user', content: [
  { type: 'text', text: 'what is it?' }, { type: 'image', image: picture },
] }] };
const turns = { messages: [
  { role: 'user', content: 'hi' }, { role: 'assistant', content: 'hello' }, { role: 'user', content: 'again' },
] };
const seen = {
  whole: await whole(chat, system),
  streamed: await streamed(chat, system),
  turns: await whole(chat, turns),
  stopped: await whole(chat, { ...system, stopSequences: ['l'], seed: 3 }),
  picture: await whole(chat, image),
  picture_streamed: await streamed(chat, image),
  text: await whole(provider.completionModel('omniloop'), { prompt: 'one two' }),
  no_model: await refusal(provider('nothing')),
  left: await left(),
};
console.log('SEEN', JSON.stringify(seen));
