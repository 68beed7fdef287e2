"""A run folder: the card that says how its episodes were made, and what may be written into it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from harness1.config import Config
from harness1.errors import MALFORMED, ConfigError, SchemaError, UsageError
from harness1.hashing import digest
from harness1.plugins import is_own, packages_of, refuse_missing
from harness1.records import Episode
from harness1.redaction import public_address
from harness1.runs.files import writing
from harness1.runs.journal import held
from harness1.runs.line_digests import LINES, Lines, continued
from harness1.runs.stage import STAGE, Stage, read_stage, refuse_changed, refuse_foreign, remove
from harness1.runs.store import EPISODES, TOKENS, latest_episodes

METRICS = "metrics.json"
RESOURCES = "resources.json"
TASKS = "tasks.csv"
CURATED = "curated.trec"
POOL = "pool.trec"
ENCODED_QRELS = "qrels.trec"
SUBMISSION = "browsecomp_plus"
CONFIG = "config.toml"
PROVENANCE = "provenance.json"
REPORT = "report.html"
VIEW = "view.html"

_OF_SAMPLES = ("curated.sample*.trec", "pool.sample*.trec")
_DERIVED = (METRICS, RESOURCES, TASKS, CURATED, POOL, ENCODED_QRELS, CONFIG, PROVENANCE, REPORT, VIEW, *_OF_SAMPLES)
_SUBMISSIONS = (SUBMISSION, f"{SUBMISSION}.sample*")
"""Patterns of the files that are made from a run's episodes."""


def run_stage(
    config: Config,
    policy: str,
    inputs: dict[str, Any],
    index: str,
    hashes: dict[str, str],
    chat: Mapping[str, str] = MappingProxyType({}),
) -> Stage:
    """Return the card of a run folder. Its configuration is enough to replay it offline, its index to replay it live.

    Args:
        index: the name of an engine, or the absolute path of a folder (`retrieval.open.absolute_index`). A password
            in it is not written.
        chat: the chat `format` of its policy, if it has one, and the location of its student's `tokenizer`.
    """
    lines = Lines(digest([inputs, hashes]), 0)
    outputs = {"policy": policy, "config": shown_config(config), "index": public_address(index), **chat}
    outputs[LINES] = msgspec.to_builtins(lines)
    if plugins := _plugins(config, policy, index, chat):
        outputs["plugins"] = plugins
    return Stage("run", inputs, hashes=hashes, outputs=outputs)


def _plugins(config: Config, policy: str, index: str, chat: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the packages of the plugins that a run is made with, by kind and name."""
    format_name = chat.get("format", config.policy.format)
    first = [spec if is_own(spec) else spec.partition(":")[0] for spec in (policy, index)]
    named = {"policies": first[:1], "retrievers": first[1:], "formats": [format_name]}
    return packages_of({"tools": config.env.plugins, "rewards": config.reward.plugins, **named})


def shown_config(config: Config) -> dict[str, Any]:
    """Return every setting without the keys of services and the secrets in addresses."""
    tree: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(config, machine=config.machine.public()))
    return tree


def toml_lines(tree: dict[str, Any], notes: Mapping[str, str] | None = None, prefix: str = "") -> list[str]:
    """Return nested settings as lines of TOML: scalars first, then one table for each group.

    Args:
        notes: by dotted name, what a comment says of a group or a setting.
    """
    notes, lines = notes or {}, list[str]()
    for key, value in tree.items():
        if not isinstance(value, dict):
            # JSON and TOML write scalars, and lists of them, alike.
            lines += [*_comment(notes.get(prefix + key)), f"{key} = {msgspec.json.encode(value).decode()}"]
    for key, value in tree.items():
        if isinstance(value, dict):
            comment = _comment(notes.get(prefix + key))
            lines += ["", *comment, f"[{prefix}{key}]", *toml_lines(value, notes, f"{prefix}{key}.")]
    return lines


def _comment(text: str | None) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ") if text else []


def of_sample(name: str, sample: int) -> str:
    """Return the name of a file or folder for one sample of the tasks; the first sample has the plain name."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}.sample{sample}{dot}{suffix}" if sample else name


def run_config(folder: Path, *, scored_again: bool = False) -> tuple[Config, str]:
    """Return the configuration and the index path of a run folder.

    Args:
        scored_again: reward terms may have changed since, because the run gets another reward.

    Raises:
        UsageError: the folder holds no run, or one that was made with a tool or a reward term that is not installed.
        SchemaError: its card is damaged.
    """
    stage = read_stage(folder)
    if stage is None or stage.verb != "run":
        why = "it has no stage.json of a run" if folder.exists() else "there is no such folder"
        raise UsageError(f"{folder} is not a run folder: {why}")
    made_with = stage.outputs.get("plugins", {})
    needed = ("tools",) if scored_again else ("tools", "rewards")
    refuse_missing({kind: made_with[kind] for kind in needed if kind in made_with}, str(folder))
    try:
        return msgspec.convert(stage.outputs["config"], Config), str(stage.outputs["index"])
    except (KeyError, *MALFORMED, ConfigError) as error:
        raise SchemaError(f"{folder / STAGE} does not say how the run was made: {error}") from error


def episodes_of(stage: Stage, folder: Path) -> list[Episode]:
    """Return the last episode of each task and sample of the run that a card describes, sorted, because the mean of
    floats depends on their order, and a file on the order of its lines."""
    made_with = tuple(stage.inputs.get(name) for name in ("env", "policy", "index"))
    return [episode for key, episode in sorted(latest_episodes(folder).items()) if key[2:] == made_with]


def clear_run(out: Path) -> None:
    """Remove an earlier run; nothing else in the folder is touched.

    Raises:
        UsageError: the folder holds something that is not a run, may not be written, or is being written by another
            process.
    """
    refuse_foreign(out, "run", "no run", EPISODES)
    with held(out, EPISODES):
        with writing(out):
            drop_leftovers(out)
        remove(out, *_DERIVED, *(f"{folder}/run_*.json" for folder in _SUBMISSIONS), keep_card=True)
        for folder in _matching(out, *_SUBMISSIONS):
            with suppress(OSError):  # somebody has put something else there, which stays
                folder.rmdir()
        remove(out, EPISODES, TOKENS)


def drop_leftovers(out: Path) -> None:
    """Remove the temporary files of processes that were killed while they replaced a file. Call it only while holding
    the folder's lock."""
    for path in _matching(out, ".*", *(f"{folder}/.*" for folder in _SUBMISSIONS)):
        name, _, process = path.name.removeprefix(".").rpartition(".")
        if process.isdecimal() and name.endswith((".json", ".jsonl", ".csv", ".trec", ".toml", ".html")):
            path.unlink(missing_ok=True)


def refuse_other_run(stage: Stage, out: Path) -> Stage:
    """Accept only a folder that is new or empty, or holds the same run; return the card with which it goes on.

    Raises:
        UsageError: the folder holds another run, or something that is not a run.
    """
    refuse_foreign(out, "run", "no run", EPISODES)
    refuse_changed(stage, out, "run")
    return continued(stage, out / EPISODES)


def _matching(out: Path, *patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in out.glob(pattern)]
