// The page: controls in, answers out. Every change asks two questions: a quick one about all devices at once, and an
// exact one about the chosen run.

import * as charts from "/static/charts.js";
import * as say from "/static/words.js";
import { BATCH_SIZES, IMAGE_SIZES, OWN_DATASET, adapters, captures, devicesOfFp8, fromLink, inWords, isCapture, isTokens, languageModels, planBody, predictBody, scaleBody, toCommand, toLink, total } from "/static/state.js";

const at = (id) => document.getElementById(id);
const made = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const MOST_TRIES = 24;
const POPULAR = ["t4", "l4", "a10g", "a10", "l40s", "v100-sxm2-16gb", "a100-sxm4-40gb", "a100-sxm4-80gb", "h100-sxm", "h200-sxm", "rtx-3090", "rtx-4090"];

let state = fromLink(location.hash);
let turn = 0;
let exactTimer = 0;
let last = { key: "", model: "", plan: null };
let underway = { model: "", answered: null };
let lastScale = { key: "", curve: null };
let aheadTimer = 0;
let moved = "";
let devices = [];
let currencies = [{ code: "USD", sign: "$", usd: 1, words: "" }];
let shownEstimate = null;
let pinned = null;
const index = { names: [] };

// A server that has enough to do says when to ask again; an answer that nobody waits for any more is not asked again.
async function ask(path, body) {
  const mine = turn;
  const isFile = body instanceof File;
  const headers = { "content-type": isFile ? "application/octet-stream" : "application/json" };
  const asked = body === undefined ? {} : { method: "POST", headers, body: isFile ? body : JSON.stringify(body) };
  for (let tries = 1; ; tries += 1) {
    const response = await fetch(path, asked).catch(() => { throw new Error("the server does not answer; look whether forerun serve still runs, then change a setting"); });
    const answer = await response.json();
    if (response.ok) return answer;
    const waitS = Number(response.headers.get("retry-after"));
    if (!waitS || tries === MOST_TRIES) throw new Error(answer.error ?? `the server answered ${response.status}`);
    if (mine === turn) at("said").textContent = "the server is busy: asked again soon";
    await new Promise((goOn) => setTimeout(goOn, 1000 * waitS));
    if (body !== undefined && mine !== turn) throw new Error("not asked any more");
  }
}

const nearest = (values, wanted) => values.reduce((best, value, i) => (Math.abs(Math.log(value / wanted)) < Math.abs(Math.log(values[best] / wanted)) ? i : best), 0);

const chosenCurrency = () => currencies.find((one) => one.code === state.currency) ?? currencies[0];

function showControls() {
  say.showIn(chosenCurrency());
  showDeviceChoices();
  at("own-dataset").hidden = at("own-dataset").disabled = !isCapture(state);
  for (const name of ["model", "machines", "inter", "parallel", "device", "precision", "dataset", "epochs", "within", "kind", "minimize", "optimizer", "layout", "compile", "recompute", "fused", "strategy", "accumulation", "vendor", "memory", "tokens", "sequence", "currency"]) at(name).value = state[name];
  document.body.dataset.kind = isCapture(state) ? "capture" : isTokens(state) ? "tokens" : "samples";
  const capture = captures.get(state.model);
  if (capture) at("model").dataset.words = capture.title;
  for (const name of ["price", "most", "lora"]) at(name).value = state[name] ?? "";
  at("adapters").value = adapters(state);
  at("devices").value = state.devices;
  at("batch").max = BATCH_SIZES.length - 1;
  at("batch").value = nearest(BATCH_SIZES, state.batch);
  at("image").value = state.image ? 1 + nearest(IMAGE_SIZES.slice(1), state.image) : 0;
  showSliders();
  for (const box of document.querySelectorAll("#compare input")) box.checked = state.compare.includes(box.value);
}

// What a slider stands for, for eyes and for readers of screens: its own value is a place in a list.
function showSliders() {
  for (const [name, words] of [["devices", state.devices], ["batch", state.batch], ["image", state.image ?? "the model's own"]]) {
    at(`${name}-out`).value = words;
    at(name).setAttribute("aria-valuetext", words);
  }
}

