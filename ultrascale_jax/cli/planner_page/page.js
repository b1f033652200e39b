"use strict";
const SETTINGS = "SETTINGS";
const GIB = 2 ** 30;
const AXIS_COLOURS = { pp: "#AA3377", dp: "#66CCEE", fsdp: "#4477AA", ep: "#EE8866", cp: "#228833", sp: "#CCBB44", tp: "#EE6677" };
const MOST_NODES = 128, DELAY_MS = 80, POLL_MS = 700, RECIPE = "recipe";
const DOUBLED = new Set(["gpus", "train.global_batch", "data.seq_len"]);
const MACHINE = ["gpus", "gpu", "cluster"];

const byId = (id) => document.getElementById(id);
const fields = new Map();  // name to the parts of a field on the page
let changes = {};          // what differs from the recipe, by field
let kept = null;           // another such object, or none
let answer = null;         // of /plan for `changes`
let keptAnswer = null;
let sweep = null;
let chosenGpu = 0;
let lastChanged = "";
let asked = 0;             // number of the newest question

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

const whole = (value) => Math.round(value).toLocaleString("en");
const short = (value) => value >= 100 ? whole(value) : String(Number(value.toPrecision(3)));
const gib = (bytes) => bytes >= 1000 * GIB ? whole(bytes / GIB) : (bytes / GIB).toFixed(bytes < GIB ? 2 : 1);
const seconds = (value) => value >= 1 ? `${value.toFixed(2)} s` : `${(1000 * value).toFixed(1)} ms`;
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const signed = (share) => `${share >= 0 ? "+" : "−"}${percent(Math.abs(share))}`;

function swatch(colour) {
  const made = element("span", "", "swatch");
  made.style.background = colour;
  return made;
}

// ---- the address holds the state -------------------------------------------------------------------------------

function readAddress() {
  const params = new URLSearchParams(location.hash.slice(1));
  const vs = params.get("vs"), over = params.get("over");
  params.delete("vs");
  params.delete("over");
  changes = Object.fromEntries(params);
  if (!(RECIPE in changes)) changes = { ...SETTINGS.start, ...changes };
  kept = vs ? Object.fromEntries(new URLSearchParams(vs)) : null;
  if (Object.hasOwn(SETTINGS.sweeps, over)) byId("over").value = over;
}

function writeAddress() {
  const params = new URLSearchParams(changes);
  if (kept) params.set("vs", new URLSearchParams(kept).toString());
  if (byId("over").selectedIndex > 0) params.set("over", byId("over").value);
  history.replaceState(null, "", `${location.pathname}${location.search}#${params}`);
}

// ---- a page without a server has a table of answers ----------------------------------------------------------------

let table = null;
async function unpack() {
  const { answers, grid, fixed } = SETTINGS.table, bytes = Uint8Array.from(atob(answers), (c) => c.charCodeAt(0));
  const text = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  table = { answers: await new Response(text).json(), grid, fixed };
}

// What the table says of a state, or which of its fields the table has not.
function lookUp(state) {
  const full = { ...table.fixed, ...state }, has = (name) => name in table.grid ? table.grid[name] : [table.fixed[name]];
  const missing = Object.keys(full).find((name) => !has(name).includes(full[name]));
  if (missing === undefined) return table.answers[Object.keys(table.grid).map((name) => full[name]).join("|")];
  const more = "`ultrascale plan serve` shows any";
  return { error: { field: missing, text: `${missing}='${full[missing]}': this file has ${has(missing).join(", ") || "none"}; ${more}` } };
}

function lookUpSweep({ over, ...state }) {
  const points = table.grid[over].map((value) => {
    const change = { [over]: value }, found = lookUp({ ...state, ...change });
    return { value, change, ...(found.error ? found : { parts: found.memory.parts, compiled: found.compiled, ...found.step }) };
  });
  const colours = Object.assign({}, ...Object.values(table.answers).map((found) => found.colours || {}));
  return { over, label: SETTINGS.sweeps[over], points, colours };
}

function fitToTable() {
  byId("suggest").hidden = true;
  [...byId("over").options].filter((option) => !(option.value in table.grid)).forEach((option) => option.remove());
  for (const [name, { row }] of fields) if (!(name in table.grid)) row.querySelectorAll("input, select, button").forEach((part) => { part.disabled = true; });
}

async function ask(path, query = {}) {
  if (SETTINGS.table && !table) await unpack().then(fitToTable);
  if (table) return path === "plan" ? lookUp(query) : lookUpSweep(query.over in table.grid ? query : { ...query, over: byId("over").value });
  const reply = await fetch(`${path}?${new URLSearchParams({ ...query, token: SETTINGS.token })}`);
  if (!reply.ok) throw new Error(`${reply.status} ${reply.statusText}`);
  return reply.json();
}

