"""The oracle teacher's reasoning with each action, in a sentence or two: what is known, what is missing, why this
action.

The slots are filled with words that a view has shown; everything else is written here.
"""

from __future__ import annotations

from collections.abc import Sequence

SLOT_WORDS = 6
SLOT_CHARACTERS = 60

LINES: dict[str, tuple[str, ...]] = {
    "open": (
        "Nothing is known yet. Search the whole question first and see which documents stand out.",
        "No document is shown so far, so begin with the question as it stands.",
        "The pool is empty. Ask about {topic} in the words of the question.",
    ),
    "asked": (
        "The question names {topic}, and no document about that is shown yet. Ask for it directly.",
        "Still missing: a document about {topic}. The question has that name, so search for it.",
        "What is shown does not cover {topic}. Search for that by name.",
    ),
    "named": (
        "{source} names {topic}, of which no document is shown yet. Search for that.",
        "{source} leads from the question to {topic}. Find what is written about that.",
        "The next link may be {topic}, named in {source}. Nothing about it is shown yet, so search.",
    ),
    "detail": (
        "The name alone was not enough. Search for {topic} beside what is asked about it.",
        "{topic} should be said more exactly. Add words of what is asked.",
    ),
    "page": (
        "What is shown leaves the question open. Ask it again for the next page of results.",
        "The first results may not reach far enough. Look further down the same ranking.",
        "Still missing: a document that settles {topic}. See what else the whole question brings up.",
    ),
    "part": (
        "The whole question brings up other things. Search for parts of it: {topic}.",
        "Fewer words may match better, so try {topic} without the rest.",
        "Something is still missing. Ask in other words of the question, such as {topic}.",
    ),
    "grep": (
        "No document on {topic} is shown. Look for these very letters in the texts.",
        "A document would write {topic} just like this. Grep for it, as ranked search did not show it.",
        "Still open: {topic}. A text that holds it can be found by pattern.",
    ),
    "read": (
        "{source} is close to the question, but maybe not all of its sentences are shown. Read it in full.",
        "{source} may name the missing link further down. Read the whole text.",
        "The shown sentences of {source} lead no further. Read all of it for more names.",
    ),
    "inspect": (
        "Only a part of {source} may be shown. Read it in full before judging.",
        "{source} looks right for {topic}. Read the whole text to be sure.",
    ),
    "keep": (
        "Keep {source}, close to what is asked, before the search goes on.",
        "The search is not over, but {source} should not be lost. Curate now.",
    ),
    "verify": (
        "Check whether {source} can bear out what is asked before the tags are set.",
        "Enough is shown on {topic}. Verify the statement against {source}.",
        "Before anything is called certain, check what is said in {source}.",
    ),
    "curate": (
        "Closest to {topic}: {source}. Tag that highest, keep near ones lower, and drop the rest.",
        "The best evidence is {source}. A few related documents stay with lower tags, and the others go.",
        "Keep {source} first. What is only near the topic gets a low tag, everything else is removed.",
    ),
    "alone": (
        "Closest to {topic}: {source}. Tag that highest and drop the rest.",
        "The best evidence is {source}. Nothing else shown comes near, so only that stays.",
    ),
    "confirmed": (
        "The check supports {source}. Tag the evidence highest and drop what is off the topic.",
        "The check bears out {source}. Put that first and remove what is off the topic.",
    ),
    "tag": (
        "Closest to {topic}: {source}. Tag that by how much it says; nothing in the set has to go.",
        "The best evidence is {source}. Give it its tags and leave the set otherwise as it is.",
    ),
    "select": (
        "Closest to {topic}: {source}. Curate that now, and look at the doubtful ones before pruning.",
        "The best evidence is {source}. Add it with tags first, and prune after a second look.",
    ),
    "guess": (
        "No document clearly covers {topic}. Keep the closest ones with low tags.",
        "Nothing found settles the question. The nearest documents stay, tagged as weak.",
    ),
    "review": (
        "The set is filled but not clean. See {source} once more in full before pruning.",
        "Look again at {source} together, to see what should stay.",
    ),
    "prune": (
        "After the second look, {source} in front is right. Remove the documents that are off the topic.",
        "The review confirms {source}. Drop what does not bear on the question.",
    ),
    "end": (
        "The evidence on {topic} is curated and nothing is left to follow.",
        "The set holds what was found on {topic}. The search can end here.",
        "All that the question asks about is covered by the curated set, so finish.",
    ),
    "give_up": (
        "Further searches bring nothing that fits better. Deliver what is curated on {topic}.",
        "Some of {topic} may remain open, but the search is spent. The best found is curated.",
    ),
    "end_argument": ("The evidence on {topic} is curated.",),
    "give_up_argument": ("The best that was found on {topic} is curated.",),
}


def line(kind: str, choice: int, source: Sequence[str] = (), topic: Sequence[str] = ()) -> str:
    """Return one of the lines of a kind. `source` are handles of shown documents, `topic` are shown names or words."""
    chosen = LINES[kind][choice % len(LINES[kind])]
    return chosen.format(source=_listed(source, 3) or "it", topic=_listed(topic, 2) or "the question")


def _listed(items: Sequence[str], limit: int) -> str:
    """Return the first few items, each cut to a few whole words, as a list in a sentence."""
    short = [_cut(item) for item in items[:limit]]
    return " and ".join(part for part in (", ".join(short[:-1]), *short[-1:]) if part)


def _cut(item: str) -> str:
    words = item.split()[:SLOT_WORDS]
    while len(words) > 1 and len(" ".join(words)) > SLOT_CHARACTERS:
        words.pop()
    return " ".join(words)
