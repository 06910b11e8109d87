// Quantities as people say them; the same words as the command line prints.

const three = (value) => {
  if (value === 0) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en", { minimumFractionDigits: Math.min(digits, 20), maximumFractionDigits: Math.min(digits, 20) });
};

const scaled = (value, steps) => {
  const [size, unit] = steps.find(([size]) => Math.abs(value) >= size) ?? steps.at(-1);
  return `${three(value / size)} ${unit}`.trim();
};

export const duration = (s) => {
  for (const [unit, upper, name] of [[1e-6, 1e-3, "µs"], [1e-3, 1, "ms"], [1, 120, "s"], [60, 7200, "min"], [3600, 172800, "h"]]) {
    if (s < upper) return `${three(s / unit)} ${name}`;
  }
  return `${three(s / 86400)} d`;
};
export const bytes = (n) => scaled(n, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [1024, "KiB"], [1, "B"]]);
export const count = (n) => scaled(n, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]]);
export const rate = (n) => `${count(n)} samples/s`;

// Amounts come in US dollars and are shown in the chosen currency.
let currency = { sign: "$", usd: 1 };
export const showIn = (one) => { currency = one; };
export const sign = () => currency.sign;
export const inCurrency = (usd) => usd / currency.usd;
export const amount = (value) => {
  const digits = value >= 1000 ? Math.round(value).toLocaleString("en") : value >= 1 || value === 0 ? value.toFixed(2) : three(value).replace(/(\.\d\d+?)0+$/, "$1");
  return `${currency.sign}${digits}`;
};
export const money = (usd) => amount(inCurrency(usd));
export const price = (usd) => `${currency.sign}${inCurrency(usd).toFixed(2)}`;
// Energies that stand beside one another have the unit of one of them.
export const energyLike = (like) => (j) => {
  const [size, unit] = [[3.6e6, "kWh"], [3600, "Wh"], [1, "J"]].find(([least]) => like >= least || least === 1);
  return `${three(j / size)} ${unit}`;
};
export const energy = (j) => energyLike(j)(j);
export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

export const range = (interval, say) => {
  const [low, high] = [say(interval.low), say(interval.high)];
  const unit = low.split(" ")[1];
  return `${unit && unit === high.split(" ")[1] ? low.split(" ")[0] : low} to ${high}`;
};
