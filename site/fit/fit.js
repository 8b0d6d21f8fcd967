/* Looks things up in window.FIT, which fit-data.js brings; labkit/fitting/table.py explains the rules
   between the points, and tests hold the two to each other. No request is made. */
"use strict";

const GIB = 2 ** 30;
const PHASES = ["setup", "forward", "backward", "step"];
const PARTS = [
  ["weights", "Weights", "#0072B2"],
  ["gradients", "Gradients", "#E69F00"],
  ["optimizer", "Optimizer state", "#009E73"],
  ["activations", "Activations", "#D55E00"],
  ["temporary", "Temporary", "#CC79A7"],
  ["rest", "Buffers, workspaces, rounding", "#8A8A8A"],
  ["cached", "Reserved beyond that", "#D8D8D8"],
];
const MAY = [
  ["adapters", "Train adapters only (LoRA)"],
  ["four-bit", "Round the frozen weights to 4 bits (QLoRA)"],
  ["bf16", "Keep the weights in BF16 only"],
  ["optimizer", "Take 8-bit AdamW or Adafactor"],
  ["cpu", "Use the computer's memory (offloading)"],
  ["eager", "Compute attention without a fused kernel"],
];
const SHOWN_WAYS = 12, MOST_ROWS = 128;
const $ = id => document.getElementById(id);

// --- between the points ----------------------------------------------------------------------

/** Least, chord and most at x of a convex function that grows, from sorted points [x, [least, chord, most]]. */
function between(points, x) {
  const left = points.filter(([at]) => at <= x).slice(-2), right = points.filter(([at]) => at >= x).slice(0, 2);
  if (!left.length || !right.length) return null;
  const [start, a] = left.at(-1), [stop, b] = right[0];
  if (start === stop) return a;
  const line = (x1, y1, x2, y2) => y1 + (y2 - y1) * (x - x1) / (x2 - x1);
  const least = [Math.min(a[0], b[0])], chord = line(start, a[1], stop, b[1]), most = [line(start, a[2], stop, b[2])];
  for (const beside of [left, right.reverse()]) {
    if (beside.length < 2) continue;
    const [[x1, beyond], [x2, near]] = beside;
    least.push(line(x1, beyond[2], x2, near[0]));
    most.push(line(x1, beyond[0], x2, near[2]));
  }
  return [Math.min(Math.max(...least), chord), chord, Math.max(...most)];
}

/** Rows and their length at a point of a row of the table; no rows: there is no such point. */
function rowShape(tokens, seqLen, longest) {
  const length = seqLen || Math.min(tokens, FIT.usualLength, longest);
  return [Math.floor(tokens / length), length];
}

/** Operations of a step, tokens * (a + b * length), from the first two points of a row. */
function flopsOf(points, longest, total, length) {
  const at = FIT.fields.indexOf("flops"), grid = FIT.table.tokens;
  const [first, second] = grid.map((t, i) => [t, points[i]]).filter(([, point]) => point);
  const each = first[1][at] / first[0], length1 = rowShape(first[0], 0, longest)[1];
  const length2 = second ? rowShape(second[0], 0, longest)[1] : length1;
  if (length2 <= length1) return total * each;
  return total * (each + (second[1][at] / second[0] - each) / (length2 - length1) * (length - length1));
}

/** One way of a model at a batch; null where the table does not reach. */
function answer(rows, longest, batch, length) {
  const grid = FIT.table.tokens, total = batch * length, values = {}, ranges = {};
  if (length > longest) return null;
  const reached = rows.map(([seqLen, points]) => [seqLen, grid.map((t, i) => [t, points[i]]).filter(([, point]) => point)]);
  for (const [i, name] of FIT.fields.entries()) {
    const along = reached
      .map(([seqLen, points]) => [seqLen, between(points.map(([t, point]) => [t, Array(3).fill(point[i])]), total)])
      .filter(([, found]) => found);
    ranges[name] = rows.length === 1 ? along[0]?.[1] : between(along, length);
    if (!ranges[name]) return null;
    values[name] = ranges[name][1];
  }
  if (rows.length === 1) values.flops = flopsOf(rows[0][1], longest, total, length);
  values.allocated = Math.max(...PHASES.map(phase => values[phase]));
  values.reserved = Math.max(values.reserved, values.allocated);
  values.least = Math.max(...PHASES.map(phase => ranges[phase][0]));
  values.most = Math.max(...PHASES.map(phase => ranges[phase][2]));
  const shapes = rows.flatMap(([seqLen]) => grid.map(t => rowShape(t, seqLen, longest).join()));
  values.exact = shapes.includes(`${batch},${length}`);
  values.known = values.exact || rows.length === 1 && grid.includes(total);
  return values;
}

