"use strict";
// The planner's page: a form, and what the formulas say of the run that it describes. The address holds the form.

const AXIS_COLOURS = { pp: "#AA3377", dp: "#66CCEE", fsdp: "#4477AA", ep: "#EE8866", cp: "#228833", sp: "#CCBB44", tp: "#EE6677" };
const MOST_NODES = 128, GPU_PX = 17, DELAY_MS = 80, MACHINE = ["gpus", "gpu", "cluster"];

const fields = new Map();  // of the form, by name
let form = null;           // what the server offers
let changes = {};          // what differs from the recipe, by field
let kept = null;           // another such object to compare with, or null
let answers = [];          // of /plan: for `changes`, and for `kept` if there is one
let chosenGpu = 0;
let lastChanged = "";
let asked = 0;             // number of the newest question
let timer = null;

const shown = (name, text) => name.startsWith("mesh.") && text === "-1" ? "rest" : text;
const read = (text) => text.trim() === "rest" ? "-1" : text.trim().replaceAll(",", "");
const title = (name) => name.split(".").at(-1).replaceAll("_", " ");

// ---- the form ------------------------------------------------------------------------------------------------------

function makeField({ name, help, choices, is_open }) {
  const row = element("div", undefined, "field"), label = element("label", title(name)), isClosed = choices.length && !is_open;
  const input = element(isClosed ? "select" : "input"), now = element("output"), error = element("p", "", "bad");
  [input.id, input.name, label.htmlFor, error.id, row.title] = [`field-${name}`, name, `field-${name}`, `field-${name}-error`, help];
  label.append(element("small", help.split(/[;:.,(]/)[0]));
  input.setAttribute("aria-describedby", error.id);
  row.append(label, input, now, error);
  if (isClosed) input.append(...choices.map((choice) => new Option(choice, choice)));
  else if (choices.length || name.startsWith("mesh.")) {
    const list = element("datalist");
    list.id = `field-${name}-list`;
    list.append(...choices.map((choice) => new Option(choice, choice)));
    input.setAttribute("list", choices.length ? list.id : "divisors");
    row.append(list);
  }
  input.addEventListener("input", () => change(name, read(input.value)));
  fields.set(name, { input, error, now, row });
  return row;
}

function makeForm() {
  const recipe = { name: "recipe", help: "", choices: form.recipes, is_open: false };
  [{ title: "Model", when: "", fields: [recipe] }, ...form.sections].forEach((section) => {
    const box = element("fieldset");
    box.dataset.when = section.when;
    box.append(element("legend", section.title), ...section.fields.map(makeField));
    byId("form").append(box);
  });
  const divisors = element("datalist");
  divisors.id = "divisors";
  byId("form").append(divisors);
  byId("form").addEventListener("submit", (event) => event.preventDefault());
  byId("over").append(...form.sweeps.map((name) => new Option(title(name), name)));
}

function change(name, text) {
  lastChanged = name;
  // Another model: the machine stays, all else is the recipe's.
  if (name === "recipe") changes = Object.fromEntries(MACHINE.filter((one) => one in changes).map((one) => [one, changes[one]]));
  changes = { ...changes, [name]: text };
  if (name === "cluster") delete changes.gpu;
  if (name === "gpu" && changes.cluster) changes.cluster = "";
  // One axis takes the rest: the one that did so keeps the size that it had.
  if (name.startsWith("mesh.") && text === "-1") Object.entries(answers[0]?.mesh.sizes ?? {}).map(([axis, size]) => [`mesh.${axis}`, size])
    .filter(([axis]) => axis !== name && answers[0].state[axis] === "-1").forEach(([axis, size]) => { changes[axis] = String(size); });
  refresh();
}

function take(state) {
  changes = { ...changes, ...state };
  refresh();
}

function showForm({ state, chosen, mesh: { sizes }, experts, step }) {
  document.querySelectorAll("fieldset").forEach((box) => {
    const when = box.dataset.when;
    box.hidden = !(when === "" || (when === "experts" ? experts : sizes[when] > 1));
  });
  for (const [name, { input, now, row }] of fields) {
    if (input.tagName === "SELECT" && ![...input.options].some(({ value }) => value === state[name])) input.append(new Option(state[name], state[name]));
    if (document.activeElement !== input) input.value = shown(name, state[name]);  // nobody is writing there
    row.classList.toggle("changed", name in changes && name !== "recipe" && changes[name] !== form.start[name]);
    now.textContent = state[name] === "-1" ? `= ${whole(sizes[title(name)])}` : state[name] === "auto" ? `= ${chosen[name]}` : "";
  }
  fields.get("train.global_batch").now.textContent = `${whole(step.tokens)} tokens`;
  const divisors = Array.from({ length: Math.min(step.gpus, 65536) }, (_, n) => n + 1).filter((n) => step.gpus % n === 0);
  byId("divisors").replaceChildren(...["rest", ...divisors].map((n) => new Option(n, n)));
}

// ---- questions and answers -----------------------------------------------------------------------------------------

function readAddress() {
  const params = new URLSearchParams(location.hash.slice(1)), vs = params.get("vs"), over = params.get("over");
  ["vs", "over"].forEach((name) => params.delete(name));
  changes = Object.fromEntries(params);
  if (!("recipe" in changes)) changes = { ...form.start, ...changes };
  kept = vs ? Object.fromEntries(new URLSearchParams(vs)) : null;
  if (form.sweeps.includes(over)) byId("over").value = over;
}

function writeAddress() {
  const params = new URLSearchParams(changes);
  if (kept) params.set("vs", new URLSearchParams(kept));
  if (byId("over").selectedIndex > 0) params.set("over", byId("over").value);
  history.replaceState(null, "", `/#${params}`);
}

function refresh() {
  asked++;
  writeAddress();
  clearTimeout(timer);
  timer = setTimeout(update, DELAY_MS);
}

async function update() {
  const question = asked;
  try {
    const questions = [ask("plan", changes), ask("sweep", { ...changes, over: byId("over").value }), ...(kept ? [ask("plan", kept)] : [])];
    const [plan, sweep, other] = await Promise.all(questions);
    if (question !== asked) return;
    showError(plan.error);
    if (plan.error) return;
    answers = [plan, other].filter((one) => one && !one.error);
    show(plan, sweep);
  } catch (error) {
    if (question === asked) showError({ field: "", text: `no answer: ${error.message}; is the server still running?` });
  }
}

// The message stands also beside the field that was changed last, if it is about it, or else beside the one that it names.
function showError(error) {
  byId("alert").textContent = error ? error.text : "";
  byId("results").classList.toggle("stale", Boolean(error));
  for (const { error: place } of fields.values()) place.textContent = "";
  if (!error) return;
  const isMesh = error.field === "mesh", isAbout = error.text.includes(lastChanged) || (isMesh && lastChanged.startsWith("mesh."));
  const field = fields.get(isAbout ? lastChanged : isMesh ? "mesh.fsdp" : error.field);
  if (field) field.error.textContent = error.text;
}

function show(plan, sweep) {
  showForm(plan);
  showSummary();
  showParts("memory", "parts", "GiB", answers.map(({ memory }) => memory.parts), gib, plan.memory.usable_bytes);
  showParts("time", "seconds", "time", answers.map(({ step }) => step.time_s), seconds);
  showMesh();
  showSweep(plan, sweep);
  showCommands(plan.commands);
  byId("notes").textContent = plan.notes.filter(Boolean).join("\n");
  byId("keep").textContent = kept ? "Stop comparing" : "Keep to compare";
}

// ---- results -------------------------------------------------------------------------------------------------------

const SPEED = [
  ["step", ({ step_s }) => seconds(step_s)],
  ["tokens/s/GPU", ({ tokens_per_s_gpu }) => whole(tokens_per_s_gpu)],
  ["MFU", ({ mfu }) => percent(mfu)],
];

function verdict({ verdict, usable_bytes, peak_bytes }) {
  const left = usable_bytes - peak_bytes;
  const space = left < 0 ? `${gib(-left)} GiB short` : `${gib(left)} GiB left`;
  return element("span", `${verdict}, ${space}`, verdict === "fits" ? "good" : "bad");
}

function showSummary() {
  const waits = ({ time_s, step_s }) => percent(sum(Object.fromEntries(Object.entries(time_s).filter(([name]) => name.startsWith("exposed")))) / step_s);
  fillTable(byId("summary"), ["", "parameters", "memory of one GPU", "", ...SPEED.map(([name]) => name), "waits for links"], answers.map(({ state, memory, step, parameters }, n) => [
    `${n ? "kept: " : ""}${state.recipe} on ${whole(step.gpus)} x ${step.gpu}`, `${number(parameters / 1e9)} B`, `${gib(memory.peak_bytes)} GiB`, verdict(memory), ...SPEED.map(([, say]) => say(step)), waits(step),
  ]));
  const { verdict: fit, hints, peak_bytes } = answers[0].memory, { options: hint, peak_bytes: hint_bytes } = hints[0] ?? { options: "" }, words = hint.split(/\s+/), fits = fit === "fits";
  byId("hint").replaceChildren();
  if (!hint) byId("hint").textContent = fits ? "" : "On this mesh nothing is enough; let the search find another.";
  else if (!fits || hint_bytes > peak_bytes) {
    // The hint is words of a command line.
    const state = Object.fromEntries(words.flatMap((word, n) => word.startsWith("--") ? [[word.slice(2).replaceAll("-", "_"), words[n + 1]]] : []));
    byId("hint").append(`${fits ? "There is room for" : "Try"} ${hint} (${gib(hint_bytes)} GiB). `, button("Take it", () => take(state)));
  }
}

// Bars and a table of the parts of all answers; `limit` is marked in the bars.
function showParts(box, table, unit, lists, say, limit = 0) {
  const most = 1.03 * Math.max(limit, ...lists.map(sum)), names = [...new Set(lists.flatMap(Object.keys))];
  byId(box).replaceChildren(...lists.map((parts) => bar(parts, most, say, limit)));
  const row = (name, first) => [first, ...lists.flatMap((parts) => {
    const value = name === null ? sum(parts) : parts[name] || 0;
    return [say(value), percent(value / sum(parts))];
  })];
  fillTable(byId(table), ["part", unit, "share", ...(kept ? ["kept", "share"] : [])], [...names.map((name) => row(name, keyed(partColour(name), name))), row(null, "together")]);
}

// Ranks are laid out with the last axis fastest, as the trainer makes its mesh.
function coordinates(rank, sizes) {
  const places = {};
  for (const [axis, size] of Object.entries(sizes).reverse()) {
    places[axis] = rank % size;
    rank = Math.floor(rank / size);
  }
  return places;
}

function showMesh() {
  const { mesh: { axes, sizes, rows, nodes, gpus_per_node: perNode }, step: { gpus, time_s } } = answers[0], drawnNodes = Math.min(nodes, MOST_NODES);
  chosenGpu = Math.max(0, Math.min(gpus - 1, chosenGpu));
  const chosen = coordinates(chosenGpu, sizes), used = Object.keys(sizes).filter((axis) => sizes[axis] > 1);
  const columns = Math.min(perNode, perNode > 16 ? 12 : 4), width = columns * GPU_PX + 12, height = Math.ceil(perNode / columns) * GPU_PX + 12;
  const room = Math.max(byId("map").clientWidth, width), across = Math.floor(room / width), tall = Math.ceil(drawnNodes / across) * height;
  const svg = drawn("svg", { viewBox: `0 0 ${room} ${tall}`, height: tall, tabindex: 0, role: "group", "aria-label": "GPUs; the arrow keys choose one" });
  for (let rank = 0; rank < Math.min(gpus, drawnNodes * perNode); rank++) {
    const node = Math.floor(rank / perNode), local = rank % perNode, x = (node % across) * width, y = Math.floor(node / across) * height;
    if (local === 0) svg.append(drawn("rect", { x: x + 1, y: y + 1, width: width - 6, height: height - 6, rx: 4, fill: "none", stroke: "var(--line)" }));
    const at = coordinates(rank, sizes), other = used.filter((axis) => at[axis] !== chosen[axis]);
    const fill = rank === chosenGpu ? "var(--ink)" : other.length === 1 ? AXIS_COLOURS[other[0]] : "var(--line)";
    const cell = drawn("rect", { x: x + 5 + (local % columns) * GPU_PX, y: y + 5 + Math.floor(local / columns) * GPU_PX, width: GPU_PX - 2, height: GPU_PX - 2, rx: 2, fill, class: "gpu" });
    cell.append(drawn("title", {}, `GPU ${rank}: ${used.map((axis) => `${axis} ${at[axis]}`).join(", ")}`));
    cell.addEventListener("click", () => { chosenGpu = rank; showMesh(); });
    svg.append(cell);
  }
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: perNode, ArrowUp: -perNode }[event.key];
    if (!step) return;
    event.preventDefault();
    chosenGpu += step;
    showMesh();
    byId("map").firstChild.focus();
  });
  byId("map").replaceChildren(svg, nodes > drawnNodes ? `and ${whole(nodes - drawnNodes)} more nodes` : "");
  const where = used.map((axis) => `${axis} ${chosen[axis] + 1} of ${sizes[axis]}`).join(", ");
  byId("gpu").textContent = `GPU ${chosenGpu} in node ${Math.floor(chosenGpu / perNode)} of ${whole(nodes)} is ${where || "alone"}; in colour, whom it talks to. Choose another by click or arrow keys.`;
  // The table of `plan memory --explain mesh`, with each axis' traffic and the time of the step that waits for it in place of a group.
  const waits = (axis) => sum(Object.entries(time_s).filter(([part]) => part.startsWith("exposed ") && part.slice(8).split("*").includes(axis)).map(([, value]) => value));
  const table = rows.map(({ "group of GPU 0": group, ...row }, n) => ({ ...row, sends: axes[n].sends, waits: waits(row.axis) ? seconds(waits(row.axis)) : "" }));
  fillTable(byId("axes"), Object.keys(table[0] ?? {}), table.map(({ axis, ...cells }) => [keyed(AXIS_COLOURS[axis], axis), ...Object.values(cells)]),
    ["splits", "link", "sends"]);
}

