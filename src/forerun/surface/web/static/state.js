// The question: what the controls say, as a link and as a command.

export const BATCH_SIZES = Array.from({ length: 45 }, (_, i) => {
  const octave = Math.floor(i / 4);
  return Math.round(2 ** octave * (1 + (i % 4) / 4));
}).filter((size, i, all) => all.indexOf(size) === i);

export const IMAGE_SIZES = [null, ...Array.from({ length: 32 }, (_, i) => 16 * (i + 1))];

// Numbers of devices of the scaling curve: one machine holds up to sixteen.
export const DEVICE_COUNTS = Array.from({ length: 16 }, (_, i) => i + 1);

export const DEFAULTS = {
  model: "torchvision:resnet50", device: "a100-sxm4-40gb", devices: 1, machines: 1, inter: "infiniband-ndr", parallel: "", precision: "amp", batch: 64, image: null, dataset: "imagenet",
  epochs: 1, tokens: "1B", sequence: 2048, optimizer: "sgd", layout: "nchw", compile: "no", recompute: "none", lora: null, quantize: "none", fused: "none", strategy: "ddp", accumulation: 1, price: null, vendor: "", memory: 0, most: null, within: "", kind: "on-demand", minimize: "time", currency: "USD", compare: ["t4", "l4", "a10g", "v100-sxm2-16gb", "a100-sxm4-40gb", "h100-sxm", "rtx-4090"],
};

export function fromLink(hash) {
  const state = structuredClone(DEFAULTS);
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  for (const [key, value] of given) {
    if (!(key in DEFAULTS)) continue;
    if (key === "compare") state.compare = value.split(",").filter(Boolean);
    else if (key === "batch" || key === "epochs") state[key] = Number(value) > 0 ? Number(value) : DEFAULTS[key];
    else if (key === "devices" || key === "machines") state[key] = Number.isInteger(Number(value)) && Number(value) > 0 ? Number(value) : 1;
    else if (key === "sequence") state.sequence = Math.max(1, Math.round(Number(value)) || DEFAULTS.sequence);
    else if (key === "accumulation") state.accumulation = Math.max(1, Math.round(Number(value)) || 1);
    else if (key === "lora") state.lora = Math.round(Number(value)) > 0 ? Math.round(Number(value)) : null;
    else if (key === "price" || key === "most") state[key] = Number(value) > 0 ? Number(value) : null;
    else if (key === "memory") state.memory = Number(value) > 0 ? Number(value) : 0;
    else if (key === "image") state.image = Number(value) > 0 ? Number(value) : null;
    else state[key] = value;
  }
  return state;
}

export function toLink(state) {
  const said = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (value !== null && String(value) !== String(DEFAULTS[key])) said.set(key, String(value));
  }
  return `#${said}`;
}

