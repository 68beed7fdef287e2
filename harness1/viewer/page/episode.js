// One episode: its head, the strip of turns, and one turn with the state behind it.

import { answersView } from "./answer.js";
import { chainView } from "./chain.js";
import { contextView } from "./context.js";
import { anyGold, commandFor, index, siblings } from "./data.js";
import { deliveredPassages } from "./delivered.js";
import { classMark, documentChip, hasClass } from "./documents.js";
import { h, num, section } from "./dom.js";
import { unfold } from "./fold.js";
import { changeView, matrixView } from "./memory.js";
import { actionView, resultView } from "./result.js";
import { recordView, rewardView } from "./reward.js";
import { address } from "./route.js";
import { stripView } from "./strip.js";

const GOLD_AT_ONCE = 6;
const SIGNS = { good: "✓", half: "–", lost: "○" };

/** The page of an episode at a turn; `go` is called with another turn. */
export function episodeView(episode, place, go) {
  return h("div", { class: "episode" }, headView(episode), answersView(episode), episode.card.asked ? deliveredPassages(episode) : null, stripView(episode, place, go), besideLinks(episode.row),
    h("div", { class: "columns" }, turnView(episode, place), sideView(episode, place, go)),
    h("div", { class: "below" }, belowView(episode, place, go)));
}

/** Show one turn. */
export function turnView(episode, place) {
  const turn = episode.turns[place];
  if (!turn) return h("p", { class: "muted" }, episode.turns.length ? `The episode ended after turn ${episode.turns.length}.` : "The episode has no turns.");
  return h("div", { class: "turn-view" }, h("h2", { id: "turn-title" }, `Turn ${place + 1}`, h("small", {}, ` of ${episode.turns.length}`)),
    actionView(episode, turn), resultView(episode, turn), changeView(episode, turn), contextView(episode, place));
}

/** The state after a turn: curated set and reward. */
export function sideView(episode, place, go) {
  return h("div", { class: "side" }, matrixView(episode, place, go), rewardView(episode));
}

/** What concerns the whole episode: how the evidence was found, and the record. */
export function belowView(episode, place, go) {
  return [chainView(episode, place, go), recordView(episode, episode.turns[place])];
}

/** Question, end, scores and gold; `brief` leaves out what stands above two columns once. */
export function headView(episode, brief = false) {
  const { row } = episode;
  const values = [["recall", row.recall], ["seen", row.trajectory], ["precision", row.precision], ["set", row.size], ["turns", row.turns], ["reward", row.reward]];
  const facts = values.filter(([, value]) => value !== null || anyGold());
  const shown = (name, value) => (name === "set" || name === "turns" ? value : num(value));
  return h("div", { class: "head" },
    h("p", { class: "muted" }, [episode.card.name, row.task, row.sample ? `sample ${row.sample}` : ""].filter(Boolean).join(" · ")),
    brief ? null : h("h1", {}, episode.query),
    h("p", { class: "facts" }, classMark(row), h("span", { class: "muted" }, `${hasClass(row) ? `${index.classes[row.failure]}; ` : ""}${row.status.replace("_", " ")} by ${row.stop.replace("_", " ")}`)),
    brief ? null : h("dl", { class: "scores" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, shown(name, value))))),
    episode.problem ? h("p", { class: "banner" }, `This record cannot be replayed exactly: ${episode.problem}. What is shown from there on comes from the record alone.`) : null,
    episode.error ? h("p", { class: "error" }, episode.error) : null,
    goldView(episode));
}

/** Show what became of everything that there was to find: what was missed comes first. */
function goldView(episode) {
  if (!episode.gold) return anyGold() ? h("p", { class: "muted" }, "No gold is known for this task: nothing is marked.") : null;
  const delivered = new Set(episode.delivered.map(([unit]) => unit));
  const hidden = new Map(episode.hidden);
  const pool = new Set(episode.pool);
  const fate = (units) => {
    const has = (test) => units.find(test);
    if (has((unit) => delivered.has(unit)) !== undefined) return ["delivered", "good"];
    if (has((unit) => pool.has(unit)) !== undefined) return ["seen, not delivered", "half"];
    const twin = has((unit) => hidden.has(unit));
    if (twin !== undefined) return [`seen as a copy of ${episode.units[hidden.get(twin)][1]}`, "half"];
    return ["never seen", "lost"];
  };
  const fates = episode.gold.targets.map((target) => [target, ...fate(target.units)]);
  const missed = fates.filter(([, , kind]) => kind !== "good");
  const ordered = [...missed, ...fates.filter(([, , kind]) => kind === "good")];
  const row = ([{ units }, words, kind]) => h("li", { class: `fate fate-${kind}` }, h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[kind]), documentChip(episode, units[0]),
    units.length > 1 ? h("small", {}, ` or ${units.length - 1} others `) : null, h("small", {}, words));
  return h("div", { class: "gold-box" },
    h("p", {}, h("b", {}, `Gold: ${fates.length - missed.length} of ${fates.length} delivered`), episode.gold.answers.length ? h("span", { class: "muted" }, ` · answer: ${episode.gold.answers.join(" / ")}`) : null),
    h("ul", { class: "gold-list" }, ordered.slice(0, GOLD_AT_ONCE).map(row)),
    ordered.length > GOLD_AT_ONCE ? h("details", {}, h("summary", {}, `${ordered.length - GOLD_AT_ONCE} more of the gold`), h("ul", { class: "gold-list" }, ordered.slice(GOLD_AT_ONCE).map(row))) : null);
}

/** Links to the same task elsewhere. */
function besideLinks(row) {
  const others = siblings(row).filter((other) => other.held);
  if (!others.length) return null;
  return h("p", { class: "beside-links" }, h("span", { class: "muted" }, "side by side with "),
    others.slice(0, 12).map((other) => h("a", { href: address([row, other]) }, `${index.runs[other.run].name}${other.run === row.run || other.sample ? ` #${other.sample}` : ""}`)));
}

/** An episode that the file does not hold. */
export function absentView(row) {
  return h("div", { class: "episode" }, h("h1", {}, row.query), section("Left out", {}, h("p", {}, "This file does not hold the episode. This command writes one that does:"), h("p", {}, h("code", {}, commandFor(row)))));
}

/** All turns one after another, for paper. */
export function printView(episode) {
  const last = episode.turns.length - 1;
  const pages = episode.turns.map((_, place) => turnView(episode, place));
  const printed = h("div", { class: "episode printed" }, headView(episode), answersView(episode), episode.card.asked ? deliveredPassages(episode) : null, stripView(episode, -1, () => {}), sideView(episode, last, () => {}), pages, belowView(episode, last, () => {}));
  unfold(printed);
  return printed;
}
