/** Prometheus's text format, and what the monitor shows of it. */

/** name -> [{ labels, value }] of every sample. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!match) continue;
    const [, name, inside = "", value] = match;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels: labels(inside), value: number(value) });
  }
  return found;
}

function labels(inside) {
  const found = {};
  for (const [, name, value] of inside.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
    found[name] = value.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));
  }
  return found;
}

const number = (text) => (text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text));

/** What one reading says; counters are totals since the server started. */
export function reading(text, seconds) {
  const all = parseMetrics(text);
  const total = (name) => (all.get(name) ?? []).reduce((sum, one) => sum + one.value, 0);
  const bySource = (name) => Object.fromEntries((all.get(name) ?? []).map((one) => [one.labels.source, one.value]));
  return {
    seconds,
    running: total("vllm:num_requests_running"),
    waiting: total("vllm:num_requests_waiting"),
    cacheUse: total("vllm:kv_cache_usage_perc"),
    blocks: Object.fromEntries((all.get("quickdraft_kv_blocks") ?? []).map((one) => [one.labels.state, one.value])),
    queries: total("vllm:prefix_cache_queries_total"),
    hits: total("vllm:prefix_cache_hits_total"),
    tokens: total("vllm:generation_tokens_total"),
    drafted: bySource("quickdraft_draft_tokens_total"),
    accepted: bySource("quickdraft_accepted_tokens_total"),
  };
}

/** What happened between two readings: tokens a second, and the share of drafted tokens that came out. */
export function between(before, after) {
  const seconds = after.seconds - before.seconds;
  const acceptance = {};
  for (const [source, drafted] of Object.entries(after.drafted)) {
    const new_ = drafted - (before.drafted[source] ?? 0);
    acceptance[source] = new_ > 0 ? (after.accepted[source] - (before.accepted[source] ?? 0)) / new_ : null;
  }
  const looked = after.queries - before.queries;
  return {
    perSecond: seconds > 0 ? Math.max(0, after.tokens - before.tokens) / seconds : 0,
    hitShare: looked > 0 ? (after.hits - before.hits) / looked : null,
    acceptance,
  };
}
