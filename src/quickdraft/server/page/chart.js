/** Line charts over the last minutes, as SVG, each with a sentence that says the same. */

import { make, makeSvg } from "./dom.js";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [480, 170, 44, 8, 10, 22];

/** A figure that is drawn anew with every `draw(times, series)`. */
export class Chart {
  /** `format` writes a value; `top` is the least end of the scale. */
  constructor(title, format, top) {
    Object.assign(this, { title, format, top });
    this.svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    this.keys = make("ul", { class: "sources" });
    this.said = make("p", { class: "quiet small" });
    this.node = make("figure", { class: "chart" }, make("figcaption", {}, title), this.svg, this.keys, this.said);
  }

  /** `times` in seconds, ascending; `series`: { name: { values, className } }, null where nothing is known. */
  draw(times, series, span) {
    const known = Object.entries(series).filter(([, one]) => one.values.some((value) => value !== null));
    const most = Math.max(this.top, ...known.flatMap(([, one]) => one.values.filter((value) => value !== null)));
    const high = nice(most);
    const end = times.at(-1) ?? 0;
    const x = (time) => LEFT + (WIDTH - LEFT - RIGHT) * (1 - (end - time) / span);
    const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value / high);
    this.svg.replaceChildren(...this.#grid(high, y, span), ...known.map(([, one]) => line(times, one, x, y)));
    const keys = known.length > 1 || known.some(([, one]) => one.named);
    this.keys.replaceChildren(...(keys ? known.map(([name, one]) => make("li", {}, swatch(one.className), name)) : []));
    this.said.textContent = known.map(([name, one]) => this.#sentence(name, one.values, known.length > 1)).join(" ") || "Nothing yet.";
    this.svg.setAttribute("aria-label", `${this.title}. ${this.said.textContent}`);
  }

  #grid(high, y, span) {
    const marks = [0, high / 2, high].flatMap((value) => [
      makeSvg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value), class: "grid" }),
      makeSvg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, this.format(value)),
    ]);
    const ends = [
      makeSvg("text", { x: LEFT, y: HEIGHT - 6 }, `${Math.round(span / 60)} min ago`),
      makeSvg("text", { x: WIDTH - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, "now"),
    ];
    return [...marks, ...ends];
  }

  #sentence(name, values, several) {
    const known = values.filter((value) => value !== null);
    const [now, low, high] = [known.at(-1), Math.min(...known), Math.max(...known)].map(this.format);
    const start = several ? `${name.charAt(0).toUpperCase()}${name.slice(1)}: latest` : "Latest";
    return `${start} ${now}, from ${low} to ${high}.`;
  }
}

/** One path; a gap where nothing is known, a dot where a value stands alone. */
function line(times, { values, className }, x, y) {
  const drawn = makeSvg("g", { class: `line ${className}` });
  let path = "";
  values.forEach((value, at) => {
    if (value === null) return;
    const [left, top] = [x(times[at]).toFixed(1), y(value).toFixed(1)];
    const goesOn = at > 0 && values[at - 1] !== null;
    path += `${goesOn ? "L" : "M"}${left} ${top}`;
    if (!goesOn && (values[at + 1] ?? null) === null) drawn.append(makeSvg("circle", { cx: left, cy: top, r: 2.5, class: "dot" }));
  });
  drawn.append(makeSvg("path", { d: path }));
  return drawn;
}

function swatch(className) {
  const path = makeSvg("path", { d: "M1 6H27", class: `line ${className}` });
  return makeSvg("svg", { viewBox: "0 0 28 12", width: 28, height: 12, class: "swatch", "aria-hidden": "true" }, path);
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value * 0.999) ?? value;
}
