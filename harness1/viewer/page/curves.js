// One chart of a metric: a line for each training, its evaluations as points; read by pointer or by keys.

import { announce, h, svg } from "./dom.js";

const WIDTH_OF_CHART = 520;
const HEIGHT = 240;
const PAD = { left: 56, right: 12, top: 12, bottom: 30 };
const TICKS = 4;

/** A moving average with exponential weights, corrected for its beginning (Kingma and Ba 2015, section 3). */
function smoothed(values, keep) {
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
}

/** Round numbers that divide a range. */
function ticks(low, high) {
  const rough = (high - low) / TICKS || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => (first + at) * step);
}

function label(value) {
  const size = Math.abs(value);
  return size !== 0 && (size >= 1e5 || size < 1e-3) ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}

/** Draw a chart. `series` are `{name, number, line: [steps, values], points: [steps, values]}`; either may be missing.
 * `levels` are `{name, value}`. */
export function chart(title, series, keep, levels) {
  const drawn = series.map((each) => ({ ...each, smooth: each.line ? smoothed(each.line[1], keep) : null }));
  const xs = drawn.flatMap((each) => [...(each.line?.[0] || []), ...(each.points?.[0] || [])]);
  const ys = [...drawn.flatMap((each) => [...(each.line?.[1] || []), ...(each.points?.[1] || [])]), ...levels.map((level) => level.value)];
  const [x0, x1, y0, y1] = [least(xs), most(xs), least(ys), most(ys)];
  const room = y1 > y0 ? (y1 - y0) * 0.06 : Math.abs(y0) * 0.1 || 1;
  const [low, high] = [y0 - room, y1 + room];
  const x = (step) => PAD.left + ((step - x0) / (x1 - x0 || 1)) * (WIDTH_OF_CHART - PAD.left - PAD.right);
  const y = (value) => HEIGHT - PAD.bottom - ((value - low) / (high - low)) * (HEIGHT - PAD.top - PAD.bottom);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH_OF_CHART} ${HEIGHT}`, tabindex: 0, role: "img", "aria-label": `${title}: ${described(drawn, levels)}. Arrow keys read it step by step.` },
    ticks(low, high).map((value) => [svg("line", { class: "grid", x1: PAD.left, x2: WIDTH_OF_CHART - PAD.right, y1: y(value), y2: y(value) }), svg("text", { class: "tick", x: PAD.left - 6, y: y(value) + 4, "text-anchor": "end" }, label(value))]),
    ticks(x0, x1).filter(Number.isInteger).map((step) => svg("text", { class: "tick", x: x(step), y: HEIGHT - 10, "text-anchor": "middle" }, label(step))),
    levels.map(({ name, value }) => [svg("line", { class: "level", x1: PAD.left, x2: WIDTH_OF_CHART - PAD.right, y1: y(value), y2: y(value) }), svg("text", { class: "tick", x: WIDTH_OF_CHART - PAD.right, y: y(value) - 4, "text-anchor": "end" }, `${name} ${label(Number(value.toPrecision(3)))}`)]),
    drawn.map((each) => lines(each, x, y, keep)));
  const cursor = svg("line", { class: "cursor", y1: PAD.top, y2: HEIGHT - PAD.bottom, visibility: "hidden" });
  picture.append(cursor);
  const reading = h("p", { class: "reading", "aria-hidden": "true" }, "\u00a0");
  reads(picture, cursor, reading, drawn, x, [...new Set(xs)].sort((a, b) => a - b));
  return h("figure", { class: "chart" }, h("figcaption", {}, title), picture, reading);
}

function least(values) {
  return values.reduce((low, value) => Math.min(low, value), Infinity);
}

function most(values) {
  return values.reduce((high, value) => Math.max(high, value), -Infinity);
}

function described(drawn, levels) {
  const beside = levels.map(({ name, value }) => `${name} at ${label(value)}`);
  return [...drawn.map((each) => {
    const values = each.points?.[1] || each.line[1];
    return `${each.name} from ${label(values[0])} to ${label(values[values.length - 1])}`;
  }), ...beside].join("; ");
}

function lines(each, x, y, keep) {
  const path = (steps, values) => values.map((value, at) => `${at ? "L" : "M"}${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const look = `series-${each.number % 6}`;
  const [steps, values] = each.points || [[], []];
  return svg("g", { class: look },
    each.line && keep > 0 ? svg("path", { class: "raw", d: path(...each.line) }) : null,
    each.line ? svg("path", { class: "curve", d: path(each.line[0], each.smooth) }) : null,
    steps.length > 1 ? svg("path", { class: "between", d: path(steps, values) }) : null,
    steps.map((step, at) => svg("circle", { cx: x(step), cy: y(values[at]), r: 4 })));
}

/** Let pointer and arrow keys walk over the steps. */
function reads(picture, cursor, reading, drawn, x, steps) {
  let at = -1;
  const show = (place, aloud) => {
    at = Math.max(0, Math.min(steps.length - 1, place));
    const step = steps[at];
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    const parts = drawn.map((each) => valueAt(each, step)).filter(Boolean);
    reading.textContent = `step ${step}: ${parts.join("; ")}`;
    if (aloud) announce(reading.textContent);
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const wanted = ((event.clientX - box.left) / box.width) * WIDTH_OF_CHART;
    let best = 0;
    steps.forEach((step, place) => { if (Math.abs(x(step) - wanted) < Math.abs(x(steps[best]) - wanted)) best = place; });
    show(best, false);
  });
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: steps.length - 1 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    show(move, true);
  });
}

function valueAt(each, step) {
  const line = each.line ? each.line[0].indexOf(step) : -1;
  const point = each.points ? each.points[0].indexOf(step) : -1;
  const told = [line >= 0 ? label(each.smooth[line]) : "", point >= 0 ? `held out ${label(each.points[1][point])}` : ""].filter(Boolean);
  return told.length ? `${each.name} ${told.join(", ")}` : "";
}
