// The exact context of a turn: its pieces by role, which of them a prefix cache holds, and the prompt as it was sent.

import { textOf } from "./data.js";
import { count, h, plural } from "./dom.js";
import { fold } from "./fold.js";

const OPEN_BELOW = 140;

/** The section of a turn. */
export function contextView(episode, place) {
  const turn = episode.turns[place];
  if (!turn.context) {
    const why = episode.problem ? `the episode cannot be replayed exactly: ${episode.problem}` : "the record does not say why";
    return fold("context", "Exact context", "", () => h("p", { class: "muted" }, `Not shown: ${why}.`));
  }
  const note = `${plural(turn.context.length, "piece")}, ${count(turn.tokens)} of ${count(turn.limit)} tokens, ${count(turn.prefill)} of them new`;
  return fold("context", "Exact context", note, () => piecesView(episode, place));
}

function piecesView(episode, place) {
  const turn = episode.turns[place];
  const sent = turn.calls.length ? turn.calls[turn.calls.length - 1].prompt : null;
  const list = h("div", { class: "pieces" });
  const search = h("input", { type: "search", class: "find", placeholder: "find in this context", "aria-label": "find in this context", oninput: () => find(list, search.value, found) });
  const found = h("span", { class: "muted", role: "status" });
  const show = (raw) => {
    list.replaceChildren(...(raw ? sentPieces(episode, sent) : contextPieces(episode, place)));
    if (search.value) find(list, search.value, found);
  };
  const all = h("button", { type: "button", onclick: () => openAll(list, all) }, "Open all");
  const modes = sent ? modeChoice(episode, sent, show) : null;
  show(false);
  return [turn.dropped ? h("p", { class: "muted" }, `${plural(turn.dropped, "piece")} dropped for room`) : null,
    h("div", { class: "tools-line" }, search, all, modes, found), list, declared(episode)];
}

function modeChoice(episode, sent, show) {
  const decoded = sent.every((number) => textOf(episode, ...episode.sent[number]) !== null);
  const option = (name, label, raw) => h("label", {}, h("input", { type: "radio", name: "mode", value: name, checked: !raw, onchange: () => show(raw) }), label);
  return h("fieldset", { class: "modes" }, h("legend", { class: "unseen" }, "what is shown"),
    option("pieces", "pieces", false), option("sent", decoded ? "as sent" : "as sent (not decoded)", true));
}

/** Count the pieces at the beginning that are those of the turn before. */
function reused(episode, place) {
  const [now, before] = [episode.turns[place].context, place ? episode.turns[place - 1].context : null];
  let same = 0;
  while (before && same < now.length && same < before.length && now[same] === before[same]) same += 1;
  return same;
}

function contextPieces(episode, place) {
  const same = reused(episode, place);
  return messages(episode.turns[place].context.map((number, at) => {
    const [key, role, place, tokens] = episode.segments[number];
    const text = textOf(episode, key, place);
    return { role, tokens, view: pieceView(key.split("#")[0], role, text, tokens, at < same) };
  }));
}

/** Pieces as messages: consecutive ones of a role are one message; every output of the policy is one. */
function messages(pieces) {
  const groups = [];
  for (const piece of pieces) {
    const last = groups[groups.length - 1];
    if (last && last[0].role === piece.role && piece.role !== "assistant") last.push(piece);
    else groups.push([piece]);
  }
  return groups.map((group) => h("details", { class: "message", open: true },
    h("summary", {}, h("span", { class: `role role-${group[0].role}` }, group[0].role), `${plural(group.length, "piece")}, ${plural(group.reduce((sum, each) => sum + each.tokens, 0), "token")}`),
    group.map((each) => each.view)));
}

function sentPieces(episode, sent) {
  return messages(sent.map((number) => {
    const [key, place, tokens, at] = episode.sent[number];
    const own = key.startsWith("=");
    const same = at === null ? null : episode.segments[at];
    const text = textOf(episode, key, place) ?? (same ? textOf(episode, same[0], same[2]) : null);
    const role = own ? "format" : same ? same[1] : key.startsWith("call/") ? "assistant" : "user";
    const view = pieceView(own ? "format" : key.split("#")[0], role, text ?? "(the tokenizer is not here: not decoded)", tokens, null);
    return { role, tokens, view };
  }));
}

function pieceView(kind, role, text, tokens, held) {
  const body = text ?? "";
  const line = body.trim().split("\n")[0];
  const long = body.trim().length > OPEN_BELOW || body.trim().includes("\n");
  const mark = held === null ? null : h("span", { class: held ? "cache held" : "cache fresh" }, held ? "reused" : "fresh");
  const head = h("span", { class: "kind" }, kind);
  const tail = [mark, h("span", { class: "tokens" }, count(tokens))];
  if (!long) return h("div", { class: `piece short piece-${role}` }, head, h("code", { class: "line" }, line), tail);
  return h("details", { class: `piece piece-${role}` }, h("summary", {}, head, h("code", { class: "line" }, line), tail), h("pre", {}, body));
}

function openAll(list, button) {
  const closed = button.textContent === "Open all";
  for (const each of list.querySelectorAll("details.piece")) each.open = closed;
  button.textContent = closed ? "Close all" : "Open all";
}

/** Hide the pieces that lack a word, open the others, and mark its first place in each. */
function find(list, wanted, found) {
  const words = wanted.trim().toLowerCase();
  let hits = 0;
  for (const each of list.querySelectorAll(".piece")) {
    const pre = each.querySelector("pre") || each.querySelector("code");
    const at = words ? pre.textContent.toLowerCase().indexOf(words) : -1;
    each.hidden = Boolean(words) && at < 0;
    pre.replaceChildren(...marked(pre.textContent, words));
    if (each.tagName === "DETAILS" && words) each.open = at >= 0;
    hits += at >= 0 ? 1 : 0;
  }
  for (const each of list.querySelectorAll(".message")) each.hidden = !each.querySelector(".piece:not([hidden])");
  found.textContent = words ? plural(hits, "piece") : "";
}

/** Mark a word wherever it is in a text. */
function marked(text, words) {
  if (!words) return [text];
  const parts = [];
  const low = text.toLowerCase();
  let from = 0;
  // Where lower case is of another length, places would not fit: then nothing is marked.
  for (let at = low.indexOf(words); low.length === text.length && at >= 0; at = low.indexOf(words, from)) {
    parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + words.length)));
    from = at + words.length;
  }
  return [...parts, text.slice(from)];
}

function declared(episode) {
  const specs = episode.shared.specs;
  return h("details", { class: "piece piece-format" },
    h("summary", {}, h("span", { class: "kind" }, "tools"), h("span", { class: "kind" }, plural(specs.length, "schema")), h("code", { class: "line" }, specs.map((spec) => spec.name).join(", "))),
    h("pre", {}, JSON.stringify(specs, null, 1)));
}
