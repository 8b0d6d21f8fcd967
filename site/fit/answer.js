/* The other half of the page: not training, but answering. It shares fit.js's state, controls and elements.
   Nothing is interpolated: transformers' caches have answers for the conversations that were simulated, vLLM's
   arithmetic (gpumem/estimation/paged.py) for any. */
"use strict";

const ALLOW = [
  ["int8", "Round the weights to 8 bits"],
  ["nf4", "Round the weights to 4 bits (NF4)"],
  ["fp8", "Round the cache to 8 bits (FP8)"],
  ["vllm", "Serve with vLLM, whose cache is paged"],
];
const ANSWER_PARTS = [
  ["weights", "Weights", "#0072B2"],
  ["kv", "KV cache", "#E69F00"],
  ["activations", "Activations", "#D55E00"],
  ["rest", "Kernels' workspaces, rounding", "#8A8A8A"],
  ["cached", "Reserved, not used", "#D8D8D8"],
];
/** The place of a conversation among those that were simulated; -1: it is none. */
const shapeOf = ({ u, p, t }) => t === FIT.serving.newTokens ? FIT.serving.shapes.findIndex(([users, prompt]) => users === u && prompt === p) : -1;
/** How many users were simulated with such prompts. */
const triedUsers = ({ p }) => FIT.serving.shapes.filter(([, prompt]) => prompt === p).map(([users]) => users);

/** One way to answer in a state; null where the table has no answer. */
function judgeAnswer(state, index) {
  const way = FIT.serving.ways[index], gpu = gpuOf(state), served = FIT.serving.models[state.m];
  if (!served || way.quantize === "int8" && !gpu.int8) return null;
  const found = way.cache === "paged" ? pagedAnswer(state, way, gpu, served) : simulatedAnswer(state, way, gpu, served);
  if (!found) return null;
  const spare = found.limit - found.reserved;
  const sure = way.cache === "paged" || !gpu.workspaces; // for that cache other GPUs were simulated, too
  const more = found.uncertain * (sure ? FIT.seen : FIT.unsure);
  let verdict = spare < more ? "near" : "fits";
  if (found.allocated > found.limit) verdict = "no"; else if (spare < 0) verdict = "tight";
  if (way.cache === "paged" && state.u > found.most) verdict = "no";
  return { known: true, ...found, spare, more, verdict, way, index };
}

/** What was simulated: one batch by transformers' generate. */
function simulatedAnswer(state, way, gpu, served) {
  const shape = shapeOf(state), point = gpu.bf16 && shape >= 0 && served[1][way.place + shape];
  if (!point) return null;
  const found = Object.fromEntries(FIT.serving.fields.map((name, i) => [name, point[i]]));
  const reserved = found.reserved + gpu.oneWorkspace, allocated = found.allocated + gpu.oneWorkspace;
  const pass = (found.read + (found.first + found.last) / 2) / (gpu.bandwidth * 1e9);
  return {
    ...found, kv: found.cached, cached: 0, reserved, allocated, uncertain: reserved, limit: gpu.capacity, perSecond: state.u / pass,
    token: found.last / (state.u * (state.p + state.t - 1)),
  };
}

/** vLLM's arithmetic: see Paged in gpumem/estimation/paged.py. */
function pagedAnswer(state, way, gpu, served) {
  const [positions, , paged] = served, point = paged[way.place + gpu.kind], length = state.p + state.t - 1, size = FIT.serving.blockTokens;
  if (!point || length + 1 > positions) return null; // vLLM counts the last token, too
  const [weights, activations, whole, read] = point, token = way.kv ? Math.floor(whole / 2) : whole;
  const limit = Math.floor(FIT.serving.utilization * gpu.usable) - gpu.context, blockBytes = size * token;
  const blocks = Math.max(0, Math.floor((limit - weights - activations) / blockBytes)), usable = Math.max(0, blocks - 1);
  const each = Math.ceil(length / size), most = Math.min(Math.floor(usable / each), gpu.conversations);
  const longest = state.u > gpu.conversations ? 0
    : Math.max(0, Math.min(Math.floor(usable / state.u) * size + 1, positions) - state.t);
  const kv = (1 + state.u * each) * blockBytes, reserved = weights + activations + kv;
  const passBytes = read + state.u * (state.p + (state.t - 1) / 2) * token;
  const perSecond = state.t > 1 ? state.u * gpu.bandwidth * 1e9 / passBytes : null; // the first comes with the prompt
  return { reserved, allocated: reserved, weights, kv, activations, token, uncertain: weights + activations, limit, most, longest, perSecond, last: kv };
}

