// The page: controls in, answers out. Every change asks two questions: a quick one about all devices at once, and an
// exact one about the chosen run.

import * as charts from "/static/charts.js";
import * as say from "/static/words.js";
import { BATCH_SIZES, IMAGE_SIZES, fromLink, planBody, predictBody, toCommand, toLink } from "/static/state.js";

const at = (id) => document.getElementById(id);
const made = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const POPULAR = ["t4", "l4", "a10g", "a10", "l40s", "v100-sxm2-16gb", "a100-sxm4-40gb", "a100-sxm4-80gb", "h100-sxm", "h200-sxm", "rtx-3090", "rtx-4090"];

let state = fromLink(location.hash);
let turn = 0;
let exactTimer = 0;
let devices = [];
let last = { key: "", plan: null };
let aheadTimer = 0;
let moved = "";

async function ask(path, body) {
  const asked = body === undefined ? {} : { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(path, asked);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error ?? `the server answered ${response.status}`);
  return answer;
}

const nearest = (values, wanted) => values.reduce((best, value, i) => (Math.abs(Math.log(value / wanted)) < Math.abs(Math.log(values[best] / wanted)) ? i : best), 0);

function showControls() {
  for (const name of ["model", "device", "precision", "dataset", "epochs", "within", "kind", "minimize"]) at(name).value = state[name];
  at("batch").max = BATCH_SIZES.length - 1;
  at("batch").value = nearest(BATCH_SIZES, state.batch);
  at("batch-out").value = state.batch;
  at("image").value = state.image ? 1 + nearest(IMAGE_SIZES.slice(1), state.image) : 0;
  at("image-out").value = state.image ?? "the model's own";
  for (const box of document.querySelectorAll("#compare input")) box.checked = state.compare.includes(box.value);
}

function readControls(event) {
  const name = event.target.name;
  moved = name;
  if (name === "batch") state.batch = BATCH_SIZES[at("batch").value];
  else if (name === "image") state.image = IMAGE_SIZES[at("image").value];
  else if (name === "epochs") state.epochs = Number(at("epochs").value) > 0 ? Number(at("epochs").value) : 1;
  else if (name === "compare") state.compare = [...document.querySelectorAll("#compare input:checked")].map((box) => box.value);
  else if (name in state) state[name] = at(name).value;
  at("batch-out").value = state.batch;
  at("image-out").value = state.image ?? "the model's own";
  renew();
}

async function renew() {
  history.replaceState(null, "", toLink(state));
  const mine = ++turn;
  clearTimeout(exactTimer);
  document.body.classList.add("busy");
  const begun = performance.now();
  try {
    const plan = await planned();
    if (mine !== turn) return;
    showPlan(plan);
    showError("");
    document.body.dataset.answeredMs = String(Math.round(performance.now() - begun));
    // While a slider moves the quick answer is enough.
    exactTimer = setTimeout(() => renewExact(mine, plan), 150);
  } catch (error) {
    if (mine === turn) showError(error.message);
  } finally {
    if (mine === turn) document.body.classList.remove("busy");
  }
}

// The answer holds every batch size of the slider, so moving it asks nothing.
async function planned() {
  const body = planBody(state, false);
  const key = JSON.stringify(body);
  if (last.key !== key) last = { key, plan: await ask("/plan", body) };
  return last.plan;
}

async function renewExact(mine, plan) {
  try {
    const own = plan.best_by_device.find((point) => point.device === state.device) ?? plan.points.find((p) => p.device === state.device);
    const estimate = await ask("/predict", predictBody(state, own?.price_usd_per_hour));
    if (mine !== turn) return;
    showEstimate(estimate);
    document.body.dataset.exact = String(mine);
    clearTimeout(aheadTimer);
    if (moved === "image") aheadTimer = setTimeout(() => lookAhead(mine), 400);
  } catch (error) {
    if (mine === turn) showError(error.message);
  }
}

// An image size that nobody asked about yet has to be traced first: once the slider has been moved, the sizes beside it
// are asked for while nothing happens.
async function lookAhead(mine) {
  const here = Number(at("image").value);
  for (const image of [here + 1, here - 1]) {
    if (mine !== turn) return;
    if (IMAGE_SIZES[image]) await ask("/plan", planBody({ ...state, image: IMAGE_SIZES[image] }, false)).catch(() => null);
  }
}

function showError(text) {
  at("error").textContent = text;
  at("error").hidden = !text;
}

