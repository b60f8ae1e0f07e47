// The live panel: what the server does, from /metrics once a second while the panel is open and the page is seen.

import { getText, readMetrics } from "./api.js";
import { byId, h } from "./dom.js";

const KEPT = 60; // seconds in the plot
const STEP_PARTS = ["schedule", "launch", "wait", "commit"];
const ROWS = [
  ["running", "Running"],
  ["waiting", "Waiting"],
  ["cache", "KV cache"],
  ["step", "Step"],
  ["rate", "Generated"],
  ["prompt", "Prompts"],
  ["hits", "Prefix cache hits"],
  ["memory", "Memory"],
];

export class Panel {
  constructor() {
    this.cells = Object.fromEntries(ROWS.map(([name]) => [name, h("dd", {}, "–")]));
    this.before = null;
    this.rates = [];
    this.timer = 0;
    this.asking = null;
    byId("numbers").append(
      h(
        "dl",
        {},
        ROWS.map(([name, label]) => h("div", {}, h("dt", {}, label), this.cells[name])),
      ),
    );
    document.addEventListener("visibilitychange", () => this.turn());
  }

  get isWanted() {
    return document.body.classList.contains("with-panel") && document.visibilityState === "visible";
  }

  /** Begins or ends asking, as the page is now. */
  turn() {
    clearTimeout(this.timer);
    this.timer = 0;
    if (this.isWanted) this.ask();
    else this.before = null;
  }

  async ask() {
    const begun = performance.now();
    try {
      this.show(readMetrics(await getText("metrics")), begun);
      byId("numbers").classList.remove("stale");
    } catch {
      byId("numbers").classList.add("stale");
      this.before = null;
    }
    clearTimeout(this.timer);
    if (this.isWanted) this.timer = setTimeout(() => this.ask(), 1000);
  }

  show(now, at) {
    const count = (name) => now.get(`vllm:${name}`) ?? 0;
    const set = (name, text) => (this.cells[name].textContent = text);
    set("running", count("num_requests_running"));
    set("waiting", count("num_requests_waiting"));
    set("cache", `${(100 * count("kv_cache_usage_perc")).toFixed(1)} %`);
    set("memory", `${((now.get("process_resident_memory_bytes") ?? 0) / 2 ** 30).toFixed(2)} GiB`);
    const looked = count("prefix_cache_queries_total");
    set("hits", looked ? `${((100 * count("prefix_cache_hits_total")) / looked).toFixed(0)} %` : "–");
    const { before } = this;
    this.before = { now, at };
    if (!before) return;
    const seconds = (at - before.at) / 1000;
    const grown = (name) => count(name) - (before.now.get(`vllm:${name}`) ?? 0);
    const steps = grown("step_wait_seconds_count");
    const stepped = STEP_PARTS.reduce((sum, part) => sum + grown(`step_${part}_seconds_sum`), 0);
    set("step", steps > 0 ? `${((1000 * stepped) / steps).toFixed(2)} ms` : "–");
    const rate = Math.max(0, grown("generation_tokens_total") / seconds);
    set("rate", `${rate < 100 ? rate.toFixed(1) : Math.round(rate)} tokens/s`);
    set("prompt", `${Math.round(Math.max(0, grown("prompt_tokens_total") / seconds))} tokens/s`);
    this.rates = [...this.rates, rate].slice(-KEPT);
    plot(this.rates);
  }
}

/** Tokens a second over the last minute, as a line. */
function plot(rates) {
  const [width, height] = [240, 60];
  const most = Math.max(...rates, 1);
  const points = rates.map((rate, at) => {
    const x = width - (rates.length - 1 - at) * (width / (KEPT - 1));
    return `${x.toFixed(1)},${(height - 2 - (rate / most) * (height - 6)).toFixed(1)}`;
  });
  const first = points[0].split(",")[0];
  byId("plot-line").setAttribute("points", points.join(" "));
  byId("plot-area").setAttribute("points", `${first},${height} ${points.join(" ")} ${width},${height}`);
  byId("plot").setAttribute(
    "aria-label",
    `Tokens a second in the last minute: now ${Math.round(rates.at(-1))}, at most ${Math.round(most)}`,
  );
  byId("plot-most").textContent = `${Math.round(most)} tokens/s`;
}
