from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness1.config import Env
from harness1.env.render import Context
from harness1.episodes.rollout import rollout
from harness1.policy.policy import Decision, Policy
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import Episode, Gold, Task
from harness1.rows.calls import prompt_ids
from harness1.viewer.episode import EpisodeView, Viewed
from harness1.viewer.tables import Passage, slice_text
from tests.support import END, curate, make_env, run, search
from tests.viewer.making import DOCUMENTS, GOLD, HOSTILE, QUESTION, joined, script
from tests.vocabularies import chat_format

TASK = Task("task", QUESTION)


class Spy:
    """A policy for one episode, which keeps every context that another one sees."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.name, self.hash = policy, policy.name, policy.hash
        self.seen: list[Context] = []

    def open(self, task: Task, seed: int) -> Spy:
        self.session = self.policy.open(task, seed)
        return self

    async def act(self, context: Context) -> Decision:
        self.seen.append(context)
        return await self.session.act(context)


def played(policy: Policy, env: Env | None = None) -> Episode:
    counter = getattr(policy, "counter", None)
    options = {"counter": counter} if counter else {}
    return run(rollout(make_env(env, DOCUMENTS, **options), policy, TASK))


def viewed(episode: Episode, env: Env | None = None, tokenizer: object = None) -> tuple[EpisodeView, Viewed]:
    view = EpisodeView(episode, env or Env(), Gold(GOLD), tokenizer)
    data = view.as_json(episode.reward)
    passages = view.tables.passages
    names = [row[1] if isinstance(row[1], str) else passages[row[1]][1 - row[2]] for row in data["units"]]
    return view, data | {"texts": [joined(parts, passages) for parts in data["texts"]], "names": names}


def pieces(view: EpisodeView, data: Viewed, turn: Viewed) -> list[tuple[str, str, str]]:
    """Kind, role and text of every piece of a turn's context, as a page would put them together."""
    rows = [data["segments"][number] for number in turn["context"]]
    texts = [view.tables.shared[key] if text is None else data["texts"][text] for key, _, text, _ in rows]
    return [(key.partition("#")[0], role, text) for (key, role, _, _), text in zip(rows, texts, strict=True)]


@pytest.mark.parametrize(
    ("order", "actions"), [("paper", ()), ("stable_first", ()), ("epoch", ()), ("paper", (search("Ada"), "no call"))]
)
def test_the_exact_context_is_what_the_policy_saw(order: str, actions: tuple[Any, ...]) -> None:
    rendering = msgspec.structs.replace(Env().rendering, order=order)
    env = msgspec.structs.replace(Env(), rendering=rendering)
    spy = Spy(script(*actions))
    view, data = viewed(played(spy, env), env)
    assert view.problem is None
    assert len(data["turns"]) == len(spy.seen) == (len(actions) or 7)
    assert data["turns"][-1]["parse_error"] == ("no call" if actions else None)
    for turn, context in zip(data["turns"], spy.seen, strict=True):
        assert pieces(view, data, turn) == [
            (piece.key.partition("#")[0], piece.role, piece.text) for piece in context.pieces
        ]
        assert (turn["tokens"], turn["prefill"]) == (context.budget.used, context.fresh)


def test_differences_add_up_to_the_memory_at_the_end() -> None:
    episode = played(script())
    _, data = viewed(episode)
    curated: dict[int, int] = {}
    pool: list[int] = []
    for turn in data["turns"]:
        change = turn["change"]
        for unit in (*change.get("removed", ()), *change.get("evicted", ())):
            del curated[unit]
        curated |= dict(change.get("added", ()))
        for unit, before, after in change.get("retagged", ()):
            assert curated[unit] == before
            curated[unit] = after
        pool += change.get("pooled", ())
        assert curated == dict(turn["curated"])
        assert turn["sizes"][1]["pool"] == len(pool)
    names = data["names"]
    assert {names[unit] for unit in curated} == {entry.unit_id for entry in episode.curated}
    assert [names[unit] for unit in pool] == list(episode.pool)
    changes = [set(turn["change"]) for turn in data["turns"]]
    assert {"added"} <= changes[0]
    assert {"retagged"} <= changes[2]
    assert {"verdicts"} <= changes[3]
    assert {"retagged", "removed"} <= changes[4]


def test_a_turn_tells_all_that_was_recorded_of_it() -> None:
    _, data = viewed(played(script()))
    second = data["turns"][1]
    assert [call["name"] for call in second["ignored"]] == ["search_corpus"]
    assert [ranking["query"] for ranking in second["observation"]["rankings"]] == [
        "Lord Byron poet",
        "Missolonghi town",
    ]
    assert data["turns"][3]["observation"]["verdicts"][0][1] == "Ada Lovelace wrote the first program"
    assert data["turns"][5]["observation"]["notes"] or data["turns"][5]["observation"]["error"]
    gold = [[data["names"][unit] for unit in target["units"]] for target in data["gold"]["targets"]]
    assert sorted(gold) == [["ada"], ["elsewhere"], ["miss"]]


