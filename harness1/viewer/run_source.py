"""A run folder for viewing: its configuration, gold and tokenizer, if they can be found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config
from harness1.env.pieces import static_piece
from harness1.errors import MALFORMED, UsageError
from harness1.eval.known_gold import KnownGold, known_gold
from harness1.eval.metrics import HEADLINE
from harness1.models.fetch import resolve_model
from harness1.models.open import HARMONY
from harness1.models.spec import ModelSpec, is_model
from harness1.models.tokenizer import HarmonyVocabulary, Tokenizer, open_tokenizer
from harness1.runs.folder import METRICS, run_config
from harness1.runs.stage import Stage, read_stage
from harness1.tools.registry import Toolbox
from harness1.viewer.gold_titles import gold_titles


@dataclass
class RunSource:
    """The data to view the episodes of one run. It can be sent to a worker process.

    Attributes:
        titles: of gold units, by id (see `gold_titles`).
        notes: one line for everything that is missing, with the consequences for the reader.
    """

    folder: Path
    name: str
    config: Config
    stage: Stage
    gold: KnownGold
    notes: list[str] = field(default_factory=list)
    titles: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> RunSource:
        """Open a folder.

        Raises:
            UsageError: the folder holds no run.
            SchemaError: its card is damaged.
        """
        config, _ = run_config(folder)
        stage = read_stage(folder)
        assert stage is not None
        gold = known_gold(stage)
        notes = [] if _is_asked(stage) else list(gold.notes)
        titles = gold_titles(stage, gold, config.index.unit)
        run = cls(folder, folder.resolve().name, config, stage, gold, notes, titles)
        if run._has_tokens and run.tokenizer is None:
            notes.append(
                "The tokenizer of its model could not be loaded: prompts are shown as pieces of the context, and"
                " outputs as what was read in them, not as the text that was sampled."
            )
        return run

    def __getstate__(self) -> dict[str, Any]:
        # A tokenizer is not sent to a worker process: it loads its own.
        return {name: value for name, value in self.__dict__.items() if name != "tokenizer"}

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer with which the episodes were recorded, or None if it is not on this machine."""
        place = self._tokenizer_place
        if place is None:
            return None
        try:
            found = HarmonyVocabulary() if place == HARMONY else open_tokenizer(resolve_model(place))
        except (UsageError, OSError):
            return None
        return found if found.hash == self.stage.hashes.get("tokenizer") else None

    @property
    def tools(self) -> list[str]:
        """The names of the policy's tools, in order."""
        return [spec.name for spec in Toolbox.of(self.config.env).specs]

    @property
    def card(self) -> dict[str, Any]:
        """The page's description of the run."""
        inputs, outputs = self.stage.inputs, self.stage.outputs
        metrics = self._metrics()
        return {
            "name": self.name,
            "folder": str(self.folder),
            "policy": outputs.get("policy", ""),
            "learned": is_model(str(outputs.get("policy", ""))),
            "index": inputs.get("index", ""),
            "reward": inputs.get("reward", ""),
            "dataset": inputs.get("dataset", ""),
            "split": inputs.get("split", ""),
            "status": self.stage.status,
            "asked": _is_asked(self.stage),
            "tools": self.tools,
            "cap": self.config.env.curation.cap,
            "notes": self.notes,
            "metrics": {name: metrics[name] for name in HEADLINE if isinstance(metrics.get(name), dict)},
        }

    def shared(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the data that its episodes share: texts by the key of their segment, and the tools."""
        toolbox = Toolbox.of(self.config.env)
        static = static_piece(self.config.env, toolbox)
        return {"texts": {static.key: static.text, **texts}, "specs": msgspec.to_builtins(toolbox.specs)}

    @property
    def _has_tokens(self) -> bool:
        return "tokenizer" in self.stage.hashes

    @property
    def _tokenizer_place(self) -> str | None:
        if not self._has_tokens:
            return None
        named = self.stage.outputs.get("tokenizer") or self.config.machine.model.tokenizer
        policy = str(self.stage.outputs.get("policy", ""))
        if named or not is_model(policy):
            return str(named) if named else None
        try:
            return ModelSpec.read(policy).model
        except UsageError:
            return None

    def _metrics(self) -> dict[str, Any]:
        path = self.folder / METRICS
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, *MALFORMED):
            return {}


def _is_asked(stage: Stage) -> bool:
    """Return whether the questions of a run are no dataset's split: somebody asked them, one by one."""
    return not (stage.inputs.get("split") or stage.outputs.get("split"))
