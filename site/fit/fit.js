/* Looks things up in window.FIT, which fit-data.js brings; site/will_it_fit explains the rules. No request
   is made. */
"use strict";

const GIB = 2 ** 30;
const PHASES = ["setup", "forward", "backward", "step"];
const WORK = ["flops", "moved"];
const PARTS = [
  ["weights", "Weights", "#0072B2"],
  ["gradients", "Gradients", "#E69F00"],
  ["optimizer", "Optimizer state", "#009E73"],
  ["activations", "Activations", "#D55E00"],
  ["temporary", "Temporary", "#CC79A7"],
  ["rest", "Kernels' workspaces, buffers, rounding", "#8A8A8A"],
  ["cached", "Reserved, not used", "#D8D8D8"],
];
const MAY = [
  ["mixed", "Mixed precision: FP32 weights, matrix products in 16 bits (AMP)"],
  ["adapters", "Train adapters only, beside 16-bit weights (LoRA)"],
  ["four-bit", "Round the frozen weights to 4 bits (QLoRA)"],
  ["bf16", "Train in pure BF16, without FP32 weights"],
  ["optimizer", "Use 8-bit AdamW or Adafactor"],
  ["backward", "Update weights during backward: no clipping by norm, no accumulation"],
  ["cpu", "Use system RAM (offloading)"],
  ["eager", "Compute attention without a fused kernel"],
];
const VERDICTS = ["fits", "near", "tight", "no"];
const MARKS = { fits: "✔", near: "≈", tight: "!", no: "✘" };
const SHOWN_WAYS = matchMedia("(max-width: 48rem)").matches ? 5 : 12;
const LENGTH_STEP = 64; // tokens: no length between is offered
const MOST_ROWS = 128, MOST_RAM = 65536; // GiB
const MOST_USERS = 1024, MOST_PROMPT = 1048576, MOST_ANSWER = 65536;
const FOR_TRAINING = 0.9; // of the RAM; the rest is the system's
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

/** Least, chord and most of the i-th field: first along the tokens of each row, then along the lengths. */
function rangeOf(rows, i, batch, length) {
  const along = ([seqLen, points], total) => [seqLen, between(points.map(([t, point]) => [t, Array(3).fill(point[i])]), total)];
  if (!rows[0][0]) return along(rows[0], batch * length)[1];
  const reached = rows.map(row => along(row, batch * length)).filter(([, found]) => found);
  if (reached.length && length < reached[0][0] && reached[0][0] === FIT.table.tokens[0]) {
    const [, level] = reached[0], [least, chord, most] = between([[0, [0, level[1], level[2]]], ...reached], length);
    return WORK.includes(FIT.fields[i]) ? [least, least || level[1], most] : [least, chord, most];
  }
  return between(reached, length)
    || between(rows.map(row => along(row, batch * row[0])).filter(([, found]) => found), length);
}

/** One way of a model at a batch; null where the table does not reach. */
function answer(rows, longest, batch, length) {
  const grid = FIT.table.tokens, total = batch * length, values = {}, ranges = {};
  if (length > longest) return null;
  const there = rows.map(([seqLen, points]) => [seqLen, grid.map((t, i) => [t, points[i]]).filter(([, point]) => point)]);
  for (const [i, name] of FIT.fields.entries()) {
    ranges[name] = rangeOf(there, i, batch, length);
    if (!ranges[name]) return null;
    values[name] = ranges[name][1];
  }
  if (!rows[0][0]) values.flops = flopsOf(rows[0][1], longest, total, length);
  values.allocated = Math.max(...PHASES.map(phase => values[phase]));
  values.reserved = Math.max(values.reserved, values.allocated);
  values.least = Math.max(...PHASES.map(phase => ranges[phase][0]));
  values.most = Math.max(...PHASES.map(phase => ranges[phase][2]));
  const shapes = rows.flatMap(([seqLen]) => grid.map(t => rowShape(t, seqLen, longest).join()));
  values.exact = shapes.includes(`${batch},${length}`);
  values.known = values.exact || !rows[0][0] && grid.includes(total);
  return values;
}

// --- what fits -----------------------------------------------------------------------------------

const modelOf = state => FIT.models.find(model => model.name === state.m);
const gpuOf = state => FIT.gpus.find(gpu => gpu.key === state.g);
/** GiB of RAM beside one GPU, where nobody says: computers with the largest GPUs have more. */
const usualRam = state => gpuOf(state).capacity > 64 * GIB ? 128 : 64;
const ramOf = state => state.ram ?? usualRam(state) * state.n; // GiB
const hostLimit = state => FOR_TRAINING * ramOf(state) * GIB;
/** Whether the points of a model's way follow older rules, and wait to be computed again. */
const outdated = (state, index) => FIT.table.outdated[state.m]?.includes(index);
const longestOf = state => FIT.table.models[state.m][1];

/** Lower bound of a step's seconds on one GPU: see gpumem/hardware/least_seconds.py. */
function leastSeconds(gpu, way, found) {
  let rate = way.recipe.precision.endsWith("fp16") ? gpu.fp16 : gpu.bf16 || gpu.fp16;
  if (way.recipe.precision === "fp32") rate = gpu.fp32;
  const work = Math.max(found.flops / (rate * 1e12), found.moved / (gpu.bandwidth * 1e9), found.sent / (gpu.peer * 1e9));
  return work + found.link / (gpu.link * 1e9);
}