const card = (name, value, range) => made("div", { className: "card" }, made("div", { className: "name", textContent: name }), made("div", { className: "value", textContent: value }), made("div", { className: "range", textContent: range }));
const cardOf = (name, interval, words) => (interval ? card(name, words(interval.value), range90(interval, words)) : card(name, "-", "not known"));
const range90 = (interval, words) => `90 %: ${say.range(interval, words)}`;

function showPlan(plan) {
  const own = plan.candidates.filter((one) => one.device === state.device);
  const chosen = own.find((one) => one.batch_size_per_device === state.batch);
  if (chosen) showQuick(chosen);
  showCurve(own);
  showDevices(plan);
}

// The values at once; their intervals follow with the exact answer.
function showQuick(one) {
  const cards = [
    card("step", say.duration(one.step_time_s), ""), card("throughput", say.rate(one.throughput_samples_per_s), ""),
    card("epoch", say.duration(one.job_time_s / state.epochs), ""), card("job", say.duration(one.job_time_s), ""),
    card("cost of the job", one.cost_usd === null ? "-" : say.money(one.cost_usd), one.cost_usd === null ? "no price known" : ""),
    card("energy of the job", one.energy_j === null ? "-" : say.energy(one.energy_j), ""),
  ];
  at("cards").replaceChildren(...cards);
}

function showEstimate(estimate) {
  at("cards").replaceChildren(
    cardOf("step", estimate.step_time_s, say.duration), cardOf("throughput", estimate.throughput_samples_per_s, say.rate),
    cardOf("epoch", estimate.epoch_time_s, say.duration), cardOf("job", estimate.job_time_s, say.duration),
    cardOf("cost of the job", estimate.cost_usd, say.money), cardOf("energy of the job", estimate.energy_j, say.energy),
  );
  showMemory(estimate);
  showStep(estimate);
  const rests = [`${estimate.device_title}: ${estimate.provenance}`, `${say.count(estimate.num_parameters)} parameters`, ...estimate.notes];
  at("notes").replaceChildren(...rests.map((text) => made("li", { textContent: text })));
}

function bar(place, parts, whole, limit, words) {
  const shown = parts.filter(([, size]) => size > 0);
  place.replaceChildren(...shown.map(([name, size], i) => {
    const part = made("span", { title: `${name}: ${words(size)}` });
    part.style.width = `${(100 * size) / whole}%`;
    part.style.background = `var(--c${i % 8})`;
    return part;
  }));
  if (limit) {
    const line = made("span", { className: "limit", title: `memory of the device: ${words(limit)}` });
    line.style.left = `calc(${(100 * limit) / whole}% - 3px)`;
    place.append(line);
  }
  place.setAttribute("aria-label", shown.map(([name, size]) => `${name} ${words(size)}`).join(", "));
  const items = shown.map(([name, size], i) => {
    const square = made("i");
    square.style.background = `var(--c${i % 8})`;
    return made("li", {}, square, `${name} ${words(size)}`);
  });
  const legend = made("ul", { className: "legend" }, ...items);
  place.nextElementSibling?.remove();
  place.after(legend);
}

const FITS = { yes: "fits", no: "does not fit", close: "too close to call, may run out of memory" };

function showMemory(estimate) {
  const card = estimate.device_memory_bytes;
  const peak = estimate.peak_memory_bytes;
  const largest = estimate.max_batch_size ? `; largest batch ${estimate.max_batch_size.value.toLocaleString("en")}` : "";
  at("memory-words").textContent = `${say.bytes(peak.value)} of ${say.bytes(card)}: ${FITS[estimate.fits] ?? ""}${largest}`;
  bar(at("memory-bar"), estimate.memory_parts.map((part) => [part.name, part.size_bytes]), Math.max(card, peak.value), card, say.bytes);
}

const BOUND = { compute: "Bound by compute: the arithmetic takes most of the time.", "memory bandwidth": "Bound by memory bandwidth: moving data takes most of the time.", host: "Bound by the host: the device waits for the CPU to launch work; a larger batch costs little." };

function showStep(estimate) {
  at("bound").textContent = BOUND[estimate.bound_by] ?? `Bound by ${estimate.bound_by}.`;
  bar(at("step-bar"), estimate.breakdown.map((part) => [part.name, part.time_s]), estimate.step_time_s.value, 0, say.duration);
}

