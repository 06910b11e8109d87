// The charts, on uPlot.

/* global uPlot */
import * as say from "/static/words.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const axis = (label, values, upright) => ({
  label, values, stroke: css("--ink"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, labelSize: 22, size: upright ? widest : 32,
});
// Room for the longest of the marks beside an axis: small amounts of money have many digits.
function widest(plot, marks, index) {
  const { font, ticks, gap } = plot.axes[index];
  plot.ctx.font = font[0];
  return Math.ceil(ticks.size + gap + 8 + Math.max(26, ...(marks ?? []).map((mark) => plot.ctx.measureText(mark).width / devicePixelRatio)));
}

// Durations that people count in.
const DURATIONS = [1e-3, 1e-2, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 72000, 86400, 172800, 432000, 864000, 1728000, 4320000, 8640000];
// Marks of an axis of decades, those left out that stand too close to the one before.
const spaced = (values, low, high, length, least) => {
  const place = (v) => (length * Math.log(v / low)) / Math.log(high / low);
  return values.filter((v) => v >= low && v <= high).reduce((found, v) => (found.length && place(v) - place(found.at(-1)) < least ? found : [...found, v]), []);
};
const durations = (plot, index, low, high) => spaced(DURATIONS, low, high, plot.width - 80, 70);
// The values that people name: 1, 2, 3, 5 and 7 of every decade.
const rounds = (plot, index, low, high) => {
  const decades = Array.from({ length: Math.ceil(Math.log10(high / low)) + 2 }, (_, i) => Math.floor(Math.log10(low)) + i);
  return spaced(decades.flatMap((decade) => [1, 2, 3, 5, 7].map((digit) => Number(`${digit}e${decade}`))), low, high, 220, 20);
};
const short = (s) => say.duration(s).replace(/\.0+(?= )/, "");
const kept = new Map();

function draw(id, options, data) {
  const place = document.getElementById(id);
  kept.get(id)?.destroy();
  place.replaceChildren();
  const plot = new uPlot({ width: Math.max(240, place.clientWidth), height: 270, ...options }, data, place);
  kept.set(id, plot);
  return plot;
}

// Throughput with its 90 % band against what grows along x; a dashed line stands beside it where one is given.
function curve(id, x, points, chosen, line) {
  const xs = points.map((point) => point.x);
  const rate = (_, v) => (v == null ? "" : say.rate(v));
  const hidden = (label) => ({ label, stroke: "transparent", points: { show: false }, value: rate });
  const series = [
    { label: x.short },
    hidden("high"),
    hidden("low"),
    { label: "predicted", stroke: css("--c0"), width: 2, points: { show: true, size: 5 }, value: rate },
    { label: "chosen", stroke: css("--c1"), points: { show: true, size: 13, width: 3, fill: "transparent" }, paths: () => null, value: rate },
  ];
  const data = [xs, points.map((p) => p.high), points.map((p) => p.low), points.map((p) => p.value), xs.map((at, i) => (at === chosen ? points[i].value : null))];
  if (line) {
    series.push({ label: line.label, stroke: css("--soft"), width: 1.5, dash: [6, 4], points: { show: false }, value: rate });
    data.push(xs.map(line.at));
  }
  const plot = draw(id, {
    scales: { x: { time: false, ...x.scale }, y: { range: (_, low, high) => [0, high * 1.08] } },
    axes: [{ ...axis(x.title, (_, splits) => splits.map((v) => (v == null || !x.isTick(v) ? "" : String(v)))), ...x.axis }, axis("samples/s", (_, splits) => splits.map((v) => (v == null ? "" : say.count(v))), true)],
    series,
    bands: [{ series: [1, 2], fill: `color-mix(in srgb, ${css("--c0")} 22%, transparent)` }],
    legend: { show: false },
    hooks: { draw: [(plot) => labels(plot, points, chosen, line)], setCursor: [(plot) => tell(plot, x.short, points)] },
  }, data);
  const here = points.find((point) => point.x === chosen);
  plot.root.setAttribute("role", "img");
  plot.root.setAttribute("aria-label", here ? `${x.short} ${here.x}: ${said(here)}` : x.title);
}

const said = (point) => `${say.rate(point.value)} (${say.rate(point.low)} to ${say.rate(point.high)})`;

// The lines are named where they are: the chosen point, the band at its end, and the line beside it; each at the first
// of its spots that no name before it has.
function labels(plot, points, chosen, line) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  const taken = [];
  const put = (text, colour, ...spots) => {
    const width = ctx.measureText(text).width;
    const boxes = spots.map(([x, y]) => {
      const left = Math.min(Math.max(x, bbox.left), bbox.left + bbox.width - width);
      const middle = Math.min(Math.max(y, bbox.top + 8 * ratio), bbox.top + bbox.height - 6 * ratio);
      return [left, middle - 7 * ratio, left + width, middle + 7 * ratio];
    });
    const box = boxes.find((one) => !taken.some((other) => overlap(one, other))) ?? boxes[0];
    taken.push(box);
    ctx.fillStyle = colour;
    ctx.fillText(text, box[0], (box[1] + box[3]) / 2);
  };
  ctx.save();
  ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  const place = (x, y) => [plot.valToPos(x, "x", true), plot.valToPos(y, "y", true)];
  const here = points.find((point) => point.x === chosen);
  if (line && points.length) {
    const end = points.at(-1);
    const [x, y] = place(end.x, line.at(end.x));
    put(line.label, css("--soft"), [x - 40 * ratio, y - 14 * ratio]);
  }
  if (points.length > 2) {
    const end = points.at(-1);
    const [x, y] = place(end.x, end.low);
    put("90 % band", css("--c0"), [x - 70 * ratio, y + 16 * ratio]);
  }
  if (here) {
    const [x, y] = place(here.x, here.value);
    const isLow = y + 24 * ratio > bbox.top + bbox.height;
    put(`${here.x}: ${say.rate(here.value)}`, css("--ink"), isLow ? [x, y - 38 * ratio] : [x + 12 * ratio, y + 18 * ratio], [x + 12 * ratio, y + 38 * ratio], [x - 130 * ratio, y - 24 * ratio]);
  }
  ctx.restore();
}

