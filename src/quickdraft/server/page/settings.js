/** The settings: their form, and what they make of a request. Kept in memory, unless the visitor wants more. */

import { byId, make } from "./dom.js";
import { setKey } from "./api.js";

const STORED = "quickdraft.settings";

/** Each setting: its label, how it is asked for, its default, and a hint. */
const FIELDS = {
  system: { label: "System prompt", kind: "area", value: "" },
  temperature: { label: "Temperature", kind: "number", value: 0, min: 0, max: 5, step: 0.1, hint: "0 takes the likeliest token" },
  top_p: { label: "Top p", kind: "number", value: 1, min: 0.01, max: 1, step: 0.01 },
  max_tokens: { label: "Most tokens", kind: "number", value: 512, min: 1, max: 1000000, step: 1 },
  seed: { label: "Seed", kind: "number", value: null, min: 0, step: 1, hint: "empty: a new one each time" },
  speculation: { label: "Speculation", kind: "list", value: "auto", hint: "off, auto, or sources such as lookup@16" },
  thinking: { label: "Thinking", kind: "choice", value: "", options: { "": "as the model does", on: "on", off: "off" } },
  tints: { label: "Show where tokens come from", kind: "box", value: true },
  markdown: { label: "Show markdown as formatted text", kind: "box", value: true },
  look: { label: "Colours", kind: "choice", value: "", options: { "": "as the system", light: "light", dark: "dark" } },
  remember: { label: "Remember conversations and settings in this browser", kind: "box", value: false },
};

/** The current values; `onChange(values)` is told of every change. */
export class Settings {
  constructor(onChange) {
    this.values = Object.fromEntries(Object.entries(FIELDS).map(([name, field]) => [name, field.value]));
    this.#load();
    this.onChange = onChange;
    this.inputs = {};
    const form = make("form", { class: "fields" }, make("h2", {}, "Settings"));
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const name of Object.keys(FIELDS)) form.append(this.#field(name));
    const forget = make("button", { type: "button" }, "Forget the API key");
    forget.addEventListener("click", () => setKey(""));
    byId("settings").append(form, forget);
    this.#apply();
  }

  /** Draft sources that this server has. */
  offer(sources) {
    const names = ["auto", "off", ...sources, "lookup@16"].filter((name, at, all) => all.indexOf(name) === at);
    byId("speculations").replaceChildren(...names.map((name) => make("option", { value: name })));
  }

  /** The fields of a chat request; `over` replaces settings. */
  request(messages, over = {}) {
    const now = { ...this.values, ...over };
    const system = now.system.trim() ? [{ role: "system", content: now.system }] : [];
    return {
      messages: [...system, ...messages],
      temperature: now.temperature,
      top_p: now.top_p,
      max_tokens: now.max_tokens,
      speculation: now.speculation.trim() || "auto",
      return_token_sources: true,
      seed: now.seed ?? newSeed(),
      ...(now.thinking ? { enable_thinking: now.thinking === "on" } : {}),
    };
  }

  #field(name) {
    const field = FIELDS[name];
    const id = `set-${name}`;
    const hint = field.hint ? make("span", { class: "quiet small", id: `${id}-hint` }, field.hint) : "";
    const input = this.#input(name, field, { id, "aria-describedby": hint ? `${id}-hint` : null });
    this.inputs[name] = input;
    input.addEventListener("change", () => this.#take(name));
    const label = make("label", { for: id }, field.label);
    if (field.kind === "box") return make("p", { class: "box" }, input, label);
    const list = field.kind === "list" ? make("datalist", { id: "speculations" }) : "";
    return make("p", {}, label, input, list, hint);
  }

  #input(name, field, attributes) {
    const value = this.values[name];
    if (field.kind === "area") return fill(make("textarea", { ...attributes, rows: 3 }), value);
    if (field.kind === "choice") {
      const options = Object.entries(field.options).map(([key, text]) => make("option", { value: key }, text));
      return fill(make("select", attributes, ...options), value);
    }
    if (field.kind === "box") return make("input", { ...attributes, type: "checkbox", checked: value });
    if (field.kind === "list") return fill(make("input", { ...attributes, list: "speculations" }), value);
    const { min, max = null, step } = field;
    return fill(make("input", { ...attributes, type: "number", min, max, step }), value ?? "");
  }

  #take(name) {
    const field = FIELDS[name];
    const input = this.inputs[name];
    let value = field.kind === "box" ? input.checked : input.value;
    if (field.kind === "number") {
      if (!input.checkValidity()) return void input.reportValidity();
      value = input.value === "" ? field.value : Number(input.value);
      if (input.value === "" && field.value !== null) input.value = field.value;
    }
    this.values[name] = value;
    this.#apply();
    this.onChange(this.values);
  }

  #apply() {
    document.documentElement.dataset.look = this.values.look;
    document.body.classList.toggle("untinted", !this.values.tints);
    if (this.values.remember) localStorage.setItem(STORED, JSON.stringify(this.values));
    else localStorage.removeItem(STORED);
  }

  #load() {
    try {
      const stored = JSON.parse(localStorage.getItem(STORED) ?? "{}");
      for (const name of Object.keys(FIELDS)) if (typeof stored[name] === typeof FIELDS[name].value) this.values[name] = stored[name];
    } catch {
      localStorage.removeItem(STORED);
    }
  }
}

/** Drawn here, as the server's own have more bits than JSON's numbers keep in a browser. */
export function newSeed() {
  return Math.floor(Math.random() * 2 ** 48);
}

function fill(input, value) {
  input.value = value;
  return input;
}
