// Addresses in the fragment: `#RUN/EPISODE/TURN`, side by side `#RUN/EPISODE,RUN/EPISODE`,
// `#list`, `#run/RUN` (the list with one run), `#recipes`, `#pairs`, `#training`, `#sessions` and `#session/NUMBER`.

import { index } from "./data.js";

/** What is shown without an address, if it is not the list: the latest of the questions that somebody asked. */
function latest() {
  const alone = index.runs.length && index.runs.every((run) => run.asked) && !index.trainings.length && !index.sessions.length;
  return alone && !index.live ? index.rows.findLast((row) => row.held) : undefined;
}

const LATEST = latest();
/** The address of the list; another page may be shown without an address. */
export const LIST = "list";

/** What an address asks for: `{page, rows, turn}`; turns count from 0. An unknown address is the list, with a note. */
export function route(hash) {
  const path = hash.replace(/^#/, "");
  if ((path === "" || path === "recipes") && index.recipes.length) return { page: "recipes", rows: [] };
  const run = /^run\/(\d+)$/.exec(path);
  if (run && index.runs[run[1]]) return { page: "list", rows: [], run: Number(run[1]) };
  if (path === "training" || (path === "pairs" && index.pairs.length)) return { page: path, rows: [] };
  if (path === "" && LATEST) return { page: "episode", rows: [LATEST], turn: 0, given: false };
  if (path === "" || path === "main" || path === "list") return { page: "list", rows: [] };
  if (path === "sessions") return { page: "sessions", rows: [] };
  const session = /^session\/(\d+)$/.exec(path);
  if (session && index.sessions[session[1]]?.held) return { page: "session", rows: [], session: Number(session[1]) };
  const parts = path.split(",").map((part) => part.split("/"));
  const rows = parts.map(([run, episode]) => rowNamed(run, decoded(episode)));
  if (rows.length > 2 || rows.some((row) => !row)) return { page: "list", rows: [], missing: path };
  const turn = Math.max(0, (Number.parseInt(parts[0][2], 10) || 1) - 1);
  return { page: rows.length === 2 ? "beside" : "episode", rows, turn, given: parts[0][2] !== undefined };
}

/** An episode may have been recorded again under its name: the last one counts. */
function rowNamed(run, episode) {
  return index.rows.findLast((row) => String(row.run) === run && row.episode === episode);
}

function decoded(text) {
  try {
    return decodeURIComponent(text ?? "");
  } catch {
    return "";
  }
}

/** The address of an episode, or of two; turns are written from 1. */
export function address(rows, turn) {
  const names = rows.map((row) => `${row.run}/${encodeURIComponent(row.episode)}`);
  if (turn !== undefined) names[0] += `/${turn + 1}`;
  return `#${names.join(",")}`;
}
