"""The policies without a model and without the gold: the script, the baselines, and the actions of a record."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness1.env.render import Context
from harness1.env.view import DocumentView, View, keep_longest
from harness1.errors import UsageError
from harness1.memory.confidence import HIGH, confidences
from harness1.memory.dedup import Fingerprints
from harness1.memory.question import claim, mentions
from harness1.plain import digest
from harness1.policy.policy import CopiedSession, Decision, Policy
from harness1.records import TAGS, Episode, Tag, Task, ToolCall
from harness1.runs.journal import read_episodes
from harness1.tools.documents import END_SEARCH
from harness1.tools.tool import ToolSpec

FAN_OUT = "fan_out_search"  # the tool that searches for several queries at once
SPARE_TURNS = 3  # turns reserved for verification, the last curation and the end


def is_full(view: View) -> bool:
    """Return whether a transcript is above the size from which it should be pruned."""
    return view.budget.used > view.budget.limit > 0


def is_late(view: View) -> bool:
    """Return whether it is time to deliver: few turns are left, or a transcript is full. Never if neither is shown."""
    left = view.budget.turns_left()
    return is_full(view) or (left is not None and left <= SPARE_TURNS)


def search_call(*queries: str) -> ToolCall:
    """Return a call that searches for one query, or for several at once."""
    if len(queries) == 1:
        return ToolCall("search_corpus", {"query": queries[0]})
    return ToolCall(FAN_OUT, {"queries": list(queries)})


def curate_call(tools: Sequence[ToolSpec], add: Mapping[str, Tag], remove: Sequence[str] = ()) -> ToolCall:
    """Return a call that curates handles, with their tags if tags are on."""
    arguments: dict[str, Any] = {"add_ids": list(add)}
    if remove:
        arguments["remove_ids"] = list(remove)
    curate = next(spec for spec in tools if spec.name == "curate")
    if add and "importance" in curate.parameters["properties"]:
        arguments["importance"] = dict(add)
    return ToolCall("curate", arguments)


def end_call(reason: str) -> ToolCall:
    """Return a call that ends the search."""
    return ToolCall(END_SEARCH, {"reasoning": reason})


LIMIT = 15  # documents delivered
PAGES, WAVES, FAN = 6, 3, 5  # most pages of the question's ranking, turns that follow leads, and leads of such a turn
VERIFIED, FIRST = 5, 3  # documents verified, and places among which the engine's first hit for the question stays
REVISION = 3  # increased whenever this policy decides differently; the hash depends on it


class ScriptedPolicy:
    """The baseline to beat: it searches the question, page by page, as long as a page brings something that would be
    delivered; then the leads, in three waves at most; verifies the best, and delivers what the harness ranks, at most
    `limit` documents, without near copies. What it ranked first for the question alone stays first, and the engine's
    first hit among the first three, whatever the leads bring. Documents of high confidence are `high`, or `very_high`
    if confirmed; the rest are `fair`. Where documents are not ranked, they are taken in the order found, and the names
    in the question are the leads. A transcript is pruned of what would not be delivered before it is too full."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.name = "scripted" if limit == LIMIT else f"scripted:{limit}"
        self.hash = digest(["scripted", limit, REVISION])

    def open(self, task: Task, seed: int) -> ScriptedSession:
        return ScriptedSession(self.limit)


