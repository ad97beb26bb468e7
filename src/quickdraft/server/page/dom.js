/** Building elements. Text only ever becomes text nodes: nothing on this page parses HTML. */

/** An element with attributes (a value of true is an empty one, false and null are left out) and children. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  set(node, attributes);
  node.append(...children);
  return node;
}

/** The same for SVG. */
export function makeSvg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, attributes);
  node.append(...children);
  return node;
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
}

/** The element of that id, which must be there. */
export function byId(id) {
  const node = document.getElementById(id);
  if (node === null) throw new Error(`no element ${id}`);
  return node;
}

/** Say something to screen readers, once; the visible page says it elsewhere. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Copy to the clipboard; the button says how it went. */
export async function copy(button, text) {
  const before = button.textContent;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyBySelection(text); // no clipboard without https, except on localhost
  }
  button.textContent = done ? "Copied" : "Could not copy";
  setTimeout(() => (button.textContent = before), 1500);
}

function copyBySelection(text) {
  const area = make("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
