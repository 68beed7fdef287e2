// Sessions that a proxy recorded: their list, and the calls of one in order.

import { index, loadSession } from "./data.js";
import { count, h, num, plural, section } from "./dom.js";

/** The page of all sessions. */
export function sessionsView() {
  return h("div", { class: "sessions" }, h("h1", {}, plural(index.sessions.length, "session")),
    h("p", { class: "muted" }, "Calls of agents that a proxy recorded. A recording has neither memory nor gold."),
    h("div", { class: "list-frame" }, h("table", { class: "list" }, h("caption", { class: "unseen" }, "Sessions"),
      h("thead", {}, h("tr", {}, ["session", "recording", "calls", "failed", "tokens sampled", "seconds"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, index.sessions.map(sessionRow)))));
}

function sessionRow(row, at) {
  const cells = [["session", row.held ? h("a", { href: `#session/${at}` }, row.name) : [row.name, h("small", {}, " left out: no room")]],
    ["recording", row.record], ["calls", row.calls], ["failed", row.failed], ["tokens sampled", row.tokens === null ? "–" : count(row.tokens)], ["seconds", num(row.seconds, 1)]];
  return h("tr", {}, cells.map(([label, cell]) => h("td", { "data-label": label }, cell)));
}

/** The page of one session. */
export async function sessionView(at) {
  const session = await loadSession(at);
  return h("div", { class: "session" },
    h("div", { class: "head" }, h("p", { class: "muted" }, [session.record, session.upstream].filter(Boolean).join(" · ")), h("h1", {}, session.name),
      h("p", { class: "facts" }, h("span", { class: "muted" }, plural(session.calls.length, "call")))),
    session.calls.map(callView));
}

function callView(call, at) {
  const facts = [call.prompt_tokens && `${count(call.prompt_tokens)} tokens read`, call.output_tokens && `${count(call.output_tokens)} sampled`,
    call.mean_logprob !== null && `mean log probability ${num(call.mean_logprob, 3)}`, call.finish, call.versions && `weights ${[...new Set(call.versions)].join(" to ")}`,
    call.waited !== null && `waited ${num(call.waited, 2)} s`, call.seconds !== null && `answered in ${num(call.seconds, 2)} s`];
  return section(`Call ${at + 1}`, { class: "call" },
    h("p", { class: "muted" }, [call.dialect, call.model, call.agent && `agent ${call.agent}`, call.attempt && `attempt ${call.attempt + 1}`, ...facts].filter(Boolean).join(" · ")),
    call.error === null ? null : h("p", { class: "error" }, `${call.status}: ${call.error}`),
    call.untrainable === null ? null : h("p", { class: "muted" }, `Not for training: ${call.untrainable}.`),
    earlierView(call),
    call.prompt === null ? null : partView("prompt", "user", call.prompt),
    call.messages.map((message) => partView(message?.role || "message", message?.role, wordsOf(message))),
    call.output === null ? null : partView("output as sampled", "assistant", call.output, true),
    call.reply === null ? null : partView("reply", "assistant", wordsOf(call.reply), true),
    call.output_tokens && call.output === null ? h("p", { class: "muted" }, "The tokens are not decoded: their tokenizer is not here.") : null,
    call.actions.map((action) => h("p", {}, h("b", {}, action.name), " ", h("code", {}, JSON.stringify(action.arguments || {})))));
}

function earlierView(call) {
  const parts = [call.reused && `${count(call.reused)} tokens`, call.earlier && plural(call.earlier, "message")].filter(Boolean);
  return parts.length ? h("p", { class: "muted" }, `Begins with ${parts.join(" and ")} of the call before; what follows is new.`) : null;
}

function partView(name, role, text, open = false) {
  return h("details", { class: `piece piece-${role}`, open }, h("summary", {}, h("span", { class: "kind" }, name), h("code", { class: "line" }, text.trim().split("\n")[0])), h("pre", {}, text));
}

/** The text of a message of a chat, or all of it where it is not only text. */
function wordsOf(message) {
  return typeof message?.content === "string" && !message.tool_calls ? message.content : JSON.stringify(message, null, 1);
}