/** Lower bound of a step's seconds on one GPU: see labkit/hardware/bound.py. */
function leastSeconds(gpu, way, found) {
  let rate = way.recipe.precision.endsWith("fp16") ? gpu.fp16 : gpu.bf16 || gpu.fp16;
  if (way.recipe.precision === "fp32") rate = gpu.fp32;
  const work = Math.max(found.flops / (rate * 1e12), found.moved / (gpu.bandwidth * 1e9));
  return work + found.link / (gpu.link * 1e9);
}

/** What a way needs of a GPU at a batch, and whether that is there. */
function judge(model, index, gpu, batch, length) {
  const way = FIT.ways[index], [, longest, ways] = FIT.table.models[model.name];
  const found = ways[index] && answer(ways[index], longest, batch, length);
  if (!found) return null;
  for (const name of ["allocated", "reserved", "floor", "least", "most"]) found[name] += gpu.workspaces;
  found.spare = gpu.capacity - found.reserved;
  found.verdict = found.spare >= 0 ? "fits" : found.allocated <= gpu.capacity ? "tight" : "not";
  const tokens = batch * length * (way.recipe.ranks || 1);
  found.perThousand = 1000 * leastSeconds(gpu, way, found) / tokens;
  return { ...found, way, index };
}

/** The largest batch of a way that fits, and whether a larger one is beyond the table. */
function largestBatch(model, index, gpu, length) {
  for (let batch = 1; batch <= MOST_ROWS; batch++) {
    const found = judge(model, index, gpu, batch, length);
    if (found?.verdict !== "fits") return { batch: batch - 1, beyond: !found && batch > 1 };
  }
  return { batch: MOST_ROWS, beyond: true };
}

/** All ways that the state allows, the best first. */
function judged(state) {
  const model = FIT.models.find(m => m.name === state.m), gpu = FIT.gpus.find(g => g.key === state.g);
  const order = { fits: 0, tight: 1, not: 2 };
  return FIT.ways
    .map((way, index) => ({ way, index }))
    .filter(({ way }) => (way.recipe.ranks || 1) === state.n)
    .filter(({ way }) => way.may.every(key => state.may.includes(key)))
    .filter(({ way }) => gpu.bf16 || !way.recipe.precision.includes("bf16"))
    .filter(({ way }) => !gpu.bf16 || way.recipe.precision !== "amp-fp16")
    .map(({ index }) => judge(model, index, gpu, state.b, state.s))
    .filter(Boolean)
    .sort((x, y) => order[x.verdict] - order[y.verdict]
      || (x.verdict === "fits"
        ? x.way.changes.length - y.way.changes.length || x.perThousand - y.perThousand
        : y.spare - x.spare)
      || x.reserved - y.reserved);
}

// --- as text -----------------------------------------------------------------------------------

function bytesText(bytes) {
  const size = Math.abs(bytes) / GIB;
  if (size < 0.9995) return `${(size * 1024).toFixed(0)} MiB`;
  return `${size.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0)} GiB`;
}

const digits = number => Number(number.toPrecision(3)).toString();

/** How a number is known, for the column of the table. */
function known(found, model) {
  const tried = model.tried[found.index], length = Math.min(FIT.usualLength, FIT.table.models[model.name][1]);
  if (tried && state.b === 1 && state.s === length) return `simulated; ${tried}`;
  const how = found.exact ? "simulated" : found.known ? "simulated, as many tokens in other rows" : "between simulated points";
  return tried ? `${how}; at 1 × ${length}, ${tried}` : how;
}

/** An element with text, and with children. */
function make(tag, text = "", attributes = {}, ...children) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// --- the page ----------------------------------------------------------------------------------

const state = { m: "", g: "", n: 1, b: 1, s: 2048, may: [], w: "", all: false };

