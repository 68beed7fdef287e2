"""What a corpus is made of before it is cut and indexed."""

from __future__ import annotations

from harness1.records import DocId, Record

CHARACTERS_PER_TOKEN = 4


class Document(Record):
    """One text of a corpus, whole, under its own id."""

    doc_id: DocId
    title: str
    text: str


def approximate_tokens(text: str) -> int:
    """The size of a text in tokens, without a tokenizer: characters / 4, rounded up, equal on every machine."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)