function readControls(event) {
  const name = event.target.name;
  if (!event.target.validity.valid) {
    turn += 1; // an answer that is under way belongs to the value before
    clearTimeout(exactTimer);
    document.body.classList.remove("busy", "asking");
    showError(`${event.target.labels[0].firstChild.textContent.trim()}: ${event.target.validationMessage}`);
    return;
  }
  moved = name;
  if (name === "batch") state.batch = BATCH_SIZES[at("batch").value];
  else if (name === "devices") state.devices = Number(at("devices").value);
  else if (name === "machines") state.machines = Math.min(512, Math.max(1, Math.round(Number(at("machines").value)) || 1));
  else if (name === "image") state.image = IMAGE_SIZES[at("image").value];
  else if (name === "epochs") state.epochs = Number(at("epochs").value) > 0 ? Number(at("epochs").value) : 1;
  else if (name === "sequence") state.sequence = Math.max(1, Math.round(Number(at("sequence").value)) || 1);
  else if (name === "accumulation") state.accumulation = Math.max(1, Math.round(Number(at("accumulation").value)) || 1);
  else if (name === "lora") state.lora = Math.round(Number(at("lora").value)) > 0 ? Math.round(Number(at("lora").value)) : null;
  else if (name === "adapters") {
    const kind = at("adapters").value;
    Object.assign(state, { lora: kind === "all" ? null : (state.lora ?? 16), quantize: kind === "all" || kind === "lora" ? "none" : kind });
  } else if (["price", "most"].includes(name)) state[name] = Number(at(name).value) > 0 ? Number(at(name).value) : null;
  else if (name === "memory") state.memory = Number(at("memory").value);
  else if (name === "compare") state.compare = [...document.querySelectorAll("#compare input:checked")].map((box) => box.value);
  else if (name in state) state[name] = at(name).value;
  showSliders();
  at("adapters").value = adapters(state);
  at("lora").value = state.lora ?? "";
  if (["vendor", "memory", "most", "currency"].includes(name)) showControls();
  renew();
}

const passes = (device) => (!state.vendor || device.vendor === state.vendor) && device.memory_bytes >= state.memory * 2 ** 30 * 0.98 && (!state.most || (device.price && device.price.usd_per_hour <= state.most));

// The lists of devices, by the filters; the chosen device stays in them.
function showDeviceChoices() {
  const listed = devices.filter((device) => device.name === state.device || passes(device));
  at("device").replaceChildren(...listed.map((device) => made("option", { value: device.name, textContent: `${device.title}${device.price ? `, ${say.price(device.price.usd_per_hour)}/h` : ""}` })));
  const filtered = state.vendor || state.memory || state.most;
  const offered = filtered ? devices.filter(passes).map((device) => device.name).slice(0, 24) : [...new Set([...POPULAR, ...state.compare])];
  at("compare").replaceChildren(...offered.map((value) => made("label", {}, made("input", { type: "checkbox", name: "compare", value }), value)));
}

// Another model or device is a step that the back button takes back; the rest changes the link in its place.
async function renew() {
  const link = toLink(state);
  const before = fromLink(location.hash);
  if (before.model !== state.model || before.device !== state.device) history.pushState(null, "", link);
  else history.replaceState(null, "", link);
  const mine = ++turn;
  clearTimeout(exactTimer);
  document.body.classList.add("busy");
  // While a new model is traced its settings may move on: then only the last of them is asked, not each.
  if (last.model !== state.model && underway.model === state.model) await underway.answered;
  if (mine !== turn) return;
  underway = { model: state.model, answered: answer(mine) };
  await underway.answered;
}

async function answer(mine) {
  const begun = performance.now();
  try {
    // Of a model that is new here the chosen run comes first: all devices at once take longer. Its refusal is said later.
    const estimate = last.model === state.model ? null : await ask("/predict", predictBody(state, state.price)).catch(() => null);
    if (mine !== turn) return;
    if (estimate) {
      showQuestion();
      showEstimate(estimate);
      showError("");
      document.body.classList.remove("busy");
    }
    const plan = await planned();
    if (mine !== turn) return;
    showError(""); // first: a chart is as wide as its place, and a place behind an error has no width
    showPlan(plan, estimate !== null);
    document.body.dataset.answeredMs = String(Math.round(performance.now() - begun));
    // While a slider moves the quick answer is enough.
    exactTimer = setTimeout(() => renewExact(mine, plan), 150);
  } catch (error) {
    if (mine === turn) showError(error.message);
  } finally {
    if (mine === turn) document.body.classList.remove("busy");
  }
}

// Charts have a width and colours of their own: with another window the answers are drawn anew, and nothing is asked.
function redraw() {
  if (!last.plan || document.body.classList.contains("failed")) return;
  showPlan(last.plan, true);
  if (lastScale.curve) showScaling(lastScale.curve);
}

// The answer holds every batch size of the slider, so moving it asks nothing.
async function planned() {
  const body = planBody(state, false);
  const key = JSON.stringify(body);
  if (last.key !== key) last = { key, model: body.models[0], plan: await ask("/plan", body) };
  return last.plan;
}