function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  const choose = (key, allowed, usual) => allowed.includes(said.get(key)) ? said.get(key) : usual;
  const whole = (key, least, most, usual) => {
    const number = Number(said.get(key));
    return Number.isInteger(number) && number >= least && number <= most ? number : usual;
  };
  const models = FIT.models.map(m => m.name);
  state.m = choose("m", models, models.includes("Llama-3.1-8B") ? "Llama-3.1-8B" : models[0]);
  state.g = choose("g", FIT.gpus.map(g => g.key), "rtx-4090");
  state.n = Number(choose("n", ["1", ...FIT.ranks.map(String)], "1"));
  state.b = whole("b", 1, MOST_ROWS, 1);
  state.s = whole("s", 1, FIT.mostLength, 2048);
  const may = said.has("may") ? said.get("may").split(",") : MAY.map(([key]) => key).slice(0, -1);
  state.may = MAY.map(([key]) => key).filter(key => may.includes(key));
  state.w = choose("w", FIT.ways.map(way => way.label), "");
}

function writeAddress() {
  const said = new URLSearchParams({ m: state.m, g: state.g, n: state.n, b: state.b, s: state.s, may: state.may.join() });
  if (state.w) said.set("w", state.w);
  history.replaceState(null, "", `#${said}`);
}

function showControls() {
  $("model").value = state.m;
  $("gpu").value = state.g;
  $("gpus").value = state.n;
  $("batch").value = state.b;
  $("length").value = state.s;
  for (const box of $("may").querySelectorAll("input")) box.checked = state.may.includes(box.value);
}

function drawBar(found, gpu) {
  const total = Math.max(found.reserved, gpu.capacity) * 1.02;
  const x = bytes => 1000 * bytes / total;
  const parts = { ...found, rest: 0, cached: found.reserved - found.allocated };
  const named = PARTS.slice(0, 5).reduce((sum, [key]) => sum + parts[key], 0);
  parts.rest = Math.max(0, found.allocated - named);
  let at = 0, rectangles = "";
  const caption = [];
  for (const [key, name, colour] of PARTS) {
    if (parts[key] <= 0) continue;
    const width = x(parts[key]);
    rectangles += `<rect x="${at.toFixed(1)}" y="24" width="${width.toFixed(1)}" height="46" fill="${colour}"/>`;
    at += width;
    caption.push(make("span", "", {}, make("i", "", { style: `background:${colour}` }), `${name} ${bytesText(parts[key])}`));
  }
  const line = x(gpu.capacity), end = line > 700;
  const text = `${bytesText(gpu.capacity)}: what ${gpu.name} leaves PyTorch`;
  $("bar").innerHTML = `<svg viewBox="0 0 1000 78" role="img" aria-label="${bytesText(found.reserved)} needed of ${bytesText(gpu.capacity)}">
    <rect x="0" y="24" width="1000" height="46" fill="none" stroke="var(--line)"/>${rectangles}
    <line x1="${line}" x2="${line}" y1="16" y2="76" stroke="currentColor" stroke-width="3"/>
    <text x="${line + (end ? 2 : -2)}" y="12" text-anchor="${end ? "end" : "start"}"></text></svg>`;
  $("bar").querySelector("text").textContent = text;
  $("parts").replaceChildren(...caption);
}

function showFacts(found, gpu, model) {
  const { batch, beyond } = largestBatch(model, found.index, gpu, state.s);
  const about = found.known ? "" : "about ";
  const most = `PyTorch may reserve up to ${FIT.off} % more`;
  const range = [found.least, found.most].map(bytesText);
  const many = state.n > 1 ? ", for each GPU" : "";
  const onHost = found.host > 2 ** 20;
  const facts = [
    ["Reserved", about + bytesText(found.reserved), found.known ? "this must fit" : `this must fit; ${most}`],
    ["Allocated at the peak", about + bytesText(found.allocated), range[0] === range[1] ? "in blocks that tensors use" : `between ${range.join(" and ")}`],
    ["Floor", bytesText(found.floor), "no order of the same work gets below"],
    ["In the computer's memory", onHost ? bytesText(found.host) : "next to nothing", onHost ? `beside Python and the files${many}` : ""],
    ["Largest batch that fits", batch ? `${batch} rows${beyond ? " or more" : ""}` : "none", `of ${state.s.toLocaleString("en")} tokens`],
    ["1,000 tokens take", `≥ ${digits(found.perThousand)} s`, "a bound from the work, not a time"],
    ["Work of a step", `${digits(found.flops / 1e12)} TFLOP`, `${digits(found.moved / 1e9)} GB moved in the GPU`],
  ];
  if (found.sent) facts.push(["Sent to the other GPUs", `${digits(found.sent / 1e9)} GB a step`, "not in the bound"]);
  if (found.link) facts.push(["Across the link to the CPU", `${digits(found.link / 1e9)} GB a step`, "in the bound"]);
  $("facts").replaceChildren(...facts.map(([name, value, small]) => make("div", "", {},
    make("dt", name), make("dd", value, {}, make("small", small)))));
}