function showCurve(candidates) {
  const points = candidates.map((one) => {
    const spread = one.step_time_high_s / one.step_time_s;
    return { batch: one.batch_size_per_device, value: one.throughput_samples_per_s, low: one.throughput_samples_per_s / spread, high: one.throughput_samples_per_s * spread };
  });
  charts.throughput(points, state.batch);
}

function showDevices(plan) {
  const found = plan.best_by_device;
  const byCost = found.some((point) => point.cost_usd);
  const second = byCost ? { title: "cost of the job", say: say.money } : { title: "energy of the job", say: say.energy };
  const value = (point) => (byCost ? point.cost_usd : point.energy_j)?.value;
  const drawn = found.filter((point) => value(point) > 0).map((point) => ({ name: point.device, x: point.job_time_s.value, y: value(point), chosen: point.device === plan.chosen?.device }));
  if (drawn.length) charts.devices(drawn, plan.pareto.map((point) => point.device), second);
  showTable(plan, found);
  if (plan.chosen) {
    at("choice").textContent = `Least ${plan.minimize}: ${plan.chosen.device} at batch ${plan.chosen.batch_size_per_device}. ${plan.num_feasible} of ${plan.num_candidates} candidates keep the limits${plan.binding ? `; binding: ${plan.binding}` : ""}.`;
  } else if (plan.nearest_miss) {
    const broken = plan.nearest_miss.broken.map((limit) => `${limit.limit}${limit.excess === null ? " (not known)" : ` by ${say.percent(limit.excess)}`}`);
    at("choice").textContent = `Nothing keeps all limits. Nearest: ${plan.nearest_miss.device} at batch ${plan.nearest_miss.batch_size_per_device}, which breaks ${broken.join(", ")}.`;
  }
}

function showTable(plan, found) {
  const titles = ["device", "batch", "step", "job", "cost", "energy", "memory", "price"];
  at("table").tHead.replaceChildren(made("tr", {}, ...titles.map((title) => made("th", { textContent: title, scope: "col" }))));
  const rows = [...found].sort((a, b) => a.job_time_s.value - b.job_time_s.value).map((point) => {
    const pick = made("button", { type: "button", textContent: point.device, title: "look at this device" });
    pick.addEventListener("click", () => {
      state.device = point.device;
      state.batch = point.batch_size_per_device;
      showControls();
      renew();
    });
    const cells = [
      point.batch_size_per_device, say.duration(point.step_time_s.value), say.duration(point.job_time_s.value), point.cost_usd ? say.money(point.cost_usd.value) : "-",
      point.energy_j ? say.energy(point.energy_j.value) : "-", say.bytes(point.peak_memory_bytes.value), point.price_usd_per_hour === null ? "-" : `${say.money(point.price_usd_per_hour)}/h`,
    ];
    const row = made("tr", { className: point.device === plan.chosen?.device ? "best" : "" }, made("td", {}, pick), ...cells.map((text) => made("td", { textContent: text })));
    row.title = point.price_source ?? "";
    return row;
  });
  at("table").tBodies[0].replaceChildren(...rows);
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
  const [hardware, data] = await Promise.all([ask("/hardware"), ask("/datasets")]);
  devices = hardware.devices.filter((device) => device.kind === "gpu");
  at("device").replaceChildren(...devices.map((device) => made("option", { value: device.name, textContent: device.title })));
  at("dataset").replaceChildren(...data.datasets.map((one) => made("option", { value: one.name, textContent: one.name })));
  const offered = [...new Set([...POPULAR, ...state.compare])];
  at("compare").replaceChildren(...offered.map((value) => made("label", {}, made("input", { type: "checkbox", name: "compare", value }), value)));
  showControls();
  at("controls").addEventListener("input", (event) => event.target.type !== "text" && !["model", "within"].includes(event.target.name) && readControls(event));
  at("controls").addEventListener("change", (event) => ["model", "within"].includes(event.target.name) && readControls(event));
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("copy-command").addEventListener("click", () => copy(toCommand(state), "command"));
  at("copy-link").addEventListener("click", () => copy(location.href, "link"));
  addEventListener("hashchange", () => { state = fromLink(location.hash); showControls(); renew(); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; renew(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renew);
  await renew();
  // The first list takes the server some seconds; nothing waits for it.
  const models = await ask("/models");
  const names = [...models.families.map((family) => family.name), "cnn:depth=4,base_filters=64", ...models.torchvision, ...models.timm];
  at("models").replaceChildren(...names.map((value) => made("option", { value })));
}

begin().catch((error) => showError(error.message));