// ---- fields ------------------------------------------------------------------------------------------------------

function divisors(number) {
  const found = [];
  for (let d = 1; d <= number && d <= 65536; d++) if (number % d === 0) found.push(d);
  return found;
}

// The next value of a number, up or down: GPUs and tokens double, an axis goes to the next divisor of the GPUs.
function next(name, text, up) {
  const axis = answer.mesh.axes.find((one) => `mesh.${one.name}` === name);
  const value = axis && text === "-1" ? axis.size : Number(text);
  if (!Number.isFinite(value)) return text;
  if (axis) {
    const sizes = divisors(Number(answer.state.gpus));
    return String((up ? sizes.find((size) => size > value) : sizes.findLast((size) => size < value)) || value);
  }
  if (DOUBLED.has(name)) return String(up ? 2 * value : Math.max(1, value % 2 ? value - 1 : value / 2));
  return String(Math.max(0, value + (up ? 1 : -1)));
}

function makeField(field) {
  const row = element("div", undefined, "field"), id = `field-${field.name}`;
  const label = element("label", field.label), box = element("span", undefined, "value");
  if (field.help) label.append(element("small", field.help));
  label.htmlFor = id;
  const closed = field.choices.length > 0 && !field.is_open;
  const input = element(closed ? "select" : "input");
  input.id = id;
  input.name = field.name;
  const error = element("p", "", "error"), now = element("output", "", "now");
  error.id = `${id}-error`;
  input.setAttribute("aria-describedby", error.id);
  if (closed) field.choices.forEach((choice) => input.append(new Option(choice, choice)));
  else if (field.choices.length) {
    const list = element("datalist");
    list.id = `${id}-list`;
    field.choices.filter(Boolean).forEach((choice) => list.append(new Option(choice, choice)));
    input.setAttribute("list", list.id);
    box.append(list);
  }
  const set = () => change(field.name, read(input.value));
  if (!closed && !field.choices.length) {
    input.inputMode = "numeric";
    const step = (up) => { input.value = shown(field.name, next(field.name, read(input.value), up)); set(); };
    for (const [sign, up, says] of [["−", false, "less"], ["+", true, "more"]]) {
      const button = element("button", sign);
      button.type = "button";
      button.tabIndex = -1;  // the arrow keys do the same
      button.setAttribute("aria-label", `${field.label}: ${says}`);
      button.addEventListener("click", () => step(up));
      box.append(button);
    }
    box.insertBefore(input, box.lastChild);
    input.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
      event.preventDefault();
      step(event.key === "ArrowUp");
    });
  } else box.prepend(input);
  input.addEventListener("input", set);
  row.append(label, box, now, error);
  fields.set(field.name, { input, error, now, row });
  return row;
}

const read = (text) => text.trim() === "rest" ? "-1" : text.trim().replaceAll(",", "");
const shown = (name, text) => name.startsWith("mesh.") && text === "-1" ? "rest" : text;

function makeForm() {
  const recipe = { name: RECIPE, label: "model", help: "a recipe", choices: SETTINGS.recipes, is_open: false };
  const first = element("fieldset");
  first.append(element("legend", "Model"), makeField(recipe));
  byId("fields").append(first);
  SETTINGS.sections.forEach((section) => {
    const box = element("fieldset"), rows = section.fields.map(makeField);
    box.dataset.when = section.when;
    if (section.folded) {
      const details = element("details");
      details.append(element("summary", section.title), ...rows);
      box.append(details);
    } else box.append(element("legend", section.title), ...rows);
    byId("fields").append(box);
  });
  byId("fields").addEventListener("submit", (event) => event.preventDefault());
  Object.entries(SETTINGS.sweeps).forEach(([name, label]) => byId("over").append(new Option(label, name)));
}

function change(name, text) {
  lastChanged = name;
  if (name === RECIPE) {
    // Another model: the machine stays, all else is the recipe's.
    changes = Object.fromEntries([...MACHINE.filter((n) => n in changes).map((n) => [n, changes[n]]), [RECIPE, text]]);
  } else changes = { ...changes, [name]: text };
  if (name === "cluster") delete changes.gpu;
  if (name === "gpu" && changes.cluster) changes.cluster = "";
  if (name.startsWith("mesh.") && text === "-1" && answer) {
    // The axis that took the rest keeps the size that it had.
    for (const axis of answer.mesh.axes) {
      const other = `mesh.${axis.name}`;
      if (other !== name && answer.state[other] === "-1") changes[other] = String(axis.size);
    }
  }
  refresh();
}

