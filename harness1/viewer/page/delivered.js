// What a search delivered: each document with the passages that were found of it, the best document first.

import { tagMark } from "./documents.js";
import { h, plural, section } from "./dom.js";

const EXCERPT = 300;

/** The section; it stands above all that says how the documents were found. */
export function deliveredPassages(episode) {
  const found = new Map(episode.delivered.map(([unit]) => [unit, []]));
  episode.chunks.forEach((unit, chunk) => found.get(unit)?.push(episode.passages[chunk]));
  return section(`${plural(episode.delivered.length, "document")} delivered, the best first`, { class: "delivered" },
    episode.delivered.length ? h("ol", {}, episode.delivered.map(([unit, tag]) => documentView(episode.units[unit], tag, found.get(unit)))) : episode.row.failure === "fault" ? null : h("p", { class: "muted" }, "Ask in words that the documents use."));
}

function documentView([id, , title], tag, passages) {
  return h("li", {}, h("p", {}, tagMark(tag), " ", h("b", {}, title || id), title ? h("code", {}, id) : null),
    passages.length ? h("p", {}, excerpt(passages[0].text)) : null,
    passages.length ? h("details", {}, h("summary", {}, plural(passages.length, "passage")), passages.map((passage) => h("pre", {}, passage.text))) : null);
}

function excerpt(text) {
  const flat = text.trim().replace(/\s+/g, " ");
  return flat.length > EXCERPT ? `${flat.slice(0, EXCERPT)} …` : flat;
}