/** What a way needs in a state, and whether that is there; null where the table does not reach. */
function judge(state, index) {
  const way = FIT.ways[index], [, longest, ways] = FIT.table.models[state.m], gpu = gpuOf(state);
  const found = ways[index]?.length && answer(ways[index], longest, state.b, state.s);
  if (!found) return null;
  if (outdated(state, index)) found.exact = found.known = false;
  // Other rows of as many tokens, or a larger workspace, move what is reserved.
  found.sure = found.exact && !gpu.workspaces;
  for (const name of ["allocated", "reserved", "floor", "least", "most"]) found[name] += gpu.workspaces;
  found.spare = gpu.capacity - found.reserved;
  found.hostShort = Math.max(0, way.recipe.ranks * found.host - hostLimit(state));
  if (found.allocated > gpu.capacity || found.hostShort) found.verdict = "no";
  else if (found.spare < 0) found.verdict = "tight";
  else found.verdict = found.reserved + moreOf(found) > gpu.capacity ? "near" : "fits";
  found.perThousand = 1000 * leastSeconds(gpu, way, found) / (state.b * state.s * way.recipe.ranks);
  return { ...found, way, index };
}

/** What may be reserved beyond what was found. */
const moreOf = found => found.reserved * (found.sure ? FIT.seen : FIT.unsure);

/** Whether a GPU is one for a way: those that compute in BF16 need no FP16. */
const suits = (gpu, { recipe }) => gpu.bf16 ? recipe.precision !== "amp-fp16" : !recipe.precision.includes("bf16");

/** The places of the ways that a state allows. */
function allowed(state) {
  const gpu = gpuOf(state);
  return [...FIT.ways.keys()].filter(index => {
    const way = FIT.ways[index];
    return way.recipe.ranks === state.n && way.may.every(key => state.may.includes(key)) && suits(gpu, way);
  });
}

const fits = found => found?.verdict === "fits" || found?.verdict === "near";

/** All ways that a state allows, the best first. Bounds within a tenth count as equal. */
function judged(state) {
  const found = allowed(state).map(index => judge(state, index)).filter(Boolean);
  const slow = FIT.slow * Math.min(...found.filter(fits).map(each => each.perThousand));
  const tenth = found => Math.round(Math.log(found.perThousand / 1000) / Math.log(1.1));
  const order = found => VERDICTS.indexOf(found.verdict);
  return found.sort((x, y) => order(x) - order(y)
    || (order(x) < 2 ? (x.perThousand >= slow) - (y.perThousand >= slow) || x.way.changes.length - y.way.changes.length
      || tenth(x) - tenth(y) || x.way.techniques - y.way.techniques : 0)
    || x.reserved - y.reserved);
}

/** The largest of some sorted values of a field with which what `best` finds fits; undefined: none. */
function largest(state, field, values, best) {
  let low = -1, high = values.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1, changed = { ...state, [field]: values[middle] }, found = best(changed);
    // Below the table's first point nothing is known, and less is needed.
    if (found ? fits(found) : changed.b * changed.s < FIT.table.tokens[0]) low = middle; else high = middle;
  }
  return best({ ...state, [field]: values[low] }) ? values[low] : undefined;
}

const batches = Array.from({ length: MOST_ROWS }, (_, i) => i + 1);
const lengthsOf = state => Array.from({ length: Math.floor(longestOf(state) / LENGTH_STEP) }, (_, i) => LENGTH_STEP * (i + 1));

/** That not even the smallest batch or length of a way fits, as text. */
const noneOf = (smallest, index) => judge(smallest, index)?.verdict === "tight" ? "none is certain" : "none";

/** The largest batch of a way that fits, as text. */
function largestBatch(state, index) {
  const most = largest(state, "b", batches, changed => judge(changed, index));
  if (!most) return noneOf({ ...state, b: 1 }, index);
  return most === MOST_ROWS || !judge({ ...state, b: most + 1 }, index) ? `${most} or more` : `${most}`;
}

/** The longest sequence of a way that fits, as text. */
function longestSequence(state, index) {
  const most = largest(state, "s", lengthsOf(state), changed => judge(changed, index));
  if (!most) return noneOf({ ...state, s: Math.ceil(FIT.table.tokens[0] / state.b) }, index);
  const more = most + LENGTH_STEP <= longestOf(state) && !judge({ ...state, s: most + LENGTH_STEP }, index);
  return most.toLocaleString("en") + (more ? " or more" : "");
}

/** What to do for a change of the state, as text. */
function doing(change) {
  const allowing = [...MAY.filter(([key]) => change.may?.includes(key) && !state.may.includes(key)),
    ...ALLOW.filter(([key]) => change.allow?.includes(key) && !state.allow.includes(key))];
  const quoted = allowing.map(([, text]) => `“${text}”`);
  const { n, g } = { ...state, ...change }, name = change.g && gpuOf({ g }).name;
  const parts = [
    quoted.length && `allow ${listed(quoted)}`,
    change.b && `use batch size ${change.b}`,
    change.s && `use sequence length ${change.s.toLocaleString("en")}`,
    change.g ? `use ${n > 1 ? `${n} ×` : "one"} ${name}` : change.n && (n === 1 ? "use one GPU, or each by itself (DDP, which adds a copy of the gradients)" : `use ${n} GPUs`),
    change.u && `answer ${plural(change.u, "user")} at a time`,
    change.p && `use prompts of ${change.p.toLocaleString("en")} tokens`,
    change.t && `answers of ${change.t.toLocaleString("en")}`,
    change.ram && `have at least ${change.ram.toLocaleString("en")} GiB of RAM`,
  ].filter(Boolean);
  return sentence(parts.join(", and "));
}