function showFields() {
  const experts = answer.experts;
  const sizes = Object.fromEntries(answer.mesh.axes.map((axis) => [axis.name, axis.size]));
  document.querySelectorAll("fieldset[data-when]").forEach((box) => {
    const when = box.dataset.when;
    box.hidden = !(when === "" || (when === "experts" ? experts : sizes[when] > 1));
  });
  for (const [name, { input, now, row }] of fields) {
    const text = answer.state[name];
    if (input.tagName === "SELECT" && ![...input.options].some((option) => option.value === text)) input.append(new Option(text, text));
    if (document.activeElement !== input) input.value = shown(name, text);  // nobody is writing there
    row.classList.toggle("changed", name in changes && name !== RECIPE && changes[name] !== SETTINGS.start[name]);
    now.textContent = name.startsWith("mesh.") && text === "-1" ? `= ${whole(sizes[name.slice(5)])}` : "";
  }
  const { chosen, step } = answer;
  const once = `${step.sequences} sequence${step.sequences > 1 ? "s" : ""} a GPU at once`;
  fields.get("train.microbatches").now.textContent = `${answer.state["train.microbatches"] === "auto" ? `auto: ${chosen.microbatches}, ` : ""}${once}`;
  fields.get("train.remat").now.textContent = answer.state["train.remat"] === "auto" ? `auto: ${chosen.remat}` : "";
  fields.get("train.global_batch").now.textContent = `${whole(step.tokens)} tokens`;
}

// ---- questions and answers -----------------------------------------------------------------------------------------

let timer = null;
function refresh() {
  asked++;
  writeAddress();
  clearTimeout(timer);
  timer = setTimeout(update, DELAY_MS);
}

async function update() {
  const number = asked, own = { ...changes }, over = byId("over").value;
  try {
    const [found, other, points] = await Promise.all([
      ask("plan", own), kept && !keptAnswer ? ask("plan", kept) : keptAnswer, ask("sweep", { ...own, over }),
    ]);
    if (number !== asked) return;
    keptAnswer = other && !other.error ? other : null;
    if (found.error) return showError(found.error);
    answer = found;
    sweep = points.error ? null : points;
    clearErrors();
    show();
  } catch (error) {
    if (number === asked) showError({ field: "", text: `no answer: ${error.message}; is the server still running?` });
  }
}

// The message stands beside the field that was changed last, if it is about it, or else beside the one that it names.
function showError(error) {
  clearErrors();
  const about = (name) => error.text.includes(name) || (name.startsWith("mesh.") && error.field === "mesh");
  const place = fields.has(lastChanged) && about(lastChanged) ? lastChanged : error.field === "mesh" ? "mesh.fsdp" : error.field;
  const field = fields.get(place);
  if (field && !field.row.closest("[hidden]")) {
    field.error.textContent = error.text;
    field.input.setAttribute("aria-invalid", "true");
    const folded = field.row.closest("details");
    if (folded) folded.open = true;
  }
  byId("alert").textContent = error.text;
  byId("results").classList.add("stale");
}

function clearErrors() {
  byId("alert").textContent = "";
  byId("results").classList.remove("stale");
  for (const { input, error } of fields.values()) {
    error.textContent = "";
    input.removeAttribute("aria-invalid");
  }
}

function show() {
  showFields();
  showTiles();
  showMemory();
  showTime();
  showMesh();
  showSweep();
  showCompiled();
  showCommands();
  const file = table ? `This file has ${whole(Object.keys(table.answers).length)} configurations; the grey choices are fixed in it.` : "";
  byId("notes").textContent = [file, answer.chosen.why, ...answer.notes].filter(Boolean).join("\n");
  byId("keep").textContent = kept ? "Stop comparing" : "Keep to compare";
}

const exposed = (time) => Object.entries(time).reduce((sum, [name, s]) => sum + (name.startsWith("exposed") ? s : 0), 0);