async function renewExact(mine, plan) {
  document.body.classList.add("asking");
  try {
    const estimate = await ask("/predict", predictBody(state, usdPerHour(plan)));
    if (mine !== turn) return;
    showEstimate(estimate);
    await renewScaling(mine);
    if (mine !== turn) return;
    document.body.dataset.exact = String(mine);
    clearTimeout(aheadTimer);
    aheadTimer = setTimeout(() => lookAhead(mine), 400);
  } catch (error) {
    if (mine === turn) showError(error.message);
  } finally {
    if (mine === turn) document.body.classList.remove("asking");
  }
}

// Price of one device that the plan goes by, also where the device keeps no limit and is not listed.
function usdPerHour(plan) {
  const own = plan.candidates.find((one) => one.device === state.device && one.cost_usd !== null);
  return own ? Number(((own.cost_usd / own.job_time_s) * (3600 / total(state))).toPrecision(9)) : null;
}

// How devices are joined is not known of every device: then that is said in the place of its curve.
async function renewScaling(mine) {
  const body = scaleBody(state);
  const key = JSON.stringify(body);
  try {
    if (lastScale.key !== key) lastScale = { key, curve: await ask("/scale", body) };
    if (mine === turn) showScaling(lastScale.curve);
  } catch (error) {
    if (mine !== turn) return;
    lastScale = { key: "", curve: null };
    at("scale-words").textContent = error.message;
    charts.noScaling();
  }
}

// What takes the server longest is asked for while nothing happens, so that it is there when a slider moves: the steps of
// several devices taken apart, which hold for any number of them, and, once the image size has been moved, the traces of
// the sizes beside it.
async function lookAhead(mine) {
  const here = Number(at("image").value);
  const images = moved === "image" ? [here + 1, here - 1].filter((i) => IMAGE_SIZES[i]).map((i) => ({ image: IMAGE_SIZES[i] })) : [];
  const several = lastScale.curve && total(state) === 1 ? [{ devices: 2 }] : [];
  for (const change of [...several, ...images]) {
    if (mine !== turn) return;
    await ask("/plan", planBody({ ...state, ...change }, false)).catch(() => null);
  }
}

// With an error nothing of an earlier question stays on the page.
function showError(text) {
  at("error").textContent = text;
  at("error").hidden = !text;
  document.body.classList.toggle("failed", Boolean(text));
  if (text) {
    shownEstimate = null;
    delete document.body.dataset.fits;
    at("cards").replaceChildren();
  }
}

// A run that does not fit takes no time and costs nothing: only its memory is said, and what would make it fit.
function showVerdict(fits, needed, memory, ways) {
  document.body.dataset.fits = fits ?? "unknown";
  const short = `${say.bytes(needed)} of ${say.bytes(memory)}`;
  at("verdict").textContent = { no: ways ? `Does not fit: it needs ${short}.` : "By a first estimate it does not fit; the exact answer follows.", close: `Too close to call: about ${short}; it may run out of memory.`, yes: `Fits: ${short}.` }[fits] ?? "";
  at("ways").hidden = fits !== "no" || !ways?.length;
  if (!ways) return;
  at("ways").replaceChildren(...ways.map((way) => {
    const use = made("button", { type: "button", textContent: way.words });
    use.addEventListener("click", () => {
      const names = { batch_size: "batch", num_devices: "devices" };
      for (const [name, value] of Object.entries(way.change)) if ((names[name] ?? name) in state) state[names[name] ?? name] = value;
      showControls();
      renew();
    });
    return made("li", {}, use, ` ${say.bytes(way.peak_memory_bytes)}, ${say.rate(way.throughput_samples_per_s)}`);
  }));
}

const card = (name, value, range) => made("div", { className: "card" }, made("div", { className: "name", textContent: name }), made("div", { className: "value", textContent: value }), made("div", { className: "range", textContent: range }));
const cardOf = (name, interval, words) => (interval ? card(name, words(interval.value), range90(interval, words)) : card(name, "-", "not known"));
const range90 = (interval, words) => `90 %: ${say.range(interval, words)}`;

function showQuestion() {
  const device = devices.find((one) => one.name === state.device);
  at("question").textContent = `${at("model").dataset.words ?? state.model} on ${state.machines > 1 ? `${state.machines} x ` : ""}${total(state) > 1 ? `${state.devices} x ` : ""}${device?.title ?? state.device}, batch ${state.batch}, ${state.precision}${inWords(state)}`;
}