def test_searches_tell_where_their_names_come_from() -> None:
    searches = (search("Ada Lovelace"), search("poet Lord Byron"), curate(add_ids=["D1", "D3"]), END)
    _, data = viewed(played(script(*searches)))
    rankings = [turn["observation"]["rankings"] for turn in data["turns"][:2]]
    told = [
        [(name, units and [data["names"][unit] for unit in units]) for name, units in ranking[0]["names"]]
        for ranking in rankings
    ]
    assert told[0] == [("Ada Lovelace", None)]
    assert told[1] == [("Lord Byron", ["ada"])]
    assert data["chain"]["names"] == ["Ada Lovelace"]
    links = [(data["names"][source], name, data["names"][target]) for source, name, target in data["chain"]["links"]]
    assert ("ada", "Lord Byron", "byron") in links


def test_prompts_are_decoded_as_they_were_sent() -> None:
    chat = chat_format("hermes", "qwen")
    spoken = StudentFormatPolicy(script(search(f"Lord Byron {HOSTILE}"), END), chat)
    episode = played(spoken)
    view, data = viewed(episode, tokenizer=chat.tokenizer)
    assert view.problem is None
    for turn, recorded in zip(data["turns"], episode.turns, strict=True):
        rows = [data["sent"][number] for number in turn["calls"][-1]["prompt"]]
        texts = [view.tables.shared[key] if text is None else data["texts"][text] for key, text, _, _ in rows]
        assert "".join(texts) == chat.tokenizer.decode(prompt_ids(episode, recorded.calls[-1]))
        assert turn["calls"][-1]["output"] == chat.tokenizer.decode(recorded.calls[-1].output_ids)
    assert "<|im_start|>" in "".join(view.tables.shared.values())
    _, bare = viewed(episode)  # without the tokenizer
    assert bare["turns"][0]["context"]
    assert all(text is None for _, text, _, _ in bare["sent"])
    assert bare["turns"][0]["calls"][0]["output"] is None
    made = msgspec.structs.replace(episode.turns[0].calls[0], output_ids=(), output_logprobs=(), text="No call.")
    turns = (msgspec.structs.replace(episode.turns[0], calls=(made,)), *episode.turns[1:])
    _, hosted = viewed(msgspec.structs.replace(episode, turns=turns))
    assert hosted["turns"][0]["calls"][0]["output"] == "No call.", "what a chat server's model wrote"


def test_a_record_of_another_environment_is_shown_without_its_contexts() -> None:
    episode = played(script())
    view, data = viewed(episode, msgspec.structs.replace(Env(), max_turns=3))
    assert "another environment" in view.problem
    assert [turn["context"] for turn in data["turns"]] == [None] * 7
    assert data["turns"][0]["observation"]["hits"]
    turns = (episode.turns[0], msgspec.structs.replace(episode.turns[1], memory_hash="0" * 64), *episode.turns[2:])
    view, _ = viewed(msgspec.structs.replace(episode, turns=turns))
    assert view.problem.startswith("turn 2: memory hash"), "an edited one says where it differs"


ADA = Passage(
    "ada#0", "ada", "Ada Lovelace, countess", "Ada wrote the first program. It was for an engine. Byron was near."
)
MORE = Passage("ada#1", "ada", "Ada Lovelace, countess", "She died in London, far too young.")
SOURCES = [(7, ADA), (9, MORE)]
ALL = dict(SOURCES)


def together(parts: object) -> str:
    passages = [ALL.get(number, ADA) for number in range(10)]
    return joined(parts, passages)


def test_a_piece_that_quotes_a_passage_stores_only_what_it_adds() -> None:
    text = (
        "[D1] Ada Lovelace, countess q1#2\nAda wrote the first program. It was for an engine. She died in London, far\n"
    )
    parts = slice_text(text, SOURCES)
    assert [part for part in parts if isinstance(part, str)] == ["[D1] ", " q1#2\n", "\n"]
    assert parts[1:4] == [7, 0, len(ADA.title)]
    assert len([part for part in parts if isinstance(part, int)]) == 9
    assert together(parts) == text


@pytest.mark.parametrize("text", ["", "\n", "Nothing of this is quoted from anywhere.\n", "Ada wrote\n"])
def test_a_text_that_quotes_nothing_stays_as_it_is(text: str) -> None:
    assert slice_text(text, SOURCES) == text
    assert slice_text(text, ()) == text


def test_characters_that_a_page_counts_twice_are_not_referred_to() -> None:
    odd = Passage("odd", "odd", "", "\U0001d11e The clef comes before all notes.")
    assert slice_text("The clef comes before all notes.\n", [(0, odd)]) == "The clef comes before all notes.\n"