/** All ways to answer that a state allows, the mildest that fits first. */
function judgedAnswers(state) {
  const order = found => VERDICTS.indexOf(found.verdict);
  return [...FIT.serving.ways.keys()].filter(i => FIT.serving.ways[i].may.every(key => state.allow.includes(key)))
    .map(i => judgeAnswer(state, i)).filter(Boolean)
    .sort((x, y) => order(x) - order(y) || (order(x) < 2 ? x.way.changes.length - y.way.changes.length || x.index - y.index : 0) || x.reserved - y.reserved);
}

/** How many users fit a way, as text: of transformers' caches, of the numbers that were simulated. */
function mostUsers(found) {
  if (found.way.cache === "paged") return found.most.toLocaleString("en");
  const tried = triedUsers(state).map(u => [u, judgeAnswer({ ...state, u }, found.index)]);
  const most = Math.max(0, ...tried.filter(([, each]) => fits(each)).map(([u]) => u));
  const none = tried.filter(([u, each]) => u > most && each?.verdict === "no").map(([u]) => u);
  return (most ? `${most} or more` : "not certain that one") + (none.length ? `, not ${Math.min(...none)}` : "");
}

const longestPrompt = found => found.way.cache === "paged" ? found.longest.toLocaleString("en") : fits(found) ? `${state.p.toLocaleString("en")} or more` : "not known";
const perSecondText = found => found.perSecond === null ? "–" : `≤ ${found.perSecond < 100 ? found.perSecond.toFixed(1) : Math.round(found.perSecond).toLocaleString("en")}`;
const evidence = found => found.way.cache === "paged" ? "vLLM's arithmetic, with simulated weights and activations"
  : state.g.startsWith("a100") ? "simulated" : "simulated for an A100";
const conversations = state => `${plural(state.u, "user")}, ${state.p.toLocaleString("en")} + ${state.t.toLocaleString("en")} tokens`;

/** Changes of the state with which something fits, the mildest first: [what to do, what it takes, what to change]. */
function answerRemedies(state) {
  const found = [];
  const offer = change => {
    const best = judgedAnswers({ ...state, ...change, w: "" }).find(fits);
    if (best) found.push([doing(change), `${best.way.label}: ${bytesText(best.reserved)}, ${perSecondText(best)} tokens a second`, { ...change, w: "" }]);
    return Boolean(best);
  };
  const all = judgedAnswers(state), capacity = gpuOf(state).capacity;
  for (const [key] of ALLOW.toReversed()) if (!state.allow.includes(key)) offer({ allow: [...state.allow, key] });
  if (!found.length && state.allow.length < ALLOW.length) offer({ allow: ALLOW.map(([key]) => key) });
  const fewer = [...all.map(each => each.most || 0), ...triedUsers(state)].filter(u => u && u < state.u);
  [...new Set(fewer)].sort((x, y) => y - x).some(u => offer({ u }));
  FIT.gpus.filter(gpu => gpu.capacity > capacity).sort((x, y) => x.capacity - y.capacity).some(gpu => offer({ g: gpu.key }));
  const shorter = all.map(each => each.longest || 0).filter(p => p && p < state.p);
  if (shorter.length) offer({ p: Math.max(...shorter) });
  return found;
}

