"""A policy that repeats the actions of a recorded run, task by task: `replay:FILE`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from harness1.env.render.context import Context
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.policy.baselines import RuleSession
from harness1.policy.policy import Decision
from harness1.records import Episode, Task, ToolCall
from harness1.runs.store import read_episodes
from harness1.tools.end_search import END_SEARCH


class RecordedPolicy:
    """A policy that emits the recorded actions, end of search included, and ends the search where the record ends.

    Raises:
        UsageError: on opening, if no recorded episode has the task's query.
    """

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
        return RuleSession(partial(_recorded, self._episodes[task.query]))


def _recorded(episode: Episode, at: int, context: Context) -> Decision:
    if at >= len(episode.turns):
        return Decision((ToolCall(END_SEARCH, {"reasoning": "The record ends here."}),))
    turn = episode.turns[at]
    if turn.action is None:
        return Decision(parse_error=turn.parse_error or "no action", reasoning=turn.reasoning)
    return Decision((turn.action, *turn.ignored), turn.reasoning)