/** A heading, and changes of a state with which something fits: [what to do, what it takes, what to change]. */
function remedies(state) {
  const found = [], everything = { may: MAY.map(([key]) => key) };
  /** Offer a change, and of what else is granted no more than is needed. */
  const offer = (change, granted = {}) => {
    const changed = { ...state, ...change, w: "" };
    const extra = ({ way, host }) => {
      const may = [...new Set([...changed.may, ...way.may])], ram = Math.ceil(way.recipe.ranks * host / FOR_TRAINING / GIB);
      return { ...(may.length > changed.may.length && { may }), ...(ram > ramOf(changed) && { ram }) };
    };
    const [best] = judged({ ...changed, ...granted }).filter(fits)
      .sort((x, y) => Object.keys(extra(x)).length - Object.keys(extra(y)).length || (extra(x).ram || 0) - (extra(y).ram || 0));
    if (!best) return false;
    const all = { ...change, ...extra(best) }, shared = changed.n > 1;
    const ram = hostText(best.host * changed.n), takes = [`${bytesText(best.reserved)} of ${shared ? "each" : "the"} GPU`];
    if (best.host > 2 ** 24) takes.push(`${ram} of ${(all.ram || ramOf(changed)).toLocaleString("en")} GiB of RAM`);
    takes.push(secondsText(best));
    found.push([doing(all), `${best.way.label}: ${takes.join(", ")}`, { ...all, w: "" }]);
    return true;
  };
  const forbidden = MAY.filter(([key]) => !state.may.includes(key));
  const helped = forbidden.filter(([key]) => offer({ may: [...state.may, key] }));
  if (!helped.length && forbidden.length > 1) offer({}, everything);
  const smaller = (field, values) => largest(state, field, values.filter(value => value < state[field]), changed => judged(changed)[0]);
  const b = smaller("b", batches), s = smaller("s", lengthsOf(state));
  if (b) offer({ b });
  else if (state.b < MOST_ROWS && fits(judged({ ...state, b: state.b + 1 })[0])) offer({ b: state.b + 1 }); // it reserves less
  else if (s) offer({ s });
  if (state.n > 1) offer({ n: 1 });
  offer({}, { ram: MOST_RAM });
  const more = FIT.ranks.filter(n => n > state.n), capacity = gpuOf(state).capacity;
  const larger = FIT.gpus.filter(gpu => gpu.capacity > capacity).sort((x, y) => x.capacity - y.capacity).map(gpu => gpu.key);
  more.some(n => offer({ n }));
  larger.some(g => offer({ g }));
  if (found.length) return ["What would fit:", found];
  const all = { ...everything, ram: MOST_RAM };
  offer({}, all);
  more.some(n => offer({ n }, everything));
  larger.some(g => offer({ g }, everything));
  if (!found.length) {
    larger.some(g => offer({ g }, all));
    more.some(n => larger.some(g => offer({ n, g }, everything)));
  }
  const enough = found.length ? "No single change is enough. What would fit:" : "No change on this page is enough, nor are several together.";
  return [enough, found];
}

// --- as text -----------------------------------------------------------------------------------

function bytesText(bytes) {
  const size = Math.abs(bytes) / GIB;
  if (size < 0.9995) return `${(size * 1024).toFixed(0)} MiB`;
  if (size > 999.5) return `${(size / 1024).toFixed(2)} TiB`;
  return `${size.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0)} GiB`;
}

