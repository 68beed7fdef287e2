// The keyboard, and the dialog that explains it.

import { h } from "./dom.js";

const KEYS = [
  ["j  k  or  →  ←", "next, previous turn; in the list: next, previous episode"],
  ["n  p", "next, previous episode, as the list is filtered and sorted"],
  ["Enter", "open an episode of the list"],
  ["/", "search"],
  ["c", "find in the exact context"],
  ["e", "how the evidence was found"],
  ["o", "side by side with the same task in the next run"],
  ["g  or  Esc", "back to the list"],
  ["t", "theme: light, dark, or the system's"],
  ["?", "this help"],
];

/** Fill the dialog. */
export function helpView(dialog) {
  dialog.replaceChildren(h("h2", { id: "help-title" }, "Keys"),
    h("table", {}, h("tbody", {}, KEYS.map(([keys, words]) => h("tr", {}, h("th", { scope: "row" }, keys.split("  ").map((key) => (key === "or" ? " or " : h("kbd", {}, key)))), h("td", {}, words))))),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
}

/** Return whether a key belongs to a field and not to the page. */
function typing(target) {
  return target.closest?.("input, select, textarea, [contenteditable]");
}

/** Listen; `actions` has a function for each name below. */
export function listen(actions) {
  const named = { j: "next", ArrowRight: "next", k: "before", ArrowLeft: "before", n: "nextEpisode", p: "episodeBefore", "/": "search", c: "find", o: "beside", e: "chain", g: "list", t: "theme", "?": "help", Escape: "back" };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]")) return;
    if (typing(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const name = named[event.key];
    if (!name) return;
    event.preventDefault();
    actions[name]();
  });
}