class ScriptedSession(CopiedSession):
    """One episode of the script."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pages = self._waves = 0
        self._asked: set[str] = set()
        self._found: dict[str, DocumentView] = {}
        self._first: tuple[tuple[str, ...], str] | None = None  # of the question's first page: by evidence, by engine
        self._verified = self._curated = False

    async def act(self, context: Context) -> Decision:
        view, names = context.view, {spec.name for spec in context.tools}
        newest = [hit.document.handle for hit in view.hits.get(max(view.turns, default=0), ())]
        for handle in newest:
            keep_longest(self._found, view.documents[handle])
        if newest and self._first is None and not self._waves:
            self._first = view.ranked[:1], newest[0]
        if is_full(view) and "prune_chunks" in names:
            best = self._best(view)
            shown = dict.fromkeys(hit.document.handle for hits in view.hits.values() for hit in hits)
            if useless := [handle for handle in shown if handle not in best]:
                call = ToolCall("prune_chunks", {"doc_ids": useless})
                return Decision((call,), "Make room: these are not worth it.")
        pages = self._pages < PAGES and not self._waves and not is_late(view)
        if not self._pages or (pages and not set(self._best(view)).isdisjoint(newest)):
            self._pages += 1
            return Decision((search_call(view.query),), "Search for the whole question.")
        fan = FAN if FAN_OUT in names else 1
        if not is_late(view) and (leads := self._leads(view, fan)):
            return Decision((search_call(*leads),), f"Follow {', '.join(leads)[:200]}.")
        best, left = self._best(view), view.budget.turns_left()
        if not self._verified and "verify" in names and best and (left is None or left >= SPARE_TURNS):
            self._verified = True
            call = ToolCall("verify", {"doc_ids": best[:VERIFIED], "claim": claim(view.query)})
            return Decision((call,), "Check the best documents before they are called certain.")
        if self._curated or not best:
            return Decision((end_call("The leads are followed and the best is curated."),))
        self._curated = True
        tags = self._tags(view, best)
        # The set is emptied first: the delivered order must be the evidence order.
        drop = [entry.handle for entry in view.curated]
        return Decision((curate_call(context.tools, tags, drop),), f"Keep the best {len(best)} documents.")

    def _best(self, view: View) -> list[str]:
        """Return what would be delivered now. Of near copies by their shown texts, the first stands for all."""
        order = list(dict.fromkeys((*view.ranked, *self._found)))
        if self._first is not None and view.ranked:
            by_evidence, by_engine = self._first
            order = list(dict.fromkeys((*by_evidence, *order)))
            if by_engine not in order[:FIRST]:
                order = list(dict.fromkeys((*order[: FIRST - 1], by_engine, *order)))
        known, best = Fingerprints(), list[str]()
        for handle in order:
            text = self._found[handle].text if handle in self._found else ""
            if len(best) < min(self._limit, view.cap) and known.match(handle, "", text) is None:
                known.add(handle, "", text)
                best.append(handle)
        return best

    def _tags(self, view: View, best: Sequence[str]) -> dict[str, Tag]:
        """Return the importance of documents, none above that of one before it: importance comes before order."""
        found = [(document.title, document.text) for document in self._found.values()]
        sure = dict(zip(self._found, confidences(view.query, found), strict=True))
        confirmed = {verdict.handle for verdict in view.verdicts if verdict.label == "yes"}
        tags, at = dict[str, Tag](), 0
        for each in best:
            high = sure.get(each, 0.0) >= HIGH
            at = max(at, TAGS.index(("very_high" if each in confirmed else "high") if high else "fair"))
            tags[each] = TAGS[at]
        return tags

    def _leads(self, view: View, fan: int) -> list[str]:
        told = [lead.name for lead in view.leads] if view.ranked else mentions(view.query)
        leads = [name for name in dict.fromkeys(told) if name not in self._asked][:fan]
        self._asked.update(leads)
        self._waves += 1
        return leads if self._waves <= WAVES else []


QUESTION_PAGES = 2  # pages of the question's ranking that `follow-leads` reads; its other numbers are the script's
TOP = 30  # most documents that `single-shot` delivers, where `env.search.hits` is that high
REPEATS, ROUNDS = 10, 2  # searches of the query repeater, and times that the tool spammer uses each tool
RULES_REVISION = 1  # increased whenever one of the rules decides differently

END = end_call("This policy does no more.")
Rule = Callable[[int, Context], Decision | ToolCall]  # returns the decision of a turn, counted from 0


def follow_leads(turn: int, context: Context) -> Decision:
    """Search the question, then the leads, and deliver the evidence order. Needs `rank` and `leads`."""
    view, turn = context.view, max(context.view.turns, default=0)
    best: dict[str, Tag] = dict.fromkeys(view.ranked[: min(LIMIT, view.cap)], "high")
    drop = [entry.handle for entry in view.curated]
    if turn < QUESTION_PAGES and not (turn and is_late(view)):
        return Decision((search_call(view.query),))
    if view.leads and turn < QUESTION_PAGES + WAVES and not is_late(view):
        return Decision((search_call(*[lead.name for lead in view.leads[:FAN]]),))
    if best and drop != list(best):
        return Decision((curate_call(context.tools, best, drop),))
    return Decision((end_call("The leads are followed."),))


def single_shot(turn: int, context: Context) -> Decision:
    """Search once, curate the hits best first, and end; with `rank` they are delivered in the order of evidence."""
    if turn == 0:
        return Decision((search_call(context.view.query),), "Search for the question as it stands.")
    found = [hit.document.handle for hit in context.view.hits.get(1, [])][:TOP]
    if turn == 1 and found:
        return Decision((ToolCall("curate", {"add_ids": found}),), "Keep the ranking as it is.")
    return Decision((end_call("One search is all that this policy does."),))


def curate_everything(turn: int, context: Context) -> ToolCall:
    """Search for the question page by page, and curate every hit until the set is full."""
    view = context.view
    if len(view.curated) >= view.cap or is_late(view) or (turn > 1 and turn % 2 == 1 and not view.hits.get(turn)):
        return END if turn else search_call(view.query)
    return ToolCall("curate", {"add_ids": _newest(view)}) if turn % 2 else search_call(view.query)


def tool_spammer(turn: int, context: Context) -> ToolCall:
    """Use each tool in turn, on single words of the question and the last documents; curate all that is visible."""
    specs = [spec for spec in context.tools if spec.name != END_SEARCH]
    if turn >= ROUNDS * len(specs):
        return END
    words = context.view.query.split() or ["the"]
    spec, word, handles = specs[turn % len(specs)], words[turn % len(words)], _newest(context.view)
    fillings: dict[str, Any] = {
        "query": word,
        "queries": [word, f"{word} {word}"],
        "pattern": re.escape(word),
        "claim": word,
        "doc_id": handles[0] if handles else "D1",
        "doc_ids": handles[:3],
        "add_ids": list(context.view.documents),
    }
    properties = spec.parameters["properties"]
    return ToolCall(spec.name, {name: value for name, value in fillings.items() if name in properties})


def id_inventor(turn: int, context: Context) -> ToolCall:
    """Curate invented ids, and documents whose ids occur in the question, found by a search; remove all others."""
    view = context.view
    if turn == 0:
        invented = [f"D{number}" for number in range(1, 6)] + [f"doc_{number}" for number in range(5)]
        return ToolCall("curate", {"add_ids": invented})
    if turn == 1:
        return search_call(view.query)
    named = [
        document.handle
        for document in view.documents.values()
        if re.search(rf"(?<!\w){re.escape(document.unit_id)}(?!\w)", view.query)
    ]
    others = [entry.handle for entry in view.curated if entry.handle not in named]
    if turn > 2 or not (named or others):
        return END
    return ToolCall("curate", {"add_ids": named, "remove_ids": others})


class RuleSession:
    """One episode of a policy that decides by the number of the turn, counted from 0, and the context alone."""

    def __init__(self, rule: Rule, turn: int = 0) -> None:
        self._rule, self._turn = rule, turn

    async def act(self, context: Context) -> Decision:
        self._turn += 1
        given = self._rule(self._turn - 1, context)
        return given if isinstance(given, Decision) else Decision((given,), "This policy does not think.")

    def fork(self) -> RuleSession:
        return RuleSession(self._rule, self._turn)


UNTHINKING: Mapping[str, Rule] = {
    "no-op": lambda turn, context: END,
    "stop-at-once": lambda turn, context: search_call(context.view.query) if turn == 0 else END,
    "curate-everything": curate_everything,
    "query-repeater": lambda turn, context: search_call(context.view.query) if turn < REPEATS else END,
    "tool-spammer": tool_spammer,
    "id-inventor": id_inventor,
}
RULES: Mapping[str, tuple[str, Rule]] = {
    "follow-leads": (digest(["follow-leads", LIMIT, QUESTION_PAGES, WAVES, FAN]), follow_leads),
    "single-shot": (digest(["single-shot", TOP]), single_shot),
    **{name: (digest(["degenerate", name, RULES_REVISION]), rule) for name, rule in UNTHINKING.items()},
}
"""The hash and the rule of each policy."""


class RulePolicy:
    """A policy that follows a fixed rule of the turn number and the context."""

    def __init__(self, name: str) -> None:
        self.name, self.hash = name, RULES[name][0]

    def open(self, task: Task, seed: int) -> RuleSession:
        return RuleSession(RULES[self.name][1])


def _newest(view: View) -> list[str]:
    return [hit.document.handle for hit in view.hits.get(max(view.hits, default=0), ())]


END_PROBABILITY = 0.1


class RandomPolicy:
    """A policy that draws a sensible action, with arguments drawn from what is visible."""

    name = "random"
    hash = digest(["random", END_PROBABILITY])

    def open(self, task: Task, seed: int) -> RandomSession:
        return RandomSession(random.Random(f"{seed}/{task.task_id}"))


class RandomSession(CopiedSession):
    """One episode; every choice comes from its own generator."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def act(self, context: Context) -> Decision:
        view = context.view
        if view.documents and self._rng.random() < END_PROBABILITY:
            return Decision((end_call("A random end."),))
        names = sorted(spec.name for spec in context.tools if spec.name != END_SEARCH)
        if not view.documents:
            names = [name for name in names if name in ("search_corpus", FAN_OUT)]
        name = self._rng.choice(names)
        return Decision((ToolCall(name, self._arguments(name, view, context.tools)),), "A random action.")

    def _arguments(self, name: str, view: View, tools: Sequence[ToolSpec]) -> dict[str, Any]:
        match name:
            case "search_corpus":
                return {"query": self._words(view)}
            case "fan_out_search":
                return {"queries": [self._words(view) for _ in range(self._rng.randint(1, 5))]}
            case "grep_corpus":
                return {"pattern": self._words(view).split()[0]}
        most = {"read_document": 1, "curate": 5}.get(name, 3)
        known = sorted(view.documents)
        handles = self._rng.sample(known, min(len(known), self._rng.randint(1, most)))
        match name:
            case "read_document":
                return {"doc_id": handles[0]}
            case "curate":
                return curate_call(tools, {handle: self._rng.choice(TAGS) for handle in handles}).arguments
            case "verify":
                return {"doc_ids": handles, "claim": view.query}
        return {"doc_ids": handles}

    def _words(self, view: View) -> str:
        if view.entities:
            word = self._rng.choice(["", *(word for word in view.query.split() if word.isalpha() and word.islower())])
            return f"{self._rng.choice(list(view.entities))} {word}".strip()
        titles = [document.title for document in view.documents.values() if document.title]
        words = self._rng.choice([view.query, *titles]).split() or ["the"]
        count = min(len(words), self._rng.randint(2, 8))
        return " ".join(self._rng.sample(words, count))