function showTiles() {
  const { step, memory, compiled } = answer, other = keptAnswer;
  const tile = (name, value, more, own, theirs) => {
    const box = element("div");
    box.dataset.name = name;
    box.append(element("dt", name), element("dd", value, "value"));
    more.forEach(([text, ...classes]) => box.append(element("dd", text, ...classes)));
    if (theirs !== undefined) box.append(element("dd", `kept: ${theirs[0]} (${signed(own / theirs[1] - 1)})`, "soft"));
    return box;
  };
  const left = memory.usable_bytes - memory.peak_bytes;
  const verdict = [memory.fits ? `fits, ${gib(left)} GiB left` : `does not fit, ${gib(-left)} GiB short`, memory.fits ? "good" : "bad"];
  const xla = compiled ? [[`XLA: ${(compiled.peak_bytes / GIB).toFixed(2)} GiB`, "soft"]] : [];
  const xlaTime = compiled && compiled.step_s ? [[`XLA, simulated: ${seconds(compiled.step_s)}`, "soft"]] : [];
  const s = other && other.step;
  byId("tiles").replaceChildren(
    tile("memory of one GPU", `${gib(memory.peak_bytes)} GiB`, [[`of ${gib(memory.usable_bytes)} usable`, "soft"], verdict, ...xla],
      memory.peak_bytes, s ? [`${gib(s.peak_bytes)} GiB`, s.peak_bytes] : undefined),
    tile("step", seconds(step.step_s), [[`${percent(exposed(step.time_s) / step.step_s)} waits for communication`, "soft"], ...xlaTime],
      step.step_s, s ? [seconds(s.step_s), s.step_s] : undefined),
    tile("tokens/s/GPU", whole(step.tokens_per_s_gpu), [[`${whole(step.tokens_per_s_gpu * step.gpus)} together`, "soft"]],
      step.tokens_per_s_gpu, s ? [whole(s.tokens_per_s_gpu), s.tokens_per_s_gpu] : undefined),
    tile("MFU", percent(step.mfu), [["model FLOPs utilisation", "soft"]], step.mfu, s ? [percent(s.mfu), s.mfu] : undefined),
    tile("model", `${short(answer.parameters / 1e9)} B`, [["parameters", "soft"]]),
  );
  const label = element("strong", `${gib(memory.peak_bytes)} of ${gib(memory.usable_bytes)} GiB`, ...(memory.fits ? [] : ["bad"]));
  byId("headline").replaceChildren(`${answer.state.recipe} on ${whole(step.gpus)} x ${step.gpu}: `, label,
    `, ${seconds(step.step_s)}, ${whole(step.tokens_per_s_gpu)} tokens/s/GPU, MFU ${percent(step.mfu)}`);
}

// Stacked bars on one scale. `rows`: [name, parts, plain]; `limit`: [value, text] or none.
function bars(box, rows, colours, limit, say) {
  const most = 1.03 * Math.max(...rows.map(([, parts]) => Object.values(parts).reduce((a, b) => a + b, 0)), limit ? limit[0] : 0);
  box.replaceChildren(...rows.map(([name, parts, plain]) => {
    const row = element("div", undefined, "bar"), track = element("div", undefined, "track", ...(plain ? ["plain"] : []));
    let from = 0;
    const total = Object.values(parts).reduce((a, b) => a + b, 0);
    for (const [part, value] of Object.entries(parts)) {
      const words = say(value), piece = element("i", value / most * (box.clientWidth - 60) > 7 * words.length + 4 ? words : "");
      piece.style.left = `${100 * from / most}%`;
      piece.style.width = `${100 * value / most}%`;
      if (!plain) piece.style.background = colours[part];
      piece.title = `${part}: ${say(value)} (${percent(value / total)})`;
      track.append(piece);
      from += value;
    }
    if (limit) {
      const line = element("div", undefined, "limit");
      line.style.left = `${100 * limit[0] / most}%`;
      if (name === rows[0][0]) line.append(element("b", limit[1], ...(limit[0] < most / 2 ? ["right"] : [])));
      track.append(line);
    }
    track.setAttribute("role", "img");
    track.setAttribute("aria-label", `${name}: ${say(total)}`);
    row.append(element("span", name), track);
    return row;
  }));
}

// A table of parts, now and kept; `say` writes a value.
function partsTable(table, parts, theirs, colours, unit, say) {
  const head = element("tr"), body = element("tbody"), foot = element("tfoot");
  ["part", unit, ...(theirs ? ["kept", "difference"] : ["share"])].forEach((name) => head.append(element("th", name)));
  const sum = (values) => Object.values(values).reduce((a, b) => a + b, 0), total = sum(parts);
  const row = (name, own, other, colour) => {
    const made = element("tr"), first = element("td");
    if (colour) first.append(swatch(colour));
    first.append(name);
    made.append(first, element("td", say(own)));
    const difference = say(own) === say(other) ? "" : `${own > other ? "+" : "−"}${say(Math.abs(own - other))}`;
    made.append(...(theirs ? [say(other), difference] : [percent(own / total)]).map((text) => element("td", text)));
    return made;
  };
  const names = [...Object.keys(parts), ...Object.keys(theirs || {}).filter((name) => !(name in parts))];
  body.append(...names.map((name) => row(name, parts[name] || 0, theirs ? theirs[name] || 0 : 0, colours[name])));
  foot.append(row("together", total, theirs ? sum(theirs) : 0));
  const top = element("thead");
  top.append(head);
  table.replaceChildren(top, body, foot);
}

