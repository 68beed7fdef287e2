"""What a run took: the content of `resources.json`. Unlike the metrics it depends on the machine and on prices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness1.config import Config, Machine, Price
from harness1.eval.model_use import Tokens, tokens_of
from harness1.eval.statistics import bootstrap_mean, finite_or_null, task_means
from harness1.records import Episode, Record, Status
from harness1.rows.calls import calls_of


class _Taken(Record):
    """What one episode took."""

    task_id: str
    whole: bool
    """The infrastructure did not break it."""
    seconds: dict[str, float]
    tokens: Tokens | None
    dollars: float | None


def resources(episodes: Iterable[Episode], config: Config, wall_seconds: float | None = None) -> dict[str, Any]:
    """Sums over all episodes, those that the infrastructure broke included; plain data.

    `wall_seconds` are those of a clock on the wall, where they are known. `episode_seconds` are those of each stage of
    an episode and their `total`: episodes run side by side, so that their sum is more. `tokens` are those of
    `model_use.Tokens`, for policies without a model too; `exact` says that none was estimated, and `episodes` of how
    many they are known. `cost`, in dollars, is there where `machine.price` sets one: of the episodes that asked a
    model, whose prompt tokens cost `cached` where the call before left them and `prompt` where they had to be read.

    `per_episode` has the `seconds` and the `cost` of one episode as `{mean, low, high}`, as metrics are: samples of a
    task are averaged, then tasks; what the infrastructure broke, and a cost that is not known, are left out.

    Raises:
        SchemaError: an episode does not hold a stretch of a prompt.
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
