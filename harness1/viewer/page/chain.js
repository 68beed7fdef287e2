// How the evidence was found: searches, the names that they took from the question or from earlier documents, and what
// they found first. The same nested list is drawn in columns where there is room, and indented where there is none.

import { documentChip } from "./documents.js";
import { h, plural } from "./dom.js";
import { fold } from "./fold.js";

const FOUND_AT_ONCE = 6;
const NAMES_SHOWN = 3;
const DEEPEST = 4;
let everything = false;

/** The searches of an episode as a tree: `{steps, roots, lost}`; a step has `found` units and `next` steps. */
export function chainOf(episode) {
  const owner = new Map();
  const curated = new Set(episode.turns.flatMap((turn) => (turn.curated || []).map(([unit]) => unit)));
  const matters = (unit) => episode.goldUnits.has(unit) || curated.has(unit);
  const steps = searches(episode);
  for (const step of steps) {
    step.found = [...new Set(step.units)].filter((unit) => !owner.has(unit) && (episode.firstSeen.has(unit) || episode.goldUnits.has(unit)));
    step.from = source(episode, step, owner, curated);
    for (const unit of step.found) owner.set(unit, step);
  }
  for (const step of steps) if (step.from !== null) owner.get(step.from.unit).next.push(step);
  const keep = (step) => {
    step.leads = step.next.map(keep).some(Boolean) || step.found.some(matters);
    return step.leads;
  };
  const roots = steps.filter((step) => step.from === null);
  roots.forEach(keep);
  const lost = (episode.gold?.targets || []).filter((target) => !target.units.some((unit) => owner.has(unit)));
  return { steps, roots, lost, curated, matters };
}

/** Every query once, with its turns; hits without a query, as of a document that was read, are a step of their turn. */
function searches(episode) {
  const byQuery = new Map();
  const add = (key, place, made, units) => {
    if (!byQuery.has(key)) byQuery.set(key, { ...made, turns: [], units: [], next: [] });
    const step = byQuery.get(key);
    if (step.turns[step.turns.length - 1] !== place) step.turns.push(place);
    step.units.push(...units);
  };
  episode.turns.forEach((turn, place) => {
    const seen = turn.observation;
    if (!seen) return;
    for (const { query, names, chunks } of seen.rankings) {
      add(query.trim().toLowerCase(), place, { query, names }, chunks.filter((chunk) => typeof chunk === "number").map((chunk) => episode.chunks[chunk]));
    }
    if (seen.hits.length && !seen.rankings.length) {
      const used = new Set(Object.values(seen.resolved));
      const units = episode.units.flatMap(([id], unit) => (used.has(id) ? [unit] : []));
      add(`turn ${place}`, place, { query: seen.tool.replaceAll("_", " "), names: units.map((unit) => [episode.units[unit][1] || "", [unit]]) }, seen.hits.map(([chunk]) => episode.chunks[chunk]));
    }
  });
  return [...byQuery.values()];
}

/** The document that told a name of a search: gold rather than curated, curated rather than others; null: the question. */
function source(episode, step, owner, curated) {
  const told = step.names.flatMap(([name, units]) => (units || []).filter((unit) => owner.has(unit)).map((unit) => ({ name, unit })));
  const weight = ({ unit }) => (episode.goldUnits.has(unit) ? 0 : curated.has(unit) ? 1 : 2);
  return told.sort((a, b) => weight(a) - weight(b))[0] || null;
}

/** The section; `go` is called with a turn. */
export function chainView(episode, place, go) {
  const chain = chainOf(episode);
  if (!chain.steps.length) return null;
  const leading = chain.steps.filter((step) => step.leads).length;
  return fold("chain", "From the question to documents", `${leading} of ${plural(chain.steps.length, "search").replace(/searchs$/, "searches")} found what was curated${episode.gold ? " or is gold" : ""}`, () => {
    const frame = h("div", { class: "chain-frame", tabindex: 0, role: "region", "aria-label": "searches and what they found" });
    const draw = () => frame.replaceChildren(tree(episode, chain, place, go));
    const all = h("label", { class: "chain-all" }, h("input", { type: "checkbox", checked: everything, onchange: () => {
      everything = all.firstChild.checked;
      draw();
    } }), "all searches and documents");
    draw();
    return [h("div", { class: "tools-line" }, all, h("span", { class: "muted" }, "Documents stand under the search that found them first.")), frame];
  }, true);
}

