"use strict";
// What both pages share: elements, numbers, tables, questions to the server, and charts.

// Paul Tol's schemes, distinct for colour-blind readers (personal.sron.nl/~pault).
const COLOURS = [
  "#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE", "#EE8866", "#999933",
  "#77AADD", "#BBCC33", "#FFAABB", "#44AA99", "#DDCC77", "#99DDFF", "#CC6677", "#BBBBBB",
];
const LEFT = 58, RIGHT = 20, TOP = 8, BOTTOM = 22, HEIGHT = 190;  // margins and height of a line chart

const byId = (id) => document.getElementById(id);
const sum = (values) => Object.values(values).reduce((a, b) => a + b, 0);
const colour = (n) => COLOURS[n % COLOURS.length];
const coloured = new Map();  // numbers of the names that have a colour

// The colour of a part of a bar: the same wherever its name stands.
function partColour(name) {
  if (!coloured.has(name)) coloured.set(name, coloured.size);
  return colour(coloured.get(name));
}

// Text of an answer goes through textContent alone: nothing in it can become markup.
function element(tag, text, ...classes) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  made.classList.add(...classes);
  return made;
}

function drawn(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(text, work) {
  const made = element("button", text);
  made.type = "button";
  made.addEventListener("click", work);
  return made;
}

// `text` behind a square of the colour, as a legend has it.
function keyed(colour, text) {
  const made = element("span"), swatch = element("span", "", "swatch");
  swatch.style.background = colour;
  made.append(swatch, text);
  return made;
}

// ---- numbers -------------------------------------------------------------------------------------------------------

function number(value) {
  if (!Number.isFinite(value)) return "";
  const size = Math.abs(value);
  if (size >= 1000 || (Number.isInteger(value) && size < 1e15)) return Math.round(value).toLocaleString("en");
  return size >= 0.001 || size === 0 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

const whole = (value) => Math.round(value).toLocaleString("en");
const gib = (bytes) => (bytes / 2 ** 30).toFixed(bytes < 2 ** 30 ? 2 : 1);
const seconds = (value) => value >= 1 ? `${value.toFixed(2)} s` : `${(1000 * value).toFixed(1)} ms`;
const percent = (share) => Number.isFinite(share) ? `${(100 * share).toFixed(1)}%` : "";

// ---- questions and tables ------------------------------------------------------------------------------------------

async function ask(path, query = {}) {
  const reply = await fetch(`/${path}?${new URLSearchParams(query)}`);
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
}

// Fill a table. `columns` are names, of which those in `words` are aligned left; a row is a list of texts and elements.
function fillTable(table, columns, rows, words = []) {
  const line = (tag, cells) => {
    const made = element("tr");
    cells.forEach((cell, n) => {
      const box = element(tag, undefined, ...(n === 0 || words.includes(columns[n]) ? ["text"] : []));
      box.append(cell);
      made.append(box);
    });
    return made;
  };
  const head = element("thead"), body = element("tbody");
  head.append(line("th", columns));
  body.append(...rows.map((cells) => line("td", cells)));
  table.replaceChildren(head, body);
}

// ---- a bar of parts ------------------------------------------------------------------------------------------------

// A horizontal bar of `parts` on a scale up to `most`; `limit`, if there is one, is marked.
function bar(parts, most, say, limit) {
  const track = element("div", undefined, "track"), total = sum(parts);
  let from = 0;
  for (const [name, value] of Object.entries(parts)) {
    const piece = element("i");
    piece.style.left = `${100 * from / most}%`;
    piece.style.width = `${100 * value / most}%`;
    piece.style.background = partColour(name);
    piece.title = `${name}: ${say(value)} (${percent(value / total)})`;
    track.append(piece);
    from += value;
  }
  if (limit) {
    const line = element("b");
    line.style.left = `${100 * limit / most}%`;
    line.title = `usable: ${say(limit)}`;
    track.append(line);
  }
  track.setAttribute("role", "img");
  track.setAttribute("aria-label", `${say(total)}: ${Object.entries(parts).map(([name, value]) => `${name} ${say(value)}`).join(", ")}`);
  return track;
}

// ---- a chart of lines ----------------------------------------------------------------------------------------------

// Round values from `low` to `high`, about `count`.
function ticks(low, high, count) {
  const power = 10 ** Math.floor(Math.log10((high - low) / count || 1));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => (high - low) / s <= count);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high + 1e-9 * step; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

// The least and largest value with a margin; a span of nothing is widened.
function span(values, margin) {
  const low = Math.min(...values), high = Math.max(...values), width = high - low || Math.abs(low) || 1;
  return high > low ? [low - margin * width, high + margin * width] : [low - width / 2, high + width / 2];
}

// A chart of several series of points [x, mean, least, largest], drawn as a line in a band; `zoomed` gets the ends of
// what the pointer drags over, or null for all. `update` draws it anew.
function lineChart(title, zoomed) {
  const figure = element("figure"), caption = element("figcaption"), output = element("output"), svg = drawn("svg", { height: HEIGHT, role: "img" });
  caption.append(element("span", title), output);
  figure.append(caption, svg);
  let view = null, pressed = null;
  const at = (event) => view.range[0] + (event.clientX - svg.getBoundingClientRect().left - LEFT) / (svg.clientWidth - LEFT - RIGHT) * (view.range[1] - view.range[0]);
  // The values near `x`, or the last ones, beside the title.
  const tell = (x) => {
    const near = view.series.map((points, n) => points.length && [n, points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a, points.at(-1))]).filter(Boolean);
    output.replaceChildren(...near.map(([n, point]) => keyed(colour(n), `${number(point[1])} `)), x === Infinity ? "" : `at ${number((near[0][1][0] - view.origin) / view.unit)} ${view.name}`);
  };
  svg.addEventListener("pointerdown", (event) => { pressed = at(event); svg.setPointerCapture(event.pointerId); });
  svg.addEventListener("pointermove", (event) => view && tell(at(event)));
  svg.addEventListener("pointerleave", () => view && tell(Infinity));
  svg.addEventListener("pointerup", (event) => {
    const ends = [pressed, at(event)].sort((a, b) => a - b);
    if (ends[1] - ends[0] > 0.02 * (view.range[1] - view.range[0])) zoomed(ends);
  });
  svg.addEventListener("dblclick", () => zoomed(null));
  const draw = () => {
    if (!view || !svg.clientWidth) return;
    svg.replaceChildren(...drawLines(view, svg.clientWidth));
    tell(Infinity);
  };
  new ResizeObserver(draw).observe(figure);
  return {
    figure,
    // `series`: points by run; `marks`: [x, colour] of vertical lines; `range`: ends of x, or null for all; the axis
    // counts from `origin` in units of `unit`, called `name`.
    update(series, { log, range, marks, origin, unit, name }) {
      const points = series.flat();
      figure.hidden = points.every((p) => p[2] === 0 && p[3] === 0);
      view = points.length ? { series, log: log && points.every((p) => p[2] > 0), range: range || span(points.map((p) => p[0]), 0), marks, origin, unit, name } : null;
      draw();
    },
  };
}

function drawLines({ series, log, range, marks, origin, unit }, width) {
  const scaled = log ? Math.log10 : (y) => y;
  // The means decide the scale, so that one spike does not flatten the rest; bands are cut there.
  const [low, high] = span(series.flat().map((p) => scaled(p[1])), 0.06);
  const X = (x) => LEFT + (x - range[0]) / (range[1] - range[0]) * (width - LEFT - RIGHT);
  const place = (value) => HEIGHT - BOTTOM - (Math.min(high, Math.max(low, value)) - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const Y = (y) => place(scaled(y));
  const parts = ticks(low, high, 4).flatMap((tick) => [
    drawn("line", { x1: LEFT, x2: width - RIGHT, y1: place(tick), y2: place(tick), stroke: "var(--line)" }),
    drawn("text", { x: LEFT - 6, y: place(tick) + 4, "text-anchor": "end" }, number(log ? 10 ** tick : tick)),
  ]);
  const [first, last] = range.map((x) => (x - origin) / unit);
  parts.push(...ticks(first, last, 5).map((tick) => drawn("text", { x: X(origin + tick * unit), y: HEIGHT - 6, "text-anchor": "middle" }, number(tick))));
  parts.push(...marks.filter(([x]) => x >= range[0] && x <= range[1]).map(([x, stroke]) => drawn("line", { x1: X(x), x2: X(x), y1: TOP, y2: HEIGHT - BOTTOM, stroke, "stroke-dasharray": "2 3" })));
  series.forEach((points, n) => {
    const band = [...points.map((p) => [p[0], p[3]]), ...points.map((p) => [p[0], p[2]]).reverse()];
    const path = (pairs) => pairs.map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join(" ");
    parts.push(drawn("polygon", { points: path(band), fill: colour(n), "fill-opacity": 0.18 }));
    parts.push(drawn("polyline", { points: path(points), fill: "none", stroke: colour(n), "stroke-width": 1.5 }));
    if (points.length < 40) parts.push(...points.map((p) => drawn("circle", { cx: X(p[0]), cy: Y(p[1]), r: 2.2, fill: colour(n) })));
  });
  return parts;
}
