// Two episodes in two columns, stepped together.

import { documentList, star, tagMark } from "./documents.js";
import { count, h, num, plural } from "./dom.js";
import { belowView, headView, sideView, turnView } from "./episode.js";
import { stripView } from "./strip.js";

const COMPARED = [["recall", "recall"], ["trajectory", "seen"], ["precision", "precision"], ["size", "set"], ["turns", "turns"], ["tokens", "tokens"], ["reward", "reward"]];

/** Two episodes at a turn; the bars of both have one scale. */
export function besideView(pair, place, go) {
  const most = Math.max(1, ...pair.flatMap((episode) => episode.turns.map((turn) => turn.tokens)));
  return h("div", { class: "beside" }, differenceView(pair),
    h("div", { class: "pair" }, pair.map((episode) => {
      const at = Math.min(place, episode.turns.length - 1);
      return h("article", { class: "column", "aria-label": `${episode.card.name} ${episode.row.task}` }, headView(episode, pair[0].row.task === pair[1].row.task), stripView(episode, at, go, most),
        place > at ? h("p", { class: "banner" }, `Ended after turn ${episode.turns.length}; its last turn is shown.`) : null,
        turnView(episode, at), sideView(episode, at, go), h("div", { class: "below" }, belowView(episode, at, go)));
    })));
}

function differenceView([first, second]) {
  const same = first.row.task === second.row.task;
  const compared = COMPARED.filter(([name]) => [first, second].some((episode) => episode.row[name] !== null));
  const decimals = (name) => (["size", "turns", "tokens"].includes(name) ? 0 : 2);
  const gap = (name) => {
    const [a, b] = [first.row[name], second.row[name]];
    if (typeof a !== "number" || typeof b !== "number") return "–";
    return `${b > a ? "+" : b < a ? "−" : ""}${name === "tokens" ? count(Math.abs(b - a)) : Math.abs(b - a).toFixed(decimals(name))}`;
  };
  const line = (label, cell) => h("tr", {}, h("th", { scope: "row" }, label), compared.map(([name]) => h("td", {}, cell(name))));
  const values = (episode) => line(`${episode.card.name}${episode.row.sample ? ` #${episode.row.sample}` : ""}`, (name) => (name === "tokens" ? count(episode.row[name]) : num(episode.row[name], decimals(name))));
  return h("div", { class: "head" },
    h("h1", {}, same ? first.query : "Two tasks"),
    h("table", { class: "difference" }, h("caption", { class: "unseen" }, "scores of both, and their difference"),
      h("thead", {}, h("tr", {}, h("td", {}), compared.map(([, label]) => h("th", { scope: "col" }, label)))),
      h("tbody", {}, values(first), values(second), line("difference", gap))),
    same ? deliveredView(first, second) : null);
}

/** What one of both delivered and the other did not. */
function deliveredView(first, second) {
  const named = (episode) => new Map(episode.delivered.map(([unit, tag]) => [episode.units[unit][0], { unit, tag }]));
  const [a, b] = [named(first), named(second)];
  const common = [...a.keys()].filter((id) => b.has(id)).length;
  const chip = (episode) => (_, { unit, tag }) => h("span", { class: "doc", title: episode.units[unit][0] }, tagMark(tag), star(episode, unit), h("span", { class: "doc-title" }, episode.units[unit][2] || episode.units[unit][0]));
  const only = (episode, own, other) => {
    const rest = [...own].filter(([id]) => !other.has(id)).map(([, each]) => each);
    rest.sort((x, y) => episode.goldUnits.has(y.unit) - episode.goldUnits.has(x.unit));
    return h("div", {}, h("h2", {}, `Only ${episode.card.name} delivered`, h("small", {}, ` ${rest.length} of ${own.size}`)), rest.length ? documentList(episode, rest, chip(episode), 6) : h("p", { class: "muted" }, "nothing"));
  };
  return h("div", { class: "only" }, h("p", { class: "muted" }, `${plural(common, "document")} delivered by both`), h("div", { class: "pair" }, only(first, a, b), only(second, b, a)));
}
