// The list of episodes: filters, sorting, and rows that are made as they come into sight.

import { anyGold, commandFor, index, toolsOf } from "./data.js";
import { classMark, hasClass, shareBar } from "./documents.js";
import { announce, count, h, num, plural, short } from "./dom.js";
import { address } from "./route.js";

const CHUNK = 100;
const NOTHING = { text: "", failure: "", tool: "", run: "", low: "", high: "", least: "", most: "", held: "" };
/** The state of the list, which is kept while an episode is shown. */
export const listState = { ...NOTHING, sort: "", down: false, shown: index.rows, made: 0, columns: [] };

const COLUMNS = [
  ["task", "task", (row) => row.task],
  ["run", "run", (row) => row.run],
  ["query", "question", (row) => row.query],
  ["failure", "class", (row) => row.failure],
  ["recall", "recall", (row) => row.recall],
  ["trajectory", "seen", (row) => row.trajectory],
  ["precision", "precision", (row) => row.precision],
  ["size", "set", (row) => row.size],
  ["turns", "turns", (row) => row.turns],
  ["tokens", "tokens", (row) => row.tokens],
  ["reward", "reward", (row) => row.reward],
];
const MEANINGS = {
  recall: "share of the gold that was delivered",
  trajectory: "share of the gold that was seen",
  precision: "share of what was delivered that is gold",
  size: "documents delivered",
  tokens: "of all contexts",
};

const SCORES = new Set(["recall", "trajectory", "precision", "reward"]);

/** Return the columns; those of scores stand where something is scored. */
function columns() {
  return COLUMNS.filter(([name, , value]) => (name === "failure" ? index.rows.some(hasClass) : !SCORES.has(name) || index.rows.some((row) => value(row) !== null)));
}

/** Return whether a row passes the filters. */
function passes(row) {
  const state = listState;
  const within = (value, low, high) =>
    (low === "" && high === "") ||
    (value !== null && (low === "" || value >= Number(low)) && (high === "" || value <= Number(high)));
  return (
    (state.failure === "" || row.failure === state.failure) &&
    (state.run === "" || row.run === Number(state.run)) &&
    (state.tool === "" || toolsOf(row).includes(state.tool)) &&
    (state.held === "" || row.held === (state.held === "held")) &&
    within(row.recall, state.low, state.high) &&
    within(row.turns, state.least, state.most) &&
    state.text.toLowerCase().split(/\s+/).every((word) => row.words.includes(word))
  );
}

function sorted(rows) {
  const column = COLUMNS.find(([name]) => name === listState.sort);
  if (!column) return rows;
  const [, , value] = column;
  const sign = listState.down ? -1 : 1;
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === y) return a.at - b.at;
    if (x === null || y === null) return x === null ? 1 : -1;
    return (x < y ? -1 : 1) * sign;
  };
  return [...rows].sort(compare);
}

let refresh = () => {};

/** Show rows that have come since the list was made; filters, order and the place on the page stay. */
export function refreshList() {
  const focused = document.activeElement?.dataset.at;
  refresh();
  if (focused !== undefined) document.querySelector(`.list [data-at="${focused}"]`)?.focus({ preventScroll: true });
}

/** The list as a page part; `update` filters again. */
export function listView() {
  const body = h("tbody", {});
  const total = h("p", { class: "total", role: "status" });
  const head = h("thead", {});
  const end = h("div", { class: "end", "aria-hidden": "true" });
  const grow = () => {
    const next = listState.shown.slice(listState.made, listState.made + CHUNK);
    body.append(...next.map(rowView));
    listState.made += next.length;
  };
  const update = (_, before = 0) => {
    listState.shown = sorted(index.rows.filter(passes));
    listState.made = 0;
    listState.columns = columns();
    body.replaceChildren();
    head.replaceChildren(headRow(update));
    do grow(); while (listState.made < Math.min(before, listState.shown.length));
    if (!listState.shown.length) body.append(h("tr", {}, h("td", { colspan: listState.columns.length, class: "none" }, "No episode passes these filters.")));
    total.textContent = `${count(listState.shown.length)} of ${plural(index.rows.length, "episode")}`;
  };
  new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && grow(), { rootMargin: "600px" }).observe(end);
  const table = h("table", { class: `list ${index.runs.length > 1 ? "" : "one-run"}` }, h("caption", { class: "unseen" }, "Episodes"), head, body);
  // Who comes back finds the rows that were there.
  update(null, listState.made);
  refresh = () => update(null, listState.made);
  return h("div", {}, filters(update), total, h("div", { class: "list-frame" }, table), end);
}

