// Recording: a sound, a picture or a film in a dialog, from microphone and camera. A sound becomes WAV, a picture JPEG, a
// film stays as the browser records it (WebM or MP4). Devices are let go when the dialog closes, however it closes.

import { h, icon } from "./dom.js";
import { toWav } from "./media.js";

const LONGEST_FILM_S = 30;
const WORDS = {
  audio: ["Record a sound", "Start recording", "Stop and attach"],
  image: ["Take a picture", "Take the picture", ""],
  video: ["Record a film", "Start recording", "Stop and attach"],
};

/** Whether this browser lets this page use microphone and camera: over https, or on localhost. */
export const canRecord = () => Boolean(navigator.mediaDevices?.getUserMedia && window.MediaRecorder);

/** A File, or null when the dialog was closed. */
export async function record(kind) {
  const wanted = { audio: kind !== "image", video: kind !== "audio" && { width: { ideal: 640 } } };
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia(wanted);
  } catch (error) {
    const devices = kind === "audio" ? "the microphone" : "the camera";
    throw new Error(`The browser did not give ${devices}: ${error.message || error.name}.`);
  }
  try {
    return await inDialog(kind, stream);
  } finally {
    stream.getTracks().forEach((track) => track.stop());
  }
}

function inDialog(kind, stream) {
  const [title, begin, end] = WORDS[kind];
  return new Promise((resolve, reject) => {
    const seen = kind === "audio" ? meter(stream) : film(stream);
    const clock = h("span", { class: "clock", role: "timer" }, "0:00");
    const act = h("button", { type: "button", class: "strong" }, begin);
    const close = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
    const dialog = h(
      "dialog",
      { class: "recorder", "aria-label": title },
      h("h2", {}, title),
      seen.element,
      h("div", { class: "row" }, act, close, kind !== "image" && clock),
    );
    let result = null;
    let running = null;
    dialog.addEventListener("close", () => {
      running?.stop();
      seen.end();
      dialog.remove();
      resolve(result);
    });
    const finish = (file) => {
      result = file;
      dialog.close();
    };
    act.onclick = () => {
      if (kind === "image") return void snapshot(seen.element).then(finish, reject);
      if (!running) {
        running = start(stream, kind, clock, (file) => file.then(finish, (error) => (dialog.close(), reject(error))));
        act.replaceChildren(icon("stop"), end);
      } else running.finish();
    };
    document.body.append(dialog);
    dialog.showModal();
    act.focus();
  });
}

/** Records until `finish` (the file goes to `done`) or `stop` (nothing does). */
function start(stream, kind, clock, done) {
  const pieces = [];
  const recorder = new MediaRecorder(stream);
  let wanted = false;
  recorder.ondataavailable = (event) => pieces.push(event.data);
  recorder.onstop = () => {
    clearInterval(ticking);
    if (wanted) done(fileOf(kind, new Blob(pieces, { type: recorder.mimeType.split(";")[0] })));
  };
  recorder.start();
  const begun = performance.now();
  const finish = () => {
    wanted = true;
    if (recorder.state !== "inactive") recorder.stop();
  };
  const ticking = setInterval(() => {
    const seconds = Math.floor((performance.now() - begun) / 1000);
    clock.textContent = `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
    if (kind === "video" && seconds >= LONGEST_FILM_S) finish();
  }, 250);
  return { finish, stop: () => recorder.state !== "inactive" && recorder.stop() };
}

async function fileOf(kind, blob) {
  if (kind === "audio") return new File([await toWav(blob)], "recording.wav", { type: "audio/wav" });
  return new File([blob], `recording.${blob.type.includes("mp4") ? "mp4" : "webm"}`, { type: blob.type });
}

async function snapshot(video) {
  const canvas = h("canvas", { width: video.videoWidth, height: video.videoHeight });
  canvas.getContext("2d").drawImage(video, 0, 0);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
  return new File([blob], "picture.jpg", { type: "image/jpeg" });
}

function film(stream) {
  const element = h("video", { autoplay: true, playsinline: true, "aria-label": "What the camera sees" });
  element.muted = true;
  element.srcObject = stream;
  return { element, end: () => (element.srcObject = null) };
}

/** How loud it is, as a bar. */
function meter(stream) {
  const context = new AudioContext();
  const analyser = context.createAnalyser();
  context.createMediaStreamSource(stream).connect(analyser);
  const samples = new Float32Array(analyser.fftSize);
  const element = h("meter", { min: 0, max: 1, value: 0, "aria-label": "Loudness" });
  let frame = 0;
  const show = () => {
    analyser.getFloatTimeDomainData(samples);
    element.value = Math.min(
      1,
      4 * Math.sqrt(samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length),
    );
    frame = requestAnimationFrame(show);
  };
  show();
  return {
    element,
    end: () => {
      cancelAnimationFrame(frame);
      context.close();
    },
  };
}