function showMemory() {
  const { memory, compiled, colours } = answer, theirs = keptAnswer && keptAnswer.memory;
  const all = { ...(theirs ? keptAnswer.colours : {}), ...colours };
  const rows = [["now", memory.parts]];
  if (compiled) rows.push(["XLA", { "XLA's buffer assignment": compiled.peak_bytes }, true]);
  if (theirs) rows.push(["kept", theirs.parts]);
  bars(byId("memory"), rows, all, [memory.usable_bytes, `${gib(memory.usable_bytes)} GiB usable of ${memory.gpu}`], gib);
  partsTable(byId("parts"), memory.parts, theirs && theirs.parts, all, "GiB", gib);
  const verdict = byId("verdict");
  verdict.replaceChildren();
  const hint = memory.hint && `${memory.hint} (${gib(memory.hint_bytes)} GiB)`;
  const roomy = memory.fits && hint && memory.hint_bytes > memory.peak_bytes;
  if (roomy) verdict.append(`There is room for ${hint}. `);
  if (!memory.fits) verdict.append(hint ? `Try ${hint}. ` : "On this mesh nothing is enough; let the search find another. ");
  if (roomy || (hint && !memory.fits)) verdict.append(button("Take it", () => takeWords(memory.hint)));
}

function button(text, work) {
  const made = element("button", text);
  made.type = "button";
  made.addEventListener("click", work);
  return made;
}

// Set the fields that words of a command line name: `--train.remat full --train.microbatches 4`.
function takeWords(words) {
  const found = words.split(/\s+/), taken = {};
  for (let n = 0; n + 1 < found.length; n += 2) taken[found[n].slice(2).replaceAll("-", "_")] = found[n + 1];
  changes = { ...changes, ...taken };
  refresh();
}

function showTime() {
  const { step, compiled, colours } = answer, theirs = keptAnswer && keptAnswer.step;
  const all = { ...(theirs ? keptAnswer.colours : {}), ...colours };
  const rows = [["now", step.time_s]];
  if (compiled && compiled.step_s) rows.push(["XLA", { "XLA's schedule, simulated": compiled.step_s }, true]);
  if (theirs) rows.push(["kept", theirs.time_s]);
  bars(byId("time"), rows, all, null, seconds);
  partsTable(byId("seconds"), step.time_s, theirs && theirs.time_s, all, "time", seconds);
}

// ---- the mesh on the nodes -----------------------------------------------------------------------------------------

// Ranks are laid out with the last axis fastest, as the trainer makes its mesh.
function coordinates(rank, axes) {
  const found = {};
  for (const axis of [...axes].reverse()) {
    found[axis.name] = rank % axis.size;
    rank = Math.floor(rank / axis.size);
  }
  return found;
}

function showMesh() {
  const { axes, gpus, gpus_per_node: perNode } = answer.mesh;
  chosenGpu = Math.min(chosenGpu, gpus - 1);
  const own = coordinates(chosenGpu, axes), used = axes.filter((axis) => axis.size > 1);
  const nodes = Math.ceil(gpus / perNode), narrow = byId("map").clientWidth < 500;
  const drawnNodes = Math.min(nodes, narrow ? MOST_NODES / 4 : MOST_NODES);
  const size = 15, gap = 2, columns = Math.min(perNode, perNode > 16 ? 12 : perNode > 4 ? 4 : 2), rows = Math.ceil(perNode / columns);
  const width = columns * (size + gap) + 12, height = rows * (size + gap) + 12;
  const room = Math.max(byId("map").clientWidth, width), across = Math.max(1, Math.floor(room / width));
  const svg = drawn("svg", { viewBox: `0 0 ${room} ${Math.ceil(drawnNodes / across) * height}`, height: Math.ceil(drawnNodes / across) * height });
  for (let node = 0; node < drawnNodes; node++) {
    const x = (node % across) * width, y = Math.floor(node / across) * height;
    svg.append(drawn("rect", { x: x + 1, y: y + 1, width: width - 6, height: height - 6, rx: 4, fill: "none", stroke: "var(--line)" }));
    for (let local = 0; local < perNode && node * perNode + local < gpus; local++) {
      const rank = node * perNode + local, at = coordinates(rank, axes);
      const other = used.filter((axis) => at[axis.name] !== own[axis.name]);
      const fill = rank === chosenGpu ? "var(--ink)" : other.length === 1 ? AXIS_COLOURS[other[0].name] : "var(--line)";
      const cell = drawn("rect", { x: x + 5 + (local % columns) * (size + gap), y: y + 5 + Math.floor(local / columns) * (size + gap), width: size, height: size, rx: 2, fill, class: "gpu" });
      cell.append(drawn("title", {}, `GPU ${rank}: ${used.map((axis) => `${axis.name} ${at[axis.name]}`).join(", ")}`));
      cell.addEventListener("click", () => { chosenGpu = rank; showMesh(); });
      svg.append(cell);
    }
  }
  byId("map").replaceChildren(svg);
  if (nodes > drawnNodes) byId("map").append(element("p", `and ${whole(nodes - drawnNodes)} more nodes`, "soft"));
  const where = used.map((axis) => `${axis.name} ${own[axis.name] + 1} of ${axis.size}`).join(", ");
  byId("gpu").textContent = `GPU ${chosenGpu} in node ${Math.floor(chosenGpu / perNode)} of ${whole(nodes)} is ${where || "alone"}; in colour, whom it talks to. Choose another by click or arrow keys.`;
  linksTable(answer.mesh);
}

