// Two runs task by task: the statistics of `harness1 compare`, and the tasks where they differ, the largest change first.

import { index } from "./data.js";
import { count, h, num, plural } from "./dom.js";
import { address } from "./route.js";

const SAME = 1e-9;
const AT_A_TIME = 200;
const AMOUNTS = new Set(["set_size", "turns", "prompt_tokens", "prefill_tokens"]);
const SHOWN = {
  differ: ["where they differ", (pair) => pair.differs],
  recall: ["where recall differs", (pair) => Math.abs(pair.recall ?? 0) > SAME],
  all: ["all tasks", () => true],
};
const pairState = { first: 0, second: 1, shown: "differ", text: "" };

/** Return whether a file has two runs of the same tasks. */
export function hasPairs() {
  return index.pairs.length > 0;
}

/** The page of pairs. */
export function pairsView() {
  const { first, second } = index.pairs[0] || { first: 0, second: 1 };
  if (!partners(pairState.first, pairState.second).length) Object.assign(pairState, { first, second });
  const body = h("div", {});
  const update = () => body.replaceChildren(statisticsView(), ...tasksView());
  update();
  return h("div", { class: "pairs" }, h("h1", {}, "Runs task by task"), choices(update), body);
}

function choices(update) {
  const choose = (name, label) => h("label", {}, h("span", {}, label), h("select", { id: `pair-${name}`, onchange: (event) => {
    pairState[name] = Number(event.target.value);
    update();
  } }, index.runs.map((run, number) => h("option", { value: number, selected: pairState[name] === number }, `${number} ${run.name}`))));
  const show = (event) => {
    pairState.shown = event.target.value;
    update();
  };
  return h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() }, choose("first", "first run"), choose("second", "second run"),
    h("label", { class: "wide" }, h("span", {}, "search"), h("input", { type: "search", id: "search", placeholder: "task or question  ( / )", value: pairState.text, oninput: (event) => {
      pairState.text = event.target.value;
      update();
    } })),
    h("label", {}, h("span", {}, "show"), h("select", { id: "pair-shown", onchange: show }, Object.entries(SHOWN).map(([value, [words]]) => h("option", { value, selected: pairState.shown === value }, words)))));
}

/** Tasks that both runs have: the episodes of both, in the order of their samples, and what differs. */
function partners(first, second) {
  const byTask = new Map();
  for (const row of index.rows) {
    if (row.run !== first && row.run !== second) continue;
    if (!byTask.has(row.task)) byTask.set(row.task, { task: row.task, query: row.query, words: `${row.task} ${row.query}`.toLowerCase(), a: [], b: [] });
    const pair = byTask.get(row.task);
    if (row.run === first) pair.a.push(row);
    if (row.run === second) pair.b.push(row);
  }
  return [...byTask.values()].filter((pair) => first !== second && pair.a.length && pair.b.length).map(compared);
}

function compared(pair) {
  const gap = (name) => {
    const [a, b] = [mean(pair.a, name), mean(pair.b, name)];
    return a === null || b === null ? null : b - a;
  };
  const sets = (rows) => rows.map((row) => row.delivered).join(" ");
  const recall = gap("recall");
  const sameSet = sets(pair.a) === sets(pair.b);
  return { ...pair, recall, seen: gap("trajectory"), reward: gap("reward"), sameSet, differs: !sameSet || Math.abs(recall ?? 0) > SAME };
}

