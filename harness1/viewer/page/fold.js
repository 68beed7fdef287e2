// Sections that fold: the content of a closed one is made when it is opened; whether it is open is kept from turn to turn.

import { h } from "./dom.js";

const opened = new Map();
const fills = new WeakMap();

/** A section with a heading that opens and closes it; `fill` makes its content, `note` says in few words what is in it. */
export function fold(name, title, note, fill, open = false) {
  const body = h("div", { class: "fold-body" });
  const details = h("details", { class: "fold", open: opened.get(name) ?? open },
    h("summary", { onclick: () => opened.set(name, !details.open) }, h("h3", {}, title), note ? h("span", { class: "fold-note" }, note) : null), body);
  fills.set(details, () => {
    if (!body.firstChild) body.append(...[fill()].flat(2).filter(Boolean));
  });
  details.addEventListener("toggle", () => details.open && fills.get(details)());
  if (details.open) fills.get(details)();
  return h("section", { class: name, "aria-label": title }, details);
}

/** Open the section of a name in a part of the page, and return it. */
export function openFold(root, name) {
  const details = root.querySelector(`section.${name} > .fold`);
  if (!details) return null;
  opened.set(name, true);
  fills.get(details)();
  details.open = true;
  return details;
}

/** Open everything in a part of the page, for paper. */
export function unfold(root) {
  for (let closed = [root]; closed.length; closed = [...root.querySelectorAll("details:not([open])")]) {
    for (const each of closed) {
      fills.get(each)?.();
      if (each !== root) each.open = true;
    }
  }
  for (const each of root.querySelectorAll(".more button")) each.click();
}
