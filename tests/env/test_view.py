"""The view is exactly what the kept pieces show, and of several showings the last one holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from harness1.config import Curation, Env, Evidence, Leads, PoolView, Pruning, Read, Rendering
from harness1.env import view as view_module
from harness1.env.pieces import sentence
from harness1.env.verifiers import Judgement, VerifierFault
from harness1.env.view import (
    ActionView,
    BridgesView,
    BridgeView,
    BudgetView,
    ChangesView,
    CuratedSetView,
    CuratedView,
    DocumentView,
    HistoryView,
    HitView,
    JudgementView,
    LeadsView,
    LeadView,
    LimitsView,
    LinksView,
    LinkView,
    OlderView,
    PoolSizeView,
    QueryView,
    RankedView,
    TurnView,
    VerdictsView,
    VerdictView,
    View,
)
from harness1.memory.parts import HistoryLine
from harness1.records import Note, Record, ToolCall, UnitId
from tests.support import call, chunk, curate, make_env, play, search, text_of, wide_corpus

A = UnitId("a")


def test_of_a_document_the_longest_text_is_kept() -> None:
    texts = ["short", "the longest text", "medium one"]
    shown = [HitView(1, DocumentView("D1", A, "T", text)) for text in texts]
    view = View.of(shown)
    assert view.documents["D1"].text == "the longest text"
    assert [hit.document.text for hit in view.hits[1]] == texts


WORDS: dict[type[Record], Callable[[Any], dict[str, str]]] = {
    QueryView: lambda shown: {
        "query": f"Question: {shown.query}\n",
        "entities": "",  # Off here; see entity handles.
        "handle": "",  # The same; see lead handles.
    },
    LimitsView: lambda shown: {"cap": f"at most {shown.cap} documents"},
    BudgetView: lambda shown: {
        "used": f"Budget: {shown.used} of",
        "limit": f"of {shown.limit} tokens",
        "turn": f"turn {shown.turn} of",
        "max_turns": f"of {shown.max_turns}.",
        "level": shown.level,
    },
    DocumentView: lambda shown: {"handle": shown.handle, "unit_id": "", "title": shown.title, "text": shown.text},
    CuratedView: lambda shown: {"handle": shown.handle, "unit_id": "", "tag": f"{shown.tag}: " if shown.tag else ""},
    CuratedSetView: lambda shown: {"entries": f"Curated {len(shown.entries)}", "cap": f"/{shown.cap}."},
    PoolSizeView: lambda shown: {
        "total": f"Pool: {shown.total} documents",
        "uncurated": f"{shown.uncurated} not curated",
        "hidden": f"{shown.hidden} near duplicates" if shown.hidden else "",
    },
    RankedView: lambda shown: {"handles": f"By evidence: {shown.handles[0]}"},
    LeadView: lambda shown: {
        "name": f"{shown.name} (",
        "handles": f"named by {', '.join(shown.handles)};" if shown.handles else "named in the question;",
        "entity": f"({shown.entity}; named" if shown.entity else "",
    },
    LinkView: lambda shown: {"handle": f"{shown.handle} links {shown.names[0]}", "names": f"and {shown.names[-1]}"},
    LinksView: lambda shown: {"links": "Bridge documents: "},
    LeadsView: lambda shown: {"leads": "Search next: "},
    OlderView: lambda shown: {
        "handles": ", ".join(shown.handles),
        "more": f"(+{shown.more} more)" if shown.more else "",
    },
    HitView: lambda shown: {
        "turn": "",  # It stands in the head before it.
        "document": f"[{shown.document.handle}",
        "found_by": "",  # Compared with marks and places below.
        "copies": f"also: {shown.copies} cop" if shown.copies else "",
        "passed_over": f"[{shown.passed_over} passage" if shown.passed_over else "",
        "entities": "",  # Off here; see entity handles.
    },
    ActionView: lambda shown: {
        "turn": "",  # A turn's action and head follow each other.
        "call": f"Action: {shown.call.name} {json.dumps(shown.call.arguments) if shown.call.arguments else ''}",
    },
    JudgementView: lambda shown: {
        "handle": f"{shown.handle} {shown.label}",
        "label": shown.label,
        "passage": f": {shown.passage}" if shown.passage else "",
        "known": f"{shown.label} (known)" if shown.known else "",
    },
    ChangesView: lambda shown: {
        "added": listed("Added", shown.added),
        "retagged": listed("Re-tagged", shown.retagged),
        "removed": listed("Removed", shown.removed),
        "evicted": listed("Evicted for more important ones", shown.evicted),
        "refused": listed("Refused, the set is full", shown.refused),
        "copied": listed("Hidden copies of", shown.copied),
        "pruned": listed("Pruned", shown.pruned),
    },
    TurnView: lambda shown: {
        "turn": f"Turn {shown.turn}: ",
        "tool": f": {shown.tool}",
        "queries": "\n".join(
            [f"q{at}: {query}" for at, query in enumerate(shown.queries, 1)]
            if len(shown.queries) > 1
            else [f"{shown.tool}: {query}" for query in shown.queries]
        ),
        "notes": "\n".join(map(sentence, shown.notes)),
        "error": sentence(shown.error) if shown.error else "",
        "verdicts": "",
        "changes": "",
    },
    BridgeView: lambda shown: {
        "entity": f"{shown.entity} (",
        "handles": ", ".join(shown.handles),
        "total": f"+{shown.total - len(shown.handles)} more" if shown.total > len(shown.handles) else "",
    },
    BridgesView: lambda shown: {"bridges": "Shared entities", "singletons": f"only: {shown.singletons}."},
    VerdictView: lambda shown: {
        "handle": f"{shown.handle} {shown.label}: {shown.claim}",
        "claim": shown.claim,
        "label": shown.label,
    },
    VerdictsView: lambda shown: {"verdicts": "Verified:"},
    HistoryView: lambda shown: {
        "lines": "History",
        "earlier": f"{shown.earlier} earlier turns" if shown.earlier else "",
    },
    HistoryLine: lambda shown: {
        "turn": f"T{shown.turn} ",
        "tool": shown.tool,
        "subject": f"({shown.subject})",
        "returned": f"returned {shown.returned},",
        "new": f"new {shown.new}",
        "curated": f"curated {shown.curated}" if shown.curated else "",
    },
}
"""How each field of each record of the view stands in the text of its piece; empty where there is nothing to say."""


def listed(label: str, names: Any) -> str:
    tags = names if isinstance(names, dict) else {}
    words = [f"{name} {tags[name]}" if tags.get(name) else name for name in names]
    return f"{label}: {', '.join(words)}." if words else ""


def records_in(value: Any) -> Iterator[Record]:
    """A view record and all those in it."""
    if type(value) in WORDS:
        yield value
        for name in value.__struct_fields__:
            yield from records_in(getattr(value, name))
    elif isinstance(value, tuple):
        for part in value:
            yield from records_in(part)


def test_every_field_of_the_view_has_words() -> None:
    shown = {each for each in vars(view_module).values() if isinstance(each, type) and issubclass(each, Record)}
    assert shown - {Record, Note, ToolCall} == WORDS.keys()


ACTIONS = (
    search("river castle"),
    curate(add_ids=["D1", "D9"], remove_ids=["D2", "D2"], importance={"D1": "very_high", "D3": "low"}),
    call("verify", doc_ids=["D1"], claim="The castle stands by the river."),
    call("read_document", doc_id="D2"),
    call("fan_out_search", queries=["Paris war", "engine program", "poet town"]),
    call("verify", doc_ids=["D1", "D3"], claim="The castle stands by the river."),
    search("  Rome\n king "),
    ToolCall("strange\nname", {"long": "x" * 5000}),
    call("grep_corpus", pattern="Byron"),
    call("verify", doc_ids=["D1"], claim="The castle  stands\nby the river in Paris."),
    *map(search, ("London", "bridge", "1824")),
    call("prune_chunks", doc_ids=["D4", "D5"]),
)


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch", "transcript"])
def test_everything_in_the_view_can_be_read_in_the_text(order: str, tags: bool) -> None:
    config = Env(
        rendering=Rendering(order),  # type: ignore[arg-type]
        curation=Curation(cap=12, tags=tags),
        pool=PoolView(lines=2, older=3),
        pruning=Pruning(on=order == "transcript"),
        evidence=Evidence(rank=True),
        leads=Leads(on=True),
        read=Read(tokens=250, by="evidence"),
    )
    env = make_env(config, wide_corpus(60))
    seen: set[type] = set()
    for step in play(env, *ACTIONS, query="Where did Ada and the poet Byron meet in London?"):
        assert step.context is not None
        view = step.context.view
        for each in step.context.pieces:
            for shown in records_in(each.shows):
                words = WORDS[type(shown)](shown)
                assert tuple(words) == shown.__struct_fields__
                assert all(part in each.text for part in words.values()), (words, each.text)
                seen.add(type(shown))
        for turn, hits in view.hits.items():
            texts = [each.text.splitlines()[0] for each in step.context.pieces if each.key.startswith(f"hit/{turn}#")]
            queries = view.turns[turn].queries
            for place, (hit, header) in enumerate(zip(hits, texts, strict=True)):
                marks = tuple((int(q) - 1, int(rank) - 1) for q, rank in re.findall(r"\bq(\d+)#(\d+)", header))
                pruned = order == "transcript"
                assert pruned or hit.found_by == (marks if len(queries) != 1 else ((0, place),))
        assert all((entry.tag is not None) == tags for entry in view.curated)
    of_memory = {CuratedSetView, CuratedView, PoolSizeView, OlderView, BridgesView, BridgeView}
    of_memory |= {VerdictsView, VerdictView, HistoryView, HistoryLine, RankedView, LeadsView, LeadView}
    of_memory |= {LinksView, LinkView}
    assert seen == (WORDS.keys() - of_memory if order == "transcript" else WORDS.keys())


def test_long_queries_and_passages_are_cut_in_text_and_view_and_whole_in_the_record() -> None:
    text = "Byron " + "was there and " * 60 + "died."
    env = make_env(chunks=[chunk("a", text)], verifier=Quoting())
    long = "Byron " + "x" * 1500
    ask = call("verify", doc_ids=["D1"], claim="Byron died.")
    searched, verified = play(env, search(long), ask)
    assert searched.context is not None
    assert verified.context is not None
    assert searched.observation is not None
    assert verified.observation is not None
    assert searched.observation.rankings[0].query == long
    assert searched.context.view.turns[1].queries == (long[:200],)
    assert f"search_corpus: {long[:200]}\n" in text_of(searched.context)
    assert searched.context.view.actions[1] == ToolCall("search_corpus")
    assert verified.observation.verdicts[0].sentence == text
    assert verified.context.view.turns[2].verdicts == (JudgementView("D1", "yes", text[:300].rstrip()),)
    assert f"D1 yes: {text[:300].strip()}\n" in text_of(verified.context)


class Quoting:
    """Says yes, and quotes the whole document."""

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        return [Judgement("yes", text) for _, text in documents]
