/** The server's API: keys, requests, streams, and its errors as sentences. */

const KEY = "quickdraft.key";

/** What went wrong, as a sentence for the visitor. */
export class Problem extends Error {
  constructor(message, { needsKey = false, passing = false } = {}) {
    super(message);
    this.needsKey = needsKey;
    this.passing = passing; // the server will do better in a moment
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export async function models(signal) {
  return (await (await ask("v1/models", { signal })).json()).data;
}

export async function metrics(signal) {
  return (await ask("metrics", { signal })).text();
}

/** The chunks of a streamed chat answer; throws a Problem, also for an error in the stream. */
export async function* chat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  for await (const data of events(response.body, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Problem(sentence(chunk.error.message));
    yield chunk;
  }
  throw new Problem("The server closed the connection before the answer was complete.");
}

/** The data of server-sent events; lines that begin with a colon only keep the connection awake. */
export async function* events(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trimEnd();
    }
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A message of the server with a capital letter and a full stop. */
export function sentence(message) {
  const text = String(message).trim();
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

async function ask(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Problem("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  throw await failure(response, key !== null);
}

async function failure(response, hadKey) {
  if (response.status === 401) {
    return new Problem(hadKey ? "The server does not know this key." : "The server asks for a key.", { needsKey: true });
  }
  try {
    return new Problem(sentence((await response.json()).error.message), { passing: response.status === 503 });
  } catch {
    return new Problem(`The server answered with status ${response.status}.`);
  }
}