function depth(steps) {
  return steps.length ? 1 + Math.max(...steps.map((step) => depth(shown(step.next)))) : 0;
}

function shown(steps) {
  return everything ? steps : steps.filter((step) => step.leads);
}

function tree(episode, chain, place, go) {
  const roots = shown(chain.roots);
  const names = episode.chain.names;
  return h("ul", { class: depth(roots) > DEEPEST ? "tree deep" : "tree" }, h("li", { class: "step" },
    h("div", { class: "node question" }, h("b", {}, "Question"), names.length ? h("ul", { class: "values" }, names.map((name) => h("li", {}, name))) : h("p", { class: "muted" }, "no name in it")),
    h("ul", { class: "next" }, roots.map((step) => stepView(episode, chain, step, place, go)), lostView(episode, chain.lost))));
}

function stepView(episode, chain, step, place, go) {
  const next = shown(step.next);
  const now = step.turns.includes(place);
  return h("li", { class: "step" }, h("div", { class: now ? "node now" : "node", "aria-current": now ? "step" : null },
    h("p", { class: "via" }, step.from ? [h("b", {}, step.from.name), h("small", {}, ` named in ${episode.units[step.from.unit][1] || episode.units[step.from.unit][0]}`)] : h("small", {}, askedNames(step))),
    h("p", { class: "searched" }, step.query === episode.query ? h("i", {}, "the whole question") : step.from && step.query === step.from.name ? null : step.query, h("span", { class: "at-turns" }, turnLinks(step.turns, place, go))),
    foundView(episode, chain, step)),
  next.length ? h("ul", { class: "next" }, next.map((each) => stepView(episode, chain, each, place, go))) : null);
}

function askedNames(step) {
  const names = step.names.filter(([, units]) => units === null).map(([name]) => name);
  return names.length ? `from the question: ${names.slice(0, NAMES_SHOWN).join(", ")}` : "from the question";
}

function turnLinks(turns, place, go) {
  return turns.map((at) => h("button", { type: "button", class: "link", "aria-label": `turn ${at + 1}`, "aria-current": at === place ? "true" : null, onclick: () => go(at) }, `turn ${at + 1}`));
}

/** What a search found first: gold, then what was curated, then all others if everything is shown. */
function foundView(episode, chain, step) {
  const last = new Map(episode.turns[episode.turns.length - 1].curated || []);
  const leadsOn = new Set(shown(step.next).map((each) => each.from.unit));
  const rank = (unit) => (episode.goldUnits.has(unit) ? 0 : leadsOn.has(unit) ? 1 : last.has(unit) ? 2 + last.get(unit) : chain.curated.has(unit) ? 8 : 9);
  const units = step.found.filter((unit) => everything || chain.matters(unit) || leadsOn.has(unit)).sort((a, b) => rank(a) - rank(b));
  const rest = step.found.length - units.length;
  const row = (unit) => h("li", { class: episode.goldUnits.has(unit) ? "gold" : "" }, documentChip(episode, unit, last.get(unit)), pointsAt(episode, unit));
  const more = units.slice(FOUND_AT_ONCE);
  return [h("ul", { class: "found" }, units.slice(0, FOUND_AT_ONCE).map(row)),
    more.length ? h("details", {}, h("summary", {}, `${more.length} more`), h("ul", { class: "found" }, more.map(row))) : null,
    rest ? h("small", {}, `${units.length ? `and ${plural(rest, "other")}` : plural(rest, "document")} not curated`) : null];
}

function pointsAt(episode, unit) {
  const links = episode.chain.links.filter(([from]) => from === unit);
  if (!links.length) return null;
  return h("small", { class: "points" }, `names ${links.slice(0, NAMES_SHOWN).map(([, name, to]) => `${name} (${episode.units[to][1] || episode.units[to][0]})`).join(", ")}`);
}

function lostView(episode, lost) {
  if (!lost.length) return null;
  return h("li", { class: "step" }, h("div", { class: "node lost" }, h("p", { class: "via" }, h("b", {}, "Gold that no search found")),
    h("ul", { class: "found" }, lost.map(({ units }) => h("li", {}, documentChip(episode, units[0]))))));
}
