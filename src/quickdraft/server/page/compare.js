/** Plain decoding and drafts side by side: the same prompt and seed, and whether the texts are equal. */

import { Answer, AnswerView, run } from "./answer.js";
import { announce, byId } from "./dom.js";
import { newSeed } from "./settings.js";

export class Compare {
  constructor(settings, context) {
    Object.assign(this, { settings, context, stopping: null });
    byId("compare-prompt").value = context.example;
    byId("compare-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
    byId("compare-prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#run();
    });
    byId("compare-stop").addEventListener("click", () => this.stop());
  }

  stop() {
    this.stopping?.abort();
  }

  async #run() {
    const prompt = byId("compare-prompt").value;
    if (!prompt.trim() || this.stopping !== null) return;
    this.#busy(new AbortController());
    byId("verdict").textContent = "";
    const wanted = this.settings.values.speculation.trim();
    const names = ["off", wanted && wanted !== "off" ? wanted : "auto"];
    const seed = this.settings.values.seed ?? newSeed();
    const answers = names.map(() => new Answer());
    const labels = ["Plain decoding", `With drafts: ${names[1]}`];
    const views = answers.map((one, at) => new AnswerView(one, labels[at], this.settings, this.context.onKey));
    byId("pair").replaceChildren(...views.map((view) => view.node));
    announce("Running plain decoding, then drafts.");
    for (const [at, answer] of answers.entries()) {
      const request = this.settings.request([{ role: "user", content: prompt }], { speculation: names[at], seed });
      await run(answer, views[at], { model: this.context.model, ...request }, this.stopping.signal);
      if (answer.problem !== null || answer.finish === "stopped") break;
    }
    this.#busy(null);
    const text = verdict(...answers);
    byId("verdict").textContent = text;
    announce(text);
  }

  #busy(stopping) {
    this.stopping = stopping;
    byId("compare-run").hidden = stopping !== null;
    byId("compare-stop").hidden = stopping === null;
  }
}

/** One sentence: are the answers equal, and how much faster was the second? */
export function verdict(plain, drafted) {
  if (!plain.timings || !drafted.timings) return "Not compared: one of the two did not end.";
  const [a, b] = [plain.timings, drafted.timings];
  const equal = plain.tokens.text === drafted.tokens.text && a.completion_tokens === b.completion_tokens;
  if (!equal) return "✗ The texts differ. This must not happen: please report it, with prompt, seed and model.";
  const ratio = b.decode_tokens_per_second / a.decode_tokens_per_second;
  return `✓ Equal: the same text, ${a.completion_tokens} tokens each. ${ratio.toFixed(2)} times the speed of plain decoding.`;
}