// Beside the pointer: the point below it.
function tell(plot, name, points) {
  const point = points[plot.cursor.idx];
  let tip = plot.over.querySelector(".tip");
  if (!point || plot.cursor.left < 0) { tip?.remove(); return; }
  if (!tip) { tip = document.createElement("div"); tip.className = "tip"; plot.over.append(tip); }
  tip.textContent = `${name} ${point.x}: ${said(point)}`;
  const isRight = plot.cursor.left > plot.over.clientWidth / 2;
  tip.style.left = isRight ? "auto" : `${plot.cursor.left + 12}px`;
  tip.style.right = isRight ? `${plot.over.clientWidth - plot.cursor.left + 12}px` : "auto";
  tip.style.top = "4px";
}

// Batches that do not fit are left out of the points.
export const throughput = (points, chosen) => curve("rate-chart", { title: "batch size", short: "batch", scale: { distr: 3, log: 2 }, isTick: (v) => Math.log2(v) % 1 === 0 }, points, chosen);

// What the devices would bring if none waited for another is the straight line.
export const scaling = (points, chosen) => curve("scale-chart", { title: "devices", short: "devices", scale: {}, isTick: Number.isInteger, axis: { incrs: [1, 2, 4, 8, 16, 32, 64] } }, points, chosen, { label: "linear", at: (number) => (number * points[0].value) / points[0].x });

export function noScaling() {
  kept.get("scale-chart")?.destroy();
  kept.delete("scale-chart");
  document.getElementById("scale-chart").replaceChildren();
}

// One point per device, its name beside it; the front is joined by a line.
export function devices(points, front, bySecond) {
  const sorted = [...points].sort((a, b) => a.x - b.x);
  const x = sorted.map((point) => point.x);
  const onFront = new Set(front);
  const series = sorted.map((point, i) => ({
    label: point.name, stroke: css(`--c${i % 8}`), points: { show: true, size: point.chosen ? 15 : 10, width: 3, fill: onFront.has(point.name) ? css(`--c${i % 8}`) : "transparent" }, paths: () => null,
    value: (_, v) => (v == null ? "" : bySecond.say(v)),
  }));
  const columns = sorted.map((point) => sorted.map((other) => (other === point ? point.y : null)));
  const line = sorted.map((point) => (onFront.has(point.name) ? point.y : null));
  const spread = (low, high) => [low / 1.35, high * 1.35];
  draw("compare-chart", {
    scales: { x: { time: false, distr: 3, range: (_, low, high) => spread(low, high) }, y: { distr: 3, range: (_, low, high) => spread(low, high) } },
    axes: [{ ...axis("time of the job", (_, splits) => splits.map(short)), splits: durations, filter: (_, splits) => splits }, { ...axis(bySecond.title, (_, splits) => splits.map((v) => bySecond.say(v).replace(/\.00$/, "")), true), splits: rounds, filter: (_, splits) => splits }],
    legend: { show: false },
    series: [
      { label: "time" },
      { label: "front", stroke: css("--soft"), dash: [6, 4], spanGaps: true, points: { show: false } },
      ...series,
    ],
    hooks: { draw: [(plot) => names(plot, sorted)] },
  }, [x, line, ...columns]);
}

// Each name goes to the first place beside its point that is free of other names and points, the nearest one if none is.
function names(plot, points) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.fillStyle = css("--ink");
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  const spots = points.map((point) => [plot.valToPos(point.x, "x", true), plot.valToPos(point.y, "y", true)]);
  const taken = spots.map(([x, y]) => [x - 8 * ratio, y - 8 * ratio, x + 8 * ratio, y + 8 * ratio]);
  points.forEach((point, i) => {
    const width = ctx.measureText(point.name).width;
    const places = around(...spots[i], width, ratio).filter(([left, , right]) => left >= bbox.left && right <= bbox.left + bbox.width + 8 * ratio);
    const place = places.find((box) => !taken.some((other) => overlap(box, other))) ?? places[0];
    if (!place) return;
    taken.push(place);
    ctx.fillText(point.name, place[0], (place[1] + place[3]) / 2);
  });
  ctx.restore();
}

// Boxes for a text beside, above and below a point: left, top, right, bottom.
function around(x, y, width, ratio) {
  const [gap, half, lift] = [11 * ratio, 7 * ratio, 17 * ratio];
  const lefts = [[x + gap, 0], [x - gap - width, 0], [x - width / 2, -lift], [x - width / 2, lift], [x + gap, -lift], [x + gap, lift], [x - gap - width, -lift], [x - gap - width, lift]];
  return lefts.map(([left, shift]) => [left, y + shift - half, left + width, y + shift + half]);
}

const overlap = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
