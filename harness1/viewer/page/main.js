// What is shown now: follows the address, and nothing else keeps state but the filters of the list.

import { besideView } from "./beside.js";
import { index, loadEpisode, siblings } from "./data.js";
import { announce, h } from "./dom.js";
import { absentView, episodeView, printView } from "./episode.js";
import { openFold } from "./fold.js";
import { helpView, listen } from "./keys.js";
import { emptyView, watch } from "./live.js";
import { listState, listView, refreshList } from "./list.js";
import { hasPairs, pairsView } from "./pairs.js";
import { recipesView } from "./recipe.js";
import { address, LIST, route } from "./route.js";
import { runsView } from "./runs.js";
import { sessionView, sessionsView } from "./session.js";
import { trainingView } from "./training.js";

const main = document.getElementById("main");
const THEMES = ["", "light", "dark"];
let now = { page: "", rows: [] };
let loaded = [];
let left = null;
let home = LIST;

async function follow() {
  const asked = route(location.hash);
  if (now.rows.length) left = now.rows[0];
  const same = asked.page === now.page && asked.rows.every((row, at) => row === now.rows[at]);
  now = asked;
  if (asked.page === "list" || asked.page === "pairs") home = asked.page === "pairs" ? "pairs" : LIST;
  const made = await pageOf(asked);
  if (now !== asked) return;
  const top = window.scrollY;
  main.replaceChildren(made);
  main.className = `page-${asked.page}`;
  document.title = titleOf(asked);
  window.scrollTo(0, same ? top : 0);
  if (!same) main.focus({ preventScroll: true });
  if ((asked.page === "list" || asked.page === "pairs") && !same && left) main.querySelector(`[data-at="${left.at}"]`)?.focus();
  for (const each of main.querySelectorAll('.turn[aria-current="step"]')) each.parentElement.scrollLeft = each.offsetLeft - each.parentElement.clientWidth / 2;
}

async function pageOf(asked) {
  if (asked.page === "recipes") return recipesView();
  if (asked.page === "training") return trainingView();
  if (asked.page === "sessions") return sessionsView();
  if (asked.page === "session") return sessionView(asked.session);
  if (asked.page === "pairs") return pairsView();
  if (asked.run !== undefined) listState.run = String(asked.run);
  if (asked.page === "list") return listPage(asked.missing);
  const absent = asked.rows.find((row) => !row.held);
  if (absent) return absentView(absent);
  loaded = await Promise.all(asked.rows.map(loadEpisode));
  const longest = Math.max(...loaded.map((episode) => episode.turns.length));
  asked.turn = Math.min(asked.turn, Math.max(0, longest - 1));
  return asked.page === "beside" ? besideView(loaded, asked.turn, go) : episodeView(loaded[0], asked.turn, go);
}

function listPage(missing) {
  if (!index.runs.length && missing === undefined) {
    if (index.trainings.length) return trainingView();
    if (index.sessions.length) return sessionsView();
  }
  const note = missing === undefined ? null : h("p", { class: "banner" }, `Nothing in this file has the address #${missing}.`);
  if (index.live && !index.rows.length) return h("div", {}, note, emptyView());
  return h("div", {}, note, headOfList(), listView());
}

function headOfList() {
  return h("div", { id: "list-head" }, runsView(() => main.replaceChildren(listPage())));
}

/** Take news of a served page into what is shown; an open episode stays as it is. */
function showNews() {
  navView();
  const head = document.getElementById("list-head");
  if (now.page === "list" && head) {
    head.replaceWith(headOfList());
    refreshList();
  } else if (["list", "recipes", "training", "sessions"].includes(now.page)) {
    const focused = document.activeElement?.id;
    follow().then(() => focused && document.getElementById(focused)?.focus({ preventScroll: true }));
  }
}

function titleOf({ page, rows, turn }) {
  const names = index.recipes.length ? index.recipes.map((recipe) => recipe.name) : [...index.runs.map((run) => run.name), ...index.trainings.map((training) => training.name), ...new Set(index.sessions.map((session) => session.record))];
  return rows.length ? `${rows.map((row) => row.task).join(" | ")} turn ${turn + 1}` : `${{ training: "Training · ", pairs: "Pairs · " }[page] || ""}${names.join(" · ")}`;
}