function showSweep(plan, { over, points, error }) {
  if (error) return byId("sweep").replaceChildren(error.text);
  const legal = points.filter((point) => !point.error), most = 1.03 * Math.max(...legal.map((point) => Math.max(point.peak_bytes, point.usable_bytes)));
  const current = plan.state[over] === "auto" ? plan.chosen[over] : plan.state[over];
  fillTable(byId("sweep"), [title(over), "memory", "GiB", ...SPEED.map(([name]) => name), "configuration"], points.map((point) => {
    const name = button(point.value, () => take(point.change));
    name.classList.toggle("current", point.value === current);
    if (point.error) return [name, "", "", ...SPEED.map(() => ""), point.error.text];
    return [name, bar(point.parts, most, gib, point.usable_bytes), gib(point.peak_bytes), ...SPEED.map(([, say]) => say(point)), element("span", `${point.label}: ${point.verdict}`, ...(point.verdict === "fits" ? [] : ["bad"]))];
  }), ["memory", "configuration"]);
}

function showCommands(commands) {
  fillTable(byId("commands"), ["to", "command", ""], Object.entries(commands).map(([name, text]) => {
    const code = element("code", text), copy = button("Copy", () => copyText(text, copy));
    code.dataset.name = name;
    return [name, code, copy];
  }), ["command"]);
}

