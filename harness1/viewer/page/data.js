// What the file holds: the index at once, episodes inflated when they are asked for.

const KEPT = 12;
const BLOCK = 64;
const BLOCKS_KEPT = 400;

/** The index: `rows` as objects, each with its place `at`. */
export const index = readIndex();
const inflated = new Map();
const blocks = new Map();

function readIndex() {
  const read = JSON.parse(document.getElementById("index").textContent);
  read.rows = read.rows.map((row, at) => namedRow(read.columns, row, at));
  return read;
}

function namedRow(columns, row, at) {
  const named = { at };
  columns.forEach((name, place) => (named[name] = row[place]));
  named.words = `${named.task} ${named.episode} ${named.query}`.toLowerCase();
  return named;
}

/** Take rows that are new or have changed, each with its place, and forget data that has changed. */
export function takeNews(rows, changed) {
  for (const [at, row] of rows) {
    index.rows[at] = namedRow(index.columns, row, at);
    inflated.delete(`e${at}`);
  }
  for (const id of changed) inflated.delete(id);
}

/** The parts of a tag, remembered for a while in a map of at most so many. */
function inflate(id, kept = inflated, most = KEPT) {
  if (!kept.has(id)) {
    if (kept.size >= most) kept.delete(kept.keys().next().value);
    kept.set(id, tagText(id).then((text) => Promise.all(text.split(",").map(unpack))));
  }
  return kept.get(id);
}

/** The text of a tag, which may still be on its way while the page is being read. */
async function tagText(id) {
  if (index.live) return servedText(id);
  if (!document.getElementById(id) && document.readyState === "loading") {
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  }
  const tag = document.getElementById(id);
  if (!tag) throw new Error(`the file does not hold ${id}`);
  return tag.textContent;
}

async function servedText(id) {
  const answer = await fetch(`data/${id}`);
  if (answer.ok) return answer.text();
  // What failed is asked for again the next time.
  inflated.delete(id);
  throw new Error(await answer.text());
}

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at += 1) bytes[at] = letters.charCodeAt(at);
  return bytes;
}

async function unpack(text) {
  const bytes = bytesOf(text);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).json();
}

/** An episode with its run and its passages: `{row, run, card, shared, passages, ...}`. */
export async function loadEpisode(row) {
  const [[episode, numbers, own], [shared]] = await Promise.all([inflate(`e${row.at}`), inflate(`r${row.run}`)]);
  if (episode.row) return episode;
  // A served episode brings its passages, and the texts that a file stores once for all episodes.
  const all = own ? { ...shared, texts: { ...shared.texts, ...own.texts } } : shared;
  prepare(episode, row, all, own ? own.passages.map(namedPassage) : await passagesOf(numbers));
  return episode;
}

/** A training's curves. */
export async function loadTraining(number) {
  return (await inflate(`t${number}`))[0];
}

/** A session of a recording. */
export async function loadSession(number) {
  return (await inflate(`s${number}`))[0];
}

/** Passages by their numbers in the file; only the blocks that hold them are inflated. */
async function passagesOf(numbers) {
  const needed = [...new Set(numbers.map((number) => Math.floor(number / BLOCK)))];
  const found = new Map(await Promise.all(needed.map(async (block) => [block, (await inflate(`p${block}`, blocks, BLOCKS_KEPT))[0]])));
  return numbers.map((number) => namedPassage(found.get(Math.floor(number / BLOCK))[number % BLOCK]));
}

function namedPassage([id, document, title, text]) {
  return { id, document, title, text };
}

function prepare(episode, row, shared, passages) {
  episode.passages = passages;
  episode.texts = episode.texts.map((parts) => joined(parts, passages));
  episode.units = episode.units.map(([handle, source, more]) => {
    if (typeof source === "string") return [source, handle, more];
    const { id, document, title } = passages[source];
    return [more ? id : document, handle, title];
  });
  episode.row = row;
  episode.card = index.runs[row.run];
  episode.shared = shared;
  const targets = episode.gold ? episode.gold.targets : [];
  episode.goldUnits = new Set(targets.flatMap((target) => target.units));
  episode.answerUnits = new Set(targets.filter((target) => target.answer).flatMap((target) => target.units));
  episode.firstSeen = new Map();
  episode.turns.forEach((turn, place) => {
    for (const unit of turn.change?.pooled || []) if (!episode.firstSeen.has(unit)) episode.firstSeen.set(unit, place);
  });
}

/** A text from its parts: strings as they are, and three numbers for each stretch of a passage. */
function joined(parts, passages) {
  if (typeof parts === "string") return parts;
  let text = "";
  for (let at = 0; at < parts.length; ) {
    if (typeof parts[at] === "string") text += parts[at++];
    else {
      const { title, text: body } = passages[parts[at]];
      text += `${title}\n${body}`.slice(parts[at + 1], parts[at + 2]);
      at += 3;
    }
  }
  return text;
}

/** The text of a segment by its number, or by its key where the run has it; null where it cannot be known. */
export function textOf(episode, key, number) {
  return number !== null ? episode.texts[number] : (episode.shared.texts[key] ?? null);
}

/** Return whether the gold of any episode is known: without it, there are no words about gold. */
export function anyGold() {
  return index.rows.some((row) => row.recall !== null);
}

/** Other episodes of the same task, in this run and others. */
export function siblings(row) {
  return index.rows.filter((other) => other.task === row.task && other.at !== row.at);
}

/** The command that writes a file with an episode that this one has left out. */
export function commandFor(row) {
  const folder = index.runs[row.run].folder;
  const quoted = /^[\w./-]+$/.test(folder) ? folder : `'${folder.replaceAll("'", "'\\''")}'`;
  return `harness1 view ${quoted} --episodes ${row.episode} --out view-${row.episode}.html`;
}

/** The names of the tools that an episode used. */
export function toolsOf(row) {
  return index.runs[row.run].tools.filter((_, bit) => row.tools & (1 << bit));
}
