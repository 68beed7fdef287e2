// What a model answered from an episode: its sentences, and below each the passages that it cites, with what is quoted.

import { h, section } from "./dom.js";

/** The answers, or nothing. */
export function answersView(episode) {
  return episode.answers.length ? episode.answers.map(answerView) : null;
}

function answerView(answer) {
  const sentences = answer.sentences.map((sentence) => h("li", {}, h("p", {}, sentence.text, sentence.citations.length ? null : h("b", { class: "error" }, " No passage bears it out.")),
    h("ul", {}, sentence.citations.map((cited) => citationView(answer, cited)))));
  return section(answer.model ? `Answer of ${answer.model}` : "The best sentences", { class: "answer" },
    sentences.length ? h("ol", {}, sentences) : h("p", {}, answer.text),
    answer.sufficient ? null : h("p", { class: "error" }, "The passages do not suffice for an answer."));
}

function citationView(answer, cited) {
  const passage = answer.passages[cited.passage - 1];
  if (!passage) return h("li", { class: "error" }, `There is no passage ${cited.passage}.`);
  const place = cited.section ? h("span", { class: "muted" }, ` ${cited.section}`) : null;
  return h("li", {}, h("b", {}, passage.title || passage.doc_id), " ", h("code", {}, passage.doc_id), place, " ",
    answer.model && cited.quote ? h("q", {}, cited.quote) : null, cited.found ? null : h("b", { class: "error" }, cited.quote ? " not found in the passage" : " does not bear it out"),
    h("details", {}, h("summary", {}, "passage"), h("pre", {}, passage.text)));
}
