"""What a gate looks at: a stage's command and its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GROUPS = ("data", "models", "rl", "sft", "tasks", "train", "serve", "config")
"""First words of verbs that have a second one."""


@dataclass(frozen=True)
class StageCase:
    """A stage whose command has ended."""

    words: tuple[str, ...]
    folder: Path

    @property
    def verb(self) -> str:
        return " ".join(self.words[: 2 if self.words[0] in GROUPS else 1])

    def option(self, name: str) -> str:
        """Return the last value of an option, or the empty string."""
        places = [at for at, word in enumerate(self.words[:-1]) if word == name]
        return self.words[places[-1] + 1] if places else ""

    def argument(self) -> str:
        """Return the first argument after the verb."""
        return next((word for word in self.words[len(self.verb.split()) :] if not word.startswith("-")), "")