/** Show another turn; the address changes without a step in the history. */
function go(turn) {
  const longest = Math.max(...loaded.map((episode) => episode.turns.length));
  if (turn < 0 || turn >= longest || turn === now.turn) return;
  history.replaceState(null, "", address(now.rows, turn));
  announce(`turn ${turn + 1}`);
  follow();
}

function episodeBy(step) {
  if (!now.rows.length) return;
  const held = listState.shown.filter((row) => row.held);
  const place = held.indexOf(now.rows[0]);
  const next = held[place < 0 ? 0 : place + step];
  if (next) location.hash = address([next]);
}

function step(by) {
  if (now.page === "list" || now.page === "pairs") focusRow(by);
  else if (now.rows.length && now.turn !== undefined) go(now.turn + by);
}

/** Focus the next row of the list; rows further down are made as the page comes to them. */
function focusRow(by) {
  const links = [...main.querySelectorAll(".list tbody [data-at]")];
  const place = links.indexOf(document.activeElement);
  links[place < 0 ? 0 : Math.max(0, Math.min(links.length - 1, place + by))]?.focus();
}

function toBeside() {
  if (now.page !== "episode") return;
  const others = siblings(now.rows[0]).filter((row) => row.held);
  const next = others.find((row) => row.run > now.rows[0].run) || others[0];
  if (next) location.hash = address([now.rows[0], next]);
}

function toSearch() {
  if (now.page !== "list" && now.page !== "pairs") {
    location.hash = LIST;
    window.addEventListener("hashchange", () => setTimeout(() => document.getElementById("search")?.focus(), 50), { once: true });
  }
  document.getElementById("search")?.focus();
}

function toFind() {
  openFold(main, "context")?.querySelector(".find")?.focus();
}

function toChain() {
  openFold(main, "chain")?.scrollIntoView({ block: "start" });
  main.querySelector(".chain-frame")?.focus({ preventScroll: true });
}

/** Back to where the episode was chosen. */
function toList() {
  if (now.page !== "list" && now.page !== "pairs") location.hash = home;
}

function stored(value) {
  // A browser may forbid a file to remember anything.
  try {
    if (value === undefined) return localStorage.getItem("harness1-theme") || "";
    localStorage.setItem("harness1-theme", value);
  } catch {
    return "";
  }
  return value;
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  const button = document.getElementById("theme");
  button.textContent = { "": "◐ auto", light: "☀ light", dark: "☾ dark" }[theme];
  button.setAttribute("aria-label", `theme: ${theme || "the system's"}`);
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || "") + 1) % THEMES.length];
  stored(theme);
  setTheme(theme);
}

function showHelp() {
  const dialog = document.getElementById("help");
  helpView(dialog);
  dialog.showModal();
}

/** On paper an episode shows all its turns. */
function forPaper(printing) {
  const shown = main.querySelector(".printed");
  if (printing && !shown && now.page === "episode" && loaded.length === 1) main.append(printView(loaded[0]));
  if (!printing && shown) shown.remove();
}

function navView() {
  const links = [];
  if (index.recipes.length) links.push(h("a", { href: "#recipes" }, index.recipes.length > 1 ? "Recipes" : "Recipe"));
  if (index.runs.length) links.push(h("a", { href: `#${LIST}` }, "Episodes"));
  if (hasPairs()) links.push(h("a", { href: "#pairs" }, "Pairs"));
  if (index.trainings.length) links.push(h("a", { href: "#training" }, "Training"));
  if (index.sessions.length) links.push(h("a", { href: "#sessions" }, "Sessions"));
  document.getElementById("nav").replaceChildren(...links);
}

function begin() {
  navView();
  document.getElementById("theme").addEventListener("click", nextTheme);
  document.getElementById("help-button").addEventListener("click", showHelp);
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  setTheme(stored());
  listen({ next: () => step(1), before: () => step(-1), nextEpisode: () => episodeBy(1), episodeBefore: () => episodeBy(-1), search: toSearch, find: toFind, beside: toBeside, chain: toChain, list: toList, back: toList, theme: nextTheme, help: showHelp });
  window.addEventListener("hashchange", follow);
  window.matchMedia("print").addEventListener("change", (event) => forPaper(event.matches));
  window.addEventListener("beforeprint", () => forPaper(true));
  window.addEventListener("afterprint", () => forPaper(false));
  follow();
  if (index.live) watch(showNews);
}

begin();