async function copyText(text, from) {
  const before = from.textContent;
  await navigator.clipboard.writeText(text).then(() => { from.textContent = "Copied"; }, () => { from.textContent = "Select it by hand"; });
  setTimeout(() => { from.textContent = before; }, 1500);
}

// ---- the search ----------------------------------------------------------------------------------------------------

async function suggest() {
  byId("search").hidden = false;
  byId("progress").textContent = "searching";
  try {
    const found = await ask("suggest", { ...changes, keep: byId("pinned").value });
    if (found.error) throw new Error(found.error.text);
    const rows = found.rows.filter((row) => row.section === found.rows[0].section), best = rows.find((row) => row.why.startsWith("best"));
    byId("progress").textContent = `${found.answer} (${Object.entries(found.counts).map(([name, n]) => `${whole(n)} ${name}`).join(", ")})`;
    fillTable(byId("found"), ["configuration", "GiB", ...SPEED.map(([name]) => name), "", "verdict"], rows.map((row) => [
      row.label, gib(row.peak_bytes), ...SPEED.map(([, say]) => say(row)), button("Show", () => take(row.state)), row.why,
    ]), ["verdict"]);
    if (best) take(best.state);
  } catch (error) {
    byId("progress").textContent = error.message;
  }
}

// ---- start ---------------------------------------------------------------------------------------------------------

async function start() {
  form = await ask("form");
  makeForm();
  readAddress();
  ["suggest", "again"].forEach((id) => byId(id).addEventListener("click", suggest));
  byId("keep").addEventListener("click", () => { kept = kept ? null : { ...changes }; refresh(); });
  byId("reset").addEventListener("click", () => { [changes, kept] = [{ ...form.start }, null]; refresh(); });
  byId("over").addEventListener("change", refresh);
  addEventListener("hashchange", () => { readAddress(); refresh(); });
  new ResizeObserver(() => { if (answers.length) showMesh(); }).observe(byId("results"));
  refresh();
}

start();
