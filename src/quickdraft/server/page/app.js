/** The page: views, keys of the keyboard, the API key, and who is told of what. */

import { models, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { byId } from "./dom.js";
import { Monitor } from "./monitor.js";
import { Settings } from "./settings.js";

const VIEWS = ["chat", "compare", "monitor"];
const RETRY_MS = 1000; // while the model is being loaded
const EXAMPLE = `Repeat this text word for word:

The tide gauge at the harbour mouth has been read every day since 1871. At first a keeper wrote the height into a \
ledger with a pencil, at noon and at midnight. Later a float in a well drew a line on paper, and a clock turned the \
drum once a day. Today a radar sensor measures the height every minute and sends it ashore by radio. The old ledgers \
are kept in the town library, and anybody may read them there.`;

const context = { model: "", example: EXAMPLE, onKey: askForKey };
const settings = new Settings(() => chat.redraw());
const chat = new Chat(settings, context);
const compare = new Compare(settings, context);
const monitor = new Monitor(context);

function open(view, { focus = false } = {}) {
  for (const name of VIEWS) {
    const tab = byId(`tab-${name}`);
    byId(name).hidden = name !== view;
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
    if (focus && name === view) tab.focus();
  }
  history.replaceState(null, "", view === "chat" ? location.pathname : `#${view}`);
  monitor.show(view === "monitor");
}

function shown() {
  return VIEWS.find((name) => !byId(name).hidden);
}

for (const view of VIEWS) {
  byId(`tab-${view}`).addEventListener("click", () => open(view));
  byId(`tab-${view}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) open(VIEWS[(VIEWS.indexOf(view) + step + VIEWS.length) % VIEWS.length], { focus: true });
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("key-dialog").open) return;
  chat.stop();
  compare.stop();
});

byId("settings-toggle").addEventListener("click", () => openSettings(byId("settings").hidden));

function openSettings(wanted) {
  byId("settings").hidden = !wanted;
  byId("settings-toggle").setAttribute("aria-expanded", String(wanted));
}

function askForKey() {
  const dialog = byId("key-dialog");
  if (!dialog.open) dialog.showModal();
}

byId("key-dialog").addEventListener("close", () => {
  const key = byId("key").value.trim();
  byId("key").value = "";
  if (byId("key-dialog").returnValue !== "use" || !key) return;
  setKey(key);
  begin();
});

/** Learn what is served, once the model is loaded; without a key that fits, ask for one. */
async function begin() {
  try {
    const [first] = await models();
    context.model = first.id;
    byId("model").textContent = `${first.id}, context ${first.max_model_len.toLocaleString("en")} tokens`;
    byId("model").classList.remove("problem");
    settings.offer(first.speculation.sources);
    chat.offer(first.speculation.sources);
    monitor.show(shown() === "monitor");
  } catch (error) {
    byId("model").textContent = error.message;
    byId("model").classList.add("problem");
    byId("key-problem").textContent = error.message;
    byId("key-problem").hidden = false;
    if (error.needsKey) askForKey();
    if (error.passing) setTimeout(begin, RETRY_MS);
  }
}

openSettings(matchMedia("(min-width: 70rem)").matches);
open(VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");
begin();
