// Recipes: their stages in order, what each gate found, and the way to the episodes and curves of each.

import { index } from "./data.js";
import { count, h, num, plural } from "./dom.js";

const STATUS_SIGNS = { passed: "✓", failed: "✗", running: "▶", stopped: "■", "to come": "·" };
const MEASURES = ["reward", "curated_recall", "curated_precision", "set_size", "turns"];
const TICK_MS = 1000;
const leftOpen = new Map();

/** The page of all recipes. */
export function recipesView() {
  return h("div", { class: "recipes" }, index.recipes.map(recipeView));
}

function recipeView(recipe) {
  const done = recipe.stages.filter((stage) => stage.status === "passed").length;
  return h("div", { class: "recipe" },
    h("h1", {}, recipe.name, " ", h("small", {}, recipe.title)),
    h("p", { class: "progress-line", role: "status" }, h("progress", { max: recipe.stages.length, value: done, "aria-label": "stages that passed" }), ` ${done} of ${plural(recipe.stages.length, "stage")} passed`, endOf(recipe)),
    measuresView(recipe),
    h("section", { "aria-label": "Stages" }, h("h2", {}, "Stages"), h("ol", { class: "stages" }, recipe.stages.map(stageView))));
}

/** How a recipe has ended, or how long it still takes. */
function endOf({ stages }) {
  const at = (status) => stages.find((stage) => stage.status === status);
  const failed = at("failed");
  if (failed) return h("b", { class: "error" }, ` ${failed.name} failed`);
  if (at("stopped")) return h("b", { class: "warn" }, ` ${at("stopped").name} was stopped: the same command goes on from there`);
  if (!at("running")) return null;
  const left = () => {
    const rest = stages.reduce((sum, stage) => sum + Math.max(0, stage.expected - (stage.status === "running" ? elapsed(stage) : 0)), 0);
    return rest ? ` · about ${inWords(rest)} left` : "";
  };
  return ticking(left);
}

function stageView(stage) {
  const failed = stage.findings.filter((finding) => !finding.passed).length;
  const gates = stage.findings.length ? kept(`${stage.folder} gates`, failed > 0, `${plural(stage.findings.length, "gate")}${failed ? `, ${failed} failed` : ""}`,
    h("ul", {}, stage.findings.map(findingView))) : null;
  return h("li", { class: `stage stage-${stage.status.replace(" ", "-")}` },
    h("span", { class: "sign", role: "img", "aria-label": stage.status }, STATUS_SIGNS[stage.status]),
    h("div", {},
      h("h3", {}, stage.name, " ", h("small", {}, stage.status === "passed" ? "" : `${stage.status} `, timeOf(stage)), linkOf(stage)),
      stage.says ? h("p", {}, stage.says) : null,
      stage.status === "failed" && !failed ? h("p", { class: "error" }, `its command ended with exit code ${stage.exit}`) : null,
      gates,
      stage.command ? kept(`${stage.folder} command`, false, "command", h("pre", {}, stage.command)) : null));
}

/** A part that stays open or closed as the reader left it, when the page is made again. */
function kept(id, open, label, content) {
  const part = h("details", { class: id.split(" ").at(-1), open: leftOpen.get(id) ?? open }, h("summary", { id, onclick: () => leftOpen.set(id, !part.open) }, label), content);
  return part;
}

function findingView({ gate, says, value, bound, passed, look }) {
  const shown = (number) => (number === null ? "not finite" : String(Number(number.toPrecision(4))));
  return h("li", { class: passed ? "" : "error" }, `${passed ? "✓" : "✗"} `, h("b", {}, gate), `: ${says}: ${shown(value)}, bound ${shown(bound)}`,
    passed || !look ? null : h("code", {}, ` ${look}`));
}

function timeOf(stage) {
  if (stage.status === "running") return ticking(() => `for ${inWords(elapsed(stage))}`);
  if (stage.status === "to come") return stage.expected ? `about ${inWords(stage.expected)}` : "";
  return inWords(stage.seconds);
}

function elapsed(stage) {
  return stage.seconds + Math.max(0, Date.now() / 1000 - stage.began);
}

function inWords(seconds) {
  return seconds >= 90 ? `${count(seconds / 60)} min` : `${seconds < 10 ? num(seconds, 1) : count(seconds)} s`;
}

/** A text that is made again every second, as long as it is on the page. */
function ticking(text) {
  const place = h("span", {}, text());
  const timer = setInterval(() => (place.isConnected ? (place.textContent = text()) : clearInterval(timer)), TICK_MS);
  return place;
}

/** The way from a stage to its episodes or curves. */
function linkOf(stage) {
  const run = index.runs.findIndex((each) => each.folder === stage.folder || each.folder === `${stage.folder}/episodes`);
  const links = [];
  if (run >= 0) links.push(h("a", { href: `#run/${run}` }, plural(index.rows.filter((row) => row.run === run).length, "episode")));
  if (index.trainings.some((each) => each.folder === stage.folder)) links.push(h("a", { href: "#training" }, "curves"));
  return links.length ? h("span", { class: "stage-links" }, links) : null;
}

/** What each evaluation measured, side by side. */
function measuresView({ stages }) {
  const measured = stages.filter((stage) => index.runs.some((run) => run.folder === stage.folder && run.split) && MEASURES.some((name) => name in (stage.metrics || {})));
  if (!measured.length) return null;
  const names = MEASURES.filter((name) => measured.some((stage) => name in stage.metrics));
  return h("section", { "aria-label": "Measures" }, h("h2", {}, "Measures"), h("div", { class: "measures-frame", tabindex: 0, role: "region", "aria-label": "What each stage measured" },
    h("table", { class: "measures" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "stage"), names.map((name) => h("th", { scope: "col" }, name.replaceAll("_", " "))))),
      h("tbody", {}, measured.map((stage) => h("tr", {}, h("th", { scope: "row" }, stage.name), names.map((name) => h("td", {}, num(stage.metrics[name])))))))));
}
