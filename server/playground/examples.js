// Prompts to begin with: those of the embedded model's card where it is served, and others for models of any kind.

const EMBEDDED = [
  { words: "What is in the picture?", file: "red-circle.png", kind: "image" },
  { words: "Which word do you hear?", file: "word-stop.ogg", kind: "audio" },
  { words: "Which way does it move?", file: "moves-right.mp4", kind: "video" },
  { words: "What is 12 + 30?" },
  { words: "Count from 3 to 7." },
  { words: "Spell the word garden." },
];

const ANY = [
  { words: "Describe this picture.", file: "red-circle.png", kind: "image" },
  { words: "What do you hear?", file: "word-stop.ogg", kind: "audio" },
  { words: "What happens in this film?", file: "moves-right.mp4", kind: "video" },
  { words: "Explain how a KV cache makes a language model faster, to somebody who can program." },
  { words: "Write a Python function that merges two sorted lists, with a test." },
  { words: "Plan a weekend in Lisbon as a table: time, place, why." },
];

const CONTINUED = [
  { words: "Once upon a time" },
  { words: "def quicksort(numbers):\n" },
  { words: "The three laws of motion are" },
];

/** Those that the model takes. */
export function examplesFor(about) {
  if (about.task === "pooling") return [];
  if (about.task === "completion") return CONTINUED;
  if (about.task === "transcription")
    return [{ words: "", label: "Write down a spoken word", file: "word-stop.ogg", kind: "audio" }];
  return (about.embedded ? EMBEDDED : ANY).filter(
    (example) => !example.kind || about.modalities.includes(example.kind),
  );
}

/** The example's medium as a File. */
export async function fileOf(example) {
  const reply = await fetch(new URL(example.file, import.meta.url));
  const blob = await reply.blob();
  return new File([blob], example.file, { type: blob.type });
}