/** That some of a model's points wait to be computed. */
function waiting([, points]) {
  const missing = FIT.serving.points - points.length;
  return missing ? `${missing} of this model's ${FIT.serving.points} conversations by transformers are not in this table yet. ` : "";
}

/** Why the table has no answer, and what would have one. */
function noAnswer(state) {
  const served = FIT.serving.models[state.m], text = number => number.toLocaleString("en");
  const { shapes, newTokens: t } = FIT.serving, [u, p] = shapes[0], [positions] = served || [];
  const simulated = listed(shapes.map(([users, prompt]) => `${users} × (${text(prompt)} + ${t})`));
  if (!served) return [`Answering with ${state.m} is not in this table yet. The command below computes it.`, null];
  if (state.p + state.t - 1 > positions) {
    const shorter = positions > state.t ? { p: positions - state.t + 1 } : { p: 1, t: 1 };
    return [`${state.m} knows ${text(positions)} positions, and a conversation has ${text(state.p + state.t)} tokens.`, shorter];
  }
  if (!gpuOf(state).bf16) return [`On GPUs without BF16 this table has vLLM's paged cache only${state.allow.includes("vllm") ? ", which this model cannot have here" : ": allow vLLM"}.`, state.allow.includes("vllm") ? null : { allow: [...state.allow, "vllm"] }];
  const missing = waiting(served);
  return [`${missing || `transformers' caches were simulated for ${simulated} tokens. `}The command below computes this conversation.`, missing ? null : { u, p, t }];
}

function showAnswers(found, chosen) {
  $("answers").replaceChildren(...found.map(each => {
    const radio = make("input", "", { type: "radio", name: "way", value: each.way.label });
    radio.checked = each === chosen;
    radio.addEventListener("change", () => { state.w = each.way.label; update(); $("answers").querySelector(":checked")?.focus(); });
    const cell = (label, text, kind = "") => make("td", text, { "data-label": label, class: kind });
    return make("tr", "", each === chosen ? { class: "chosen" } : {},
      make("td", "", {}, make("label", "", {}, radio, make("span", each.way.label))),
      cell("Needs", bytesText(each.reserved), "number"),
      cell("To spare", `${MARKS[each.verdict]} ${answerSpare(each)}`, each.verdict),
      cell("Most users", mostUsers(each)),
      cell("Longest prompt", longestPrompt(each)),
      cell("Tokens a second", perSecondText(each), "number"),
      cell("Changes", each.way.changes.join("; ") || "nothing"),
      cell("Evidence", evidence(each)));
  }));
}

const answerSpare = found => ({ fits: bytesText(found.spare), near: bytesText(found.spare), tight: `${bytesText(found.spare)} short; may fit if PyTorch frees cached blocks`,
  no: found.spare < 0 ? `${bytesText(found.spare)} short` : `vLLM takes ${found.most} at a time` })[found.verdict];

/** Show everything for the state; what training alone has is hidden. */
function updateAnswers() {
  const gpu = gpuOf(state), found = judgedAnswers(state), best = found[0];
  const chosen = found.find(each => each.way.label === state.w) || best, fitting = found.filter(fits).length;
  for (const box of $("allow").querySelectorAll("input")) {
    const idle = box.value === "int8" && !gpu.int8 && "this GPU has no int8 tensor cores";
    box.disabled = Boolean(idle);
    box.nextSibling.textContent = ALLOW.find(([key]) => key === box.value)[1] + (idle ? `: ${idle}` : "");
  }
  for (const part of document.querySelectorAll(".answer")) part.hidden = !best;
  const [reason, back] = best ? ["", null] : noAnswer(state);
  const verdict = chosen?.verdict || (back ? "tight" : "no"), spare = chosen && bytesText(chosen.spare);
  const words = chosen && {
    fits: [`${state.m} answers on an ${gpu.name}`, `${spare} to spare.`],
    near: [`${state.m} probably answers on an ${gpu.name}`, `${spare} to spare, and ${bytesText(chosen.more)} more may be taken.`],
    tight: [`${fitting ? "This way" : state.m} may answer on an ${gpu.name}`, `PyTorch would reserve ${spare} more than the GPU has. What its tensors use does fit, so it may succeed after giving back cached blocks: the command below computes that.`],
    no: [fitting ? `This way does not fit on an ${gpu.name}` : `${state.m} does not fit on an ${gpu.name}${state.allow.length < ALLOW.length ? " with what you allow" : ""}`,
      chosen.spare < 0 ? `${spare} short.` : `vLLM takes ${chosen.most} of these conversations at a time, and the others wait.`],
  }[chosen.verdict];
  $("verdict").textContent = words ? `${MARKS[verdict]} ${words[0]}` : "No answer";
  $("verdict").className = $("brief").className = verdict;
  $("why").textContent = words ? `${chosen.way.label}, with ${conversations(state)}. ${words[1]}` : reason;
  $("brief").replaceChildren(...words ? [`${MARKS[verdict]} `, make("span", `${chosen.way.label}, ${conversations(state)}: `), `${answerSpare(chosen)}${fits(chosen) ? " to spare" : ""}`] : ["No answer"]);
  const offers = fitting ? [] : answerRemedies(state);
  if (back) offers.unshift([doing(back), "", back]);
  if (chosen !== best && !fits(chosen) && fitting) offers.push(["Show the best", `of ${plural(fitting, "way")} that fit${fitting === 1 ? "s" : ""}`, { w: "" }]);
  $("offers").hidden = !offers.length;
  $("offers").firstElementChild.textContent = back || fitting ? "" : "What would fit:";
  $("offers").lastElementChild.replaceChildren(...offers.map(offer => make("li", "", {}, changing(...offer))));
  $("trusted").textContent = FIT.serving.trusted;
  const way = chosen?.way || FIT.serving.ways[0], precision = gpu.bf16 ? "" : " --precision fp16";
  $("command").replaceChildren(...unbroken(`labkit estimate ${state.m} --serve --gpu ${state.g} --users ${state.u} --prompt ${state.p} --new ${state.t}${precision}${way.options}`));
  $("command").closest("section").hidden = false;
  if (!chosen) return;
  $("answers-text").textContent = (fitting ? `${fitting} of ${plural(found.length, "way")} fit${fitting === 1 ? "s" : ""}, those that change least first.` : "None fits.")
    + ` ✔ fits. ≈ probably fits. ! may fit without cached blocks. ✘ does not fit. ${waiting(FIT.serving.models[state.m])}${FIT.serving.stored}`;
  drawBar(chosen, gpu, ANSWER_PARTS);
  const round = gpu => Math.round(gpu.capacity / GIB);
  const smallest = [...FIT.gpus].sort((x, y) => round(x) - round(y) || (y.key === state.g) - (x.key === state.g)).find(({ key }) => fits(judgeAnswer({ ...state, g: key }, chosen.index)));
  const facts = [
    [chosen.way.cache === "paged" ? "Needed" : "Reserved", bytesText(chosen.reserved), "must stay below the limit"],
    ["KV cache at the end", bytesText(chosen.last), `${(chosen.token / 1024).toLocaleString("en", { maximumFractionDigits: 1 })} KiB for each token of a user`],
    ["Most users this way", mostUsers(chosen), `with ${state.p.toLocaleString("en")} + ${state.t.toLocaleString("en")} tokens each`],
    ["Longest prompt this way", longestPrompt(chosen), `tokens, with ${plural(state.u, "user")} and answers of ${state.t.toLocaleString("en")}`],
    ["Smallest GPU this way", smallest ? smallest.name : "none of these", smallest ? `${bytesText(smallest.capacity)} for PyTorch` : ""],
    ["Tokens a second", perSecondText(chosen), "of all users together: a bound by memory bandwidth, never a speed"],
  ];
  $("facts").replaceChildren(...facts.map(([name, value, small]) => make("div", "", {}, make("dt", name), make("dd", value, {}, make("small", small)))));
  showAnswers(found, chosen);
}
