"""A run folder: the card that says how its episodes were made, and what may be written into it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from harness1.config import Config
from harness1.errors import ConfigError, SchemaError, UsageError
from harness1.retrieval.engines import is_engine
from harness1.stage import STAGE, Stage, read_stage
from harness1.store import EPISODES, TOKENS

METRICS = "metrics.json"


def run_stage(
    config: Config,
    policy: str,
    inputs: dict[str, Any],
    index: str,
    hashes: dict[str, str],
    spoken: Mapping[str, str] = MappingProxyType({}),
) -> Stage:
    """The card of a run folder: enough to replay it, offline by its configuration and live by its index.

    Args:
        spoken: where its policy has one, its chat `format`, and where the `tokenizer` of its student lies.
    """
    outputs = {"policy": policy, "config": shown_config(config), "index": absolute_index(index), **spoken}
    return Stage("run", inputs, hashes=hashes, outputs=outputs)


def shown_config(config: Config) -> dict[str, Any]:
    """Every setting but the keys of services, which are secrets."""
    run = config.run
    run = msgspec.structs.replace(run, web=run.web.public(), model=run.model.public(), verifier=run.verifier.public())
    tree: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(config, run=run))
    return tree


def absolute_index(index: str) -> str:
    """An index folder by its whole path, so that the run can be replayed from anywhere; an engine as it is named."""
    return index if is_engine(index) else str(Path(index).resolve())


def run_config(folder: Path) -> tuple[Config, str]:
    """The configuration and the index path of a run folder.

    Raises:
        UsageError: the folder holds no run.
        SchemaError: its card is damaged.
    """
    stage = read_stage(folder)
    if stage is None or stage.verb != "run":
        raise UsageError(f"{folder} is no run folder: it has no stage.json of a run")
    try:
        return msgspec.convert(stage.outputs["config"], Config), str(stage.outputs["index"])
    except (KeyError, msgspec.ValidationError, ConfigError) as error:
        raise SchemaError(f"{folder / STAGE} does not say how the run was made: {error}") from error


def clear_run(out: Path) -> None:
    """Remove an earlier run; nothing else in the folder is touched.

    Raises:
        UsageError: the folder holds something that is no run.
    """
    refuse_foreign(out)
    for name in (STAGE, EPISODES, TOKENS, METRICS):
        (out / name).unlink(missing_ok=True)


def refuse_other_run(stage: Stage, out: Path) -> None:
    """Keep runs apart that differ in what decides their episodes.

    Raises:
        UsageError: the folder holds another run, or something that is no run.
    """
    refuse_foreign(out)
    found = read_stage(out)
    if found is not None and (found.verb, found.inputs) != (stage.verb, stage.inputs):
        names = [name for name in stage.inputs if found.inputs.get(name) != stage.inputs[name]] or ["verb"]
        raise UsageError(
            f"{out} holds another run (it differs in {', '.join(names)}): choose another --out, or --force"
        )


def refuse_foreign(out: Path) -> None:
    """Write runs only into folders that are new, empty or hold a run.

    Raises:
        UsageError: the folder holds something else.
    """
    try:
        if not out.exists() or not any(out.iterdir()):
            return
    except OSError as error:
        raise UsageError(f"{out} cannot hold a run: {error.strerror}") from error
    stage = read_stage(out)
    if (stage is None and not (out / EPISODES).is_file()) or (stage is not None and stage.verb != "run"):
        raise UsageError(f"{out} is not empty and holds no run: choose another --out")
