// What a policy did in a turn, and what came back.

import { documentChip, documentList, star, unseen } from "./documents.js";
import { count, h, num, plural, section } from "./dom.js";

const HITS_AT_ONCE = 5;
const VERDICTS_AT_ONCE = 6;
const LONG_ARGUMENT = 400;

/** The action of a turn, with its reasons and everything that went wrong on the way. */
export function actionView(episode, turn) {
  const { action } = turn;
  return section(action ? `Action: ${action.name}` : "No action", { class: "action" },
    turn.parse_error ? h("p", { class: "error" }, `Not understood: ${turn.parse_error}`) : null,
    action ? argumentsView(episode, turn) : null,
    turn.reasoning ? h("blockquote", {}, turn.reasoning) : null,
    turn.ignored.length ? h("p", { class: "warn" }, `${plural(turn.ignored.length, "further call")} ignored: ${turn.ignored.map((call) => `${call.name} ${JSON.stringify(call.arguments || {})}`).join("; ")}`) : null,
    turn.calls.map((call, at) => attemptView(episode, call, at, turn)));
}

function argumentsView(episode, turn) {
  const given = Object.entries(turn.action.arguments || {});
  if (!given.length) return h("p", { class: "muted" }, "without arguments");
  const handles = new Map(episode.units.map(([, handle], unit) => [handle, unit]).filter(([handle]) => handle));
  const valueView = (value) => {
    if (Array.isArray(value)) return h("ul", { class: "values" }, value.map((each) => h("li", {}, valueView(each))));
    if (value !== null && typeof value === "object") return h("ul", { class: "values" }, Object.entries(value).map(([name, each]) => h("li", {}, valueView(name), " ", valueView(each))));
    if (typeof value === "string" && value.length > LONG_ARGUMENT) return h("details", {}, h("summary", {}, `${value.slice(0, 120)} …`), h("pre", {}, value));
    const unit = handles.get(value);
    return unit === undefined ? String(value) : h("span", { title: episode.units[unit][2] }, h("b", {}, value), star(episode, unit));
  };
  return h("dl", { class: "arguments" }, given.map(([name, value]) => [h("dt", {}, name), h("dd", {}, valueView(value))]));
}

function attemptView(episode, call, at, turn) {
  const failed = at < turn.calls.length - 1 || !turn.action;
  const facts = [
    plural(call.output_tokens, "token"),
    call.mean_logprob === null ? "" : `mean log probability ${num(call.mean_logprob, 3)}`,
    call.finish,
    `temperature ${call.sampling.temperature ?? 1}`,
    `weights ${call.versions[0]}${call.versions[1] === call.versions[0] ? "" : ` to ${call.versions[1]}`}`,
    `${num(call.seconds, 2)} s`,
  ];
  return h("details", { class: failed ? "attempt failed" : "attempt", open: failed },
    h("summary", {}, failed ? `Failed attempt ${call.attempt + 1}` : `Output as sampled`, h("small", {}, ` ${facts.filter(Boolean).join(" · ")}`)),
    h("pre", {}, call.output ?? "(not decoded: no tokens were recorded, or their tokenizer is not here)"));
}

/** The structured result of a turn. */
export function resultView(episode, turn) {
  const seen = turn.observation;
  if (!seen) return null;
  const gold = seen.hits.filter((hit) => episode.goldUnits.has(episode.chunks[hit[0]])).length;
  return section("Result", { class: "result" },
    seen.error ? h("p", { class: "error" }, seen.error[1]) : null,
    seen.notes.map(([code, words]) => h("p", { class: "note", title: code }, words)),
    seen.verdicts.length ? verdictTable(episode, seen.verdicts) : null,
    seen.hits.length ? h("p", { class: "muted" }, `${plural(seen.hits.length, "hit")}${episode.gold ? `, ${gold} of gold` : ""}`) : null,
    hitList(episode, seen), rankingsView(episode, seen),
    seen.auto.length ? h("div", {}, h("h4", {}, "Curated by the environment"), documentList(episode, seen.auto)) : null,
    resolvedView(seen.resolved));
}

