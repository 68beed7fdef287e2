"""What an episode asked of its language model."""

from __future__ import annotations

from harness1.model_calls import calls_of, prompt_ids
from harness1.records import Episode
from harness1.rl.episode_calls import captured_calls
from harness1.rl.prefix_merging import prefix_merging


def model_use(episode: Episode) -> dict[str, float]:
    """Calls, failed attempts among them, and tokens; nothing for a policy without a model.

    `merge_ratio` is the number of trained calls for each training row: 1.0 where no prompt goes on from the one before.
    """
    calls = list(calls_of(episode))
    if not calls:
        return {}
    used = {"model_calls": float(len(calls)), "failed_attempts": float(sum(_failed(episode)))}
    if not all(call.output_ids for call in calls):
        return used
    return used | {
        "prompt_tokens": float(sum(len(prompt_ids(episode, call)) for call in calls)),
        "output_tokens": float(sum(len(call.output_ids) for call in calls)),
        "merge_ratio": prefix_merging(captured_calls(episode)).merge_ratio,
    }


def _failed(episode: Episode) -> list[int]:
    """For each turn, the attempts that held no call."""
    return [len(turn.calls) - (turn.action is not None) for turn in episode.turns if turn.calls]