function showPlan(plan, hasEstimate) {
  const own = plan.candidates.filter((one) => one.device === state.device && Object.entries(one.settings).every(([name, value]) => value === state[name]));
  const chosen = own.find((one) => one.batch_size_per_device === state.batch);
  const device = devices.find((one) => one.name === state.device);
  showQuestion();
  if (chosen && !hasEstimate && chosen.peak_memory_bytes > device.memory_bytes) {
    at("cards").replaceChildren();
    showVerdict("no", chosen.peak_memory_bytes, device.memory_bytes, null);
  } else if (chosen && !hasEstimate) {
    showQuick(chosen);
  }
  showCurve(own.filter((one) => one.peak_memory_bytes <= device.memory_bytes));
  showDevices(plan);
}

// The values at once; their intervals follow with the exact answer.
function showQuick(one) {
  const cards = [
    card("step", say.duration(one.step_time_s), ""), card("throughput", say.rate(one.throughput_samples_per_s), ""),
    card("epoch", say.duration(one.job_time_s / (one.num_epochs || 1)), ""), card("job", say.duration(one.job_time_s), ""),
    card("cost of the job", one.cost_usd === null ? "-" : say.money(one.cost_usd), one.cost_usd === null ? "no price known" : ""),
    card("energy of the job", one.energy_j === null ? "-" : say.energy(one.energy_j), ""),
  ];
  at("cards").replaceChildren(...cards);
}

function cardsOf(estimate) {
  if (estimate.fits === "no") return [];
  const rate = (n) => `${say.count(n)} tokens/s`;
  const tokens = estimate.tokens_per_s ? [cardOf("tokens", estimate.tokens_per_s, rate)] : [cardOf("throughput", estimate.throughput_samples_per_s, say.rate)];
  if (estimate.mfu) tokens.push(cardOf("model FLOPs utilisation", estimate.mfu, say.percent));
  return [
    cardOf("step", estimate.step_time_s, say.duration), ...tokens,
    cardOf("epoch", estimate.epoch_time_s, say.duration), cardOf("job", estimate.job_time_s, say.duration),
    cardOf("cost of the job", estimate.cost_usd, say.money), cardOf("energy of the job", estimate.energy_j, say.energyLike(estimate.energy_j?.value)),
  ];
}

function showEstimate(estimate) {
  shownEstimate = estimate;
  at("cards").replaceChildren(...cardsOf(estimate));
  showVerdict(estimate.fits, estimate.peak_memory_bytes.value, estimate.device_memory_bytes, estimate.ways_to_fit ?? []);
  showMemory(estimate);
  showStep(estimate);
  showBeside();
  const price = devices.find((one) => one.name === state.device)?.price;
  const paid = state.price ? [`price: ${say.price(state.price)}/h, yours`] : price ? [`price: ${say.price(price.usd_per_hour)}/h of one device, ${price.provider} ${price.instance}, read on ${price.date} (${price.source})`] : ["price: none is known of this device"];
  const rests = [`${estimate.device_title}: ${estimate.provenance}`, `${say.count(estimate.num_parameters)} parameters`, ...paid, ...(state.currency === "USD" ? [] : [chosenCurrency().words]), ...estimate.notes];
  at("notes").replaceChildren(...rests.map((text) => made("li", { textContent: text })));
}

// A kept run and the present one, column by column, with their ratio.
const COMPARED = [["step", "step_time_s", say.duration], ["throughput", "throughput_samples_per_s", say.rate], ["tokens", "tokens_per_s", (n) => `${say.count(n)} tokens/s`], ["job", "job_time_s", say.duration], ["cost", "cost_usd", say.money], ["energy", "energy_j", say.energy], ["memory", "peak_memory_bytes", say.bytes]];
function showBeside() {
  at("beside").hidden = !pinned || !shownEstimate;
  if (at("beside").hidden) return;
  const title = (run) => `${run.question}${run.estimate.fits === "no" ? " (does not fit)" : ""}`;
  const present = { question: at("question").textContent, estimate: shownEstimate };
  at("beside-table").tHead.replaceChildren(made("tr", {}, ...["", title(pinned), title(present), "ratio"].map((text) => made("th", { textContent: text, scope: "col" }))));
  const value = (run, key) => (run.estimate.fits === "no" && key !== "peak_memory_bytes" ? null : run.estimate[key]?.value ?? null);
  const rows = COMPARED.map(([name, key, words]) => [name, value(pinned, key), value(present, key), words]).filter(([, a, b]) => a !== null || b !== null);
  at("beside-table").tBodies[0].replaceChildren(...rows.map(([name, a, b, words]) => made("tr", {}, made("th", { textContent: name, scope: "row" }), ...[a, b].map((one) => made("td", { textContent: one === null ? "-" : words(one) })), made("td", { textContent: a && b ? `${(b / a).toPrecision(3)} x` : "-" }))));
}