const digits = number => number.toLocaleString("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
const traffic = bytes => bytes < 1e12 ? `${digits(bytes / 1e9)} GB` : `${digits(bytes / 1e12)} TB`;
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const listed = texts => [texts.slice(0, -1).join(", "), texts.at(-1)].filter(Boolean).join(" and ");
const sentence = text => text.slice(0, 1).toUpperCase() + text.slice(1);
const hostText = bytes => bytes > 2 ** 24 ? bytesText(bytes) : "< 16 MiB";

const secondsText = found => `≥ ${digits(found.perThousand)} s per 1,000 tokens`;

/** What a way changes beside what Python counts as a change of the training. */
const also = way => [
  way.recipe.precision.startsWith("amp") && (way.recipe.ranks > 1 ? "everything is computed in 16 bits (FSDP2's mixed precision)" : "matrix products are computed in 16 bits"),
  way.recipe.precision === "amp-fp16" && "losses are scaled, and steps that overflow are skipped",
  way.may.includes("backward") && "no clipping by norm, no accumulation",
].filter(Boolean);

/** How a number is known, for the column of the table. */
function known(found) {
  const tried = modelOf(state).tried[found.index], length = Math.min(FIT.usualLength, longestOf(state));
  if (tried && state.b === 1 && state.s === length) return `simulated; ${tried}`;
  const how = outdated(state, found.index) ? "simulated by an earlier version" : found.exact ? "simulated" : found.known ? `simulated as ${rowShape(state.b * state.s, 0, longestOf(state)).map(each => each.toLocaleString("en")).join(" × ")}` : "between simulated batches";
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

/** A button that changes the state. */
function changing(text, small, change) {
  const button = make("button", "", { type: "button" }, make("b", text), make("small", small));
  button.addEventListener("click", () => { Object.assign(state, change); showControls(); writeAddress(true); update(true); $("verdict").focus(); });
  return button;
}

// --- the page ----------------------------------------------------------------------------------

const state = { do: "train", m: "", g: "", n: 1, b: 1, s: 2048, ram: null, may: [], w: "", all: false, u: 1, p: 2048, t: 128, allow: [] };

/** Take the state from the address; return what it says that cannot be. */
function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1)), wrong = [];
  const choose = (key, name, those, usual) => {
    if (!said.has(key) || those.includes(said.get(key))) return said.get(key) ?? usual;
    wrong.push(`${name} “${said.get(key)}”`);
    return those.find(one => one && said.get(key).includes(one)) ?? usual; // Mistral-7B for mistralai/Mistral-7B-v0.1
  };
  const whole = (key, name, most, usual) => {
    const number = Number(said.get(key));
    if (said.has(key) && Number.isInteger(number) && number >= 1 && number <= most) return number;
    if (said.has(key)) wrong.push(`${name} “${said.get(key)}” (1 to ${most.toLocaleString("en")})`);
    return number > most ? most : usual;
  };
  state.do = choose("do", "task", ["train", "answer"], "train");
  const models = FIT.models.map(model => model.name);
  state.m = choose("m", "model", models, models.includes("Llama-3.1-8B") ? "Llama-3.1-8B" : models[0]);
  state.g = choose("g", "GPU", FIT.gpus.map(gpu => gpu.key), "rtx-4090");
  state.n = Number(choose("n", "number of GPUs", ["1", ...FIT.ranks.map(String)], "1"));
  state.b = whole("b", "batch size", MOST_ROWS, 1);
  state.s = whole("s", "sequence length", FIT.mostLength, 2048);
  state.ram = whole("ram", "system RAM", MOST_RAM, null);
  state.u = whole("u", "users", MOST_USERS, 1);
  state.p = whole("p", "prompt", MOST_PROMPT, 2048);
  state.t = whole("t", "answer", MOST_ANSWER, FIT.serving.newTokens);
  /** Some of `keys`, as the address lists them. */
  const several = (name, keys, usual) => {
    const named = said.has(name) ? said.get(name).split(",").filter(Boolean) : usual, unknown = named.filter(key => !keys.includes(key));
    if (unknown.length) wrong.push(`change “${unknown.join()}”`);
    return unknown.length && unknown.length === named.length ? usual : keys.filter(key => named.includes(key));
  };
  const keys = MAY.map(([key]) => key), allow = ALLOW.map(([key]) => key);
  state.may = several("may", keys, keys.slice(0, -1));
  state.allow = several("allow", allow, allow);
  const ways = state.do === "answer" ? FIT.serving.ways : FIT.ways;
  state.w = choose("w", "way", ["", ...ways.map(way => way.label)], "");
  $("notice").textContent = wrong.length ? `This link asks for something this page doesn't have: ${wrong.join(", ")}. It shows what it has instead.` : "";
  return wrong;
}

/** Write the state to the address; what was chosen with one click can be taken back. */
function writeAddress(step = false) {
  const { m, g, n, b, s, u, p, t } = state;
  const said = new URLSearchParams(state.do === "answer" ? { do: "answer", m, g, u, p, t, allow: state.allow.join() } : { m, g, n, b, s, may: state.may.join() });
  if (state.ram && state.do === "train") said.set("ram", state.ram);
  if (state.w) said.set("w", state.w);
  history[step ? "pushState" : "replaceState"](null, "", `#${said}`);
}

function showControls() {
  $("choose").elements.do.value = state.do;
  for (const part of document.querySelectorAll("[data-do]")) part.hidden = part.dataset.do !== state.do;
  for (const [id, key] of [["users", "u"], ["prompt", "p"], ["new", "t"]]) $(id).value = state[key];
  for (const box of $("allow").querySelectorAll("input")) box.checked = state.allow.includes(box.value);
  $("model").value = state.m;
  $("gpu").value = state.g;
  $("gpus").value = state.n;
  $("batch").value = state.b;
  $("length").value = state.s;
  $("ram").value = ramOf(state);
  $("ram-note").textContent = `${state.ram ? "" : `Assumed: ${usualRam(state)} GiB of RAM for each GPU. `}A tenth of the RAM is left to the system.`;
}

