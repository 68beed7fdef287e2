"""A run folder: the card of a run, its episodes and its metrics; which folder may be written to, and which may not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config
from harness1.errors import ConfigError, SchemaError, UsageError
from harness1.stage import STAGE, Stage, read_stage
from harness1.store import EPISODES, TOKENS

METRICS = "metrics.json"
VERB = "run"


def run_stage(config: Config, policy: str, inputs: dict[str, Any], index: str, hashes: dict[str, str]) -> Stage:
    """The card of a run folder: enough to replay it, offline by its configuration and live by its index."""
    outputs = {"policy": policy, "config": msgspec.to_builtins(config), "index": str(Path(index).resolve())}
    return Stage(VERB, inputs, hashes=hashes, outputs=outputs)


def run_config(folder: Path) -> tuple[Config, str]:
    """The configuration and the index path of a run folder.

    Raises:
        UsageError: the folder holds no run.
        SchemaError: its card is damaged.
    """
    stage = read_stage(folder)
    if stage is None or stage.verb != VERB:
        raise UsageError(f"{folder} is no run folder: it has no {STAGE} of a run")
    try:
        return msgspec.convert(stage.outputs["config"], Config), str(stage.outputs["index"])
    except KeyError as error:
        raise SchemaError(f"{folder / STAGE} is damaged: it names no {error.args[0]}") from error
    except (msgspec.ValidationError, ConfigError) as error:
        raise SchemaError(f"{folder / STAGE} is damaged: {error}") from error


@contextmanager
def marked(stage: Stage, out: Path) -> Iterator[None]:
    """The card says `running` meanwhile, and `interrupted` if the work is cut short."""
    stage.write(out)
    try:
        yield
    except BaseException:
        stage.write(out, status="interrupted")
        raise


def clear_run(out: Path) -> None:
    """Remove an earlier run; nothing else in the folder is touched.

    Raises:
        UsageError: the folder holds something that is no run.
    """
    refuse_other_folder(out)
    for name in (STAGE, EPISODES, TOKENS, METRICS):
        (out / name).unlink(missing_ok=True)


def refuse_other_folder(out: Path) -> None:
    """Write into a new folder, an empty one, or that of a run.

    Raises:
        UsageError: the path is something else.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is no folder: choose another --out")
    if out.is_dir() and any(out.iterdir()) and not _holds_run(out):
        raise UsageError(f"{out} is not empty and holds no run: choose another --out")


def refuse_other_run(stage: Stage, out: Path) -> None:
    """Keep runs apart that differ in what decides their episodes. An input that is None is not known yet, and not
    compared.

    Raises:
        UsageError: the folder holds another run, or something that is no run.
    """
    refuse_other_folder(out)
    found = read_stage(out)
    if found is None:
        return
    names = [name for name in stage.inputs.keys() | found.inputs.keys() if _differ(name, stage, found)]
    if names:
        raise UsageError(
            f"{out} holds another run (it differs in {', '.join(sorted(names))}): choose another --out, or --force"
        )


def _differ(name: str, stage: Stage, found: Stage) -> bool:
    unknown = name in stage.inputs and stage.inputs[name] is None
    return not unknown and stage.inputs.get(name) != found.inputs.get(name)


def _holds_run(folder: Path) -> bool:
    """Whether a run was begun in a folder: its card says so, or there are episodes and no card yet."""
    stage = read_stage(folder)
    return (folder / EPISODES).is_file() if stage is None else stage.verb == VERB