function headRow(update) {
  const cell = ([name, label]) => {
    const on = listState.sort === name;
    const order = on ? (listState.down ? "descending" : "ascending") : "none";
    const press = () => {
      listState.down = on ? !listState.down : false;
      listState.sort = name;
      update();
      announce(`sorted by ${label}, ${listState.down ? "descending" : "ascending"}`);
      document.getElementById(`sort-${name}`).focus();
    };
    const arrow = on ? (listState.down ? " ↓" : " ↑") : "";
    return h("th", { scope: "col", class: `c-${name}`, "aria-sort": order },
      h("button", { type: "button", id: `sort-${name}`, title: MEANINGS[name], onclick: press }, label + arrow));
  };
  return h("tr", {}, listState.columns.map(cell));
}

function rowView(row) {
  const title = row.held ? h("a", { href: address([row]), "data-at": row.at }, row.task) : leftOut(row);
  const cells = {
    task: [title, row.sample ? h("span", { class: "muted" }, ` #${row.sample}`) : null, row.problem ? h("span", { class: "warn", title: row.problem, role: "img", "aria-label": row.problem }, " ⚠") : null],
    run: index.runs[row.run].name,
    query: row.query,
    failure: classMark(row),
    recall: shareBar(row.recall),
    trajectory: num(row.trajectory),
    precision: num(row.precision),
    size: row.size,
    turns: row.turns,
    tokens: short(row.tokens),
    reward: num(row.reward),
  };
  const open = (event) => {
    if (row.held && !event.target.closest("a, button, summary, code") && !String(window.getSelection())) location.hash = address([row]);
  };
  return h("tr", { class: row.held ? "" : "left-out", onclick: open },
    listState.columns.map(([name, label]) => h("td", { class: `c-${name}`, "data-label": label }, cells[name])));
}

function leftOut(row) {
  return h("details", { class: "out" },
    h("summary", { "data-at": row.at }, row.task, " ", h("small", {}, "left out")),
    h("p", {}, row.problem ? "" : "This file has no room for it. This command writes a file that holds it:"),
    h("code", {}, commandFor(row)));
}

function filters(update) {
  const set = (name) => (event) => {
    listState[name] = event.target.value;
    update();
  };
  const counts = {};
  for (const row of index.rows) counts[row.failure] = (counts[row.failure] || 0) + 1;
  const choice = (name, label, options) =>
    h("label", {}, h("span", {}, label), h("select", { id: `filter-${name}`, onchange: set(name) },
      h("option", { value: "" }, "all"),
      options.map(([value, text]) => h("option", { value, selected: listState[name] === String(value) }, text))));
  const range = (low, high, label, most, step) =>
    h("fieldset", {}, h("legend", {}, label),
      [[low, "from", 0], [high, "to", most]].map(([name, word, hint]) =>
        h("input", { type: "number", id: `filter-${name}`, "aria-label": `${label} ${word}`, min: 0, max: most, step, placeholder: hint, value: listState[name], oninput: set(name) })));
  const tools = [...new Set(index.runs.flatMap((run) => run.tools))].sort();
  const longest = Math.max(1, ...index.rows.map((row) => row.turns));
  const clear = () => {
    Object.assign(listState, NOTHING);
    form.replaceWith(filters(update));
    update();
  };
  const form = h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    h("label", { class: "wide" }, h("span", {}, "search"), h("input", { type: "search", id: "search", placeholder: "task or question  ( / )", value: listState.text, oninput: set("text") })),
    index.rows.some(hasClass) ? choice("failure", "class", Object.keys(index.classes).filter((name) => counts[name]).map((name) => [name, `${name} (${counts[name]})`])) : null,
    choice("tool", "tool used", tools.map((name) => [name, name])),
    index.runs.length > 1 ? choice("run", "run", index.runs.map((run, number) => [number, run.name])) : null,
    anyGold() ? range("low", "high", "recall", 1, 0.05) : null,
    range("least", "most", "turns", longest, 1),
    index.rows.some((row) => !row.held) ? choice("held", "in this file", [["held", "held"], ["out", "left out"]]) : null,
    h("button", { type: "button", id: "clear", onclick: clear }, "Clear"));
  return form;
}