/** Take the state from the form, or say what is wrong there. */
function readControls() {
  const wrong = $("choose").querySelector("input:invalid");
  document.querySelector("main").classList.toggle("stale", Boolean(wrong));
  $("notice").textContent = wrong ? `${wrong.labels[0].firstChild.textContent.trim()}: a whole number from 1 to ${Number(wrong.max).toLocaleString("en")} on this page.` : "";
  if (wrong) return;
  const before = ramOf(state), ram = Number($("ram").value);
  if (ram !== before) state.ram = ram;
  Object.assign(state, {
    m: $("model").value, g: $("gpu").value, n: Number($("gpus").value),
    b: Number($("batch").value), s: Number($("length").value), do: $("choose").elements.do.value,
    u: Number($("users").value), p: Number($("prompt").value), t: Number($("new").value),
    allow: [...$("allow").querySelectorAll(":checked")].map(box => box.value),
    may: [...$("may").querySelectorAll("input")].filter(box => box.disabled ? state.may.includes(box.value) : box.checked).map(box => box.value),
  });
  const ways = state.do === "answer" ? FIT.serving.ways : allowed(state).map(index => FIT.ways[index]);
  if (!ways.some(way => way.label === state.w)) state.w = "";
  showControls(); // RAM goes with the GPUs
  update();
}

function drawBar(found, gpu, kinds = PARTS) {
  const limit = found.limit ?? gpu.capacity, total = Math.max(found.reserved, limit) * 1.02;
  const x = bytes => 1000 * bytes / total;
  const parts = { ...found, rest: 0, cached: found.reserved - found.allocated };
  const named = kinds.slice(0, -2).reduce((sum, [key]) => sum + parts[key], 0);
  parts.rest = Math.max(0, found.allocated - named);
  const shown = kinds.filter(([key]) => parts[key] >= 2 ** 19);
  let at = 0, rectangles = "";
  for (const [key, , colour] of shown) {
    rectangles += `<rect x="${at.toFixed(1)}" y="0" width="${x(parts[key]).toFixed(1)}" height="46" fill="${colour}"/>`;
    at += x(parts[key]);
  }
  const line = x(limit), texts = shown.map(([key, name]) => `${name} ${bytesText(parts[key])}`);
  $("bar").innerHTML = `<svg viewBox="0 0 1000 54" preserveAspectRatio="none" role="img"><rect x="0" y="0" width="1000" height="46" fill="none"
    stroke="var(--line)"/>${rectangles}<line x1="${line}" x2="${line}" y1="0" y2="54" stroke="currentColor" stroke-width="4" vector-effect="non-scaling-stroke"/></svg>`;
  $("bar").firstChild.setAttribute("aria-label", `${bytesText(found.reserved)} needed of ${bytesText(limit)}: ${texts.join(", ")}`);
  $("limit").textContent = `Limit: ${bytesText(limit)}, available to ${limit < gpu.capacity ? `vLLM with --gpu-memory-utilization ${FIT.serving.utilization},` : "PyTorch"} on ${gpu.name} with no display or other program on it`;
  $("parts").replaceChildren(...shown.map(([, , colour], i) =>
    make("span", "", {}, make("i", "", { style: `background:${colour}` }), texts[i])));
}

function showFacts(found) {
  const enough = { ...state, ram: MOST_RAM }, batch = largestBatch(state, found.index), each = state.n > 1 ? " on each GPU" : "";
  const gpu = gpuOf(state);
  const size = gpu => Math.round(gpu.capacity / GIB);
  const smallest = [...FIT.gpus].sort((x, y) => size(x) - size(y) || (y.key === state.g) - (x.key === state.g))
    .find(gpu => suits(gpu, found.way) && fits(judge({ ...enough, g: gpu.key }, found.index)));
  const together = state.n === 2 ? "Both GPUs" : `All ${state.n} GPUs`, others = state.n === 2 ? "the other GPU" : "the other GPUs";
  const stepOnCpu = /(weights|optimizer) on the host/.test(found.way.label), kept = FIT.table.models[state.m][0] * found.way.gradients;
  const about = aboutText(found), range = [found.least, found.most].map(bytesText);
  const most = `must stay below the limit; usually at most ${bytesText(FIT.off * found.reserved)} more`;
  const facts = [
    [`Reserved${each}`, about + bytesText(found.reserved), found.known ? "must stay below the limit" : most],
    ["Allocated at the peak", about + bytesText(found.allocated), range[0] === range[1] ? "used by tensors" : `between ${range.join(" and ")}`],
    ["Lower bound", bytesText(found.floor), "weights, optimizer state, one gradient and one layer: this way can never need less"],
    ["System RAM", hostText(found.host * state.n), "during a step; loading and saving the weights may take more"],
    ["Largest batch this way", batch, `of ${plural(state.s, "token")}${each}`],
    ["Longest sequence this way", longestSequence(state, found.index), `of ${longestOf(state).toLocaleString("en")} here, with batch size ${state.b}${each}`],
    ["Smallest GPU this way", smallest ? smallest.name : "none of these", smallest ? `${bytesText(smallest.capacity)} for PyTorch${found.hostShort ? ", and more RAM" : ""}` : ""],
    ["Time per 1,000 tokens", `≥ ${digits(found.perThousand)} s`, `at peak speed; real runs are slower${stepOnCpu ? ", most of all this one: the CPU's step is not counted" : ""}${state.n > 1 ? `. ${together} together` : ""}`],
    [`Work per step${each}`, `${digits(found.flops / 1e12)} TFLOP`, `${traffic(found.moved)} of GPU memory traffic`],
  ];
  if (kept) facts.push(["With gradient accumulation", `up to ${bytesText(kept)} more`, "gradients stay until the step: add --accumulate 2 to the command below"]);
  if (found.sent) facts.push([`Sent to ${others}`, `${traffic(found.sent)} a step`, `${digits(found.sent / (gpu.peer * 1e9))} s over ${gpu.peerName} at best, while it computes`]);
  if (found.link) facts.push(["Across the link to the CPU", `${traffic(found.link)} a step`, "in the seconds above"]);
  $("facts").replaceChildren(...facts.map(([name, value, small]) => make("div", "", {},
    make("dt", name), make("dd", value, {}, make("small", small)))));
}