// One colour per part, whatever the order of the parts.
const COLOURS = {
  activations: 0, weights: 1, gradients: 2, "optimizer state": 3, temporaries: 4, input: 5, fragmentation: 6, context: 7,
  convolution: 0, "pooling and resizing": 1, normalisation: 2, optimizer: 3, "element-wise and reductions": 4, "copies and casts": 5, linear: 6, "attention and batched products": 7,
};
// Others take one of their own name, or the next that no part beside them has.
function coloursOf(names) {
  const taken = new Set(names.map((name) => COLOURS[name]));
  return new Map(names.map((name) => {
    let colour = COLOURS[name] ?? [...name].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 8, 5);
    for (let tries = 0; !(name in COLOURS) && taken.has(colour) && tries < 8; tries += 1) colour = (colour + 1) % 8;
    taken.add(colour);
    return [name, `var(--c${colour})`];
  }));
}

function bar(place, parts, whole, limit, words) {
  const shown = parts.filter(([, size]) => size > 0);
  const colours = coloursOf(shown.map(([name]) => name));
  place.replaceChildren(...shown.map(([name, size]) => {
    const part = made("span", { title: `${name}: ${words(size)}` });
    part.style.width = `${(100 * size) / whole}%`;
    part.style.background = colours.get(name);
    return part;
  }));
  if (limit) {
    const line = made("span", { className: "limit", title: `memory of the device: ${words(limit)}` });
    line.style.left = `calc(${(100 * limit) / whole}% - 3px)`;
    place.append(line);
  }
  place.setAttribute("aria-label", shown.map(([name, size]) => `${name} ${words(size)}`).join(", "));
  const items = shown.map(([name, size]) => {
    const square = made("i");
    square.style.background = colours.get(name);
    return made("li", {}, square, `${name} ${words(size)}`);
  });
  const legend = made("ul", { className: "legend" }, ...items);
  place.nextElementSibling?.remove();
  place.after(legend);
}

const FITS = { yes: "fits", no: "does not fit", close: "too close to call, may run out of memory" };

function showScaling(curve) {
  const points = curve.points.map((point) => ({ x: point.num_devices, ...point.throughput_samples_per_s }));
  const number = total(state);
  charts.scaling(points, number);
  const chosen = curve.points.find((point) => point.num_devices === number);
  const stop = curve.stops_paying_at.weak;
  const pays = stop ? `Adding devices stops paying at ${stop}: those added bring less than half of what the first does.` : `Up to ${points.at(-1).x}, every device added brings at least half of what the first does.`;
  const own = number === 1 ? "" : `${number} devices are ${chosen.speedup.toFixed(2)} times as fast as one (${say.percent(chosen.efficiency)} each). `;
  const link = curve.intra_link ? `Over ${curve.intra_link}${curve.inter_link && state.machines > 1 ? ` and ${curve.inter_link} between machines` : ", in one machine"}, batch ${state.batch} on each. ` : "";
  at("scale-words").textContent = `${own}${link}${pays}`;
}

// Of a run that does not fit a larger batch, which one device alone has room for, is no help.
function largestWords({ max_batch_size: largest, batch_size_per_device: batch, fits }) {
  const most = fits === "no" ? batch : 1e7;
  if (!largest || largest.value >= most) return "";
  if (largest.value < 1) return fits === "no" && batch > 1 ? "; a batch of 1 does not fit either" : "";
  return `; largest batch ${largest.value.toLocaleString("en")}`;
}

function showMemory(estimate) {
  const card = estimate.device_memory_bytes;
  const peak = estimate.peak_memory_bytes;
  const largest = largestWords(estimate);
  const range = estimate.shown_memory_bytes;
  const shown = range ? `; nvidia-smi shows ${say.bytes(range.low)} to ${say.bytes(range.high)}` : "";
  at("memory-words").textContent = `${say.bytes(peak.value)} of ${say.bytes(card)}: ${FITS[estimate.fits] ?? ""}${largest}${shown}`;
  bar(at("memory-bar"), estimate.memory_parts.map((part) => [part.name, part.size_bytes]), Math.max(card, peak.value), card, say.bytes);
}

const BOUND = { compute: "Bound by compute: the arithmetic takes most of the time.", "memory bandwidth": "Bound by memory bandwidth: moving data takes most of the time.", host: "Bound by the host: the device waits for the CPU to launch work; a larger batch costs little.", "data loader": "Bound by the data loader: the device waits for batches; more workers or cores would help." };

function showStep(estimate) {
  at("bound").textContent = BOUND[estimate.bound_by] ?? `Bound by ${estimate.bound_by}.`;
  bar(at("step-bar"), estimate.breakdown.map((part) => [part.name, part.time_s]), estimate.step_time_s.value, 0, say.duration);
}

