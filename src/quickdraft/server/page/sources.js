/** Where tokens come from: names, the text of an answer with its tokens, and the legend. */

import { make } from "./dom.js";

/** Every source there is, in the order they are shown, with what it means. */
export const SOURCES = {
  model: "chosen by the model itself",
  lookup: "drafted from the context",
  dflash2: "drafted by the DFlash2 model",
  dflash: "drafted by the DFlash model",
  mtp: "drafted by the MTP module",
  prediction: "drafted from the prediction",
  corpus: "drafted from a corpus",
  forced: "the only token allowed there",
};

/** Text that grows by pieces of tokens. */
export class TokenText {
  constructor(entries = []) {
    this.text = "";
    this.entries = []; // { start, end, source }, in order and without gaps
    this.add(entries);
  }

  /** Entries of `token_sources`: { text, source }. */
  add(entries) {
    for (const { text, source } of entries) {
      const start = this.text.length;
      this.text += text;
      this.entries.push({ start, end: this.text.length, source });
    }
  }

  /** The parts of [start, end) by token: { start, end, source }. */
  slices(start, end) {
    const found = [];
    for (let i = this.#first(start); i < this.entries.length && this.entries[i].start < end; i++) {
      const one = this.entries[i];
      found.push({ start: Math.max(one.start, start), end: Math.min(one.end, end), source: one.source });
    }
    return found;
  }

  /** Tokens with text by source. */
  counts() {
    const counts = {};
    for (const { source } of this.entries) counts[source] = (counts[source] ?? 0) + 1;
    return counts;
  }

  #first(offset) {
    let low = 0;
    let high = this.entries.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.entries[middle].end > offset) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

/** Where the parts of an answer stand in its whole text: [reasoning, content]; -1 for one that does not. */
export function locate(whole, reasoning, content) {
  const thought = reasoning ? whole.indexOf(reasoning) : -1;
  const after = Math.max(0, thought) + reasoning.length;
  const close = whole.indexOf("</think>", after);
  const from = reasoning && close >= 0 ? close + "</think>".length : after;
  return [thought, content ? whole.indexOf(content, from) : -1];
}

/** The class of a source's tint; unknown ones look like the model's. */
export function tint(source) {
  return Object.hasOwn(SOURCES, source) ? `token from-${source}` : "token";
}

/** A list that explains the tints of these sources, with how many tokens each gave. */
export function legend(counts) {
  const names = Object.keys(SOURCES).filter((name) => counts[name] !== undefined);
  const items = names.map((name) => {
    const count = counts[name] === null ? "" : ` ${counts[name]}`;
    return make("li", { title: SOURCES[name] }, make("span", { class: tint(name) }, name), count);
  });
  return make("ul", { class: "sources", "aria-label": "Where tokens come from" }, ...items);
}