/** How much is missing, and where. */
const shortText = found => listed([[state.n > 1 ? "on each GPU" : "on the GPU", -found.spare], ["in RAM", found.hostShort]]
  .filter(([, bytes]) => bytes > 0).map(([where, bytes]) => `${bytesText(bytes)} short ${where}`));
const aboutText = found => found.known ? "" : "about ";

function spareText(found) {
  const spare = bytesText(found.spare);
  if (found.verdict === "no") return shortText(found);
  return { fits: spare, near: aboutText(found) + spare, tight: `${spare} short; may fit if PyTorch frees cached blocks` }[found.verdict];
}

function showWays(found, chosen) {
  const rows = state.all ? found : found.slice(0, SHOWN_WAYS);
  if (!rows.includes(chosen)) rows.push(chosen);
  $("ways").replaceChildren(...rows.map(each => {
    const radio = make("input", "", { type: "radio", name: "way", value: each.way.label });
    radio.checked = each === chosen;
    radio.addEventListener("change", () => { state.w = each.way.label; update(); $("ways").querySelector(":checked")?.focus(); });
    const cell = (label, text, kind = "") => make("td", text, { "data-label": label, class: kind });
    return make("tr", "", each === chosen ? { class: "chosen" } : {},
      make("td", "", {}, make("label", "", {}, radio, make("span", each.way.label))),
      cell("Needs", aboutText(each) + bytesText(each.reserved), "number"),
      cell("To spare", `${MARKS[each.verdict]} ${spareText(each)}`, each.verdict),
      cell("RAM", hostText(each.host * state.n), "number"),
      cell("Largest batch", largestBatch(state, each.index)),
      cell("Time per 1,000 tokens", `≥ ${digits(each.perThousand)} s`, "number"),
      cell("Changes", [...each.way.changes, ...also(each.way)].join("; ") || "nothing"),
      cell("Evidence", known(each)));
  }));
  $("more").hidden = found.length <= SHOWN_WAYS;
  $("more").textContent = state.all ? "Show fewer ways" : `Show all ${found.length} ways`;
}

/** Each rule beside the ways that it is about, on one GPU. */
function showRules() {
  const gpu = gpuOf(state), parameters = FIT.table.models[state.m][0];
  const about = FIT.rules.flatMap(({ name, perParameter, ways }) => ways
    .filter(index => suits(gpu, FIT.ways[index]))
    .map(index => judge({ ...state, n: 1 }, index))
    .filter(Boolean)
    .map(found => [name, perParameter * parameters, found]));
  $("rules").replaceChildren(...about.map(([name, says, found]) => {
    const off = says / found.allocated - 1, cell = (label, text) => make("td", text, { "data-label": label, class: "number" });
    return make("tr", "", {}, make("td", name), cell("Says", bytesText(says)), make("td", found.way.label, { "data-label": "Applies to" }),
      cell("Actually allocated", bytesText(found.allocated)), cell("The rule is", `${Math.abs(100 * off).toFixed(0)} % too ${off < 0 ? "low" : "high"}`));
  }));
  $("no-rules").hidden = about.length > 0;
  $("rules-table").hidden = !about.length;
}

/** The command for a way, and if the way was found, its script. */
function showTaking(way, found) {
  const model = modelOf(state), ram = state.ram || found?.host > 2 ** 24 ? `--host-memory ${Math.floor(hostLimit(state) / GIB)}GiB ` : "";
  const sharing = state.n > 1 && !way.options.includes("--ranks"); // not in the table
  const options = `--batch-size ${state.b} --seq-len ${state.s} ${ram}${way.options}`.trim();
  $("command").replaceChildren(...unbroken(sharing
    ? `labkit advise ${model.name} --gpu ${state.g} --gpus ${state.n} --seq-len ${state.s}`
    : `labkit estimate ${model.name} --gpu ${state.g} ${options}`));
  $("command").closest("section").hidden = state.s > longestOf(state) && longestOf(state) < FIT.mostLength;
  $("taking").hidden = model.images || !found;
  const text = way.script
    .replaceAll(FIT.placeholders.model, model.hub || model.name)
    .replaceAll(FIT.placeholders.name, model.name)
    .replaceAll(FIT.placeholders.targets, model.targets)
    .replaceAll(FIT.placeholders.batch, state.b)
    .replaceAll(FIT.placeholders.length, state.s);
  const tight = found?.verdict === "tight";
  $("warning").hidden = !found || fits(found);
  $("warning").textContent = tight ? "This way may run out of memory. With expandable segments, as below, PyTorch may reserve less." : "This way does not fit: its script would run out of memory.";
  $("script").href = `data:text/x-python;charset=utf-8,${encodeURIComponent(text)}`;
  const torchrun = `torchrun --nproc-per-node ${state.n} train.py your.txt`;
  $("launch").replaceChildren(...unbroken((tight ? "PYTORCH_ALLOC_CONF=expandable_segments:True " : "") + (state.n > 1 ? torchrun : "python train.py your.txt")));
  $("tokens").textContent = state.s.toLocaleString("en");
  const started = state.n > 1 ? `-- ${torchrun}` : "train.py your.txt";
  $("phantom").replaceChildren(...unbroken(`labkit phantom --gpu ${state.g} ${tight ? "--expandable-segments " : ""}${started}`));
}