function linksTable({ axes, links }) {
  const head = element("tr"), body = element("tbody"), top = element("thead");
  const columns = ["axis", "size", "splits", "sends", "link", "GB/s", "GiB a step", "comm./comp.", "waits"];
  columns.forEach((name, n) => head.append(element("th", name, ...(n > 1 && n < 5 ? ["text"] : []))));
  top.append(head);
  links.forEach((link) => {
    const row = element("tr"), first = element("td");
    first.append(swatch(AXIS_COLOURS[link.name]), link.name);
    const where = link.nodes === 1 ? "in the node" : `over ${whole(link.nodes)} nodes, ${link.per_node} in each`;
    row.append(first, element("td", whole(axes.find((axis) => axis.name === link.name).size)));
    row.append(...[link.splits, link.sends, where].map((text) => element("td", text, "text")));
    const numbers = [short(link.gbs), link.bytes === null ? "" : gib(link.bytes), link.ratio === null ? "" : link.ratio.toFixed(2)];
    row.append(...[...numbers, link.exposed_s ? seconds(link.exposed_s) : ""].map((text) => element("td", text)));
    body.append(row);
  });
  byId("axes").replaceChildren(top, body);
}

function moveGpu(event) {
  const { gpus, gpus_per_node: perNode } = answer.mesh;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: perNode, ArrowUp: -perNode };
  if (!(event.key in steps)) return;
  event.preventDefault();
  chosenGpu = Math.max(0, Math.min(gpus - 1, chosenGpu + steps[event.key]));
  showMesh();
}

// ---- the sweep -----------------------------------------------------------------------------------------------------

const nameOf = (value) => value.startsWith("save:") ? `${value.slice(5).split(",").length} saved` : /^\d{4,}$/.test(value) ? whole(Number(value)) : value;

// The value of the sweep's field that is shown: what `auto` has become.
function current() {
  const text = answer.state[sweep.over];
  return text === "auto" ? String(answer.chosen[sweep.over.split(".")[1]]) : text;
}

// Columns of stacked parts: each of `points` has `stack` ([colour, value] from below), a `mark` of XLA, a `limit`, and a text.
function columns(box, points, say) {
  const room = Math.max(260, box.clientWidth), left = 42, top = 14;
  const pitch = (room - left) / points.length, turned = points.some((p) => nameOf(p.value).length * 6.5 > pitch);
  const height = turned ? 240 : 220, bottom = turned ? 54 : 26;
  const totals = points.map((p) => p.stack.reduce((sum, [, value]) => sum + value, 0)), highest = Math.max(...points.map((p) => p.limit || 0));
  const most = 1.05 * Math.max(...totals.filter((t) => !highest || t < 3 * highest), highest, 1e-9);
  const Y = (value) => height - bottom - Math.min(1, value / most) * (height - top - bottom);
  const svg = drawn("svg", { viewBox: `0 0 ${room} ${height}`, height });
  const power = 10 ** Math.floor(Math.log10(most)), step = [0.2, 0.5, 1, 2].map((m) => m * power).find((s) => most / s <= 5) || 5 * power;
  for (let tick = 0; tick <= most; tick += step) {
    svg.append(drawn("line", { x1: left, x2: room, y1: Y(tick), y2: Y(tick), stroke: "var(--line)" }), drawn("text", { x: left - 5, y: Y(tick) + 4, "text-anchor": "end" }, short(Number(tick.toPrecision(6)))));
  }
  points.forEach((point, n) => {
    const x = left + n * pitch + 0.15 * pitch, width = 0.7 * pitch, here = point.value === current();
    const group = drawn("g", { class: here ? "column here" : "column", tabindex: 0, role: "button", "aria-label": point.text });
    group.append(drawn("rect", { x: left + n * pitch, y: 0, width: pitch, height, fill: "transparent" }));
    let from = 0;
    for (const [colour, value] of point.stack) {
      group.append(drawn("rect", { x, width, y: Y(from + value), height: Math.max(0, Y(from) - Y(from + value)), fill: colour }));
      from += value;
    }
    if (from > most) group.append(drawn("text", { x: x + width / 2, y: top - 2, "text-anchor": "middle" }, say(from)));
    if (!point.stack.length) group.append(drawn("text", { x: x + width / 2, y: height - bottom - 6, "text-anchor": "middle" }, "–"));
    if (point.mark) group.append(drawn("rect", { x: x - 2, width: width + 4, y: Y(point.mark) - 1.5, height: 3, fill: "var(--ink)" }));
    if (here) group.append(drawn("rect", { x: x - 3, width: width + 6, y: top, height: height - top - bottom + 1, fill: "none", stroke: "var(--mark)", "stroke-width": 1.5, rx: 3 }));
    const words = nameOf(point.value);
    const label = drawn("text", { x: x + width / 2, y: height - bottom + 14, "text-anchor": turned ? "end" : "middle" }, words);
    if (turned) label.setAttribute("transform", `rotate(-28 ${x + width / 2} ${height - bottom + 14})`);
    group.append(label, drawn("title", {}, point.text));
    const tell = () => { byId("reading").textContent = point.text; };
    group.addEventListener("mouseenter", tell);
    group.addEventListener("focus", tell);
    const take = () => { changes = { ...changes, ...point.change }; lastChanged = sweep.over; refresh(); };
    group.addEventListener("click", take);
    group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); take(); } });
    if (point.limit) group.append(drawn("line", { x1: left + n * pitch, x2: left + (n + 1) * pitch, y1: Y(point.limit), y2: Y(point.limit), stroke: "var(--bad)", "stroke-width": 1.5, "stroke-dasharray": "5 4" }));
    svg.append(group);
  });
  box.replaceChildren(svg);
}