function showCurve(candidates) {
  at("rate").hidden = !candidates.length;
  if (!candidates.length) return;
  const points = candidates.map((one) => {
    const spread = one.step_time_high_s / one.step_time_s;
    return { x: one.batch_size_per_device, value: one.throughput_samples_per_s, low: one.throughput_samples_per_s / spread, high: one.throughput_samples_per_s * spread };
  });
  charts.throughput(points, state.batch);
}

const label = (point) => (point.num_devices > 1 ? `${point.device} x${point.num_devices}` : point.device);
// What was compared because nothing fits as asked.
const widened = (plan) => plan.notes.filter((note) => note.startsWith("nothing fits as asked")).map((note) => ` ${note[0].toUpperCase()}${note.slice(1)}.`).join("");
const changes = (point) => Object.entries(point.settings).filter(([, value]) => value !== "none").map(([name, value]) => (name === "recompute" ? `, recompute ${value}` : `, ${value}`)).join("");

function showDevices(plan) {
  const found = plan.best_by_device;
  const byCost = found.some((point) => point.cost_usd);
  const second = byCost ? { title: "cost of the job", say: say.amount } : { title: "energy of the job", say: say.energy };
  const value = (point) => (byCost ? point.cost_usd && say.inCurrency(point.cost_usd.value) : point.energy_j?.value);
  const drawn = found.filter((point) => value(point) > 0).map((point) => ({ name: label(point), x: point.job_time_s.value, y: value(point), chosen: point.device === plan.chosen?.device }));
  at("compared").hidden = !drawn.length;
  at("all-devices").hidden = !found.length;
  if (drawn.length) charts.devices(drawn, plan.pareto.map(label), second);
  showTable(plan, found);
  if (plan.chosen) {
    at("choice").textContent = `Least ${plan.minimize}: ${label(plan.chosen)} at batch ${plan.chosen.batch_size_per_device}${changes(plan.chosen)}. ${plan.num_feasible} of ${plan.num_candidates} candidates keep the limits${plan.binding ? `; binding: ${plan.binding}` : ""}.${widened(plan)}`;
  } else if (plan.nearest_miss) {
    const broken = plan.nearest_miss.broken.map((limit) => `${limit.limit}${limit.excess === null ? " (not known)" : ` by ${say.percent(limit.excess)}`}`);
    at("choice").textContent = `Nothing keeps all limits. Nearest: ${label(plan.nearest_miss)} at batch ${plan.nearest_miss.batch_size_per_device}${changes(plan.nearest_miss)}, which breaks ${broken.join(", ")}.${widened(plan)}`;
  }
}

// The instance of a price, the way of paying and the date, none of them broken between two lines.
function unbroken(point) {
  const parts = point.fits === "no" || !point.price_source ? ["-"] : point.price_source.replace(/^1 x /, "").split(", ");
  return parts.flatMap((part, i) => [made("span", { textContent: part + (i < parts.length - 1 ? "," : "") }), " "]);
}

function showTable(plan, found) {
  const titles = ["device", "batch", "step", "job", "cost", "energy", "memory", "price", "price of"];
  at("table").tHead.replaceChildren(made("tr", {}, ...titles.map((title) => made("th", { textContent: title, scope: "col" }))));
  const energy = say.energyLike(Math.min(...found.map((point) => point.energy_j?.value ?? Infinity)));
  const rows = [...found].sort((a, b) => a.job_time_s.value - b.job_time_s.value).map((point) => {
    const pick = made("button", { type: "button", textContent: label(point) + changes(point), title: "look at this device" });
    pick.addEventListener("click", () => {
      Object.assign(state, { device: point.device, batch: point.batch_size_per_device }, point.settings);
      showControls();
      renew();
    });
    const cells = [
      point.batch_size_per_device, say.duration(point.step_time_s.value), say.duration(point.job_time_s.value), point.cost_usd ? say.money(point.cost_usd.value) : "-",
      point.energy_j ? energy(point.energy_j.value) : "-", say.bytes(point.peak_memory_bytes.value), point.price_usd_per_hour === null ? "-" : `${say.price(point.price_usd_per_hour)}/h`,
    ];
    if (point.fits === "no") for (const i of [1, 2, 3, 4, 6]) cells[i] = i === 1 ? "does not fit" : "-";
    const row = made("tr", { className: point.fits === "no" ? "nofit" : point.device === plan.chosen?.device ? "best" : "" }, made("td", {}, pick), ...cells.map((text) => made("td", { textContent: text })), made("td", {}, ...unbroken(point)));
    return row;
  });
  at("table").tBodies[0].replaceChildren(...rows);
}

