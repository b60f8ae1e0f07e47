// Files to attachments: {kind, name, mime, url, text}. Pictures, sounds and films become data URLs; what the server cannot
// read is converted here where the browser can (pictures to JPEG, sounds to WAV); other files become text.

import { h, icon } from "./dom.js";

const PICTURES = ["image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp"];
const LONGEST_SIDE = 2048; // of a picture that is converted or too heavy
const HEAVY = 4 << 20; // bytes of a picture that is made smaller before it travels
const TEXT_LIMIT = 256 << 10;
const SOUNDS = {
  wav: "wav",
  "x-wav": "wav",
  wave: "wav",
  mpeg: "mp3",
  mp3: "mp3",
  flac: "flac",
  "x-flac": "flac",
  ogg: "ogg",
};
const NAMES = { image: "picture", audio: "sound", video: "film" };
export const RATE = 16000; // samples a second of sounds that are made here

/** The attachment of a file; throws an Error whose message says what to do. `about` is the server's /about. */
export async function attachmentOf(file, about) {
  const kind = kindOf(file);
  if (kind !== "text" && !about.modalities.includes(kind)) {
    throw new Error(`${file.name}: this model takes ${listed(about.modalities)}, no ${NAMES[kind]}s.`);
  }
  const made = await MAKERS[kind](file);
  const limit = about.max_request_bytes * 0.9;
  if ((made.url?.length ?? 0) > limit) {
    throw new Error(
      `${file.name}: is larger than the ${Math.floor(limit / 1.4e6)} MB that this server takes; send a shorter or smaller file.`,
    );
  }
  return made;
}

export function listed(modalities) {
  const words = modalities.map((name) => (name === "text" ? "text" : `${NAMES[name]}s`));
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

export function kindOf(file) {
  const kind = file.type.split("/")[0];
  if (kind in NAMES) return kind;
  if (/\.(mkv|mov|mp4|webm|m4v)$/i.test(file.name)) return "video";
  if (/\.(wav|mp3|flac|ogg|opus|m4a)$/i.test(file.name)) return "audio";
  return "text";
}

const MAKERS = {
  async image(file) {
    const asItIs = PICTURES.includes(file.type) && file.size <= HEAVY;
    const blob = asItIs ? file : await smaller(file);
    return { kind: "image", name: file.name, mime: blob.type, url: await dataUrl(blob) };
  },
  async audio(file) {
    const format = SOUNDS[file.type.split(";")[0].split("/")[1]];
    const blob = format ? file : await toWav(file);
    return {
      kind: "audio",
      name: file.name,
      mime: format ? file.type : "audio/wav",
      format: format ?? "wav",
      url: await dataUrl(blob),
    };
  },
  async video(file) {
    const mime = file.type.split(";")[0] || "video/mp4";
    return { kind: "video", name: file.name, mime, url: await dataUrl(file.slice(0, file.size, mime)) };
  },
  async text(file) {
    if (file.size > TEXT_LIMIT) throw new Error(`${file.name}: texts may have up to ${TEXT_LIMIT >> 10} KiB.`);
    const text = await file.text();
    if (text.includes("\u0000")) throw new Error(`${file.name}: is no picture, sound, film or text that can be sent.`);
    return { kind: "text", name: file.name, mime: "text/plain", text };
  },
};

export function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** A picture in a form that the server reads, its longer side shortened. */
async function smaller(file) {
  const url = URL.createObjectURL(file);
  try {
    const picture = new Image();
    picture.src = url;
    await picture.decode();
    const scale = Math.min(1, LONGEST_SIDE / Math.max(picture.naturalWidth, picture.naturalHeight, 1));
    const canvas = h("canvas", {
      width: Math.max(1, Math.round((picture.naturalWidth || 512) * scale)),
      height: Math.max(1, Math.round((picture.naturalHeight || 512) * scale)),
    });
    const context = canvas.getContext("2d");
    context.fillStyle = "white";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    return await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
  } catch {
    throw new Error(`${file.name}: this browser cannot open the picture; send a JPEG, PNG, WebP, GIF or BMP.`);
  } finally {
    URL.revokeObjectURL(url);
  }
}

/** Any sound that the browser decodes, as a WAV of one channel and 16 bits. */
export async function toWav(blob) {
  let sound;
  try {
    sound = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await blob.arrayBuffer());
  } catch {
    throw new Error(
      `${blob.name ?? "the recording"}: this browser cannot open the sound; send a WAV, MP3, FLAC or OGG.`,
    );
  }
  const context = new OfflineAudioContext(1, Math.max(1, Math.ceil(sound.duration * RATE)), RATE);
  const source = context.createBufferSource();
  source.buffer = sound;
  source.connect(context.destination);
  source.start();
  return wavOf((await context.startRendering()).getChannelData(0));
}

/** A WAV file of samples between -1 and 1. */
export function wavOf(samples) {
  const bytes = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const word = (at, text) => [...text].forEach((letter, place) => bytes.setUint8(at + place, letter.charCodeAt(0)));
  word(0, "RIFF");
  bytes.setUint32(4, 36 + 2 * samples.length, true);
  word(8, "WAVEfmt ");
  bytes.setUint32(16, 16, true);
  bytes.setUint16(20, 1, true); // integers
  bytes.setUint16(22, 1, true); // one channel
  bytes.setUint32(24, RATE, true);
  bytes.setUint32(28, 2 * RATE, true);
  bytes.setUint16(32, 2, true);
  bytes.setUint16(34, 16, true);
  word(36, "data");
  bytes.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, at) => bytes.setInt16(44 + 2 * at, Math.max(-1, Math.min(1, sample)) * 32767, true));
  return new Blob([bytes.buffer], { type: "audio/wav" });
}

/** The bytes of an attachment. */
export function blobOf(file) {
  const text = atob(file.url.slice(file.url.indexOf(",") + 1));
  return new Blob([Uint8Array.from(text, (letter) => letter.charCodeAt(0))], { type: file.mime });
}

/** The attachment as a part of a message's content. */
export function partOf(file) {
  if (file.kind === "image") return { type: "image_url", image_url: { url: file.url } };
  if (file.kind === "video") return { type: "video_url", video_url: { url: file.url } };
  if (file.kind === "audio") {
    return {
      type: "input_audio",
      input_audio: { format: file.format, data: file.url.slice(file.url.indexOf(",") + 1) },
    };
  }
  return { type: "text", text: `${file.name}:\n\`\`\`\n${file.text}\n\`\`\`` };
}

/** What people see or hear of an attachment. */
export function preview(file) {
  if (file.kind === "image") return h("img", { src: file.url, alt: file.name, class: "shown" });
  if (file.kind === "audio")
    return h("audio", { src: file.url, controls: true, "aria-label": file.name, class: "shown" });
  if (file.kind === "video")
    return h("video", {
      src: file.url,
      controls: true,
      muted: true,
      playsinline: true,
      "aria-label": file.name,
      class: "shown",
    });
  return h("span", { class: "chip" }, icon("file"), file.name);
}
