// The evidence graph: entities on the left, the documents that share them on the right. The layout depends on nothing
// but the graph: entities by their number of documents, documents by the mean place of their entities.

import { h, plural, section, svg } from "./dom.js";
import { letter } from "./documents.js";

const ENTITIES = 16;
const DOCUMENTS = 28;
const STEP = 24;
const WIDE = { width: 560, left: 190, right: 350, letters: [26, 27] };
const NARROW = { width: 380, left: 130, right: 212, letters: [17, 19] };

/** The graph as it was after a turn. */
export function graphView(episode, place) {
  const after = episode.turns[place]?.index ?? 0;
  const all = episode.graph
    .map(([name, links]) => ({ name, units: [...new Set(links.filter(([, turn]) => turn <= after).map(([unit]) => unit))] }))
    .filter((entity) => entity.units.length > 1);
  if (!all.length) return section("Evidence graph", { class: "graph" }, h("p", { class: "muted" }, "No two documents share an entity so far."));
  const { entities, units } = chosen(episode, all);
  const total = episode.turns[place].sizes?.[1].bridges ?? all.length;
  const says = `After turn ${place + 1}, ${total} ${total === 1 ? "entity is" : "entities are"} in at least two documents`;
  const more = total > entities.length ? `; the ${entities.length} in most of them are drawn` : "";
  return section("Evidence graph", { class: "graph" }, h("p", { class: "muted" }, `${says}${more}.`),
    drawing(episode, place, entities, units, says), words(episode, entities));
}

function chosen(episode, all) {
  const entities = all.slice().sort((a, b) => b.units.length - a.units.length || (a.name < b.name ? -1 : 1)).slice(0, ENTITIES);
  const mentions = new Map();
  entities.forEach((entity, at) => entity.units.forEach((unit) => mentions.set(unit, [...(mentions.get(unit) || []), at])));
  const weight = (unit) => mentions.get(unit).length + (episode.goldUnits.has(unit) ? 100 : 0);
  const units = [...mentions.keys()].sort((a, b) => weight(b) - weight(a) || a - b).slice(0, DOCUMENTS);
  const mean = (unit) => mentions.get(unit).reduce((sum, at) => sum + at, 0) / mentions.get(unit).length;
  return { entities, units: units.sort((a, b) => mean(a) - mean(b) || a - b) };
}

function drawing(episode, place, entities, units, says) {
  const frame = window.matchMedia("(max-width: 760px)").matches ? NARROW : WIDE;
  const { left: from, right: to } = frame;
  const height = Math.max(entities.length, units.length) * STEP + 12;
  const row = (at, many) => ((at + 0.5) * (height - 12)) / many + 6;
  const tags = new Map(episode.turns[place].curated || []);
  const edges = entities.flatMap((entity, at) => entity.units.filter((unit) => units.includes(unit)).map((unit) => {
    const [y0, y1] = [row(at, entities.length), row(units.indexOf(unit), units.length)];
    return svg("path", { d: `M${from} ${y0} C${from + 50} ${y0} ${to - 50} ${y1} ${to} ${y1}`, class: episode.goldUnits.has(unit) ? "edge to-gold" : "edge", "data-entity": at, "data-unit": unit });
  }));
  const picture = svg("svg", { viewBox: `0 0 ${frame.width} ${height}`, role: "img", "aria-label": says });
  const light = (name, value) => () => {
    picture.classList.toggle("lit", value !== null);
    for (const edge of edges) edge.classList.toggle("on", edge.getAttribute(name) === String(value));
  };
  const reacts = (name, value) => ({ onpointerenter: light(name, value), onpointerleave: light(name, null) });
  const names = entities.map((entity, at) => svg("text", { x: from - 8, y: row(at, entities.length) + 4, "text-anchor": "end", class: "entity", ...reacts("data-entity", at) },
    svg("title", {}, `${entity.name}: ${plural(entity.units.length, "document")}`), clipped(entity.name, frame.letters[0])));
  const nodes = units.map((unit, at) => nodeView(episode, unit, tags.get(unit), row(at, units.length), frame, reacts("data-unit", unit)));
  picture.append(...edges, ...names, ...nodes);
  return picture;
}

function nodeView(episode, unit, tag, y, { right, letters }, reacts) {
  const [id, handle, title] = episode.units[unit];
  const gold = episode.goldUnits.has(unit) ? (episode.answerUnits.has(unit) ? "★ " : "☆ ") : "";
  const mark = tag === undefined
    ? svg("circle", { cx: right + 8, cy: y, r: 4, class: "pooled" })
    : [svg("rect", { x: right, y: y - 8, width: 16, height: 16, rx: 3, class: `box-${tag}` }), svg("text", { x: right + 8, y: y + 4, "text-anchor": "middle", class: `box-letter letter-${tag}` }, letter(tag))];
  return svg("g", { class: gold ? "node gold" : "node", ...reacts }, svg("title", {}, `${id} ${title}`), mark,
    svg("text", { x: right + 22, y: y + 4 }, clipped(`${gold}${handle || id} ${title}`, letters[1])));
}

function clipped(text, most) {
  const letters = Array.from(text);
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

/** Write the graph in words, for screen readers and for copying. */
function words(episode, entities) {
  return h("details", {}, h("summary", {}, "in words"), h("ul", { class: "values" }, entities.map((entity) =>
    h("li", {}, h("b", {}, entity.name), `: ${entity.units.map((unit) => episode.units[unit][1] || episode.units[unit][0]).join(", ")}`))));
}
