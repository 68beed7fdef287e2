"""Other work on a page: trainings as curves, recordings as sessions, and recipes by stages."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import ChatPolicy, Config
from harness1.config.settings import present
from harness1.errors import MALFORMED, ConfigError, UsageError
from harness1.models.open import format_at
from harness1.models.spec import ModelSpec
from harness1.models.tokenizer import Tokenizer
from harness1.recipe.run import JOURNAL, RecipeState, StageRecord, is_at_work, read_recipe_state
from harness1.rows.calls import CALLS, VERB, RecordedCall, read_records
from harness1.runs.files import STAGE, Stage, read_stage
from harness1.training.log import LOG, VALIDATION_PREFIX, read_log
from harness1.viewer.html import deflate


def training_row(folder: Path) -> dict[str, str]:
    """Return what the page knows of a training before its curves are asked for."""
    return {"name": folder.resolve().name, "folder": str(folder)}


def training_card(folder: Path) -> dict[str, Any]:
    """Return a training as JSON data: steps and values of its metrics, those of the validation apart, with the hashes
    of its indexes and its reward, beside which runs of the same can stand. The log is as for `read_log`."""
    curves: dict[str, list[list[float]]] = {}
    validation: dict[str, list[list[float]]] = {}
    for line in read_log(folder):
        step = line.pop("step")
        for name, value in line.items():
            if isinstance(value, int | float):
                kind = validation if name.startswith(VALIDATION_PREFIX) else curves
                steps, values = kind.setdefault(name.removeprefix(VALIDATION_PREFIX), [[], []])
                steps.append(step)
                values.append(value)
    stage = read_stage(folder)
    inputs = {} if stage is None else stage.inputs
    made_with = {"indexes": inputs.get("indexes", []), "reward": inputs.get("reward", "")}
    return {**training_row(folder), **made_with, "curves": curves, "validation": validation}


Sent = Sequence[int] | Sequence[Any]


def is_recording(folder: Path) -> bool:
    """Return True if a folder holds calls that a proxy recorded."""
    if not (folder / CALLS).is_file():
        return False
    stage = read_stage(folder)
    return stage is None or stage.verb == VERB


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """Return the sessions of a record as JSON data, in the order of their first calls. Parts that a call lacks are
    None; times are in seconds. Raises SchemaError: the record is damaged."""
    groups: dict[str, list[RecordedCall]] = {}
    for call in sorted(read_records(folder), key=lambda call: call.t_arrived):
        groups.setdefault(call.session_id, []).append(call)
    stage = read_stage(folder)
    tokenizer = _tokenizer(stage)
    inputs = {} if stage is None else stage.inputs
    about = {"record": folder.resolve().name, "upstream": inputs.get("upstream", "")}
    sessions = []
    for name, group in groups.items():
        ids: Sequence[int] = ()
        said: list[Any] = []
        calls = []
        for call in group:
            found = (call.request or {}).get("messages")
            messages = found if isinstance(found, list) else []
            kept = _count_common(ids, call.prompt_ids), _count_common(said, messages)
            calls.append(_call(call, messages, *kept, tokenizer))
            if call.prompt_ids:
                ids = (*call.prompt_ids, *call.output_ids)
            if call.request is not None:
                said = [*messages, *([call.reply] if call.reply else [])]
        sessions.append(about | {"name": name, "calls": calls})
    return sessions


def hold_sessions(folders: Sequence[Path], room: int) -> list[tuple[dict[str, Any], str]]:
    """Return the rows of all sessions of some records, and their data compressed; it is empty where a session does not
    fit into a number of bytes. Raises SchemaError: a record is damaged."""
    found = []
    for session in (session for folder in folders for session in read_sessions(folder)):
        text = deflate(session)
        held = len(text) <= room
        room -= len(text) if held else 0
        calls = session["calls"]
        row = {
            "name": session["name"],
            "record": session["record"],
            "calls": len(calls),
            "failed": sum(call["error"] is not None for call in calls),
            "tokens": sum(call["output_tokens"] or 0 for call in calls) or None,
            "seconds": sum(call["seconds"] or 0.0 for call in calls),
            "held": held,
        }
        found.append((row, text if held else ""))
    return found


def _count_common(before: Sent, now: Sent) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False)))


def _call(
    call: RecordedCall, messages: list[Any], kept_ids: int, kept: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return a call, of whose prompt only what follows the tokens or messages of the one before is written out."""

    def text(tokens: Sequence[int]) -> str | None:
        return tokenizer.decode(tokens) if tokenizer is not None and tokens else None

    logprobs, names = call.output_logprobs, ("status", "error", "untrainable", "attempt", "model", "dialect", "reply")
    return {name: getattr(call, name) for name in names} | {
        "agent": call.agent_id,
        "reused": kept_ids or None,
        "prompt": text(call.prompt_ids[kept_ids:]),
        "prompt_tokens": len(call.prompt_ids) or None,
        "earlier": kept,
        "messages": messages[kept:],
        "output": text(call.output_ids),
        "output_tokens": len(call.output_ids) or None,
        "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        "actions": msgspec.to_builtins(call.actions),
        "finish": call.finish_reason,
        "versions": [call.version_start, call.version_end] if call.output_ids else None,
        "waited": round(call.t_start - call.t_arrived, 3) if call.t_start else None,
        "seconds": round(call.t_end - call.t_start, 3) if call.t_start else None,
    }


