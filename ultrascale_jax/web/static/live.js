"use strict";
// The live page of runs: charts of every metric, goodput, events. It asks again every two seconds.

const TITLES = {
  loss: "loss (nats)", eval_loss: "held-out loss (nats)", lr: "learning rate", grad_norm: "gradient norm", tokens_per_s: "tokens/s",
  mfu: "MFU", step_s: "step (s)", hbm_gib: "memory of the first device (GiB)", moe_max_load: "busiest expert over the mean",
  data_wait_s: "wait for data (s)", mtp_loss: "loss of further tokens (nats)",
  moe_entropy: "entropy of the router (nats)", tflops_per_device: "TFLOP/s of a device",
};
const HIDDEN = new Set(["tokens", "eval_tokens", "batch_hash", "skipped", "spike"]);
const SHARES = new Set(["mfu", "goodput"]);
const POINTS = 600, PERIOD_MS = 2000, HOUR_S = 3600;

const charts = new Map();
let state = { runs: [], classes: {}, faults: [] };
let zoom = null;  // ends along x, or null for all
let begin = 0;    // the least x of all points
let busy = false;

const axis = () => document.querySelector("input[name=x]:checked").value;
const moment = (time) => new Date(1000 * time).toISOString().replace("T", " ").slice(0, 19);

async function refresh() {
  if (busy) return;
  busy = true;
  try {
    state = await ask("state", { x: axis(), points: POINTS, ...(zoom ? { first: zoom[0], last: zoom[1] } : {}) });
    show();
    byId("status").textContent = `updated ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    byId("status").textContent = `no answer: ${error.message}`;
  } finally {
    busy = false;
  }
}

function show() {
  const names = new Set(state.runs.flatMap((run) => Object.keys(run.series)));
  if (!zoom) begin = Math.min(...state.runs.flatMap((run) => Object.values(run.series).map((points) => points[0]?.[0] ?? Infinity)));
  [...Object.keys(TITLES).filter((field) => names.has(field)), ...[...names].filter((field) => !(field in TITLES) && !HIDDEN.has(field))].forEach(showChart);
  showRuns();
  showSamples();
  showLedger();
  showEvents();
}

function showRuns() {
  const say = (column, value) => SHARES.has(column) ? percent(value ?? NaN) : number(value);
  // A column is left out where every run's is empty.
  const columns = Object.keys(state.runs[0].summary).filter((column) => state.runs.some(({ summary }) => say(column, summary[column])));
  const rows = state.runs.map(({ path, summary }, n) => [keyed(colour(n), path), ...columns.map((column) => say(column, summary[column]))]);
  fillTable(byId("runs"), ["run", ...columns.map((column) => (TITLES[column] ?? column.replaceAll("_", " ")).replace(/ \(.*/, ""))], rows);
}

function showChart(field) {
  if (!charts.has(field)) {
    const made = lineChart(TITLES[field] || field.replaceAll("_", " "), (ends) => { zoom = ends; refresh(); });
    made.figure.dataset.field = field;
    made.numbers = element("table");
    made.figure.append(made.numbers);
    byId("charts").append(made.figure);
    charts.set(field, made);
  }
  const chart = charts.get(field), points = state.runs.map((run) => run.series[field] || []), isTime = axis() === "time";
  const marks = state.runs.flatMap((run) => run.events.filter(({ kind }) => kind === "start" || state.faults.includes(kind))
    .map((event) => [event[axis()], event.kind === "start" ? "var(--soft)" : "var(--bad)"]));
  const scale = isTime ? { origin: begin, unit: HOUR_S, name: "hours" } : { origin: 0, unit: 1, name: "steps" };
  chart.update(points, { log: byId("log").checked, range: zoom, marks, ...scale });
  // The numbers of a chart as a table, for eyes that cannot see it.
  if (!byId("numbers").checked) return chart.numbers.replaceChildren();
  fillTable(chart.numbers, ["run", axis(), "mean", "least", "largest"], points.flatMap((of, n) => of.map((p) => [state.runs[n].path, ...p.map(String)])));
}

// Rows of all runs' events or samples, the newest first.
const newest = (list) => state.runs.flatMap((run, n) => run[list].map((event) => ({ ...event, n, run }))).sort((a, b) => b.time - a.time);

function showSamples() {
  const samples = newest("samples");
  byId("samples").hidden = !samples.length;
  byId("samples").lastElementChild.replaceChildren(...samples.slice(0, 20).map((sample) => {
    const box = element("div");
    box.append(keyed(colour(sample.n), `${sample.run.path}, after step ${number(sample.step)}`), element("pre", sample.text));
    return box;
  }));
}

function showLedger() {
  byId("ledger").replaceChildren(...state.runs.map((run, n) => [run, n]).filter(([run]) => sum(run.seconds)).map(([run, n]) => {
    const box = element("div"), key = element("div", undefined, "key"), all = run.seconds, total = sum(all);
    const parts = Object.fromEntries(Object.entries(all).filter(([, s]) => s >= 0.05));
    key.append(...Object.entries(parts).map(([name, s]) => {
      const made = keyed(partColour(name), `${name} ${number(s)} s (${percent(s / total)})`);
      made.title = state.classes[name];
      return made;
    }));
    box.append(keyed(colour(n), `${run.path}: goodput ${percent(run.goodput)} of ${number(total)} s`), bar(parts, total, seconds), key);
    return box;
  }));
}

function showEvents() {
  fillTable(byId("events"), ["time (UTC)", "step", "event", "says"], newest("events").map((event) => {
    const kind = element("span", event.kind.replaceAll("_", " "), ...(state.faults.includes(event.kind) ? ["bad"] : []));
    return [keyed(colour(event.n), moment(event.time)), number(event.step), kind, event.text];
  }), ["event", "says"]);
}

document.querySelectorAll("header input").forEach((input) => input.addEventListener("change", () => {
  if (input.name === "x") zoom = null;
  refresh();
}));
byId("numbers").checked = location.hash === "#numbers";
refresh();
setInterval(refresh, PERIOD_MS);