const quoted = (word) => (/^[\w.:=,@%+/-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

export const total = (state) => state.devices * state.machines;
const several = (state, name) => (state.machines > 1 ? `${state.machines}x${state.devices}x${name}` : state.devices > 1 ? `${name}x${state.devices}` : name);
// Devices with arithmetic in fp8, the one format that has no slower substitute.
export const devicesOfFp8 = new Set();
// The chosen device and those it is compared with that have the format, as many of each as are asked for.
const compared = (state) => [...new Set([state.device, ...state.compare])].filter((name) => name === state.device || state.precision !== "fp8" || devicesOfFp8.has(name)).map((name) => several(state, name));

// Captured scripts by the name that the server gave them: their title and the name of the file.
export const captures = new Map();
export const isCapture = (state) => state.model.startsWith("capture:");
export const OWN_DATASET = "own";

export function toCommand(state) {
  const model = isCapture(state) ? `capture:${captures.get(state.model)?.file ?? "run.forerun"}` : state.model;
  const words = ["forerun", "plan", model, "--on", compared(state).join(",")];
  words.push("--batch-size", String(state.batch), "--precision", state.precision);
  if (isTokens(state)) words.push("--tokens", state.tokens, "--sequence-length", String(state.sequence));
  else if (isCapture(state) && state.dataset === OWN_DATASET) words.push("--epochs", String(state.epochs));
  else words.push("--dataset", state.dataset, "--epochs", String(state.epochs));
  for (const [name, value] of Object.entries(division(state))) if (value !== null) words.push(`--${name}`, value);
  if (isCapture(state)) return [...words, ...costWords(state)].map(quoted).join(" ");
  if (state.image) words.push("--image-size", String(state.image));
  if (state.optimizer !== "sgd") words.push("--optimizer", state.optimizer);
  if (state.layout !== "nchw") words.push("--layout", state.layout);
  if (state.compile === "yes") words.push("--compile");
  for (const [name, value] of Object.entries(saving(state))) if (value !== null) words.push(`--${name.replace("_", "-")}`, String(value));
  return [...words, ...costWords(state)].map(quoted).join(" ");
}

function costWords(state) {
  const words = [];
  if (sharing(state)) words.push("--strategy", state.strategy);
  if (state.accumulation > 1) words.push("--accumulation", String(state.accumulation));
  if (state.price) words.push("--price", `${state.device}=${state.price}/h`);
  if (state.within.trim()) words.push("--within", state.within);
  if (state.minimize !== "time") words.push("--minimize", state.minimize);
  if (state.kind !== "on-demand") words.push("--price-kind", state.kind);
  if (state.currency !== "USD") words.push("--currency", state.currency.toLowerCase());
  return words;
}

// A model of language trains on tokens, others on a dataset.
export const languageModels = new Set();
export const isTokens = (state) => languageModels.has(state.model) || /^config:/.test(state.model);
const jobBody = (state) => (isCapture(state) && state.dataset === OWN_DATASET ? { epochs: state.epochs } : isTokens(state) ? { tokens: state.tokens, sequence_length: state.sequence } : { dataset: state.dataset, epochs: state.epochs });
const other = (value, usual) => (value === usual ? null : value);
// Adapters and fused kernels are for models of language; weights are quantized beside them only.
const saving = (state) => {
  const lora = isTokens(state) ? state.lora : null;
  return { recompute: other(state.recompute, "none"), lora, quantize: lora ? other(state.quantize, "none") : null, fused_kernels: isTokens(state) ? other(state.fused, "none") : null };
};
// Machines, and the way in which all devices divide a model.
const division = (state) => ({ inter: state.machines > 1 ? state.inter : null, parallel: total(state) > 1 ? state.parallel.replaceAll(" ", "") || null : null });
// A captured script has decided the rest itself.
const ownBody = (state) => (isCapture(state) ? {} : { optimizer: state.optimizer, compile: state.compile === "yes", ...saving(state) });
const sharedBody = (state) => ({ accumulation: state.accumulation, ...ownBody(state), ...division(state), ...jobBody(state) });
const sharing = (state) => (total(state) > 1 ? other(state.strategy, "ddp") : null);
export const adapters = (state) => (state.lora === null ? "all" : state.quantize === "none" ? "lora" : state.quantize);
export const inWords = (state) => {
  const { lora, quantize, recompute, fused_kernels: fused } = saving(state);
  const shared = sharing(state);
  const { parallel } = division(state);
  if (isCapture(state)) return shared ? `, ${shared}` : "";
  return [lora && `${quantize ? `${quantize} ` : ""}LoRA ${lora}`, recompute && `recompute ${recompute}`, fused && `kernels of ${fused}`, shared, parallel].filter(Boolean).map((word) => `, ${word}`).join("");
};
const images = (state) => (isCapture(state) ? {} : { layout: state.layout, image_size: state.image });
const runBody = (state) => ({ model: state.model, device: state.device, batch_size: state.batch, precision: state.precision, ...images(state), ...sharedBody(state) });

// The price is that of one device.
export const predictBody = (state, usdPerHour) => ({ ...runBody(state), num_devices: total(state) > 1 ? total(state) : null, num_nodes: state.machines > 1 ? state.machines : null, strategy: sharing(state), price_usd_per_hour: usdPerHour ?? null });

// The curve holds every number of devices of the slider, so moving it changes the mark only. A layout keeps its axes and
// gets more groups of data, of machines there are up to four times as many.
export function scaleBody(state) {
  const { parallel } = division(state);
  const axes = (parallel ?? "").split(",").filter((axis) => /^(tp|pp|cp)=/.test(axis));
  const least = axes.reduce((product, axis) => product * (Number(axis.split("=")[1]) || 1), state.machines > 1 && !parallel ? state.devices : 1);
  const most = state.machines > 1 ? 4 * total(state) : DEVICE_COUNTS.at(-1);
  const doubled = Array.from({ length: 12 }, (_, i) => least * 2 ** i).filter((number) => number <= most);
  const counts = new Set([...(parallel || state.machines > 1 ? doubled : DEVICE_COUNTS), total(state)]);
  const device = state.machines > 1 ? `${4 * state.machines}x${state.devices}x${state.device}` : state.device;
  return { ...runBody(state), device, parallel: axes.join(",") || null, strategy: other(state.strategy, "ddp"), num_devices: [...counts].sort((a, b) => a - b) };
}

// Every device at every batch size of the slider: the chosen point, the curve and the comparison in one answer.
export function planBody(state, exact) {
  const sizes = [...new Set([...BATCH_SIZES, state.batch])].sort((a, b) => a - b);
  return {
    models: [state.model], devices: compared(state), batch_sizes: sizes,
    precisions: [state.precision], layouts: isCapture(state) ? null : [state.layout], image_sizes: state.image && !isCapture(state) ? [state.image] : [], ...sharedBody(state), strategy: sharing(state),
    price_usd_per_hour: state.price ? { [state.device]: state.price } : null,
    within: state.within.split(",").map((word) => word.trim()).filter(Boolean), minimize: state.minimize,
    price_kinds: [state.kind], num_points: 1, max_rejected: 0, exact,
  };
}
