// Trainings: charts of what was measured, several trainings in each.

import { chart } from "./curves.js";
import { index, loadTraining } from "./data.js";
import { h, plural } from "./dom.js";

const FIRST = ["reward", "curated_recall", "loss", "entropy", "precision", "turns", "set_size", "gradient", "k3", "rate"];
const AT_ONCE = 6;
const chosenCurves = { names: null, keep: 0.6, hidden: new Set() };

/** The page of all trainings. */
export async function trainingView() {
  const trainings = await Promise.all(index.trainings.map((_, number) => loadTraining(number)));
  const names = [...new Set(trainings.flatMap((each) => [...Object.keys(each.curves), ...Object.keys(each.validation)]))].sort();
  chosenCurves.names = chosenCurves.names || new Set(firstNames(names));
  const charts = h("div", { class: "charts" });
  const update = () => charts.replaceChildren(...[...chosenCurves.names].map((name) => metricChart(name, trainings)).filter(Boolean));
  update();
  return h("div", { class: "training" }, h("h1", {}, "Training"), key(trainings, update), controls(names, update), charts);
}

function firstNames(names) {
  const known = FIRST.filter((name) => names.includes(name));
  return (known.length ? known : names).slice(0, AT_ONCE);
}

function metricChart(name, trainings) {
  const series = trainings
    .map((each, number) => ({ name: each.name, number, line: each.curves[name], points: each.validation[name] }))
    .filter((each) => (each.line || each.points) && !chosenCurves.hidden.has(each.number));
  return series.length ? chart(name, series, chosenCurves.keep, levels(name, trainings)) : null;
}

/** What policies that do not learn measured in a metric, with the index and the reward of a training. */
function levels(name, trainings) {
  const beside = (run) => !run.learned && typeof run.metrics[name]?.mean === "number" && trainings.some((each) => each.reward && each.reward === run.reward && each.indexes.includes(run.index));
  return index.runs.filter(beside).map((run) => ({ name: run.name, value: run.metrics[name].mean }));
}

function key(trainings, update) {
  const toggle = (number) => (event) => {
    if (event.target.checked) chosenCurves.hidden.delete(number);
    else chosenCurves.hidden.add(number);
    update();
  };
  const steps = (each) => Math.max(0, ...Object.values(each.curves).map(([taken]) => taken[taken.length - 1]));
  return h("ul", { class: "series-key" }, trainings.map((each, number) => h("li", {}, h("label", {},
    h("input", { type: "checkbox", checked: !chosenCurves.hidden.has(number), onchange: toggle(number) }),
    h("span", { class: `line-key key-${number % 6}`, "aria-hidden": "true" }), each.name, h("small", {}, ` ${plural(steps(each), "step")}, ${plural(Object.values(each.validation)[0]?.[0].length || 0, "evaluation")}`)))));
}

function controls(names, update) {
  const value = h("output", {}, chosenCurves.keep.toFixed(2));
  const smooth = (event) => {
    chosenCurves.keep = Number(event.target.value);
    value.textContent = chosenCurves.keep.toFixed(2);
    update();
  };
  const pick = (name) => (event) => {
    if (event.target.checked) chosenCurves.names.add(name);
    else chosenCurves.names.delete(name);
    update();
  };
  return h("div", { class: "controls" },
    h("label", {}, "smoothing ", h("input", { type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: chosenCurves.keep, oninput: smooth }), value),
    h("p", { class: "muted" }, "Lines show training; points show evaluations on held-out tasks; dotted lines show policies that do not learn."),
    h("details", {}, h("summary", {}, `${plural(names.length, "metric")} to choose from`), h("div", { class: "metric-choice" }, names.map((name) =>
      h("label", {}, h("input", { type: "checkbox", checked: chosenCurves.names.has(name), onchange: pick(name) }), name)))));
}