def _tokenizer(stage: Stage | None) -> Tokenizer | None:
    if stage is None or "format" not in stage.inputs:
        return None
    try:
        policy = msgspec.convert(present(stage.inputs["policy"], "policy."), ChatPolicy)
        chat = format_at(ModelSpec.read(str(stage.inputs["upstream"])).model, Config(policy=policy))
    except (KeyError, UsageError, ConfigError, OSError, *MALFORMED):
        return None
    return chat.tokenizer if chat.hash == stage.inputs["format"] else None


PLAY, TRAIN = (("eval",), ("sft", "collect")), (("sft", "train"), ("rl", "train"))
"""The verbs of stages that leave episodes, and of those that leave curves."""


def is_recipe(folder: Path) -> bool:
    """Return True if a folder is that of a recipe."""
    return (folder / JOURNAL).is_file()


def recipe_parts(folder: Path) -> list[Path]:
    """Return the folders of the stages that have begun and have episodes or curves. Raises as `recipe_card`."""
    return [folder / name for name, record in _recipe_state(folder).stages.items() if _is_of((*PLAY, *TRAIN), record)]


def parts_on_disk(folder: Path) -> list[Path]:
    """Return those parts that have written something, the last one first: what was trained stands beside the rest."""
    stages = _recipe_state(folder).stages
    marks = {folder / name: LOG if _is_of(TRAIN, record) else STAGE for name, record in stages.items()}
    return [part for part in reversed(recipe_parts(folder)) if (part / marks[part]).is_file()]


def recipe_card(folder: Path) -> dict[str, Any]:
    """Return a recipe as JSON data. Times are in seconds; `expected` is 0 where nothing is known. Raises UsageError:
    the folder has been removed; SchemaError: the journal is damaged."""
    journal, at_work = _recipe_state(folder), is_at_work(folder)
    expected = journal.times()
    stages = []
    for name in dict.fromkeys([*journal.plan, *journal.stages]):
        card: dict[str, Any] = {"name": name, "folder": str(folder / name), "status": "to come", "findings": []}
        if name in journal.plan:
            card["says"] = journal.plan[name].says
        if record := journal.stages.get(name):
            card |= msgspec.to_builtins({each: getattr(record, each) for each in ("findings", "seconds", "metrics")})
            card["status"] = record.status_now(at_work)
            card["command"] = f"harness1 {shlex.join(record.words)}"
            card["began"], card["exit"] = record.began, record.exit
        stages.append(card | {"expected": expected.get(name, 0.0)})
    return {"name": folder.resolve().name, "folder": str(folder), "title": journal.title, "stages": stages}


def _is_of(verbs: Sequence[tuple[str, ...]], record: StageRecord) -> bool:
    return any(record.words[: len(verb)] == verb for verb in verbs)


def _recipe_state(folder: Path) -> RecipeState:
    if (journal := read_recipe_state(folder)) is None:
        raise UsageError(f"{folder} holds no recipe any more")
    return journal
