"""What tells where to look: leads with handles, documents in evidence order with reasons, bridge documents."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from harness1.config import Env, Evidence, Leads, PoolView, Rendering
from harness1.config.env import LARGEST_CAP
from harness1.env.environment import SearchEnv, Step
from harness1.env.render import visible_units
from harness1.records import Task
from tests.support import curate, hit, make_env, play, run, search, text_of, wide_corpus

FULL = Env().switch(entity_handles=True)
WORLD_QUESTION = "Which king of Paris met Ada in Rome before the war?"
SEARCHES = [search(query) for query in ("river castle", "Paris king", "Rome war", "poet town", "Byron 1824", "rain")]


def line(step: Step, start: str) -> str:
    return next(line for line in text_of(step.context).splitlines() if line.startswith(start))


def test_a_lead_has_a_handle_from_the_first_context_on_where_there_are_leads_and_handles() -> None:
    task = Task("t", "Where was “the lady of the lake” born?")
    context = run(make_env(FULL).reset(task))
    assert "Search next: the lady of the lake (E1; named in the question; not found yet).\n" in text_of(context)
    assert (context.view.leads[0].entity, context.view.entities) == ("E1", {"E1": "the lady of the lake"})
    for config in (Env(), Env().switch(rank=False, entity_handles=True)):
        env = make_env(config)
        assert "(E1" not in text_of(run(env.reset(task)))
        assert env.state.memory.entities.names == []


def test_a_lead_that_no_hit_shows_gets_a_handle_at_the_end_of_the_turn() -> None:
    short = msgspec.structs.replace(FULL, compression=msgspec.structs.replace(FULL.compression, sentences=1))
    env = make_env(short)
    step = play(env, search("Ada Lovelace program"))[0]
    assert "Lord Byron" not in "".join(piece.text for turn in env.state.turns for piece in turn.hits)
    assert "Lord Byron (E4; named by D1; not found yet)" in line(step, "Search next: ")
    assert step.context.view.entities["E4"] == "Lord Byron"


def test_only_leads_that_are_shown_get_handles() -> None:
    counts = []
    for lines in (1, 8):
        env = make_env(msgspec.structs.replace(FULL, leads=Leads(lines=lines)), wide_corpus(40))
        step = play(env, search("river castle"), query="Did “alpha one” see “beta two” and “gamma three”?")[0]
        assert all(lead.entity for lead in step.context.view.leads)
        counts.append(len({"alpha one", "beta two", "gamma three"}.intersection(env.state.memory.entities.names)))
    assert counts == [1, 3]


def ranked_world(config: Env = FULL, **rendering: Any) -> tuple[SearchEnv, Step]:
    config = msgspec.structs.replace(config, rendering=Rendering(window=(1, 9), **rendering))
    env = make_env(config, wide_corpus(60))
    return env, play(env, *SEARCHES, query=WORLD_QUESTION)[-1]


def shown_in(step: Step, section: str) -> list[str]:
    keys = [piece.key for piece in step.context.pieces]
    return [key.partition("/")[2].partition("#")[0] for key in keys if key.startswith(f"{section}/")]


def test_pool_lines_and_further_handles_come_in_evidence_order() -> None:
    env, step = ranked_world(msgspec.structs.replace(FULL, pool=PoolView(lines=7, older=5)))
    memory = env.state.memory
    visible = visible_units(env.state.turns[-1:])
    units = [unit for unit in memory.assess().units if unit not in visible and unit not in memory.curated]
    handles = [memory.pool.entries[unit].handle for unit in units]
    assert handles != sorted(handles, key=lambda handle: -int(handle[1:]))
    assert shown_in(step, "pool") == handles[:7]
    assert line(step, "Further: ") == f"Further: {', '.join(handles[7:12])} (+{len(handles) - 12} more)"


def test_curated_lines_come_in_evidence_order_within_their_tag() -> None:
    env, step = ranked_world()
    worst = [env.state.memory.pool.entries[unit].handle for unit in reversed(env.state.memory.assess().units)]
    run(env.step([curate(add_ids=worst[:4], importance=dict.fromkeys(worst[:4:2], "high"))]))
    step = run(env.step([search("engine")]))
    places = {env.state.memory.pool.entries[unit].handle: at for at, unit in enumerate(env.state.memory.assess().units)}
    shown = shown_in(step, "curated")
    tags = [line(step, f"{handle} (").partition("(")[2].split(";")[0].rstrip(")") for handle in shown]
    assert {tag.partition(")")[0] for tag in tags} == {"high", "fair"}
    assert shown == sorted(shown, key=lambda handle: (handle not in worst[:4:2], places[handle]))
    delivered = [entry.handle for entry in step.context.view.curated]
    assert delivered != sorted(delivered, key=places.__getitem__)  # the order of delivery is the policy's


def test_a_reason_stands_at_the_line_of_a_document_or_in_the_order_if_it_has_none() -> None:
    env, step = ranked_world()
    order = line(step, "By evidence: ")
    visible = {env.state.memory.pool.entries[unit].handle for unit in visible_units(env.state.turns[-1:])}
    assert set() < set(re.findall(r"(D\d+) \(", order)) <= visible
    assert re.findall(r"D\d+", order) == list(step.context.view.ranked)
    assert len(step.context.view.ranked) == min(LARGEST_CAP, len(env.state.memory.pool.entries))
    few = msgspec.structs.replace(FULL, evidence=Evidence(lines=1))
    assert ranked_world(few)[1].context.view.ranked == step.context.view.ranked[:1]


def test_the_reason_at_a_line_is_the_one_of_now() -> None:
    env, step = ranked_world()
    memory, told = env.state.memory, dict[str, set[str]]()
    for action in (*SEARCHES, *map(search, ("Ada Rome", "king war", "London", "engine program"))):
        step = run(env.step([action]))
        for handle in shown_in(step, "pool"):
            unit = memory.pool.handles[handle]
            reason = memory.assess().reasons[unit]
            mark = f" ({reason})" if reason else ""
            assert line(step, f"{handle} ").startswith(f"{handle}{mark} {memory.pool.entries[unit].title}: ")
            told.setdefault(handle, set()).add(reason)
    assert any(len(reasons) > 1 for reasons in told.values())


def test_bridge_documents_and_rare_names_of_the_best_are_shown_where_documents_are_ranked() -> None:
    step = play(make_env(FULL), search("Ada Lovelace engine"), query="Did Ada Lovelace know Charles Babbage?")[0]
    assert line(step, "Bridge documents: ") == "Bridge documents: D1 links Ada Lovelace and Charles Babbage."
    texts = [
        "Ada met Babbage in England.",
        "Here Babbage came to England.",
        *(f"In England. Rain {at}." for at in range(9)),
    ]
    found = [hit(f"d{at}", text, f"Title {at}") for at, text in enumerate(texts)]
    lines = []
    for config in (Env().switch(rank=False), FULL):
        env = make_env(config)
        run(env.reset(Task("t", "Did Ada die?")))
        env.state.memory.absorb(found, config)
        lines.append(line(run(env.step([search("nothing")])), "Shared entities: "))
    assert lines[0].startswith("Shared entities: England (D1, D2, D3, D4, D5 +6 more); ")
    assert lines[1].startswith("Shared entities: Babbage (D1, D2); England (")
