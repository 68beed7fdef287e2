// How a document, a tag and gold look, wherever they are shown: never by colour alone.

import { anyGold, index } from "./data.js";
import { h } from "./dom.js";

/** The tag of a curated unit as a letter on its colour. */
export function tagMark(tag) {
  const name = index.tags[tag];
  return h("span", { class: `tag tag-${tag}`, title: name.replace("_", " ") }, letter(tag), unseen(` ${name}`));
}

/** V, H, F or L. */
export function letter(tag) {
  return index.tags[tag][0].toUpperCase();
}

/** A star for gold: filled where the document holds the answer. */
export function star(episode, unit) {
  if (!episode.goldUnits.has(unit)) return null;
  const answer = episode.answerUnits.has(unit);
  const says = answer ? "gold, holds the answer" : "gold";
  return h("span", { class: "star", title: says, role: "img", "aria-label": says }, answer ? "★" : "☆");
}

/** Make text for screen readers alone. */
export function unseen(text) {
  return h("span", { class: "unseen" }, text);
}

/** A document in a line of text: handle, gold mark, title. */
export function documentChip(episode, unit, tag) {
  const [id, handle, title] = episode.units[unit];
  return h(
    "span",
    { class: "doc", title: id },
    tag === undefined ? null : tagMark(tag),
    handle || !title ? h("b", {}, handle || id) : null,
    star(episode, unit),
    h("span", { class: "doc-title" }, title),
  );
}

/** Documents as a list; beyond so many, behind a button. */
export function documentList(episode, units, chip = documentChip, most = 12) {
  const list = h("ul", { class: "docs" });
  const add = (unit) => list.append(h("li", {}, chip(episode, unit)));
  units.slice(0, most).forEach(add);
  if (units.length > most) {
    const more = h("button", { type: "button", class: "link" }, `${units.length - most} more`);
    const item = h("li", { class: "more" }, more);
    more.addEventListener("click", () => {
      item.remove();
      units.slice(most).forEach(add);
    });
    list.append(item);
  }
  return list;
}

/** Return whether the class of an episode says something: not that it has no gold, where none has. */
export function hasClass(row) {
  return row.failure !== "unscored" || anyGold();
}

/** The class of an episode as a labelled mark, if it says something. */
export function classMark(row) {
  if (!hasClass(row)) return null;
  return h("span", { class: `class class-${row.failure}`, title: index.classes[row.failure] }, row.failure);
}

/** A share as a small bar with its number. */
export function shareBar(value) {
  if (value === null) return h("span", { class: "muted" }, "–");
  const bar = h("span", { class: "share-fill", style: { width: `${Math.round(value * 100)}%` } });
  return h("span", { class: "share" }, h("span", { class: "share-track", "aria-hidden": "true" }, bar), value.toFixed(2));
}