function mean(rows, name) {
  const values = rows.map((row) => row[name]).filter((value) => value !== null);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function signedGap(value, decimals) {
  if (value === null) return "–";
  const rounded = Number(value.toFixed(decimals));
  return `${rounded > 0 ? "+" : rounded < 0 ? "−" : ""}${Math.abs(value).toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })}`;
}

/** The paired differences, which were computed when the file was written. */
function statisticsView() {
  const { first, second } = pairState;
  const turned = index.pairs.find((pair) => pair.first === second && pair.second === first);
  const found = index.pairs.find((pair) => pair.first === first && pair.second === second) || turned;
  if (!found) return h("p", { class: "banner" }, first === second ? "Choose two runs." : "This file has no statistics of these two: they are not of the same tasks, or there are many runs. `harness1 compare` may compute them.");
  const names = [first, second].map((number) => index.runs[number].name);
  const row = ([name, [a, b, difference, low, high, p]]) => {
    const decimals = !AMOUNTS.has(name) ? 3 : Math.max(Math.abs(a), Math.abs(b)) < 1000 ? 1 : 0;
    const [from, to] = turned ? [-high, -low] : [low, high];
    const sides = (turned ? [b, a] : [a, b]).map((value) => h("td", {}, value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })));
    return h("tr", { class: p < 0.05 ? "significant" : "" }, h("th", { scope: "row" }, name.replaceAll("_", " ")), sides, h("td", { class: "gap" }, signedGap(turned ? -difference : difference, decimals)),
      h("td", {}, `${signedGap(from, decimals)} to ${signedGap(to, decimals)}`), h("td", {}, p < 0.001 ? "< 0.001" : num(p, 3)));
  };
  return h("div", { class: "card" }, h("p", { class: "muted" }, `${plural(found.tasks, "common task")}; differences are those of the second run from the first, with 95 % intervals by the bootstrap over tasks and two-sided p-values of paired randomisation tests${index.runs.length > 2 ? ", corrected for the number of runs" : ""}.`),
    h("div", { class: "frame", tabindex: 0, role: "region", "aria-label": "paired differences" }, h("table", { class: "statistics" }, h("caption", { class: "unseen" }, "Paired differences"),
      h("thead", {}, h("tr", {}, ["metric", ...names, "difference", "95 % interval", "p"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, Object.entries(found.metrics).map(row)))));
}

function tasksView() {
  const every = partners(pairState.first, pairState.second);
  const words = pairState.text.toLowerCase().split(/\s+/);
  const shown = every.filter((pair) => SHOWN[pairState.shown][1](pair) && words.every((word) => pair.words.includes(word)));
  const size = (value) => Math.abs(value ?? 0);
  shown.sort((a, b) => size(b.recall) - size(a.recall) || size(b.seen) - size(a.seen) || size(b.reward) - size(a.reward) || (a.task < b.task ? -1 : 1));
  const [higher, lower] = [1, -1].map((sign) => every.filter((pair) => sign * (pair.recall ?? 0) > SAME).length);
  const total = `${count(shown.length)} of ${plural(every.length, "task")}; recall of the second is higher in ${higher}, lower in ${lower}, equal in ${every.length - higher - lower}; ${every.filter((pair) => !pair.sameSet).length} delivered other sets.`;
  const body = h("tbody", {}, shown.slice(0, AT_A_TIME).map(pairRow));
  const rest = shown.slice(AT_A_TIME);
  const more = h("button", { type: "button", class: "link", onclick: () => {
    body.append(...rest.map(pairRow));
    more.remove();
  } }, `${plural(rest.length, "further task")}`);
  const heads = [["task", "task"], ["query", "question"], ["a", "recall, first"], ["b", "second"], ["gap", "difference"], ["seen", "change in seen"], ["set", "sets"]];
  return [h("p", { class: "total", role: "status" }, total),
    h("div", { class: "list-frame" }, h("table", { class: "list pair-list" }, h("caption", { class: "unseen" }, "Tasks of both runs"),
      h("thead", {}, h("tr", {}, heads.map(([name, label]) => h("th", { scope: "col", class: `c-${name}` }, label)))), body)),
    rest.length ? more : null].filter(Boolean);
}

function pairRow(pair) {
  const [a, b] = [pair.a[0], pair.b[0]];
  const held = a.held && b.held;
  const to = address([a, b]);
  const open = (event) => {
    if (held && !event.target.closest("a") && !String(window.getSelection())) location.hash = to;
  };
  const cells = {
    task: held ? h("a", { href: to, "data-at": a.at }, pair.task) : [pair.task, h("small", {}, " left out")],
    query: pair.query,
    a: num(mean(pair.a, "recall")),
    b: num(mean(pair.b, "recall")),
    gap: h("b", {}, signedGap(pair.recall, 2)),
    seen: signedGap(pair.seen, 2),
    set: pair.sameSet ? h("span", { class: "muted" }, "equal") : `${mean(pair.a, "size").toFixed(0)} → ${mean(pair.b, "size").toFixed(0)}`,
  };
  const labels = { a: "recall, first", b: "second", gap: "difference", set: "sets" };
  return h("tr", { class: held ? "" : "left-out", onclick: open }, Object.entries(cells).map(([name, value]) => h("td", { class: `c-${name}`, "data-label": labels[name] }, value)));
}