function showWays(found, chosen, model) {
  const rows = state.all ? found : found.slice(0, SHOWN_WAYS);
  if (!rows.includes(chosen)) rows.push(chosen);
  $("ways").replaceChildren(...rows.map(each => {
    const radio = make("input", "", { type: "radio", name: "way", value: each.way.label });
    radio.checked = each === chosen;
    radio.addEventListener("change", () => { state.w = each.way.label; update(); $("ways").querySelector(":checked")?.focus(); });
    const spare = each.spare >= 0 ? bytesText(each.spare) : `${bytesText(each.spare)} too little`;
    const mark = { fits: "✔ ", tight: "! ", not: "✘ " }[each.verdict];
    return make("tr", "", each === chosen ? { class: "chosen" } : {},
      make("td", "", {}, make("label", "", {}, radio, make("span", each.way.label))),
      make("td", bytesText(each.reserved), { class: "number" }),
      make("td", mark + spare, { class: `number ${each.verdict}` }),
      make("td", `≥ ${digits(each.perThousand)} s`, { class: "number" }),
      make("td", each.way.changes.join("; ") || "nothing"),
      make("td", known(each, model)));
  }));
  $("more").hidden = found.length <= SHOWN_WAYS;
  $("more").textContent = state.all ? "Show fewer ways" : `Show all ${found.length} ways`;
}

function showRules(found, model) {
  const parameters = FIT.table.models[model.name][0];
  const rules = [
    ["16 bytes a parameter (FP32 AdamW), no activations", 16 * parameters],
    ["accelerate estimate-memory, training with Adam, float32: 4 times the weights", 16 * parameters],
    ["accelerate estimate-memory, bfloat16: twice the float32 weights", 8 * parameters],
    ["QLoRA: half a byte a parameter", parameters / 2],
  ];
  $("rules").replaceChildren(...rules.map(([name, bytes]) => {
    const off = bytes / state.n / found.reserved - 1;
    const each = state.n > 1 ? " each" : "";
    return make("tr", "", {}, make("td", name), make("td", bytesText(bytes / state.n) + each, { class: "number" }),
      make("td", `${Math.abs(100 * off).toFixed(0)} % too ${off < 0 ? "little" : "much"}`, { class: "number" }));
  }));
}

function showTaking(found, gpu, model) {
  const options = `--batch-size ${state.b} --seq-len ${state.s} ${found.way.options}`.trim();
  $("command").textContent = `labkit estimate ${model.name} --gpu ${gpu.key} ${options}`;
  const text = found.way.script
    .replaceAll(FIT.placeholders.model, model.hub || model.name)
    .replaceAll(FIT.placeholders.name, model.name)
    .replaceAll(FIT.placeholders.targets, model.targets)
    .replaceAll(FIT.placeholders.batch, state.b)
    .replaceAll(FIT.placeholders.length, state.s);
  $("taking").hidden = model.images;
  $("script").href = `data:text/x-python;charset=utf-8,${encodeURIComponent(text)}`;
  const torchrun = `torchrun --nproc-per-node ${state.n} train.py your.txt`;
  $("launch").textContent = state.n > 1 ? torchrun : "python train.py your.txt";
  const started = state.n > 1 ? `-- ${torchrun}` : "train.py your.txt";
  $("phantom").textContent = `labkit phantom --gpu ${gpu.key} ${started}`;
}

