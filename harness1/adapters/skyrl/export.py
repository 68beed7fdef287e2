"""Export of a run folder to SkyRL: complete groups of episodes, with a fixed number of groups in each file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness1.adapters.skyrl.generator_output import generator_output, instance_of
from harness1.adapters.skyrl.readme import readme
from harness1.config import Config
from harness1.errors import SchemaError, UsageError
from harness1.hashing import file_digest
from harness1.records import Episode, ModelCall, Record, Status
from harness1.rl.advantages import has_signal
from harness1.rows.calls import captured_calls, trained_calls
from harness1.runs.files import refuse_full_disk, write_atomically
from harness1.runs.folder import run_config
from harness1.runs.stage import STAGE, Stage, read_stage, refuse_foreign, refuse_other, under_way
from harness1.runs.store import EPISODES, read_episodes

VERB = "rl export"
README, PROMPTS, BATCHES = "README.md", "prompts.jsonl", "batch-*.json"
PROMPT_BYTES, RESPONSE_BYTES = 6, 36
"""Approximate disk space of a token: its id, and for a response also its mask, reward and log probability."""

Progress = Callable[[str, int, int], None]
"""Called with an activity, the amount done, and the total (0 if unknown)."""


class Export(Record, kw_only=True):
    """The contents of an export, and counts of what was left out, by reason."""

    files: int
    groups_per_file: int
    samples: int
    """Episodes played of each group; unfit ones are left out."""
    episodes: int
    steps: int
    tokens: int
    versions: tuple[int, int]
    """The lowest and the highest version of the weights that sampled."""
    left_out_episodes: dict[str, int]
    left_out_groups: dict[str, int]


class _Found(NamedTuple):
    """The facts by which an episode is chosen."""

    line: int
    fault: str = ""
    """The reason why it is left out."""
    reward: float = 0.0
    versions: tuple[int, int] = (0, 0)
    steps: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0


Groups = dict[str, list[_Found]]


def export(
    run: Path,
    out: Path,
    groups_per_file: int = 0,
    *,
    force: bool = False,
    on_torn: Callable[[int], None] = lambda _: None,
    on_progress: Progress = lambda what, done, of: None,
) -> Export:
    """Write the groups of a run that have a policy gradient, unless the folder already holds this export.

    Args:
        run: a run folder of `rl train` or `eval --samples N`, whose episodes have model calls.
        groups_per_file: SkyRL's `train_batch_size`; 0 takes it from the run's configuration, or all groups if there
            are fewer.
        on_torn: called with the size in bytes of a torn last line.

    Raises:
        UsageError: there is no run or nothing to train on, the folder holds something else, or the disk is full.
        SchemaError: the run is damaged.
    """
    config, _ = run_config(run)
    card = read_stage(run)
    assert card is not None, "run_config has read it"
    inputs = {"run": [file_digest(run / name) for name in (STAGE, EPISODES)], "groups_per_file": groups_per_file}
    stage = Stage(VERB, inputs, hashes=card.hashes)
    refuse_foreign(out, VERB)
    if not force:
        if (there := _there(stage, out)) is not None:
            return there
        refuse_other(stage, out, "export")
    made, chosen = _planned(run, config, card, groups_per_file, on_torn, on_progress)
    episodes = [each for group in chosen.values() for each in group]
    size = sum(PROMPT_BYTES * each.prompt_tokens + RESPONSE_BYTES * each.response_tokens for each in episodes)
    refuse_full_disk(out, size)
    with under_way(stage, out):
        _write(run, out, made, chosen, on_progress)
        write_atomically(out / README, readme(made.files, made.groups_per_file, made.samples, card).encode())
        stage.write(out, status="finished", outputs=msgspec.to_builtins(made))
    return made


def unfit(episode: Episode) -> str:
    """Return in a word why an episode has no policy gradient, or "" if it has one."""
    calls = list(trained_calls(episode))
    if episode.status is Status.INFRA_ERROR:
        return "broken"
    if not calls:
        return "no_calls"
    if episode.untrainable is not None or not all(call.output_logprobs for call in calls):
        return "no_logprobs"
    if not all(map(_plainly_sampled, calls)):
        return "altered_sampling"
    return "" if episode.reward is not None else "unscored"


def _plainly_sampled(call: ModelCall) -> bool:
    """Return True if the recorded probabilities are the model's own, which a trainer computes."""
    sampling = call.sampling
    return (sampling.temperature, sampling.top_p, sampling.top_k, sampling.grammar) == (1.0, 1.0, 0, None)


def _there(stage: Stage, out: Path) -> Export | None:
    """Return this export if the folder holds all of it."""
    found = read_stage(out)
    if found is None or not stage.is_done(out):
        return None
    made = msgspec.convert(found.outputs, Export)
    return made if len(list(out.glob(BATCHES))) == made.files else None