class RecordedPolicy:
    """A policy that emits recorded actions, and then ends. Raises UsageError on opening: no episode has the query."""

    def __init__(self, episodes: list[Episode], name: str = "replay") -> None:
        self.name = name
        self._episodes = {episode.task.query: episode for episode in episodes}
        actions = [[query, [turn.action for turn in episode.turns]] for query, episode in self._episodes.items()]
        self.hash = digest(["replay", sorted(actions, key=lambda pair: str(pair[0]))])

    @classmethod
    def load(cls, path: Path) -> RecordedPolicy:
        """Read a run folder, or its `episodes.jsonl`."""
        folder = path.parent if path.is_file() else path
        return cls(list(read_episodes(folder)), f"replay:{path}")

    def open(self, task: Task, seed: int) -> RuleSession:
        if task.query not in self._episodes:
            raise UsageError(f"no recorded episode has the query {task.query[:80]!r}")
        return RuleSession(partial(_repeat_turn, self._episodes[task.query]))


def _repeat_turn(episode: Episode, at: int, context: Context) -> Decision:
    if at >= len(episode.turns):
        return Decision((end_call("The record ends here."),))
    turn = episode.turns[at]
    if turn.action is None:
        return Decision(parse_error=turn.parse_error or "no action", reasoning=turn.reasoning)
    return Decision((turn.action, *turn.ignored), turn.reasoning)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "scripted": ScriptedPolicy,
    "random": RandomPolicy,
    **{name: partial(RulePolicy, name) for name in RULES},
}
"""The policies that need no argument, by name."""
