"""Queries that a policy without gold could also write: every word is from the question or a shown document."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from harness1.env.view import DocumentView
from harness1.memory.entities import FUNCTION_WORDS, extract
from harness1.memory.question import QUESTION_WORDS, SCANNED_CHARACTERS, head, mentions, normalised_name, relatedness
from harness1.policy.teacher.evidence import SeenEvidence
from harness1.policy.teacher.evidence_score import EvidenceScore

LEAD = 0.08
"""Least value of a name in a document that is not gold for it to be searched."""
COMMON = 3
"""A single word that more other documents name than this is too common to search for."""
FACET = 3
LOUD = 5
"""A longer word in capitals is a heading."""
SHORTEST = 4
"""Fewest content words of a question that is taken apart."""

_WORD = re.compile(r"[^\W_](?:[\w'’./-]*\w)?")
_LITERAL = re.compile(r"[\w ,'-]+")


@dataclass(frozen=True)
class Lead:
    """A query, the name that it follows, and the handle of the document that the name is from (empty: the question)."""

    query: str
    name: str
    source: str = ""
    detailed: bool = False


def leads(question: str, evidence: SeenEvidence) -> Iterator[list[Lead]]:
    """Yield groups of queries about names, the most promising group first.

    1. Names in the question, and names beside its relation words in gold documents, that have no document yet.
    2. The other names in gold documents, then those of strong documents.
    3. Names together with words of the question, and adjacent names ("Paris, Texas" is two).
    """
    known, own = evidence.heads(), [Lead(name, name) for name in topics(question)]
    near, far = _named(evidence, known)
    yield [*(lead for lead in own if _tells(lead.name, known, _counts(evidence))), *near]
    yield [*far, *_strong(evidence.score, known)]
    detailed = (
        Lead(f"{lead.name} {words}", lead.name, lead.source, detailed=True)
        for lead in (*own, *near, *far)
        if (words := facet(question, lead.name))
    )
    joined = (
        Lead(f"{name} {follower}", f"{name} {follower}", document.handle)
        for document in reversed(evidence.gold)
        for name, follower in pairwise(extract(_whole(document), SCANNED_CHARACTERS))
    )
    yield [*detailed, *joined]


def topics(question: str) -> list[str]:
    """Return the names in a question, those of several words first, without years and parts of longer names."""
    names = {f" {normalised_name(name)} ": name for name in mentions(question) if not normalised_name(name).isdecimal()}
    inner = [key for key, name in names.items() if not _runs_on(name, question)] or list(names)
    whole = [names[key] for key in inner if not any(key != other and key in other for other in inner)]
    return sorted(whole, key=lambda name: " " not in name)


def _runs_on(name: str, question: str) -> bool:
    """Return whether a run of capitals is more than a name: it includes the opening word, or two sides of a choice."""
    opens = question.startswith(name) and name.split()[0].lower() in FUNCTION_WORDS | QUESTION_WORDS
    return opens or " or " in name


def subject(question: str) -> tuple[str, ...]:
    """Return briefly what a question is about: its names, or else its first content words."""
    return tuple(topics(question) or filter(None, [" ".join(content_words(question)[:FACET])]))


def facet(question: str, name: str) -> str:
    """Return the first few words of the question about what is asked of a name."""
    named = set(normalised_name(" ".join([name, *mentions(question)])).split())
    return " ".join([word for word in content_words(question) if normalised_name(word) not in named][:FACET])


def beside(question: str, name: str) -> str:
    """Return the last few content words before a name in the question, which say what about it is meant."""
    before, _, behind = question.partition(name)
    named = set(normalised_name(" ".join(mentions(question))).split())
    words = [word for word in content_words(before) if normalised_name(word) not in named] if behind or before else []
    return " ".join(words[-FACET:])


def parts(question: str) -> list[str]:
    """Return stretches of a question's own words, for a corpus where the whole question finds something else."""
    words = content_words(question)
    if len(words) < SHORTEST:
        return [" ".join(words)] if words else []
    half = len(words) // 2
    telling = set(sorted(words, key=lambda word: -len(word))[: max(3, half)])
    windows = (words[start : start + 3] for start in range(0, len(words) - 2, 2))
    cut = (words[:half], words[half:], [word for word in words if word in telling], words[::2], words[1::2], *windows)
    return list(dict.fromkeys(" ".join(part) for part in cut))


def patterns(question: str, evidence: SeenEvidence) -> Iterator[str]:
    """Yield patterns to grep for: names without a document, then words of the question that no document has."""
    known = evidence.heads()
    near, _ = _named(evidence, known)
    names = [name for name in topics(question) if head(name) not in known]
    yield from (name for name in (*names, *(lead.name for lead in near)) if _LITERAL.fullmatch(name))
    shown = {word for document in evidence.documents.values() for word in normalised_name(_whole(document)).split()}
    words = sorted(content_words(question), key=lambda word: -len(word))
    unseen = [word for word in words if len(word) > 3 and not shown.issuperset(normalised_name(word).split())]
    yield from (f"(?i){word}" for word in unseen if _LITERAL.fullmatch(word))


def content_words(question: str) -> list[str]:
    """Return the distinct content words, spelled as in the question."""
    words = {normalised_name(word): word for word in reversed(_WORD.findall(question))}
    return [word for key, word in reversed(words.items()) if key and key not in FUNCTION_WORDS | QUESTION_WORDS]


def _named(evidence: SeenEvidence, known: set[str]) -> tuple[list[Lead], list[Lead]]:
    """Return the names in gold documents that have no document of their own, latest document first: those beside
    relation words, most specific first, and the others."""
    near: dict[str, tuple[float, Lead]] = {}
    far: dict[str, Lead] = {}
    counts = _counts(evidence)
    for document in reversed(evidence.gold):
        text = _whole(document)
        for name in extract(text, SCANNED_CHARACTERS):
            if not _tells(name, known, counts):
                continue
            lead, value = Lead(name, name, document.handle), relatedness(text, name, evidence.score.relations)
            if value:
                near.setdefault(head(name), (value + (" " in name) / 2, lead))
            else:
                far.setdefault(head(name), lead)
    others = [lead for key, lead in far.items() if key not in near]
    return (
        [lead for _, lead in sorted(near.values(), key=lambda found: -found[0])],
        sorted(others, key=lambda lead: " " not in lead.name),
    )


def _tells(name: str, known: set[str], counts: Mapping[str, int]) -> bool:
    """Return whether searching for a name can find something new: it is not common, and no document has that title."""
    key = head(name)
    if len(key) < 3 or key in known or key.isdecimal() or (" " not in key and counts[key] > COMMON):
        return False
    return not any(len(word) > LOUD and word.isupper() for word in name.split())


def _counts(evidence: SeenEvidence) -> Counter[str]:
    """Count the hits that each name occurs in."""
    return Counter(key for candidate in evidence.score.candidates.values() for key in candidate.names)


def _strong(score: EvidenceScore, known: set[str]) -> Iterator[Lead]:
    """Yield names in any strong document, best first, each with the best document that has it."""
    best = score.update()
    for key, (value, name) in sorted(score.leads.items(), key=lambda lead: -lead[1][0]):
        if value > LEAD and key not in known and not name.isupper():
            source = next((candidate.handle for candidate in best if key in candidate.names), "")
            yield Lead(name, name, source)


def _whole(document: DocumentView) -> str:
    return f"{document.title}. {document.text}"
