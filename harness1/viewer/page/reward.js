// What the reward is made of: a waterfall of what each term adds; and what the record says about the episode itself.

import { anyGold } from "./data.js";
import { h, num } from "./dom.js";
import { fold } from "./fold.js";

/** The terms of a reward. */
export function rewardView(episode) {
  const { reward } = episode;
  if (!reward && !anyGold()) return null;
  if (!reward) return fold("reward", "Reward", "none", () => h("p", { class: "muted" }, "The episode was not scored."));
  const terms = Object.entries(reward.terms || {}).map(([name, { value, weight }]) => ({ name, value, weight, adds: value * weight }));
  let sum = 0;
  for (const term of terms) {
    term.from = sum;
    sum += term.adds;
  }
  const ends = terms.flatMap((term) => [term.from, term.from + term.adds]).concat(0, reward.total);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const share = (value) => ((value - low) / (high - low || 1)) * 100;
  const bar = (from, to, kind) => h("span", { class: "fall", "aria-hidden": "true" },
    h("i", { class: "zero", style: { left: `${share(0)}%` } }),
    h("span", { class: kind, style: { left: `${share(Math.min(from, to))}%`, width: `${Math.max(0.6, Math.abs(share(to) - share(from)))}%` } }));
  const row = (label, detail, adds, from, to, kind) => h("tr", { class: kind }, h("th", { scope: "row" }, label), h("td", { class: "detail" }, detail), h("td", { class: "adds" }, adds), h("td", {}, bar(from, to, kind)));
  return fold("reward", "Reward", num(reward.total), () => [
    reward.override ? h("p", { class: "warn" }, `Overridden by ${reward.override}: the terms do not count.`) : null,
    h("table", {}, h("caption", { class: "unseen" }, "terms of the reward"), h("tbody", {},
      terms.map((term) => row(term.name.replaceAll("_", " "), `${num(term.value)} × ${num(term.weight)}`, signed(term.adds), term.from, term.from + term.adds, term.adds < 0 ? "minus" : "plus")),
      row("total", "", num(reward.total), 0, reward.total, "sum"))),
  ], true);
}

function signed(value) {
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
}

/** Hashes, times and seeds: what names the episode and the turn exactly. */
export function recordView(episode, turn) {
  const facts = [
    ["episode", episode.row.episode],
    ["seed", episode.seed],
    ["context hash", turn?.hashes[1]],
    ["memory hash", turn?.hashes[0]],
    ...Object.entries(episode.hashes).map(([name, value]) => [`${name} hash`, value]),
    ...Object.entries(episode.stage_ms).map(([name, value]) => [`time in ${name}`, `${(value / 1000).toFixed(2)} s`]),
    ["weights", episode.versions[1] ? episode.versions.join(" to ") : ""],
    ["not trainable", episode.untrainable],
    ["fault", episode.error],
  ];
  return fold("record", "Record", "ids, seeds, hashes and times", () => h("dl", {}, facts.filter(([, value]) => value !== undefined && value !== null && value !== "").map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, h("code", {}, String(value)))))));
}
