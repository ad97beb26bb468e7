/** The monitor: /metrics every two seconds while it is shown, as numbers and charts of the last minutes. */

import { metrics } from "./api.js";
import { Chart } from "./chart.js";
import { byId, make } from "./dom.js";
import { between, reading } from "./metrics.js";

const EVERY_MS = 2000;
const SPAN_SECONDS = 180;

const percent = (value) => `${Math.round(100 * value)} %`;
const count = (value) => (value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 }));

export class Monitor {
  constructor(context) {
    this.context = context;
    this.points = []; // { ...reading, ...between }
    this.timer = null;
    this.charts = {
      speed: new Chart("Tokens per second", count, 10),
      requests: new Chart("Requests", count, 2),
      cache: new Chart("Cache: memory in use, prompt tokens found", percent, 1),
      acceptance: new Chart("Share of drafted tokens accepted, by source", percent, 1),
    };
    byId("charts").append(...Object.values(this.charts).map((chart) => chart.node));
    document.addEventListener("visibilitychange", () => this.#follow());
  }

  /** Read on, or stop reading. */
  show(shown) {
    this.shown = shown;
    this.#follow();
  }

  #follow() {
    const wanted = this.shown && !document.hidden;
    if (wanted && this.timer === null) {
      this.timer = setInterval(() => this.#read(), EVERY_MS);
      this.#read();
    } else if (!wanted && this.timer !== null) {
      clearInterval(this.timer);
      this.timer = null;
    }
  }

  async #read() {
    if (this.reading) return;
    this.reading = true;
    try {
      this.#add(reading(await metrics(AbortSignal.timeout(10000)), performance.now() / 1000));
      byId("monitor-problem").hidden = true;
    } catch (error) {
      byId("monitor-problem").textContent = error.message;
      byId("monitor-problem").hidden = false;
      if (error.needsKey) {
        this.show(false);
        this.context.onKey();
      }
    } finally {
      this.reading = false;
    }
  }

  #add(now) {
    const last = this.points.at(-1);
    // Totals that fell belong to a server that was started anew.
    if (last && now.tokens < last.tokens) this.points = [];
    const before = this.points.at(-1);
    this.points.push({ ...now, ...(before ? between(before, now) : { perSecond: null, hitShare: null, acceptance: {} }) });
    this.points = this.points.filter((one) => now.seconds - one.seconds <= SPAN_SECONDS);
    this.#draw();
  }

  #draw() {
    const now = this.points.at(-1);
    const times = this.points.map((one) => one.seconds);
    const of = (get) => this.points.map((one) => get(one) ?? null);
    this.#tiles(now);
    const { speed, requests, cache, acceptance } = this.charts;
    speed.draw(times, { speed: { values: of((one) => one.perSecond), className: "series-1" } }, SPAN_SECONDS);
    requests.draw(times, {
      running: { values: of((one) => one.running), className: "series-1" },
      waiting: { values: of((one) => one.waiting), className: "series-2" },
    }, SPAN_SECONDS);
    cache.draw(times, {
      "in use": { values: of((one) => one.cacheUse), className: "series-1" },
      found: { values: of((one) => one.hitShare), className: "series-2" },
    }, SPAN_SECONDS);
    const sources = Object.keys(now.drafted);
    const lines = sources.map((name) => [name, { values: of((one) => one.acceptance[name]), className: `line-${name}`, named: true }]);
    acceptance.draw(times, Object.fromEntries(lines), SPAN_SECONDS);
  }

  #tiles(now) {
    const sum = (counts) => Object.values(counts).reduce((total, one) => total + one, 0);
    const [drafted, accepted] = [sum(now.drafted), sum(now.accepted)];
    const tiles = {
      Running: count(now.running),
      Waiting: count(now.waiting),
      "Tokens per second": now.perSecond === null ? "–" : count(now.perSecond),
      "Tokens in all": count(now.tokens),
      "Cache in use": percent(now.cacheUse),
      "Cached blocks kept": count(now.blocks.cached ?? 0),
      "Prompt tokens found in the cache": now.queries ? percent(now.hits / now.queries) : "–",
      "Drafted tokens accepted": drafted ? percent(accepted / drafted) : "–",
    };
    const nodes = Object.entries(tiles).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    byId("tiles").replaceChildren(...nodes);
  }
}