/** Show everything for the state. */
function update() {
  const started = performance.now();
  const model = FIT.models.find(m => m.name === state.m), gpu = FIT.gpus.find(g => g.key === state.g);
  const found = judged(state);
  writeAddress();
  $("verdict").className = "";
  for (const part of document.querySelectorAll("main section:not(:first-of-type), figure, #facts")) part.hidden = !found.length;
  if (!found.length) {
    $("verdict").textContent = "No way of this table";
    const [least, most] = [FIT.table.tokens[0], FIT.table.tokens.at(-1)];
    const longest = FIT.table.models[model.name][1];
    $("why").textContent = `The table has steps of ${least} to ${most.toLocaleString("en")} tokens on each GPU, rows of at most ${longest.toLocaleString("en")} for ${model.name}, and nothing that needs more than ${bytesText(FIT.most)}. Allow more changes, take more GPUs, or another batch.`;
    return;
  }
  const chosen = found.find(each => each.way.label === state.w) || found[0];
  const many = state.n > 1 ? `${state.n} × ${gpu.name}` : `an ${gpu.name}`; // all are NVIDIA
  const short = bytesText(chosen.spare);
  const words = {
    fits: [`✔ ${model.name} fits on ${many}`, `${short} to spare`],
    tight: [`! ${model.name} may fit on ${many}`, `PyTorch would have to give back cached blocks: it would like ${short} more than there is. PYTORCH_ALLOC_CONF=expandable_segments:True helps`],
    not: [`✘ ${model.name} does not fit on ${many}`, `${short} too little`],
  }[chosen.verdict];
  const first = chosen === found[0];
  const role = { fits: first ? "The way that changes least, and among those the cheapest" : "", tight: "", not: first ? "The nearest to fitting" : "" }[chosen.verdict];
  $("verdict").textContent = words[0];
  $("verdict").classList.add(chosen.verdict);
  const near = chosen.verdict === "fits" ? chosen.reserved * (1 + FIT.off / 100) > gpu.capacity : chosen.least <= gpu.capacity;
  const unsure = near && !chosen.known ? " This batch lies between simulated ones and is near the limit: the command below computes it." : "";
  $("why").textContent = `${role ? `${role}: ` : ""}${chosen.way.label}. ${words[1]}.${unsure}`;
  const fitting = found.filter(each => each.verdict === "fits").length;
  $("ways-text").textContent = `${fitting} of ${found.length} fit. Those that change the training least come first, and among them the cheapest.`;
  drawBar(chosen, gpu);
  showFacts(chosen, gpu, model);
  showWays(found, chosen, model);
  showRules(chosen, model);
  showTaking(chosen, gpu, model);
  document.documentElement.dataset.milliseconds = (performance.now() - started).toFixed(1);
}

function start() {
  if (typeof FIT === "undefined" || FIT.table?.schema !== 1) {
    $("broken").textContent = "The page's data (fit-data.js) is missing or damaged: take the page and its folder anew.";
    $("broken").hidden = false;
    return;
  }
  $("model").append(...FIT.models.map(m => new Option(`${m.name} (${m.size})`, m.name)));
  $("gpu").append(...FIT.gpus.map(g => new Option(`${g.name}, ${bytesText(g.capacity)}`, g.key)));
  $("gpus").append(...[1, ...FIT.ranks].map(n => new Option(n === 1 ? "1" : `${n}, sharing the model (FSDP2)`, n)));
  for (const [id, most] of [["batch", MOST_ROWS], ["length", FIT.mostLength]]) {
    $(id).min = 1;
    $(id).max = most;
  }
  $("may").append(...MAY.map(([key, text]) => make("label", "", {},
    make("input", "", { type: "checkbox", value: key }), make("span", text))));
  $("trust").innerHTML = FIT.trust;
  $("made").textContent = FIT.made;
  $("choose").addEventListener("submit", event => event.preventDefault());
  $("choose").addEventListener("input", () => {
    if (!$("choose").checkValidity()) return;
    Object.assign(state, {
      m: $("model").value, g: $("gpu").value, n: Number($("gpus").value),
      b: Number($("batch").value), s: Number($("length").value),
      may: [...$("may").querySelectorAll(":checked")].map(box => box.value),
    });
    update();
  });
  $("more").addEventListener("click", () => { state.all = !state.all; update(); });
  addEventListener("hashchange", () => { readAddress(); showControls(); update(); });
  readAddress();
  showControls();
  document.querySelector("main").hidden = false;
  update();
}

start();