/** Why the table has no answer: a headline, a sentence, and a change that leads back. */
function nothing() {
  const [least, most] = [FIT.table.tokens[0], FIT.table.tokens.at(-1)], longest = longestOf(state), total = state.b * state.s;
  const model = modelOf(state);
  const text = number => number.toLocaleString("en");
  const limited = longest < FIT.mostLength ? state.m : "This table";
  if (state.s > longest) return ["No answer", `${limited} takes at most ${text(longest)} tokens in a sequence.`, { s: longest }];
  if (model.images && state.s < model.shortest) return ["No answer", `An image of ${state.m} is ${model.images} tokens, and each row has one: the table begins at ${text(model.shortest)} tokens in a sequence.`, { s: model.shortest }];
  if (total < least) {
    const s = Math.ceil(least / state.b);
    return ["No answer", `The table begins at ${least} tokens in a step.`, s > longest ? { b: Math.ceil(least / state.s) } : { s }];
  }
  if (total > most) return ["No answer", `${state.b} × ${text(state.s)} is beyond the table, which ends at ${text(most)} tokens in a step.`, { b: Math.floor(most / state.s) }];
  if (!allowed(state).length && gpuOf(state).bf16) return ["No answer", "For several GPUs the table has mixed precision, pure BF16 and LoRA. Allow one of them.", { n: 1 }];
  if (!allowed(state).length) return ["No answer", "This table covers several GPUs only if they compute in BF16.", { n: 1 }];
  const limit = bytesText(gpuOf(state).bf16 ? FIT.most : FIT.mostFp16);
  return [`✘ ${noneText()}`, `Every way in this table that you allow needs more than ${limit} per GPU.`, null];
}

/** Words of a command, which are not to be broken at their hyphens. */
const unbroken = text => text.split(" ").flatMap(word => [make("span", word), " "]);

const gpusText = () => state.n > 1 ? `${state.n} × ${gpuOf(state).name}` : `an ${gpuOf(state).name}`; // all are NVIDIA

/** That nothing fits, and whether that holds for all ways. */
function noneText() {
  const narrow = MAY.slice(0, -1).some(([key]) => !state.may.includes(key));
  return `${state.m} does not fit on ${gpusText()}${narrow ? " with what you allow" : state.n > 1 ? " in any way on this page" : ""}`;
}

