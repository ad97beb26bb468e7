/** The chat: conversations, the composer, and one answer at a time. */

import { Answer, AnswerView, run } from "./answer.js";
import { announce, byId, make } from "./dom.js";
import { legend, SOURCES } from "./sources.js";

const STORED = "quickdraft.conversations";
const EXAMPLES = ["Name three rivers.", "Write a Python function that reverses a list, with a docstring."];

export class Chat {
  constructor(settings, context) {
    Object.assign(this, { settings, context, stopping: null });
    this.follows = true; // the end of the log stays in sight while the answer grows
    byId("log").addEventListener("scroll", ({ target }) => {
      this.follows = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
    });
    this.conversations = this.#load();
    this.current = this.conversations.at(-1);
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new").addEventListener("click", () => this.#open(this.#begin()));
    byId("clear").addEventListener("click", () => this.#clear());
    byId("conversations").addEventListener("change", (event) => this.#open(this.conversations[event.target.value]));
    byId("legend").append(legend(Object.fromEntries(Object.keys(SOURCES).slice(0, 1).map((name) => [name, null]))));
    this.#show();
  }

  /** Show which sources this server drafts from. */
  offer(sources) {
    const all = Object.fromEntries(["model", ...sources].map((name) => [name, null]));
    byId("legend").replaceChildren(make("span", { class: "quiet small" }, "Tokens:"), legend(all));
  }

  stop() {
    this.stopping?.abort();
  }

  /** Keep what is to be kept, and draw again what settings change. */
  settle() {
    if (this.settings.values.remember) localStorage.setItem(STORED, JSON.stringify(this.conversations));
    else localStorage.removeItem(STORED);
  }

  redraw() {
    if (this.stopping === null) this.#show();
    this.settle();
  }

  #load() {
    try {
      const kept = this.settings.values.remember ? JSON.parse(localStorage.getItem(STORED) ?? "[]") : [];
      const turns = (one) => one.map(({ asked, answer }) => ({ asked, answer: new Answer(answer) }));
      if (kept.length) return kept.map(turns);
    } catch {
      localStorage.removeItem(STORED);
    }
    return [[]];
  }

  #begin() {
    const empty = this.conversations.find((one) => !one.length);
    if (empty) return empty;
    this.conversations.push([]);
    return this.conversations.at(-1);
  }

  #open(conversation) {
    this.stop();
    this.current = conversation;
    this.#show();
    byId("message").focus();
  }

  #clear() {
    this.stop();
    this.conversations = this.conversations.filter((one) => one !== this.current);
    if (!this.conversations.length) this.conversations.push([]);
    this.current = this.conversations.at(-1);
    this.#show();
    this.settle();
    announce("Conversation cleared.");
    byId("message").focus();
  }

  #send() {
    const text = byId("message").value;
    if (!text.trim() || this.stopping !== null) return;
    byId("message").value = "";
    this.#ask(text);
  }

  async #ask(text) {
    const conversation = this.current;
    const before = conversation.filter((turn) => turn.answer.content && !turn.answer.problem);
    const messages = before.flatMap((turn) => [{ role: "user", content: turn.asked }, turn.answer.message()]);
    const turn = { asked: text, answer: new Answer() };
    conversation.push(turn);
    this.#list();
    const log = byId("log");
    if (conversation.length === 1) log.replaceChildren();
    const view = this.#turn(turn, conversation.length);
    this.#busy(new AbortController());
    const own = this.stopping;
    announce("The model is answering.");
    const body = { model: this.context.model, ...this.settings.request([...messages, { role: "user", content: text }]) };
    await run(turn.answer, view, body, own.signal);
    if (this.stopping === own) this.#busy(null);
    announce(turn.answer.problem ?? `The answer is complete. ${view.facts.textContent}`);
    this.settle();
    if (this.current === conversation) this.#regeneratable();
  }

  #regenerate() {
    if (this.stopping !== null) return;
    const turn = this.current.pop();
    this.#show();
    byId("message").focus();
    this.#ask(turn.asked);
  }

  #busy(stopping) {
    this.stopping = stopping;
    byId("send").hidden = stopping !== null;
    byId("stop").hidden = stopping === null;
  }

  #list() {
    const name = (one) => (one.length ? one[0].asked.replace(/\s+/g, " ").slice(0, 40) : "New conversation");
    const options = this.conversations.map((one, at) => make("option", { value: at, selected: one === this.current }, name(one)));
    byId("conversations").replaceChildren(...options);
  }

  #show() {
    this.#list();
    byId("log").replaceChildren();
    if (!this.current.length) this.#examples();
    this.current.forEach((turn, index) => this.#turn(turn, index + 1).now());
    this.#regeneratable();
  }

  #examples() {
    const buttons = [...EXAMPLES, this.context.example].map((text) => {
      const button = make("button", { type: "button" }, text.length > 70 ? `${text.slice(0, 70)}…` : text);
      button.addEventListener("click", () => {
        byId("message").value = text;
        byId("message").focus();
      });
      return button;
    });
    byId("log").append(make("div", { class: "examples" }, make("p", {}, "Ask something, or try:"), ...buttons));
  }

  #turn(turn, number) {
    const log = byId("log");
    const asked = make("article", { class: "turn asked", "aria-label": `You, message ${number}` });
    asked.append(make("h2", { class: "who" }, "You"), make("div", { class: "text plain-text" }, turn.asked));
    const view = new AnswerView(turn.answer, "Answer", this.settings, this.context.onKey);
    view.node.setAttribute("aria-label", `Answer ${number}`);
    view.onDraw = () => this.follows && this.#toEnd();
    log.append(asked, view.node);
    this.#toEnd();
    return view;
  }

  #toEnd() {
    this.follows = true;
    byId("log").scrollTop = byId("log").scrollHeight;
  }

  #regeneratable() {
    byId("log").querySelector("#regenerate")?.remove();
    if (!this.current.length || this.stopping !== null) return;
    const button = make("button", { type: "button", id: "regenerate", class: "plain" }, "Regenerate");
    button.addEventListener("click", () => this.#regenerate());
    byId("log").lastElementChild.querySelector("footer").append(button);
    if (this.follows) this.#toEnd();
  }
}