function verdictTable(episode, verdicts) {
  const claims = [...new Set(verdicts.map(([, claim]) => claim))];
  const row = ([unit, , label, sentence, cached]) =>
    h("li", {}, h("span", { class: `verdict verdict-${label}${label === "no" && episode.goldUnits.has(unit) ? " verdict-wrong" : ""}` }, label), cached ? h("small", {}, " known ") : " ",
      documentChip(episode, unit), sentence ? h("q", { class: "passage" }, sentence) : null);
  return claims.map((claim) => {
    const own = verdicts.filter((each) => each[1] === claim);
    const rest = own.slice(VERDICTS_AT_ONCE);
    return h("div", { class: "verdicts" }, h("p", {}, "Claim: ", h("q", {}, claim)), h("ul", {}, own.slice(0, VERDICTS_AT_ONCE).map(row)),
      rest.length ? h("details", { class: "rest" }, h("summary", {}, plural(rest.length, "further verdict")), h("ul", {}, rest.map(row))) : null);
  });
}

/** For each chunk, at which place of which query it was found. */
function places(seen) {
  const found = new Map();
  seen.rankings.forEach((ranking, query) => ranking.chunks.forEach((chunk, rank) => {
    if (!found.has(chunk)) found.set(chunk, []);
    found.get(chunk).push(seen.rankings.length > 1 ? `q${query + 1}#${rank + 1}` : `#${rank + 1}`);
  }));
  return found;
}

function hitView(episode, [chunk, score, tokens], found) {
  const { id, text } = episode.passages[chunk];
  const unit = episode.chunks[chunk];
  const [unitId, handle, title] = episode.units[unit];
  return h("details", { class: episode.goldUnits.has(unit) ? "hit gold" : "hit" },
    h("summary", { title: id }, h("b", {}, handle || unitId), star(episode, unit), h("span", { class: "doc-title" }, title || unitId),
      handle ? null : h("small", {}, "hidden copy "),
      h("small", { class: "place" }, (found.get(chunk) || []).join(" ")), h("small", { class: "tokens" }, `${num(score, 2)}`, unseen(" score"))),
    h("p", { class: "muted" }, `${id} · ${count(tokens)} tokens`), h("pre", {}, text));
}

/** Hits under the query that found them first; of one query the first few, of several the queries alone are open. */
function hitList(episode, seen) {
  if (!seen.hits.length) return null;
  const found = places(seen);
  const groups = new Map();
  for (const hit of seen.hits) {
    const query = seen.rankings.findIndex((ranking) => ranking.chunks.includes(hit[0]));
    if (!groups.has(query)) groups.set(query, []);
    groups.get(query).push(hit);
  }
  const views = (hits) => hits.map((hit) => hitView(episode, hit, found));
  if (groups.size > 1) {
    const inOrder = [...groups].sort(([a], [b]) => a - b);
    return h("div", { class: "hits" }, inOrder.map(([query, hits]) => h("details", { class: "rest by-query" },
      h("summary", {}, query < 0 ? "without a query" : [h("small", {}, `q${query + 1} `), seen.rankings[query].query], " ", amount(episode, hits)), views(hits))));
  }
  const hits = views(seen.hits);
  const rest = hits.slice(HITS_AT_ONCE);
  return h("div", { class: "hits" }, hits.slice(0, HITS_AT_ONCE),
    rest.length ? h("details", { class: "rest" }, h("summary", {}, `${rest.length} more `, amount(episode, seen.hits.slice(HITS_AT_ONCE), true)), rest) : null);
}

function amount(episode, hits, goldOnly = false) {
  const gold = hits.filter(([chunk]) => episode.goldUnits.has(episode.chunks[chunk])).length;
  return h("small", {}, goldOnly ? "" : plural(hits.length, "hit"), gold ? [goldOnly ? "" : ", ", h("span", { class: "star" }, "★"), ` ${gold} of gold`] : null);
}

function rankingsView(episode, seen) {
  if (!seen.rankings.length) return null;
  const name = (chunk) => {
    if (typeof chunk === "string") return h("li", { class: "muted" }, chunk, " (no room)");
    return h("li", {}, documentChip(episode, episode.chunks[chunk]));
  };
  return h("details", { class: "rankings" }, h("summary", {}, plural(seen.rankings.length, "ranking")),
    seen.rankings.map((ranking) => h("div", {}, h("h4", {}, ranking.query), h("ol", {}, ranking.chunks.map(name)),
      ranking.before.length ? [h("h4", {}, "before reranking"), h("ol", {}, ranking.before.map(name))] : null)));
}

function resolvedView(resolved) {
  const pairs = Object.entries(resolved);
  if (!pairs.length) return null;
  return h("details", {}, h("summary", {}, `${plural(pairs.length, "handle")} used`), h("p", { class: "muted" }, pairs.map(([handle, id]) => `${handle} = ${id}`).join(", ")));
}
