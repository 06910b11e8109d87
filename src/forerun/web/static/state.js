// The question: what the controls say, as a link and as a command.

export const BATCH_SIZES = Array.from({ length: 45 }, (_, i) => {
  const octave = Math.floor(i / 4);
  return Math.round(2 ** octave * (1 + (i % 4) / 4));
}).filter((size, i, all) => all.indexOf(size) === i);

export const IMAGE_SIZES = [null, ...Array.from({ length: 32 }, (_, i) => 16 * (i + 1))];

export const DEFAULTS = {
  model: "torchvision:resnet50", device: "a100-sxm4-40gb", precision: "amp", batch: 64, image: null, dataset: "imagenet",
  epochs: 1, within: "", kind: "on-demand", minimize: "time", compare: ["t4", "l4", "a10g", "v100-sxm2-16gb", "a100-sxm4-40gb", "h100-sxm", "rtx-4090"],
};

export function fromLink(hash) {
  const state = structuredClone(DEFAULTS);
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  for (const [key, value] of given) {
    if (!(key in DEFAULTS)) continue;
    if (key === "compare") state.compare = value.split(",").filter(Boolean);
    else if (key === "batch" || key === "epochs") state[key] = Number(value) > 0 ? Number(value) : DEFAULTS[key];
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

export function toCommand(state) {
  const words = ["forerun", "plan", state.model, "--on", [state.device, ...state.compare.filter((d) => d !== state.device)].join(",")];
  words.push("--batch-size", String(state.batch), "--precision", state.precision, "--dataset", state.dataset, "--epochs", String(state.epochs));
  if (state.image) words.push("--image-size", String(state.image));
  if (state.within.trim()) words.push("--within", state.within);
  if (state.minimize !== "time") words.push("--minimize", state.minimize);
  if (state.kind !== "on-demand") words.push("--price-kind", state.kind);
  return words.map(quoted).join(" ");
}

export function predictBody(state, usdPerHour) {
  return {
    model: state.model, device: state.device, batch_size: state.batch, precision: state.precision, image_size: state.image,
    dataset: state.dataset, epochs: state.epochs, price_usd_per_hour: usdPerHour ?? null,
  };
}

// Every device at every batch size of the slider: the chosen point, the curve and the comparison in one answer.
export function planBody(state, exact) {
  const sizes = [...new Set([...BATCH_SIZES, state.batch])].sort((a, b) => a - b);
  return {
    models: [state.model], devices: [...new Set([state.device, ...state.compare])], batch_sizes: sizes,
    precisions: [state.precision], image_sizes: state.image ? [state.image] : [], dataset: state.dataset, epochs: state.epochs,
    within: state.within.split(",").map((word) => word.trim()).filter(Boolean), minimize: state.minimize,
    price_kinds: [state.kind], num_points: 1, max_rejected: 0, exact,
  };
}
