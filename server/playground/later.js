// Work that can wait: in turn, in slices of some milliseconds, so that the page answers to keys and clicks in between.

const SLICE_MS = 8;
const waiting = [];
let working = null;

/** Does `task(value)` after what waits already, with the value of the promise `needed`; a library that fails ends its tasks. */
export function later(task, needed) {
  waiting.push([task, needed]);
  working ??= work();
}

/** When nothing waits any more. */
export const settled = () => working ?? Promise.resolve();

async function work() {
  await pause();
  let until = performance.now() + SLICE_MS;
  while (waiting.length) {
    const [task, needed] = waiting.shift();
    try {
      task(await needed);
    } catch (error) {
      console.info(error); // what was to be drawn stays text
    }
    if (performance.now() < until) continue;
    await pause();
    until = performance.now() + SLICE_MS;
  }
  working = null;
}

const pause = () => new Promise((resolve) => setTimeout(resolve));
