/** One answer: what came of it so far, how it is asked for, and how it is shown while it grows. */

import { chat } from "./api.js";
import { copy, make } from "./dom.js";
import { render, renderPlain } from "./render.js";
import { legend, locate, TokenText } from "./sources.js";

/** What came of one request. Plain data but for `tokens`, so that it can be kept. */
export class Answer {
  constructor(kept = {}) {
    this.reasoning = kept.reasoning ?? "";
    this.content = kept.content ?? "";
    this.tokens = new TokenText((kept.tokens ?? []).map(([text, source]) => ({ text, source })));
    this.timings = kept.timings ?? null;
    this.seed = kept.seed ?? null;
    this.finish = kept.finish ?? null; // "stop", "length", ...; "stopped" by the visitor
    this.problem = kept.problem ?? null;
    this.steps = 0;
    this.beganAt = this.lastAt = null; // milliseconds; its first and its latest tokens
    this.firstTokens = 0;
  }

  toJSON() {
    const tokens = this.tokens.entries.map(({ start, end, source }) => [this.tokens.text.slice(start, end), source]);
    const { reasoning, content, timings, seed, finish, problem } = this;
    return { reasoning, content, tokens, timings, seed, finish, problem };
  }

  /** Take one chunk of the stream in. */
  add(chunk, now) {
    const [choice] = chunk.choices;
    if (!choice) return;
    this.reasoning += choice.delta.reasoning_content ?? "";
    this.content += choice.delta.content ?? "";
    if (choice.token_sources?.length) {
      this.tokens.add(choice.token_sources);
      this.steps += 1;
      this.lastAt = now;
      if (this.beganAt === null) [this.beganAt, this.firstTokens] = [now, this.tokens.entries.length];
    }
    if (choice.finish_reason) {
      [this.finish, this.timings, this.seed] = [choice.finish_reason, chunk.timings ?? null, chunk.seed ?? null];
    }
  }

  /** Tokens a second and a step: exact once it has ended, before that as they come in here. */
  rates() {
    if (this.timings) {
      const { completion_tokens: tokens, decode_tokens_per_second: perSecond, steps } = this.timings;
      return { tokens, perSecond, perStep: tokens / steps };
    }
    const tokens = this.tokens.entries.length;
    const seconds = (this.lastAt - this.beganAt) / 1000;
    return {
      tokens,
      perSecond: seconds > 0 ? (tokens - this.firstTokens) / seconds : null,
      perStep: this.steps ? tokens / this.steps : null,
    };
  }

  /** The answer as a message of a later request. */
  message() {
    return { role: "assistant", content: this.content };
  }
}

/** Ask, and tell `view` of everything; resolves when the answer has ended, well or not. */
export async function run(answer, view, body, signal) {
  try {
    for await (const chunk of chat(body, signal)) {
      answer.add(chunk, performance.now());
      view.later();
    }
  } catch (error) {
    if (signal.aborted) answer.finish = "stopped";
    else answer.problem = error.message;
    if (error.needsKey) view.onKey();
  }
  view.now();
}

/** An answer on the page. Draws at most once a frame. */
export class AnswerView {
  constructor(answer, label, settings, onKey = () => {}) {
    Object.assign(this, { answer, settings, onKey, frame: 0 });
    this.thought = make("div", { class: "text" });
    this.fold = make("details", { class: "thought", hidden: true }, make("summary", {}, "Reasoning"), this.thought);
    this.text = make("div", { class: "text" });
    this.problem = make("p", { class: "problem", hidden: true });
    this.facts = make("p", { class: "facts" });
    this.legend = make("div");
    this.copy = make("button", { type: "button", class: "plain" }, "Copy answer");
    this.copy.addEventListener("click", () => copy(this.copy, this.answer.content));
    this.foot = make("footer", {}, this.facts, this.legend, this.copy);
    this.node = make("article", { class: "turn answer", "aria-label": label, "aria-busy": "true" });
    this.node.append(make("h2", { class: "who" }, label), this.fold, this.text, this.problem, this.foot);
    this.onDraw = () => {};
    this.drawn = "";
  }

  later() {
    this.frame ||= requestAnimationFrame(() => this.#draw());
  }

  now() {
    cancelAnimationFrame(this.frame);
    this.#draw();
  }

  #draw() {
    this.frame = 0;
    const { answer } = this;
    const { tokens, reasoning, content } = answer;
    const [thoughtAt, contentAt] = locate(tokens.text, reasoning, content);
    this.fold.hidden = !reasoning;
    renderPlain(this.thought, reasoning, tokens, thoughtAt);
    const show = this.settings.values.markdown ? render : renderPlain;
    this.text.classList.toggle("plain-text", show === renderPlain);
    if (this.drawn !== show.name) this.text.replaceChildren();
    this.drawn = show.name;
    if (content) show(this.text, content, tokens, contentAt);
    this.problem.hidden = answer.problem === null;
    this.problem.textContent = answer.problem ?? "";
    this.#drawFoot();
    this.node.setAttribute("aria-busy", String(answer.finish === null && answer.problem === null));
    this.onDraw();
  }

  #drawFoot() {
    const { answer } = this;
    const ended = answer.finish !== null || answer.problem !== null;
    this.facts.textContent = facts(answer, ended);
    this.legend.replaceChildren(legend(answer.tokens.counts()));
    this.copy.hidden = !ended || !answer.content;
  }
}

const ENDS = { length: "cut at the most tokens", stopped: "stopped" };

/** One line about an answer: how many tokens, how fast, how it ended. */
export function facts(answer, ended) {
  const { tokens, perSecond, perStep } = answer.rates();
  if (!tokens) return ended ? (ENDS[answer.finish] ?? "") : "Reading the prompt…";
  const parts = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
  if (perSecond) parts.push(`${perSecond.toFixed(perSecond < 10 ? 1 : 0)} tokens/s`);
  if (perStep) parts.push(`${perStep.toFixed(2)} tokens per step`);
  if (answer.timings?.cached_tokens) parts.push(`${answer.timings.cached_tokens} prompt tokens cached`);
  if (answer.seed !== null && answer.timings) parts.push(`seed ${answer.seed}`);
  if (ENDS[answer.finish]) parts.push(ENDS[answer.finish]);
  return parts.join(" · ");
}