function showSweep() {
  if (!sweep) return;
  const text = (p) => p.error ? `${nameOf(p.value)}: ${p.error.text}` : `${nameOf(p.value)}: ${gib(p.peak_bytes)} of ${gib(p.usable_bytes)} GiB${p.compiled ? ` (XLA: ${gib(p.compiled.peak_bytes)})` : ""}, ${p.fits ? "" : "does not fit, "}${seconds(p.step_s)}, ${whole(p.tokens_per_s_gpu)} tokens/s/GPU, MFU ${percent(p.mfu)}; ${p.label}`;
  const shared = (p) => ({ value: p.value, change: p.change, text: text(p) });
  columns(byId("sweep-memory"), sweep.points.map((p) => ({
    ...shared(p), stack: p.error ? [] : Object.entries(p.parts).map(([name, bytes]) => [sweep.colours[name], bytes / GIB]), mark: p.compiled && p.compiled.peak_bytes / GIB,
    limit: p.error ? null : p.usable_bytes / GIB,
  })), short);
  columns(byId("sweep-speed"), sweep.points.map((p) => ({
    ...shared(p), stack: p.error ? [] : [[p.fits ? "#4477AA" : "var(--line)", p.tokens_per_s_gpu]],
    mark: p.compiled && p.compiled.step_s ? p.tokens_per_s_gpu * p.step_s / p.compiled.step_s : null,
  })), whole);
  const shownPoint = sweep.points.find((p) => p.value === current());
  byId("reading").textContent = shownPoint ? text(shownPoint) : "Point at a column to read it; click to take it. Grey does not fit.";
  const head = element("tr"), body = element("tbody"), top = element("thead");
  [sweep.label, "GiB", "step", "tokens/s/GPU", "MFU", "configuration"].forEach((name, n) => head.append(element("th", name, ...(n === 5 ? ["text"] : []))));
  top.append(head);
  sweep.points.forEach((p) => {
    const row = element("tr");
    const cells = p.error ? ["", "", "", "", p.error.text] : [gib(p.peak_bytes), seconds(p.step_s), whole(p.tokens_per_s_gpu), percent(p.mfu), `${p.label}${p.fits ? "" : ": does not fit"}`];
    row.append(element("td", p.value), ...cells.map((cell, n) => element("td", cell, ...(n === 4 ? ["text"] : []))));
    body.append(row);
  });
  byId("points").replaceChildren(top, body);
}

// ---- compiled programs, commands, suggestions ----------------------------------------------------------------------

