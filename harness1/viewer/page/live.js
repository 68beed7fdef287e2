// A served page: asks its server for what is new, and takes it into the index.

import { index, takeNews } from "./data.js";
import { h, plural } from "./dom.js";

const EVERY_MS = 1500;

/** Shown as long as there is no episode. */
export function emptyView() {
  const { waiting } = index.live;
  return h("p", { class: "banner", id: "empty" }, waiting.length ? `Waiting for ${waiting.join(", ")}: nothing is recorded there yet.` : "Waiting for the first episode.");
}

/** Ask again and again; `show` is called when something has changed. */
export async function watch(show) {
  let before = "";
  for (;;) {
    const more = await news().catch(() => null);
    if (more === null) say("the server has ended; what is here stays");
    else {
      const { changed, left } = more;
      const state = JSON.stringify([index.runs, index.recipes, index.trainings, index.sessions, index.live]);
      if (changed || state !== before) show();
      before = state;
      say(["live", plural(index.rows.length, "episode"), ...index.live.waiting.map((folder) => `waiting for ${folder}`), ...index.live.problems].join(" · "));
      if (left) continue;
    }
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

async function news() {
  const { life, next } = index.live;
  const answer = await fetch(`news?life=${life}&next=${next}`);
  if (!answer.ok) throw new Error(await answer.text());
  const found = await answer.json();
  // A run that was begun again has other episodes: nothing of the old ones may stay.
  if (life && found.life !== life) location.reload();
  takeNews(found.rows, found.changed);
  Object.assign(index, { runs: found.runs, recipes: found.recipes, trainings: found.trainings, sessions: found.sessions });
  index.live = { life: found.life, next: found.next, waiting: found.waiting, problems: found.problems };
  return { changed: found.rows.length + found.changed.length > 0, left: found.left };
}

function say(text) {
  const place = document.getElementById("watch");
  if (place.textContent !== text) place.textContent = text;
}