/** Show everything for the state. */
function update(keepAddress = false) {
  if (!keepAddress) writeAddress();
  if (state.do === "answer") { updateAnswers(); return; }
  const gpu = gpuOf(state), found = judged(state);
  const notShared = "not simulated for several GPUs", ways = FIT.table.models[state.m][2];
  const fourBit = FIT.ways.some((way, i) => way.may.includes("four-bit") && ways[i]?.some(([, points]) => points.some(Boolean)));
  for (const box of $("may").querySelectorAll("input")) {
    const idle = {
      "four-bit": state.n > 1 ? notShared : !fourBit ? "bitsandbytes does not round experts" : !state.may.includes("adapters") && "requires adapters (LoRA)",
      optimizer: state.n > 1 && notShared,
      bf16: !gpu.bf16 && "needs a GPU with BF16",
    }[box.value];
    box.disabled = Boolean(idle);
    box.checked = !idle && state.may.includes(box.value);
    const [, text] = MAY.find(([key]) => key === box.value);
    box.nextSibling.textContent = text + (idle ? `: ${idle}` : "");
  }
  const best = found[0], chosen = found.find(each => each.way.label === state.w) || best;
  for (const part of document.querySelectorAll(".answer")) part.hidden = !best;
  const missing = best ? null : nothing();
  const fitting = found.filter(fits).length;
  const verdict = chosen?.verdict || (missing[2] ? "tight" : "no");
  const spare = chosen && bytesText(chosen.spare);
  const onCpu = chosen?.way.label.match(/\w+ on the host/);
  const kind = chosen?.way.label.split(/[,;]/)[0].replace("All weights", "all weights trained") + (onCpu ? `, ${onCpu}` : "");
  const words = chosen && {
    fits: [`${state.m} fits on ${gpusText()} with ${kind}`, `${spare} to spare.`],
    near: [`${state.m} probably fits on ${gpusText()} with ${kind}`, `${sentence(aboutText(chosen) + spare)} to spare, and PyTorch may reserve ${bytesText(moreOf(chosen))} more${chosen.known ? "" : ": the command below computes this batch"}.`],
    tight: [`${fitting ? "This way" : state.m} may fit on ${gpusText()} with ${kind}`, `PyTorch would reserve ${spare} more than the GPU has. What its tensors use does fit, so it may succeed after giving back cached blocks.`],
    no: [fitting ? `This way does not fit on ${gpusText()}` : noneText(), `${shortText(chosen)}.`],
  }[chosen.verdict];
  $("verdict").textContent = words ? `${MARKS[verdict]} ${words[0]}` : missing[0];
  $("verdict").className = verdict;
  const role = chosen !== best ? "" : { fits: `The fewest changes${found.some(each => fits(each) && each.way.changes.length < best.way.changes.length) ? " at good speed" : ""}: `, near: "", tight: "", no: "The nearest to fitting in this table: " }[verdict];
  const batch = `${state.b} × ${state.s.toLocaleString("en")} tokens${state.n > 1 ? " on each GPU" : ""}`;
  const unfused = modelOf(state).sharedHeads && !chosen?.way.may.includes("eager") && { fp32: "in FP32", "amp-fp16": "in FP16 on this GPU" }[chosen?.way.recipe.precision];
  const scores = unfused ? ` This model has grouped-query attention, for which PyTorch has no fused kernel ${unfused}: the scores are stored. For a batch with padding transformers repeats the heads, and a fused kernel takes them.` : "";
  $("why").textContent = words ? `${role}${chosen.way.label}, with ${batch}. ${words[1]}${scores}` : missing[1];
  $("brief").replaceChildren(...words
    ? [`${MARKS[verdict]} `, make("span", `${chosen.way.label}, ${batch}: `), `${spareText(chosen)}${fits(chosen) ? " to spare" : ""}`]
    : [missing[0]]);
  $("brief").className = verdict;
  const [heading, offers] = fitting ? ["", []] : remedies(state);
  const back = missing?.[2];
  if (back && !offers.some(([, , change]) => Object.keys(back).some(key => key in change))) offers.unshift([doing(back), "", back]);
  if (chosen !== best && !fits(chosen) && fitting) offers.push(["Show the best", `of ${plural(fitting, "way")} that fit${fitting === 1 ? "s" : ""}`, { w: "" }]);
  $("offers").hidden = fitting && !offers.length;
  $("offers").firstElementChild.textContent = back ? "" : heading;
  $("offers").lastElementChild.replaceChildren(...offers.map(offer => make("li", "", {}, changing(...offer))));
  $("trusted").textContent = chosen && outdated(state, chosen.index) ? "Simulated with an earlier version of labkit: about right until it is computed again."
    : chosen?.known ? `Simulated, not measured on a GPU. ${FIT.trusted}`
    : FIT.between;
  showRules();
  showTaking(chosen ? chosen.way : FIT.ways[allowed(state)[0] ?? 0], chosen);
  if (chosen) {
    $("ways-text").textContent = fitting
      ? `${fitting} of ${plural(found.length, "way")} fit${fitting === 1 ? "s" : ""}. Sorted by how much they change training (mixed precision does not count), then roughly by speed; ways that take ${FIT.slow} times as long as the fastest come last. ✔ fits. ≈ probably fits, and stands below those that do. ! may fit without cached blocks. ✘ does not fit.`
      : "None fits. The nearest to fitting in this table comes first.";
    if (state.n > 1) $("ways-text").textContent += ` NCCL's buffers are not counted. For several GPUs the page has FSDP2 with AdamW. QLoRA, 8-bit AdamW and Adafactor
      are not simulated there. What fits on one GPU also runs on each of several (DDP), which takes a second copy of the gradients.`;
    drawBar(chosen, gpu);
    showFacts(chosen);
    showWays(found, chosen);
  }
}

function start() {
  if (typeof FIT === "undefined" || FIT.table?.schema !== 1) {
    $("broken").textContent = "The page's data (fit-data.js) is missing or damaged: download the page with its folder again.";
    $("broken").hidden = false;
    return;
  }
  $("model").append(...FIT.models.map(model => new Option(`${model.name}, ${model.size} parameters`, model.name)));
  $("gpu").append(...FIT.gpus.map(gpu => new Option(`${gpu.name}, ${bytesText(gpu.capacity)}`, gpu.key)));
  $("gpus").append(...[1, ...FIT.ranks].map(n => new Option(n === 1 ? "1" : `${n} (FSDP2)`, n)));
  for (const [id, most] of [["batch", MOST_ROWS], ["length", FIT.mostLength], ["ram", MOST_RAM], ["users", MOST_USERS], ["prompt", MOST_PROMPT], ["new", MOST_ANSWER]]) {
    $(id).min = 1;
    $(id).max = most;
  }
  for (const [id, those] of [["may", MAY], ["allow", ALLOW]]) {
    $(id).append(...those.map(([key, text]) => make("label", "", {}, make("input", "", { type: "checkbox", value: key }), make("span", text))));
  }
  $("trust").innerHTML = FIT.trust;
  $("made").textContent = FIT.made;
  $("choose").addEventListener("submit", event => event.preventDefault());
  $("choose").addEventListener("input", readControls);
  $("more").addEventListener("click", () => { state.all = !state.all; update(); });
  const open = () => { const wrong = readAddress(); showControls(); update(wrong.length > 0); };
  addEventListener("hashchange", open);
  document.querySelector("main").hidden = false;
  new IntersectionObserver(([seen]) => { $("brief").hidden = seen.isIntersecting; }).observe($("verdict"));
  open();
}

start();
