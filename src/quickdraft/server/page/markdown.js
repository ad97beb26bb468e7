/**
 * Markdown as a tree whose leaves are offsets into the text, so that each character keeps its token.
 *
 * Blocks: { type, start, end, ... } with `children` (blocks) or `inline` (nodes). Inline nodes: { type: "text",
 * start, end }, { type: "code" | "strong" | "em" | "del" | "link", children, [href] }. A subset of CommonMark
 * with tables: what models write. Links go to http, https and mailto only; images become links; HTML is text.
 */

const DEEPEST = 12;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+|$)/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** The blocks of a text. */
export function parse(text) {
  const lines = [];
  let start = 0;
  while (start <= text.length) {
    const found = text.indexOf("\n", start);
    const end = found < 0 ? text.length : found;
    lines.push({ start, end });
    start = end + 1;
  }
  return blocks(text, lines, 0);
}

function blocks(text, lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!content(text, line).trim()) {
      at += 1;
      continue;
    }
    const taken = (depth < DEEPEST && container(text, lines, at, depth)) || leaf(text, lines, at);
    found.push({ ...taken.block, start: line.start, end: lines[taken.next - 1].end });
    at = taken.next;
  }
  return found;
}

const content = (text, line) => text.slice(line.start, line.end);

function container(text, lines, at, depth) {
  if (RULE.test(content(text, lines[at]))) return null;
  return quote(text, lines, at, depth) ?? list(text, lines, at, depth);
}

function quote(text, lines, at, depth) {
  const inner = [];
  let next = at;
  for (; next < lines.length; next++) {
    const mark = QUOTE.exec(content(text, lines[next]));
    if (!mark) break;
    inner.push({ start: lines[next].start + mark[0].length, end: lines[next].end });
  }
  return next > at ? { block: { type: "quote", children: blocks(text, inner, depth + 1) }, next } : null;
}

function list(text, lines, at, depth) {
  const first = ITEM.exec(content(text, lines[at]));
  if (!first) return null;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let next = at;
  while (next < lines.length) {
    const mark = ITEM.exec(content(text, lines[next]));
    if (!mark || /\d/.test(mark[2]) !== ordered || RULE.test(content(text, lines[next]))) break;
    const [inner, after] = item(text, lines, next, mark);
    items.push({ start: lines[next].start, children: blocks(text, inner, depth + 1) });
    next = after;
  }
  if (!items.length) return null;
  return { block: { type: "list", ordered, first: ordered ? parseInt(first[2], 10) : 1, children: items }, next };
}

/** The lines of one item, without their indent, and the line after it. */
function item(text, lines, at, mark) {
  const indent = mark[1].length + mark[2].length + 1;
  const inner = [{ start: Math.min(lines[at].start + mark[0].length, lines[at].end), end: lines[at].end }];
  let next = at + 1;
  for (; next < lines.length; next++) {
    const line = content(text, lines[next]);
    const space = line.length - line.trimStart().length;
    const blank = !line.trim();
    if (blank && !deeper(text, lines, next + 1, Math.min(indent, 2))) break;
    if (!blank && space < Math.min(indent, 2) && (starts(line) || lastBlank(text, inner))) break;
    inner.push({ start: lines[next].start + Math.min(space, indent), end: lines[next].end });
  }
  while (next < lines.length && !content(text, lines[next]).trim()) next += 1;
  return [inner, next];
}

const lastBlank = (text, lines) => !content(text, lines.at(-1)).trim();

function deeper(text, lines, at, indent) {
  while (at < lines.length && !content(text, lines[at]).trim()) at += 1;
  return at < lines.length && /^ */.exec(content(text, lines[at]))[0].length >= indent;
}

/** Does this line begin a block, so that no paragraph goes on with it? */
function starts(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function leaf(text, lines, at) {
  const line = content(text, lines[at]);
  const fence = FENCE.exec(line);
  if (fence) return code(text, lines, at, fence);
  if (RULE.test(line)) return { block: { type: "rule" }, next: at + 1 };
  const heading = HEADING.exec(line);
  if (heading) {
    const own = { start: lines[at].start + heading[0].length, end: lines[at].end };
    return { block: { type: "heading", level: heading[1].length, inline: inline(text, [own]) }, next: at + 1 };
  }
  return table(text, lines, at) ?? paragraph(text, lines, at);
}

function code(text, lines, at, fence) {
  const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(content(text, lines[end]))) end += 1;
  const inner = lines.slice(at + 1, end);
  const next = Math.min(end + 1, lines.length);
  return { block: { type: "code", language: fence[2].trim(), lines: inner, closed: end < lines.length }, next };
}

function table(text, lines, at) {
  const under = at + 1 < lines.length ? content(text, lines[at + 1]) : "";
  if (!content(text, lines[at]).includes("|") || !under.includes("|") || under.length > 1000 || !TABLE_LINE.test(under)) return null;
  let next = at + 2;
  while (next < lines.length && content(text, lines[next]).includes("|")) next += 1;
  const rows = [lines[at], ...lines.slice(at + 2, next)];
  return { block: { type: "table", rows: rows.map((row) => cells(text, row)) }, next };
}

