/** Markdown as elements, each token in its tint. Elements of finished blocks are kept while text grows. */

import { copy, make } from "./dom.js";
import { parse } from "./markdown.js";
import { tint } from "./sources.js";

const INLINE = { strong: "strong", em: "em", del: "del", code: "code" };

/**
 * Show `text` in `parent`. `tokens` (a TokenText) and `offset`, where `text` begins in it, give the tints; an
 * offset below 0 leaves the text without.
 */
export function render(parent, text, tokens, offset) {
  const leaf = (start, end) => tinted(text, tokens, offset, start, end);
  const blocks = parse(text);
  const keys = blocks.map((block) => `${offset} ${block.type} ${block.start} ${block.end}`);
  keys[keys.length - 1] += " open"; // the last one may still change
  let kept = 0;
  while (kept < keys.length && parent.children[kept]?.dataset.key === keys[kept] && !keys[kept].endsWith("open")) kept++;
  while (parent.children.length > kept) parent.lastElementChild.remove();
  for (let index = kept; index < blocks.length; index++) {
    const node = block(blocks[index], text, leaf);
    node.dataset.key = keys[index];
    parent.append(node);
  }
}

/** Text as it is, without markdown. */
export function renderPlain(parent, text, tokens, offset) {
  parent.replaceChildren(...tinted(text, tokens, offset, 0, text.length));
}

function tinted(text, tokens, offset, start, end) {
  if (offset < 0) return [text.slice(start, end)];
  const slices = tokens.slices(offset + start, offset + end);
  return slices.map((one) => make("span", { class: tint(one.source) }, tokens.text.slice(one.start, one.end)));
}

function block(one, text, leaf) {
  switch (one.type) {
    case "heading":
      return make(`h${Math.min(6, one.level + 2)}`, {}, ...inline(one.inline, leaf)); // below the page's own
    case "paragraph":
      return make("p", {}, ...inline(one.inline, leaf));
    case "quote":
      return make("blockquote", {}, ...one.children.map((child) => block(child, text, leaf)));
    case "list":
      return list(one, text, leaf);
    case "code":
      return code(one, text, leaf);
    case "table":
      return table(one, leaf);
    default:
      return make("hr");
  }
}

function list(one, text, leaf) {
  const items = one.children.map((item) => {
    const [only] = item.children;
    const tight = item.children.length > 0 && only.type === "paragraph";
    const first = tight ? inline(only.inline, leaf) : [];
    return make("li", {}, ...first, ...item.children.slice(tight ? 1 : 0).map((child) => block(child, text, leaf)));
  });
  return one.ordered ? make("ol", { start: one.first }, ...items) : make("ul", {}, ...items);
}

function code(one, text, leaf) {
  const parts = one.lines.flatMap((line, index) => [...(index ? ["\n"] : []), ...leaf(line.start, line.end)]);
  const button = make("button", { type: "button", class: "plain" }, "Copy");
  const whole = one.lines.map((line) => text.slice(line.start, line.end)).join("\n");
  button.addEventListener("click", () => copy(button, whole));
  const head = make("div", { class: "code-head" }, make("span", {}, one.language || "text"), button);
  const body = make("pre", { tabindex: "0", role: "region", "aria-label": `Code: ${one.language || "text"}` });
  body.append(make("code", {}, ...parts));
  return make("div", { class: "code" }, head, body);
}

function table(one, leaf) {
  const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, {}, ...inline(cell, leaf))));
  const [head, ...rest] = one.rows;
  const body = make("tbody", {}, ...rest.map((cells) => row(cells, "td")));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, row(head, "th")), body));
}

function inline(nodes, leaf) {
  return nodes.flatMap((node) => {
    if (node.type === "text") return leaf(node.start, node.end);
    const children = inline(node.children, leaf);
    if (node.type !== "link") return [make(INLINE[node.type], {}, ...children)];
    return [make("a", { href: node.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children)];
  });
}
