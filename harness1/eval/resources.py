"""Resources used by a run, the content of `resources.json`. Unlike metrics they depend on the machine and on prices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness1.config import Config, Machine, Price
from harness1.eval.model_use import Tokens, tokens_of
from harness1.eval.statistics import bootstrap_mean, finite_or_null, task_means
from harness1.records import Episode, Record, Status
from harness1.rows.calls import calls_of


class _Taken(Record):
    """Resources used by one episode."""

    task_id: str
    whole: bool
    """True unless the infrastructure broke the episode."""
    seconds: dict[str, float]
    tokens: Tokens | None
    dollars: float | None


def resources(episodes: Iterable[Episode], config: Config, wall_seconds: float | None = None) -> dict[str, Any]:
    """Return, as plain data, sums over all episodes, those broken by the infrastructure included.

    `wall_seconds` is elapsed time, if known. `episode_seconds` are those of each stage of an episode and their `total`,
    which is larger, since episodes run side by side. `tokens` are those of `model_use.Tokens`, for policies without a
    model too; `exact` says that none was estimated, and `episodes` is the number of episodes for which they are known.
    `cost`, in dollars, is present if `machine.price` is set, over the episodes with a model: a prompt token costs
    `cached` if the previous call left it in the cache, else `prompt`.

    `per_episode` has the `seconds` and the `cost` of one episode as `{mean, low, high}`, like metrics: samples of a
    task are averaged, then tasks. Broken episodes and unknown costs are left out.

    Raises:
        SchemaError: an episode lacks a segment of a prompt.
    """
    taken = [_taken(episode, config.machine.price) for episode in episodes]
    known = [each.tokens for each in taken if each.tokens is not None]
    stages = sorted({stage for each in taken for stage in each.seconds})
    seconds = {stage: sum(each.seconds.get(stage, 0.0) for each in taken) for stage in stages}
    found: dict[str, Any] = {} if wall_seconds is None else {"wall_seconds": round(wall_seconds, 3)}
    found |= {
        "episodes": len(taken),
        "episode_seconds": {name: round(spent, 3) for name, spent in seconds.items()}
        | {"total": round(sum(seconds.values()), 3)},
        "tokens": {
            "prompt": sum(tokens.prompt for tokens in known),
            "prefill": sum(tokens.prefill for tokens in known),
            "output": sum(tokens.output for tokens in known),
            "exact": all(tokens.exact for tokens in known),
            "episodes": len(known),
        },
        "per_episode": _per_episode([each for each in taken if each.whole], config.machine),
    }
    if config.machine.price != Price():
        found["cost"] = sum(each.dollars or 0.0 for each in taken)
    return found


def _taken(episode: Episode, price: Price) -> _Taken:
    tokens = tokens_of(episode)
    return _Taken(
        episode.task.task_id,
        episode.status is not Status.INFRA_ERROR,
        {stage: spent / 1000 for stage, spent in episode.stage_ms.items()},
        tokens,
        None if tokens is None else _dollars(tokens, price) if any(calls_of(episode)) else 0.0,
    )


def _per_episode(taken: Sequence[_Taken], machine: Machine) -> dict[str, dict[str, float | None]]:
    samples = {"seconds": [(each.task_id, sum(each.seconds.values())) for each in taken]}
    if machine.price != Price():
        samples["cost"] = [(each.task_id, each.dollars) for each in taken if each.dollars is not None]
    means = {name: list(task_means(pairs).values()) for name, pairs in samples.items()}
    return {name: finite_or_null(bootstrap_mean(values, machine.bootstrap)) for name, values in means.items()}


def _dollars(tokens: Tokens, price: Price) -> float:
    cached = tokens.prompt - tokens.prefill
    return (tokens.prefill * price.prompt + cached * price.cached + tokens.output * price.output) / 1e6