// The search box over all models: those whose name has every word, the best twelve.
function found(text) {
  const words = text.toLowerCase().split(/[^a-z0-9.]+/).filter(Boolean);
  const score = (name) => { const bare = name.replace(/^\w+:/, ""); return (bare === text ? -2 : bare.startsWith(text) ? -1 : 0) + name.length / 100; };
  return index.names.filter((name) => words.every((word) => name.toLowerCase().includes(word))).sort((a, b) => score(a) - score(b)).slice(0, 12);
}

function showFound(names) {
  const list = at("found-models");
  list.replaceChildren(...names.map((name, i) => {
    const item = made("li", { textContent: name, role: "option", id: `found-${i}` });
    item.addEventListener("pointerdown", (event) => { event.preventDefault(); choose(name); });
    return item;
  }));
  list.hidden = !names.length;
  at("model").setAttribute("aria-expanded", String(!list.hidden));
  mark(-1);
}

let marked = -1;
function mark(next) {
  const items = [...at("found-models").children];
  marked = items.length ? Math.max(-1, Math.min(items.length - 1, next)) : -1;
  items.forEach((item, i) => item.setAttribute("aria-selected", String(i === marked)));
  if (marked >= 0) at("model").setAttribute("aria-activedescendant", items[marked].id);
  else at("model").removeAttribute("aria-activedescendant");
}

function choose(name) {
  if (!name) { at("model").value = state.model; return; }
  if (state.model !== name) delete at("model").dataset.words;
  at("model").value = name;
  showFound([]);
  if (state.model === name) return;
  if (isCapture(state)) Object.assign(state, { dataset: state.dataset === OWN_DATASET ? "imagenet" : state.dataset, accumulation: 1 });
  state.model = name;
  if (isTokens(state) && state.optimizer === "sgd") Object.assign(state, { optimizer: "adamw", precision: "bf16", batch: 1, image: null });
  showControls();
  renew();
}

function search(event) {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); mark(marked + (event.key === "ArrowDown" ? 1 : -1)); }
  else if (event.key === "Escape") { event.preventDefault(); at("model").value = state.model; showFound([]); }
  else if (event.key === "Enter") { event.preventDefault(); choose(at("found-models").children[marked]?.textContent ?? at("model").value.trim()); }
}

async function useConfig() {
  try {
    const config = JSON.parse(at("config").value);
    const kept = await ask("/configs", config);
    state.sequence = Math.min(state.sequence, config.max_position_embeddings ?? config.n_positions ?? state.sequence);
    choose(kept.model);
    at("model").dataset.words = `${config._name_or_path || config.model_type} (pasted)`;
    at("said").textContent = "configuration taken";
    at("paste").open = false;
  } catch (error) {
    showError(error instanceof SyntaxError ? `expected the JSON of a config.json: ${error.message}` : error.message);
  }
}

// A file that was chosen or dropped: a capture, or the configuration of a model.
async function useFile(file) {
  if (!file) return;
  if (file.name.endsWith(".json")) {
    at("config").value = await file.text();
    await useConfig();
    return;
  }
  try {
    const kept = await ask("/captures", file);
    const { batch_size: batch, precision, layout, optimizer, compile, accumulation, epochs, dataset_size: size, strategy } = kept.settings;
    captures.set(kept.model, { title: kept.title, file: file.name });
    Object.assign(state, { model: kept.model, batch, precision, layout, optimizer, compile: compile ? "yes" : "no", accumulation: accumulation ?? 1, epochs: epochs ?? 1, image: null, strategy: strategy ?? "ddp", parallel: "" });
    state.dataset = size ? OWN_DATASET : state.dataset === OWN_DATASET ? "imagenet" : state.dataset;
    at("said").textContent = `${file.name} taken: this server keeps it for an hour after the last question`;
    showControls();
    await renew();
  } catch (error) {
    showError(error.message);
  }
}

function saved(name, address) {
  made("a", { href: address, download: name }).click();
  at("said").textContent = `${name} saved`;
}

