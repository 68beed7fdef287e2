// The working memory: what a turn changed, and the curated set over all turns.

import { index } from "./data.js";
import { documentChip, documentList, letter, star, tagMark, unseen } from "./documents.js";
import { h, plural } from "./dom.js";
import { fold } from "./fold.js";

const ROWS = 12;
const AT_HAND = 6;
const QUIET = new Set(["new in the pool", "hidden as near duplicates", "verdicts", "shared entities"]);
const SIZES = ["curated", "pool", "aliases", "verdicts", "bridges"];
const NAMES = { curated: "curated", pool: "pool", aliases: "hidden copies", verdicts: "verdicts", bridges: "shared entities" };

/** The memory before and after a turn, as a difference. */
export function changeView(episode, turn) {
  if (!turn.change) return null;
  const { change } = turn;
  const [before, after] = turn.sizes;
  const groups = [
    ["+", "added", "added to the curated set", change.added, ([unit, tag]) => documentChip(episode, unit, tag)],
    ["~", "retagged", "tagged anew", change.retagged, ([unit, from, to]) => [tagMark(from), " → ", documentChip(episode, unit, to)]],
    ["−", "removed", "removed from the curated set", change.removed, (unit) => documentChip(episode, unit)],
    ["−", "removed", "evicted", change.evicted, (unit) => documentChip(episode, unit)],
    ["×", "removed", "refused, the set was full", change.refused, (unit) => documentChip(episode, unit)],
    ["+", "added", "new in the pool", change.pooled, (unit) => documentChip(episode, unit)],
    ["=", "same", "hidden as near duplicates", change.hidden, ([unit, twin]) => [documentChip(episode, unit), " behind ", documentChip(episode, twin)]],
    ["+", "added", "no longer hidden", change.shown, (unit) => documentChip(episode, unit)],
    ["+", "added", "verdicts", change.verdicts, ([unit, claim, label]) => [h("span", { class: `verdict verdict-${label}` }, label), " ", documentChip(episode, unit), h("q", { class: "passage" }, claim)]],
    ["+", "added", "shared entities", change.bridges, ([name, units]) => [h("b", {}, name), h("small", {}, ` in ${units.map((unit) => episode.units[unit][1] || episode.units[unit][0]).join(", ")}`)]],
  ].filter(([, , , items]) => items?.length);
  return fold("change", "Memory change", summary(change, turn.sizes), () => [
    h("table", { class: "sizes" }, h("caption", { class: "unseen" }, "sizes before and after the turn"),
      h("tbody", {}, h("tr", {}, SIZES.map((name) => h("th", { scope: "col" }, NAMES[name]))),
        h("tr", {}, SIZES.map((name) => h("td", { class: before[name] === after[name] ? "same" : "changed" }, before[name] === after[name] ? after[name] : `${before[name]} → ${after[name]}`))))),
    groups.length ? groups.map((group) => groupView(episode, change, group)) : h("p", { class: "muted" }, "Nothing changed."),
  ], true);
}

function summary(change, [before, after]) {
  const curated = ["added", "retagged", "removed", "evicted"].filter((name) => change[name]?.length).map((name) => `${change[name].length} ${name}`);
  return curated.length ? `curated: ${curated.join(", ")}` : after.pool > before.pool ? `${after.pool - before.pool} pooled` : "";
}

/** What was done to the curated set is open; the rest is counted, and opened by its heading. */
function groupView(episode, change, [sign, kind, label, items, show]) {
  const many = label === "shared entities" ? change.bridges_total : items.length;
  const heading = [h("span", { class: "sign", "aria-hidden": "true" }, sign), `${label} (${many}${many > items.length ? `, the first ${items.length} are listed` : ""})`];
  const list = documentList(episode, items, (_, item) => h("span", {}, show(item)), AT_HAND);
  if (QUIET.has(label)) return h("details", { class: `group group-${kind}` }, h("summary", {}, heading), list);
  return h("div", { class: `group group-${kind}` }, h("h4", {}, heading), list);
}

/** Documents by turns: the tag of what was curated, a dot for what was in the pool; `go` is called with a turn. */
export function matrixView(episode, place, go) {
  const units = matrixUnits(episode);
  if (!units.length) return fold("matrix", "Curated set over time", "", () => h("p", { class: "muted" }, episode.gold ? "Nothing was curated, and no gold was seen." : "Nothing was curated."), true);
  const tags = episode.turns.map((turn) => new Map(turn.curated || []));
  const turns = episode.turns.map((_, at) => at);
  const head = h("tr", {}, h("th", { scope: "col", class: "corner" }, "document"), turns.map((at) =>
    h("th", { scope: "col", class: at === place ? "now" : "" }, h("button", { type: "button", tabindex: -1, "aria-label": `turn ${at + 1}`, onclick: () => go(at) }, at + 1))));
  const rows = units.map((unit) => {
    const [id, handle, title] = episode.units[unit];
    return h("tr", {}, h("th", { scope: "row", title: `${id} ${title}` }, star(episode, unit), h("b", {}, handle || id), " ", title),
      turns.map((at) => cellView(episode, unit, tags[at].get(unit), at, at === place)));
  });
  const now = tags[place]?.size ?? 0;
  const body = h("tbody", {}, rows.slice(0, ROWS));
  const rest = rows.slice(ROWS);
  const more = h("p", { class: "more" }, h("button", { type: "button", class: "link", onclick: () => {
    body.append(...rest);
    more.remove();
  } }, `${plural(rest.length, "further document")}`));
  return fold("matrix", "Curated set over time", `${now} of at most ${episode.card.cap} after turn ${place + 1}`, () => [h("p", {}, legend(episode)),
    h("div", { class: "frame", tabindex: 0, role: "region", "aria-label": "matrix of documents and turns" }, h("table", {}, h("caption", { class: "unseen" }, "Tag of each document after each turn"), h("thead", {}, head), body)),
    rest.length ? more : null], true);
}

function cellView(episode, unit, tag, at, now) {
  const seen = episode.firstSeen.has(unit) && episode.firstSeen.get(unit) <= at;
  const here = now ? "now " : "";
  if (tag !== undefined) return h("td", { class: `${here}tag tag-${tag}`, title: index.tags[tag] }, letter(tag));
  return h("td", { class: `${here}${seen ? "pooled" : "absent"}` }, seen ? "·" : "", seen ? unseen("in the pool") : null);
}

/** Gold that was seen, then what was curated at the end, then what was curated before. */
function matrixUnits(episode) {
  const units = new Set(episode.turns.flatMap((turn) => (turn.curated || []).map(([unit]) => unit)));
  for (const unit of episode.goldUnits) if (episode.firstSeen.has(unit)) units.add(unit);
  const last = new Set((episode.turns[episode.turns.length - 1]?.curated || []).map(([unit]) => unit));
  const rank = (unit) => (episode.goldUnits.has(unit) ? 0 : last.has(unit) ? 1 : 2);
  return [...units].sort((x, y) => rank(x) - rank(y));
}

function legend(episode) {
  return h("span", { class: "legend" }, index.tags.map((name, tag) => h("span", {}, tagMark(tag), name.replace("_", " "))),
    h("span", {}, "· pooled"), episode.gold ? h("span", {}, h("span", { class: "star" }, "☆"), " gold, ", h("span", { class: "star" }, "★"), " holds the answer") : null);
}
