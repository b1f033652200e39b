"use strict";
// The playbook's runs on a page of the site: filters, parallel coordinates and a table. charts.js comes first.

const SETTINGS = ["model", "GPUs", "dp", "tp", "pp", "mbs", "gas", "zero"], RESULT = "result";
const MEASURED = { GiB: "mem_gb", "MFU %": "mfu_pct", "tokens/s/GPU": "tok_s_gpu" };
const LINES = [...SETTINGS, "GiB", "MFU %"], COLUMNS = [...SETTINGS, ...Object.keys(MEASURED)];
const TALL = 340, SIDE = 34, ABOVE = 22, BELOW = 8, FAN = 0.75, MOST_ROWS = 15;

const runs = readRuns(byId("runs-csv").textContent);
const values = Object.fromEntries([...SETTINGS, RESULT].map((name) => [name, [...new Set(runs.map((run) => run[name]))].sort((a, b) => a - b || (a > b ? 1 : -1))]));
const most = Object.fromEntries(Object.keys(MEASURED).map((name) => [name, Math.max(...runs.map((run) => run[name] || 0))]));
const picks = {};          // select of each setting
const brushes = {};        // lowest and highest place on an axis, by its name
let order = "MFU %";       // column by which the table is sorted
const status = element("p"), plot = drawn("svg", { height: TALL, role: "img", "aria-label": "Parallel coordinates of the selected runs" }), table = element("table");

// A failed run has NaN where others have measurements. `rank` is the share of all runs that have a lower MFU.
function readRuns(csv) {
  const [head, ...lines] = csv.trim().split("\n").map((line) => line.split(","));
  const read = lines.map((cells) => {
    const row = Object.fromEntries(head.map((name, n) => [name, name === "model" ? cells[n] : Number(cells[n])]));
    const measured = Object.fromEntries(Object.entries(MEASURED).map(([name, column]) => [name, row[column]]));
    return { ...row, ...measured, GPUs: 8 * row.nodes, [RESULT]: Number.isNaN(row.mem_gb) ? "failed" : "ran" };
  });
  read.sort((a, b) => (a["MFU %"] || 0) - (b["MFU %"] || 0)).forEach((run, n) => { run.rank = n / read.length; });
  return read;
}

// Height of a run on an axis, from 0 to 1. Every value of a setting has a slot, in which the faster runs lie higher.
function place(name, run) {
  if (name in most) return run[name] / most[name];
  return (values[name].indexOf(run[name]) + 0.5 + FAN * (run.rank - 0.5)) / values[name].length;
}

function isSelected(run) {
  return Object.entries(picks).every(([name, { value }]) => value === "" || value === String(run[name]))
    && Object.entries(brushes).every(([name, [low, high]]) => place(name, run) >= low && place(name, run) <= high);
}

function show() {
  const selected = runs.filter(isSelected), ran = selected.filter((run) => run[RESULT] === "ran");
  status.textContent = `${whole(selected.length)} of ${whole(runs.length)} runs, ${whole(selected.length - ran.length)} of which failed.`;
  draw(selected);
  const sorted = [...ran].sort((a, b) => typeof a[order] === "string" ? b["MFU %"] - a["MFU %"] : b[order] - a[order]);
  fillTable(table, COLUMNS, sorted.slice(0, MOST_ROWS).map((run) => COLUMNS.map((name) => number(run[name]) || run[name])));
  table.querySelectorAll("th").forEach((cell, n) => {
    cell.classList.toggle("current", COLUMNS[n] === order);
    cell.addEventListener("click", () => { order = COLUMNS[n]; show(); });
  });
}

function draw(selected) {
  const width = plot.clientWidth || 900, X = (n) => SIDE + n / (LINES.length - 1) * (width - 2 * SIDE), Y = (at) => TALL - BELOW - at * (TALL - ABOVE - BELOW);
  // From the slowest to the fastest, so that the fastest are seen.
  const curves = selected.map((run) => {
    const points = LINES.map((name, n) => [X(n), Y(place(name, run))]).filter(([, y]) => !Number.isNaN(y));
    const share = run["MFU %"] / most["MFU %"], stroke = Number.isNaN(share) ? "var(--line)" : `hsl(${240 - 225 * share} 75% 50%)`;
    const curve = drawn("polyline", { points: points.map((one) => one.map((x) => x.toFixed(1)).join()).join(" "), fill: "none", stroke, "stroke-opacity": 0.6 });
    curve.append(drawn("title", {}, COLUMNS.map((name) => `${name} ${run[name]}`).join(", ")));
    return curve;
  });
  plot.replaceChildren(...curves, ...LINES.flatMap((name, n) => drawAxis(name, X(n), Y)));
}

function drawAxis(name, x, Y) {
  const marks = name in most ? ticks(0, most[name], 5).map((value) => [value, value / most[name]]) : values[name].map((value, n) => [value, (n + 0.5) / values[name].length]);
  const [low, high] = brushes[name] ?? [0, 0];
  const brush = drawn("rect", { x: x - 7, width: 14, y: Y(high), height: Y(low) - Y(high), fill: "var(--ink)", "fill-opacity": 0.25 });
  const handle = drawn("rect", { x: x - 14, width: 28, y: Y(1), height: Y(0) - Y(1), class: "axis", "data-name": name });
  const at = (event) => Math.min(1, Math.max(0, (Y(0) - event.clientY + plot.getBoundingClientRect().top) / (Y(0) - Y(1))));
  handle.addEventListener("pointerdown", (event) => {
    const from = at(event);
    handle.setPointerCapture(event.pointerId);
    handle.onpointermove = (move) => {
      const ends = [from, at(move)].sort((a, b) => a - b);
      brush.setAttribute("y", Y(ends[1]));
      brush.setAttribute("height", Y(ends[0]) - Y(ends[1]));
    };
    handle.onpointerup = (up) => {
      const ends = [from, at(up)].sort((a, b) => a - b);
      if (ends[1] - ends[0] > 0.01) brushes[name] = ends; else delete brushes[name];
      show();
    };
  });
  return [
    drawn("line", { x1: x, x2: x, y1: Y(0), y2: Y(1), stroke: "var(--ink)" }),
    drawn("text", { x, y: 12, "text-anchor": "middle", class: "name" }, name),
    ...marks.map(([value, y]) => drawn("text", { x: x + 4, y: Y(y) + 4 }, value)), brush, handle,
  ];
}

function start() {
  const filters = element("div", undefined, "filters"), scroll = element("div", undefined, "scroll");
  for (const [name, choices] of Object.entries(values)) {
    const label = element("label", name), select = element("select");
    select.name = name;
    select.append(new Option("any", ""), ...choices.map((value) => new Option(value, value)));
    select.addEventListener("change", show);
    picks[name] = select;
    label.append(select);
    filters.append(label);
  }
  filters.append(button("Reset", () => {
    Object.values(picks).forEach((select) => { select.value = ""; });
    Object.keys(brushes).forEach((name) => delete brushes[name]);
    show();
  }));
  scroll.append(table);
  byId("runs").append(filters, status, plot, scroll);
  new ResizeObserver(() => draw(runs.filter(isSelected))).observe(byId("runs"));
  show();
}

start();