function saveCsv() {
  const cell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = [...at("table").rows].map((row) => [...row.cells].map((one) => cell(one.textContent)).join(","));
  saved("forerun.csv", URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" })));
}

// The answer in short with its charts, as one picture.
function savePng() {
  const style = getComputedStyle(document.body);
  const pictures = [...document.querySelectorAll(".chart canvas")].filter((one) => one.offsetParent);
  const ratio = devicePixelRatio;
  const width = Math.max(900 * ratio, ...pictures.map((one) => one.width));
  const lines = [at("question").textContent, at("verdict").textContent, ...[...document.querySelectorAll(".card")].map((one) => [...one.children].map((part) => part.textContent).join("   ")), location.href];
  const canvas = made("canvas", { width: width + 40 * ratio, height: (40 + 26 * lines.length) * ratio + pictures.reduce((sum, one) => sum + one.height + 30 * ratio, 0) });
  const context = canvas.getContext("2d");
  context.fillStyle = style.backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = style.color;
  lines.forEach((line, i) => {
    context.font = `${i ? 400 : 650} ${16 * ratio}px system-ui, sans-serif`;
    context.fillText(line, 20 * ratio, (36 + 26 * i) * ratio);
  });
  let top = (40 + 26 * lines.length) * ratio;
  for (const one of pictures) {
    context.font = `650 ${14 * ratio}px system-ui, sans-serif`;
    context.fillText(one.closest("section").querySelector("h2").textContent, 20 * ratio, top + 14 * ratio);
    context.drawImage(one, 20 * ratio, top + 20 * ratio);
    top += one.height + 30 * ratio;
  }
  saved("forerun.png", canvas.toDataURL("image/png"));
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    at("said").textContent = `${what} copied`;
  } catch {
    at("said").textContent = text;
  }
}

async function begin() {
  const [hardware, data, rates] = await Promise.all([ask("/hardware"), ask("/datasets"), ask("/currencies")]);
  currencies = rates.currencies.sort((a, b) => (b.code === "USD") - (a.code === "USD"));
  at("currency").replaceChildren(...currencies.map((one) => made("option", { value: one.code, textContent: one.code, title: one.words })));
  devices = hardware.devices.filter((device) => device.kind === "gpu");
  devices.filter((device) => device.peak_flops_per_s.fp8).forEach((device) => devicesOfFp8.add(device.name));
  at("vendor").append(...[...new Set(devices.map((device) => device.vendor))].sort().map((value) => made("option", { value, textContent: value })));
  const ownDataset = made("option", { id: "own-dataset", value: OWN_DATASET, textContent: "the script's own" });
  at("dataset").replaceChildren(ownDataset, ...data.datasets.map((one) => made("option", { value: one.name, textContent: one.name })));
  showControls();
  // What is written is read when it is done, what is chosen or moved at once.
  const written = ["within", "config", "model", "tokens", "parallel", "capture"];
  at("controls").addEventListener("input", (event) => !written.includes(event.target.id) && readControls(event));
  at("controls").addEventListener("change", (event) => ["within", "tokens", "parallel"].includes(event.target.id) && readControls(event));
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("model").addEventListener("input", () => showFound(found(at("model").value.trim())));
  at("model").addEventListener("keydown", search);
  at("model").addEventListener("change", () => choose(at("model").value.trim()));
  at("model").addEventListener("blur", () => showFound([]));
  at("use-config").addEventListener("click", useConfig);
  at("capture").addEventListener("change", () => useFile(at("capture").files[0]));
  at("pick-capture").addEventListener("click", () => at("capture").click());
  addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  addEventListener("drop", (event) => { event.preventDefault(); document.body.classList.remove("dropping"); useFile(event.dataTransfer.files[0]); });
  at("copy-command").addEventListener("click", () => copy(toCommand(state), "command"));
  at("copy-link").addEventListener("click", () => copy(location.href, isCapture(state) ? "link holds no file: it works while this server keeps the capture, an hour after its last question;" : "link"));
  at("save-csv").addEventListener("click", saveCsv);
  at("save-png").addEventListener("click", savePng);
  at("pin").addEventListener("click", () => {
    if (!shownEstimate) return;
    pinned = { question: at("question").textContent, estimate: shownEstimate };
    at("said").textContent = "kept: change the run to see both";
    showBeside();
  });
  at("unpin").addEventListener("click", () => { pinned = null; showBeside(); });
  addEventListener("hashchange", () => { state = fromLink(location.hash); showControls(); renew(); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // The first list takes the server some seconds; only a model that is not of a library waits for it.
  const list = ask("/models").then(listModels);
  if (/^[\w.-]+$/.test(state.model)) await list;
  showControls();
  await Promise.all([renew(), list]);
}

// A name that is being written when the list comes is searched at once, and stays as it is.
function listModels(models) {
  const languages = models.language ?? [];
  languages.forEach((name) => languageModels.add(name));
  index.names = [...new Set([...models.families.map((family) => family.name), "cnn:depth=4,base_filters=64", ...languages, ...models.torchvision, ...models.timm])];
  document.body.dataset.models = String(index.names.length);
  if (at("model").value !== state.model) showFound(found(at("model").value.trim()));
  else showControls();
}

begin().catch((error) => showError(error.message));
