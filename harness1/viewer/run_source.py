"""A run folder for viewing: its configuration, gold and tokenizer, if they can be found."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from harness1.env.pieces import static_piece
from harness1.errors import MALFORMED, UsageError
from harness1.eval.metrics import HEADLINE
from harness1.eval.run import Run
from harness1.models.fetch import resolve_model
from harness1.models.open import HARMONY
from harness1.models.spec import ModelSpec, is_model
from harness1.models.tokenizer import HarmonyVocabulary, Tokenizer, open_tokenizer
from harness1.runs.folder import METRICS
from harness1.tools.registry import Toolbox
from harness1.viewer.gold_titles import gold_titles


class RunSource(Run):
    """A recorded run with all that a page says of it. It can be sent to a worker process."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def notes(self) -> list[str]:
        """One line for everything that is missing, with the consequences for the reader."""
        notes = list(self.gold_notes) if self.split else []
        if self._has_tokens and self.tokenizer is None:
            notes.append(
                "The tokenizer of its model could not be loaded: prompts are shown as pieces of the context, and"
                " outputs as what was read in them, not as the text that was sampled."
            )
        return notes

    @cached_property
    def titles(self) -> Mapping[str, str]:
        """Of gold units, by id (see `gold_titles`)."""
        return gold_titles(self)

    def __getstate__(self) -> dict[str, Any]:
        # A tokenizer is not sent to a worker process: it loads its own.
        return super().__getstate__() | {"titles": self.titles}

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
        inputs = self.stage.inputs
        metrics = self._metrics()
        return {
            "name": self.name,
            "folder": str(self.folder),
            "policy": self.policy,
            "learned": is_model(self.policy),
            "index": inputs.get("index", ""),
            "reward": inputs.get("reward", ""),
            "dataset": inputs.get("dataset", ""),
            "split": inputs.get("split", ""),
            "status": self.stage.status,
            "asked": not self.split,
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
        if named or not is_model(self.policy):
            return str(named) if named else None
        try:
            return ModelSpec.read(self.policy).model
        except UsageError:
            return None

    def _metrics(self) -> dict[str, Any]:
        path = self.folder / METRICS
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, *MALFORMED):
            return {}
