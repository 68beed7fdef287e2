"""What earlier tunings learned, kept by what they were about: corpus, reward and size of the model.

A file of lines for each, under one folder; processes may append at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from harness1.config import load_config
from harness1.errors import MALFORMED, SchemaError
from harness1.hashing import digest
from harness1.models.fetch import resolve_model
from harness1.recipe.artifacts import artifact
from harness1.recipe.recipe import Recipe
from harness1.recipe.stage_case import StageCase
from harness1.recipe.trials import TrialResult, objective_of
from harness1.runs.files import lock_or_wait, writing
from harness1.runs.journal import read_lines

FOLDER = Path("~/.cache/harness1/experience")


def subject_of(recipe: Recipe, shared: Path) -> str:
    """Return the hash of what a tuning is about: the documents as they are indexed, the reward of the objective's
    stage, the size of the model as a power of two, the objective, and the names of the settings that are varied.

    Args:
        shared: the folder of the shared stages, which are done.
    """
    objective = objective_of(recipe)
    indexes = [name for name, stage in recipe.stages.items() if stage.run.startswith("index ")]
    corpus = sorted(artifact(shared / name) for name in indexes)
    words = recipe.words(objective.stage, shared)
    settings = [word for before, word in pairwise(words) if before == "--set"]
    config = StageCase(words, shared).option("--config") or None
    size = sum(file.stat().st_size for place in _models(recipe, shared) for file in place.glob("*.safetensors"))
    about = [corpus, load_config(config, settings).reward_hash, max(size, 1).bit_length()]
    return digest([*about, objective.stage, objective.metric, sorted(recipe.search)])


def _models(recipe: Recipe, shared: Path) -> Iterator[Path]:
    """Yield the folders of models that stages begin with."""
    for name in recipe.stages:
        model = StageCase(recipe.words(name, shared), shared).option("--model").removeprefix("hf:")
        if model and "@" not in model and not Path(model).is_relative_to(shared):
            yield resolve_model(model)
        elif Path(model).is_dir():
            yield Path(model)


@dataclass(frozen=True)
class Experience:
    """The results of earlier trials about one subject."""

    folder: Path
    subject: str

    @property
    def path(self) -> Path:
        return self.folder / f"{self.subject[:16]}.jsonl"

    def results(self) -> list[TrialResult]:
        """Return what earlier trials left, oldest first; raise SchemaError for a line that is damaged."""
        return list(self._read()) if self.path.is_file() else []

    def keep(self, result: TrialResult) -> None:
        """Append the result of a trial."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with writing(self.folder), self.path.open("ab") as file:
            lock_or_wait(file, lambda: None)
            file.write(msgspec.json.encode(result) + b"\n")

    def _read(self) -> Iterator[TrialResult]:
        for number, line in read_lines(self.path):
            try:
                yield msgspec.json.decode(line, type=TrialResult)
            except MALFORMED as error:
                raise SchemaError(f"{self.path}:{number}: not the result of a trial: {error}") from error
