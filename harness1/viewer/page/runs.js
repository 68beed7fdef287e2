// The head of the list: each run with its metrics and how its episodes ended.

import { index } from "./data.js";
import { hasClass } from "./documents.js";
import { listState } from "./list.js";
import { count, h, num, plural } from "./dom.js";

const SHARES = new Set(["curated_recall", "curated_precision", "curated_f1", "trajectory_recall", "answer_recall", "selection_loss", "nDCG@10"]);

/** Cards of all runs, and what the file leaves out. */
export function runsView(again) {
  const out = index.rows.filter((row) => !row.held);
  const show = () => {
    listState.held = "out";
    again();
  };
  return h("div", {},
    out.length ? h("p", { class: "banner" }, `This file holds ${index.rows.length - out.length} of ${plural(index.rows.length, "episode")}; ${out.length} are left out: they are grey in the list, each with the command that shows it. `,
      h("button", { type: "button", class: "link", id: "show-left-out", onclick: show }, "List them")) : null,
    h("div", { class: "runs" }, index.runs.map(runCard)));
}

function runCard(run, number) {
  const rows = index.rows.filter((row) => row.run === number);
  const folded = index.runs.length > 1 && window.matchMedia("(max-width: 760px)").matches;
  return h("details", { class: "card", open: !folded },
    h("summary", {}, h("h2", {}, index.runs.length > 1 ? h("span", { class: "muted" }, `${number} `) : null, run.name), run.metrics.curated_recall ? h("small", {}, ` recall ${num(run.metrics.curated_recall.mean, 3)}`) : null),
    h("p", { class: "muted" }, [run.policy, [run.dataset, run.split].filter(Boolean).join("/"), plural(rows.length, "episode"), run.status === "finished" ? "" : run.status].filter(Boolean).join(" · ")),
    h("dl", { class: "headline" }, Object.entries(run.metrics).filter(([, value]) => value.mean !== null).map(metric)),
    mix(rows),
    run.notes.map((note) => h("p", { class: "banner" }, note)));
}

function metric([name, { mean, low, high }]) {
  const decimals = SHARES.has(name) ? 3 : 2;
  const shown = (value) => (mean >= 1000 ? count(value) : num(value, decimals));
  const percent = (value) => `${Math.max(0, Math.min(1, value)) * 100}%`;
  const bar = SHARES.has(name) ? h("span", { class: "interval", "aria-hidden": "true" },
    h("span", { style: { left: percent(low), width: `calc(${percent(high)} - ${percent(low)})` } }),
    h("i", { style: { left: percent(mean) } })) : null;
  return h("div", {}, h("dt", {}, name.replaceAll("_", " ")),
    h("dd", {}, h("b", {}, shown(mean)), h("small", {}, `${shown(low)} to ${shown(high)}`), bar));
}

/** How the episodes fell into classes, as one bar and in words. */
function mix(rows) {
  const counts = Object.keys(index.classes).map((name) => [name, rows.filter((row) => row.failure === name).length]).filter(([, many]) => many);
  if (!rows.some(hasClass)) return null;
  return h("div", { class: "mix" },
    h("div", { class: "mix-bar", "aria-hidden": "true" }, counts.map(([name, many]) => h("span", { class: `fill-${name}`, style: { flexGrow: many } }))),
    h("p", {}, counts.map(([name, many]) => h("span", { class: `class class-${name}`, title: index.classes[name] }, `${name} ${many}`))));
}
