"""The opening of every context: the static prompt, generated from the enabled mechanisms, and the question."""

from __future__ import annotations

from harness1.config import Env
from harness1.env.render.pieces import Piece, piece
from harness1.env.render.view import LimitsView, QueryView
from harness1.memory.entity_handles import QUESTION
from harness1.memory.working_memory import WorkingMemory
from harness1.tools.registry import Toolbox


def static_piece(env: Env, toolbox: Toolbox) -> Piece:
    """Return the instructions, which never change within an episode and mention no mechanism that is off."""
    # Minimal instructions do not say how many documents can be delivered.
    limits = LimitsView(env.curation.cap) if env.rendering.instructions != "minimal" else None
    return piece("static", "system", "\n".join(_instructions(env, toolbox)), limits)


def query_piece(memory: WorkingMemory, env: Env) -> Piece:
    """Return the question, with the handles of the entities that it names."""
    text, entities = shown_question(memory.query), dict[str, str]()
    if env.evidence.handles:
        text, entities = memory.entities.marked(text, env.evidence.characters)
    handle = QUESTION if env.leads_have_handles else ""
    label = f"Question ({handle})" if handle else "Question"
    return piece("query", "user", f"{label}: {text}", QueryView(shown_question(memory.query), entities, handle))


def shown_question(query: str) -> str:
    """Put a question on one line, as contexts show it."""
    return " ".join(query.split())


def _instructions(env: Env, toolbox: Toolbox) -> list[str]:
    match env.rendering.instructions:
        case "minimal":
            return ["Curate the documents that answer the question."]
        case "brief":
            return _brief(env, toolbox)
        case "full":
            return _full(env, toolbox)


PRUNING = (
    "- The context grows with every turn. Above {soft} tokens prune useless documents with prune_chunks, or conclude;"
    " above {hard} tokens only prune_chunks, curate and end_search are carried out."
)
RANKED = (
    "By evidence: documents in the order of all that speaks for them, with reasons. Deliver the best. Bridge documents"
    " link names of the question."
)
LEAD_HANDLES = "A query may be a handle: Q is the question, E3 the lead of that handle."
LEADS = "Search next: names that the question or strong documents mention and no search has found yet."
READING = (
    "Of a long document read_document shows the parts nearest to the question; D12.3 reads on from the third part."
)
NAMED = "Names are followed by handles such as (E3): a query may say E3 for the name."


def _brief(env: Env, toolbox: Toolbox) -> list[str]:
    """Return the task and what no model can guess, for a window that holds no more."""
    lines = [
        f"Find the documents that someone needs to answer the question. Your result is the curated set, at most"
        f" {env.curation.cap}. One tool call each turn: search, curate what is useful by its handle (such as D12),"
        " search again for what is missing, then end_search alone.",
        "Short queries; never the same one twice.",
    ]
    if env.refills:
        lines.append(f"The best {env.auto_populate.documents} by evidence stay curated until you curate.")
    elif env.auto_populate.on:
        lines.append(f"The first search curates its best {env.auto_populate.documents}: remove what is useless.")
    if env.curation.tags:
        lines.append("Tags: very_high states the answer, high is a needed link, fair may be useful, low is doubtful.")
    if env.evidence.handles:
        lines.append(NAMED)
    if env.evidence.ranks:
        lines.append(RANKED)
    if env.leads_on:
        lines.append(LEADS)
    if env.leads_have_handles:
        lines.append(LEAD_HANDLES)
    if "read_document" in toolbox.tools and env.read.by == "evidence":
        lines.append(READING)
    if env.pruning.on:
        lines.append(PRUNING.removeprefix("- ").format(soft=env.pruning.tokens, hard=env.pruning.refusal))
    return lines


def _full(env: Env, toolbox: Toolbox) -> list[str]:
    tools = toolbox.tools
    lines = [
        "You are a search agent. You do not answer the question: you collect the documents that someone else needs to"
        f" answer it. Your result is the curated set, at most {env.curation.cap} documents.",
        "Each turn you take exactly one action, a call of one tool. The harness keeps what was found: documents have"
        " handles such as D12 (D12.3 is the third part of D12), and every handle stays valid.",
        "Work in a loop: split the question into facets, search, curate what is useful, refine, finish.",
        "Rules:",
        "- Short queries of 5 to 12 words. Never repeat a query: documents that were returned once do not come back.",
    ]
    if "fan_out_search" in tools:
        lines.append(f"- fan_out_search runs up to {env.fan_out.queries} different queries in one turn: begin with it.")
    if "grep_corpus" in tools:
        lines.append("- grep_corpus finds exact names, dates, numbers and quotations.")
    if "read_document" in tools:
        lines.append("- read_document shows a whole document where the shown sentences are not enough.")
        if env.read.by == "evidence":
            lines.append(f"- {READING}")
    if "review_docs" in tools:
        lines.append("- review_docs shows documents from memory again without a search.")
    if env.compression.on:
        lines.append(f"- Hits show the {env.compression.sentences} sentences nearest to the query, not the whole text.")
    lines += _curation(env)
    lines += _evidence(env)
    if "verify" in tools:
        lines.append("- Verify a claim before you rely on a document that must meet several constraints.")
    if env.dedup.on:
        lines.append("- Near duplicates are hidden behind the document that came first.")
    if env.pruning.on:
        lines.append(PRUNING.format(soft=env.pruning.tokens, hard=env.pruning.refusal))
    elif env.budget_marker.on:
        lines.append(
            f"- The budget line shows used tokens and turns (at most {env.max_turns}). Above"
            f" {env.budget_marker.warning:.0%} finish within 3 turns, above {env.budget_marker.critical:.0%} at once."
        )
    lines.append("- Call end_search alone, when the set is complete or nothing more can be found.")
    return lines


def _evidence(env: Env) -> list[str]:
    lines = []
    if env.evidence.on:
        lines.append("- Shared entities link documents; an entity named in a good document may be the next hop.")
    if env.evidence.handles:
        lines.append(f"- {NAMED}")
    if env.evidence.ranks:
        lines.append(f"- {RANKED}")
    if env.leads_on:
        lines.append(f"- {LEADS}")
    if env.leads_have_handles:
        lines.append(f"- {LEAD_HANDLES}")
    return lines


def _curation(env: Env) -> list[str]:
    lines = ["- Curate often, a few documents at a time, and remove what turns out to be useless."]
    if env.refills:
        lines.append(f"- The best {env.auto_populate.documents} documents by evidence stay curated until you curate.")
    elif env.auto_populate.on:
        lines.append(
            f"- After the first search its best {env.auto_populate.documents} documents are curated for you"
            + (f" as {env.auto_populate.tag}: re-tag or remove them." if env.curation.tags else ": review them.")
        )
    if env.curation.tags:
        lines.append(
            "- Tags: very_high = states part of the answer, high = needed link, fair = likely useful, low = doubtful."
            + (
                " A full set gives up its least important entry for a more important one."
                * (env.curation.eviction == "rank")
            )
        )
    return lines