def _planned(
    run: Path,
    config: Config,
    card: Stage,
    groups_per_file: int,
    on_torn: Callable[[int], None],
    on_progress: Progress,
) -> tuple[Export, Groups]:
    """Return the description of the export and its groups, in the order in which they were finished; raise UsageError
    if there are no groups to train on, or too few for a file."""
    samples = int(card.inputs.get("samples", config.rl.samples))
    groups, groups_out = _whole_groups(found := _latest(run, on_torn, on_progress), samples)
    faults = [each.fault for group in found.values() for each in group if each.fault]
    episodes_out = {name: faults.count(name) for name in sorted(set(faults))}
    size = groups_per_file or min(config.rl.groups, len(groups))
    if not size or len(groups) < size:
        raise UsageError(_too_few(run, len(groups), size, episodes_out, groups_out, sum(map(len, found.values()))))
    files = len(groups) // size
    chosen = dict(islice(groups.items(), files * size))
    if remainder := len(groups) - len(chosen):
        groups_out["remainder"] = remainder
    kept = [each for group in chosen.values() for each in group]
    made = Export(
        files=files,
        groups_per_file=size,
        samples=samples,
        episodes=len(kept),
        steps=sum(each.steps for each in kept),
        tokens=sum(each.prompt_tokens + each.response_tokens for each in kept),
        versions=(min(each.versions[0] for each in kept), max(each.versions[1] for each in kept)),
        left_out_episodes=episodes_out,
        left_out_groups=groups_out,
    )
    return made, chosen


def _latest(run: Path, on_torn: Callable[[int], None], on_progress: Progress) -> Groups:
    """Return the episodes of each group; of an episode that was played again, the last."""
    found: dict[tuple[str, int], _Found] = {}
    for line, episode in enumerate(read_episodes(run, on_torn)):
        try:
            found[instance_of(episode), episode.sample_idx] = _facts(episode, line)
        except ValueError as error:
            raise SchemaError(f"{run} is damaged: episode {episode.episode_id}: {error}") from error
        on_progress(f"reading {run}", line + 1, 0)
    groups: Groups = {}
    for (name, _), each in found.items():
        groups.setdefault(name, []).append(each)
    return groups


def _facts(episode: Episode, line: int) -> _Found:
    if fault := unfit(episode):
        return _Found(line, fault)
    calls = list(captured_calls(episode))
    return _Found(
        line,
        reward=0.0 if episode.reward is None else episode.reward.total,
        versions=episode.policy_versions,
        steps=len(calls),
        prompt_tokens=sum(len(call.prompt_ids) for call in calls),
        response_tokens=sum(len(call.output_ids) for call in calls),
    )


def _whole_groups(found: Groups, samples: int) -> tuple[Groups, dict[str, int]]:
    """Return the groups to train on, without unfit episodes, in the order in which they were finished, and the number
    of other groups by reason."""
    kept: Groups = {}
    left_out: dict[str, int] = {}
    for name, group in found.items():
        fit = [each for each in group if not each.fault]
        if len(group) < samples:
            reason = "unfinished"
        elif len(fit) < 2:
            reason = "alone"
        elif not has_signal([each.reward for each in fit]):
            reason = "equal_rewards"
        else:
            kept[name] = fit
            continue
        left_out[reason] = left_out.get(reason, 0) + 1
    order = sorted(kept, key=lambda name: max(each.line for each in kept[name]))
    return {name: kept[name] for name in order}, left_out


def _too_few(
    run: Path, groups: int, size: int, episodes_out: dict[str, int], groups_out: dict[str, int], episodes: int
) -> str:
    if episodes_out.get("no_calls", 0) == episodes:
        return f"{run} holds no model calls: export a run of `rl train`, or of `eval --samples 8 --policy hf:MODEL`"
    if groups:
        why = f"{run} has {groups} groups to train on, fewer than the {size} of a file: lower --groups-per-file"
    else:
        why = f"{run} has no group of episodes to train on"
    reasons = [f"{count} episodes {name}" for name, count in episodes_out.items()]
    reasons += [f"{count} groups {name}" for name, count in groups_out.items()]
    return why + (f". Left out: {', '.join(reasons)}" if reasons else "")


def _write(run: Path, out: Path, made: Export, chosen: Groups, on_progress: Progress) -> None:
    """Write the files of batches, and their questions."""
    for old in out.glob(BATCHES):
        old.unlink()
    groups, asked = _groups(run, chosen), []
    for number in range(made.files):
        on_progress(f"writing {out}", number, made.files)
        batch = list(islice(groups, made.groups_per_file))
        try:
            output = generator_output(batch)
        except ValueError as error:
            raise SchemaError(f"{run} cannot be exported: {error}") from error
        write_atomically(out / BATCHES.replace("*", f"{number:05}"), msgspec.json.encode(output))
        asked += [_prompt(group[0]) for group in batch]
    write_atomically(out / PROMPTS, b"".join(msgspec.json.encode(each) + b"\n" for each in asked))


def _groups(run: Path, chosen: Mapping[str, Sequence[_Found]]) -> Iterator[list[Episode]]:
    """Yield the chosen groups in the order in which they were finished, read again because memory may not hold all."""
    places = {each.line: name for name, group in chosen.items() for each in group}
    waiting: dict[str, list[Episode]] = {}
    for line, episode in enumerate(read_episodes(run)):
        if (name := places.get(line)) is None:
            continue
        group = waiting.setdefault(name, [])
        group.append(episode)
        if len(group) == len(chosen[name]):
            yield sorted(waiting.pop(name), key=lambda each: each.sample_idx)


def _prompt(episode: Episode) -> dict[str, Any]:
    """Return a line of the dataset by which SkyRL counts its steps; it trains only on the batches."""
    return {"prompt": [{"role": "user", "content": episode.task.query}], "task_id": episode.task.task_id}
