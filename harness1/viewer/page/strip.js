// The turns of an episode as a strip: tool, tokens of the context (reused and fresh), gold found, errors.

import { count, h } from "./dom.js";

/** Gold units that a turn pooled. */
function goldIn(episode, turn) {
  return (turn.change?.pooled || []).filter((unit) => episode.goldUnits.has(unit)).length;
}

/** A row of buttons; `go` is called with a turn. */
export function stripView(episode, place, go, most) {
  const limit = most || Math.max(1, ...episode.turns.map((turn) => turn.tokens));
  const buttons = episode.turns.map((turn, at) => {
    const gold = goldIn(episode, turn);
    const wrong = turn.parse_error || turn.observation?.error;
    const tool = turn.action ? turn.action.name : "no action";
    const says = `turn ${at + 1}, ${tool}, ${count(turn.tokens)} tokens, ${count(turn.tokens - turn.prefill)} of them reused${gold ? `, ${gold} gold found` : ""}${wrong ? ", an error" : ""}`;
    const tall = (tokens) => ({ height: `${(tokens / limit) * 100}%` });
    return h("button", { type: "button", class: "turn", "aria-label": says, title: says, "aria-current": at === place ? "step" : null, onclick: () => go(at) },
      h("span", { class: "bar", "aria-hidden": "true" }, h("span", { class: "fresh", style: tall(turn.prefill) }), h("span", { class: "reused", style: tall(turn.tokens - turn.prefill) })),
      h("span", { class: "number" }, at + 1, gold ? h("span", { class: "star" }, "★".repeat(Math.min(3, gold))) : null, wrong ? h("span", { class: "wrong" }, "!") : null),
      h("span", { class: "tool" }, tool.replaceAll("_", " ")));
  });
  const total = episode.turns.reduce((sum, turn) => sum + turn.tokens, 0);
  const fresh = episode.turns.reduce((sum, turn) => sum + turn.prefill, 0);
  return h("div", { class: "strip-box" },
    h("div", { class: "strip", role: "group", "aria-label": "turns" }, buttons),
    h("p", { class: "key" }, h("span", { class: "swatch reused" }), "reused from the turn before ", h("span", { class: "swatch fresh" }), "fresh ",
      h("span", { class: "muted" }, `· ${count(total)} tokens in all, ${total ? Math.round(((total - fresh) / total) * 100) : 0}% reused`)));
}