function cells(text, line) {
  const found = [];
  let start = line.start;
  for (let at = line.start; at <= line.end; at++) {
    if (at < line.end && (text[at] !== "|" || text[at - 1] === "\\")) continue;
    found.push({ start, end: at });
    start = at + 1;
  }
  const blank = (cell) => !content(text, cell).trim();
  if (blank(found[0])) found.shift();
  if (found.length && blank(found.at(-1))) found.pop();
  return found.map((cell) => inline(text, [cell]));
}

function paragraph(text, lines, at) {
  let next = at + 1;
  while (next < lines.length && content(text, lines[next]).trim() && !starts(content(text, lines[next]))) next += 1;
  return { block: { type: "paragraph", inline: inline(text, lines.slice(at, next)) }, next };
}

/** Inline nodes of some lines; leading and trailing space of each does not count. */
function inline(text, lines) {
  let joined = "";
  const offsets = [];
  lines.forEach((line, index) => {
    const own = content(text, line);
    const skipped = own.length - own.trimStart().length;
    const kept = own.trim();
    if (index) offsets.push(lines[index - 1].end);
    joined += (index ? "\n" : "") + kept;
    for (let i = 0; i < kept.length; i++) offsets.push(line.start + skipped + i);
  });
  return nodes({ text: joined, offsets }, 0, joined.length, 0);
}

const ESCAPE = /\\[!-/:-@[-`{-~]/y;
const TICKS = /`+/y;
const LINK = /!?\[([^[\]]{0,500})\]\(\s*<?([^\s()<>]{1,2000})>?(?:\s+"[^"]{0,500}")?\s*\)/y;
const BARE_LINK = /https?:\/\/[^\s<>"']{1,2000}[^\s<>"'.,;:!?)\]*_]/y;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

function nodes(source, start, end, depth) {
  const found = [];
  let plain = start;
  let at = start;
  const flush = (to) => {
    for (const run of runs(source, plain, to)) found.push({ type: "text", ...run });
  };
  while (at < end) {
    const special = /[\\`*_~[!h]/.test(source.text[at]) ? construct(source, at, end, depth) : null;
    if (special === null) {
      at += 1;
      continue;
    }
    flush(at);
    found.push(...special.nodes);
    at = plain = special.next;
  }
  flush(end);
  return found;
}

function construct(source, at, end, depth) {
  const match = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(source.text);
    return found && at + found[0].length <= end ? found : null;
  };
  if (match(ESCAPE)) return { nodes: texts(source, at + 1, at + 2), next: at + 2 };
  const ticks = match(TICKS);
  if (ticks) return codeSpan(source, at, end, ticks[0]);
  const link = match(LINK);
  if (link) return linked(source, at, link, depth);
  const bare = (at === 0 || /[\s(]/.test(source.text[at - 1])) && match(BARE_LINK);
  if (bare) {
    const next = at + bare[0].length;
    return { nodes: [{ type: "link", href: bare[0], children: texts(source, at, next) }], next };
  }
  return depth < DEEPEST ? emphasis(source, at, end, depth) : null;
}

function codeSpan(source, at, end, ticks) {
  const inner = at + ticks.length;
  for (let close = source.text.indexOf(ticks, inner); close >= 0 && close < end; ) {
    let after = close;
    while (source.text[after] === "`") after += 1;
    if (after - close === ticks.length) {
      return { nodes: [{ type: "code", children: texts(source, inner, close) }], next: after };
    }
    close = source.text.indexOf(ticks, after);
  }
  return { nodes: texts(source, at, inner), next: inner };
}

function linked(source, at, link, depth) {
  const next = at + link[0].length;
  const inner = at + link[0].indexOf("[") + 1;
  const children = nodes(source, inner, inner + link[1].length, depth + 1);
  const safe = /^(https?:\/\/|mailto:)/i.test(link[2]);
  return safe ? { nodes: [{ type: "link", href: link[2], children }], next } : { nodes: texts(source, at, next), next };
}

function emphasis(source, at, end, depth) {
  const { text } = source;
  for (const [mark, type] of MARKS) {
    const inner = at + mark.length;
    if (!text.startsWith(mark, at) || inner >= end || /\s/.test(text[inner])) continue;
    if (mark[0] === "_" && at > 0 && /\w/.test(text[at - 1])) continue;
    const close = closing(text, mark, inner, end);
    if (close < 0) continue;
    return { nodes: [{ type, children: nodes(source, inner, close, depth + 1) }], next: close + mark.length };
  }
  return null;
}

function closing(text, mark, from, end) {
  for (let at = text.indexOf(mark, from + 1); at >= 0 && at + mark.length <= end; at = text.indexOf(mark, at + 1)) {
    if (/\s/.test(text[at - 1])) continue;
    if (mark.length === 1 && (text[at + 1] === mark || text[at - 1] === mark)) {
      if (text[at + 1] === mark) at += 1; // that is the other, longer mark
      continue;
    }
    if (mark[0] === "_" && /\w/.test(text[at + mark.length] ?? "")) continue;
    return at;
  }
  return -1;
}

const texts = (source, start, end) => runs(source, start, end).map((run) => ({ type: "text", ...run }));

/** The runs of original offsets that [start, end) of the joined text covers. */
function runs({ offsets }, start, end) {
  const found = [];
  for (let at = start; at < end; at++) {
    const last = found.at(-1);
    if (last && last.end === offsets[at]) last.end += 1;
    else found.push({ start: offsets[at], end: offsets[at] + 1 });
  }
  return found;
}
