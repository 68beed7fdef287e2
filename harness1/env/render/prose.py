"""Notes and errors in the words that the policy reads."""

from __future__ import annotations

from typing import Any

from harness1.records import Note

SENTENCES: dict[str, str] = {
    "bad_arguments": "Not executed: {reason}. The parameters are: {parameters}.",
    "unknown_tool": "Not executed: there is no tool {name!r}. Use one of: {tools}.",
    "empty_query": "Not executed: the query is empty. Write 5 to 12 words.",
    "empty_pattern": "Not executed: the pattern is empty. Write a regular expression with some fixed words.",
    "bad_pattern": "Not executed: the pattern is not usable ({reason}). Write a simpler RE2 pattern.",
    "unknown_handles": "Unknown: {handles} ({count}). Use handles that a search has returned.",
    "unknown_entities": "Unknown: {handles} ({count}). Use entity handles that are shown.",
    "no_handles": "Not executed: no document was named. Use handles that a search has returned.",
    "not_curated": "Not in the curated set: {handles} ({count}).",
    "nothing_to_curate": "Not executed: name documents to add or to remove.",
    "invalid_tags": "Unknown tags {tags} count as fair; the tags are very_high, high, fair and low.",
    "claim_too_short": "Not executed: write the claim as a whole statement of at least {characters} characters.",
    "queries_left_out": "{count} queries were left out; the limit is {limit}.",
    "documents_left_out": "{count} documents were left out; the limit is {limit}.",
    "parts_left_out": "{count} parts did not fit; ask for fewer documents.",
    "hits_left_out": "{count} more hits did not fit; a further search can find them.",
    "nothing_found": "Nothing new was found. Use other words.",
    "continues": "{parts} more parts: read {handle} to go on.",
    "no_such_part": "The document has no such part.",
    "crowded": "Not executed: the context holds more than {limit} tokens. Prune, curate or end.",
    "nothing_to_prune": "Not executed: name documents to prune.",
    "not_executed": "Not executed: {tools}; one action per turn.",
    "said": "{text}",
    "answered": "It returned: {text}",
    "tool_error": "Not done: {reason}",
    "result": "Returned {returned}, new {new}; pool {pool}, curated {curated}/{cap}.",
    "curated_empty": "The curated set is empty.",
    "seeded": "The first {count} documents were curated with tag {tag}: review, re-tag or remove them.",
    "seeded_untagged": "The first {count} documents were curated: review them.",
    "refilled": "{count} documents with more evidence are curated now; the set follows the evidence until you edit it.",
    "single_tool": "Only {tool} was used so far.",
    "curate_now": "Curate the useful documents of this result now.",
    "curate_overdue": "{turns} turns without curation while {uncurated} pooled documents are not curated: curate now.",
    "verify_now": "Verify the documents that must meet every constraint before you tag them very_high.",
    "finish": "{left} turns are left: finish the curated set, then end_search.",
}
"""One sentence for each code; a note's data fills the gaps. `said` is for tools of other packages, in their words."""


def sentence(note: Note) -> str:
    """Put a note into words."""
    return SENTENCES[note.code].format(**{name: _words(value) for name, value in note.data.items()})


def _words(value: Any) -> Any:
    """Join lists with commas; leave everything else as it is, on one line."""
    if isinstance(value, list | tuple):
        return ", ".join(" ".join(str(part).split()) for part in value)
    return " ".join(value.split()) if isinstance(value, str) else value