function showCompiled() {
  const { compiled, memory, step, programs = [] } = answer, box = byId("compiled");
  if (compiled) {
    const time = compiled.step_s ? `; ${seconds(compiled.step_s)} a step, simulated (formula: ${seconds(step.step_s)}, ${signed(step.step_s / compiled.step_s - 1)})` : "";
    box.textContent = `XLA: ${(compiled.peak_bytes / GIB).toFixed(2)} GiB; formula: ${(memory.peak_bytes / GIB).toFixed(2)} GiB (${signed(memory.peak_bytes / compiled.peak_bytes - 1)})${time}. From ${compiled.source}.`;
  } else box.textContent = "This configuration has not been compiled here. The command below compiles it without a GPU; add --dump DIR, and start this page with --compiled DIR.";
  byId("programs").replaceChildren();
  if (!programs.length) return;
  const list = element("select");
  list.setAttribute("aria-label", "compiled programs of this model");
  list.append(new Option(`${programs.length} compiled of this model: show one`, ""));
  programs.forEach((program, n) => list.append(new Option(program.label, n)));
  list.addEventListener("change", () => { if (list.value) { changes = { ...programs[list.value].state }; refresh(); } });
  byId("programs").append(list);
}

const COMMANDS = { train: "train it", memory: "the memory on the command line", compile: "compile it with XLA, without a GPU", serve: "this page" };

function showCommands() {
  byId("commands").replaceChildren(...Object.entries(COMMANDS).flatMap(([name, says]) => {
    const line = element("dd"), code = element("code", answer.commands[name]);
    code.dataset.name = name;
    const copy = button("Copy", () => copyText(answer.commands[name], copy));
    copy.setAttribute("aria-label", `Copy: ${says}`);
    line.append(code, copy);
    return [element("dt", says), line];
  }));
}

async function copyText(text, from) {
  const before = from.textContent;
  try {
    await navigator.clipboard.writeText(text);
    from.textContent = "Copied";
  } catch {
    from.textContent = "Select it by hand";
  }
  setTimeout(() => { from.textContent = before; }, 1500);
}

let searching = 0;
async function suggest() {
  const number = ++searching, own = { ...changes, keep: byId("pinned").value };
  byId("suggestions").hidden = false;
  byId("cancel").hidden = false;
  byId("progress").classList.remove("bad");
  byId("progress").textContent = "searching";
  try {
    for (;;) {
      const found = await ask("suggest", own);
      if (number !== searching) return;
      if (found.error) throw new Error(found.error.text);
      if (found.rows) { showFound(found); break; }
      byId("progress").textContent = `searching, ${Math.round(found.running_s)} s`;
      await new Promise((done) => setTimeout(done, POLL_MS));
    }
  } catch (error) {
    byId("progress").textContent = error.message;
    byId("progress").classList.add("bad");
  }
  byId("cancel").hidden = true;
}

function takeRow(row) {
  changes = { ...changes, ...row.state };
  refresh();
}

// The table of the search; the best is filled in at once.
function showFound(found) {
  byId("progress").textContent = `${found.answer} (${Object.entries(found.counts).slice(0, 2).map(([name, n]) => `${whole(n)} ${name}`).join(", ")})`;
  const head = element("tr"), rows = found.rows.filter((row) => row.section === found.rows[0].section);
  ["configuration", "GiB", "step", "tokens/s/GPU", "MFU", "", "verdict"].forEach((name, n) => head.append(element("th", name, ...(n === 6 ? ["text"] : []))));
  byId("found").tHead.replaceChildren(head);
  byId("found").tBodies[0].replaceChildren(...rows.map((row) => {
    const line = element("tr"), take = element("td");
    take.append(button("Show", () => takeRow(row)));
    line.append(element("td", row.label), ...[row.peak_gib.toFixed(1), seconds(row.step_s), whole(row.tokens_per_s_gpu), percent(row.mfu)].map((cell) => element("td", cell)));
    line.append(take, element("td", row.verdict, "text"));
    return line;
  }));
  const best = rows.find((row) => row.verdict === "best");
  if (best) takeRow(best);
}

// ---- start ---------------------------------------------------------------------------------------------------------

function keep() {
  [kept, keptAnswer] = kept ? [null, null] : [{ ...changes }, answer];
  refresh();
}

function reset() {
  changes = { ...SETTINGS.start };
  [kept, keptAnswer] = [null, null];
  refresh();
}

makeForm();
readAddress();
byId("suggest").addEventListener("click", suggest);
byId("search").addEventListener("click", suggest);
byId("pinned").addEventListener("keydown", (event) => { if (event.key === "Enter") suggest(); });
byId("cancel").addEventListener("click", () => { searching++; byId("cancel").hidden = true; byId("progress").textContent = "stopped"; ask("cancel"); });
byId("keep").addEventListener("click", keep);
byId("link").addEventListener("click", () => copyText(location.href, byId("link")));
byId("reset").addEventListener("click", reset);
byId("over").addEventListener("change", refresh);
byId("map").addEventListener("keydown", moveGpu);
addEventListener("hashchange", () => { readAddress(); keptAnswer = null; refresh(); });
new ResizeObserver(() => { if (answer) { showMesh(); showSweep(); } }).observe(byId("results"));
refresh();
