"""Hold a policy in training, with everything that is saved between batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from statistics import fmean

import msgspec

from harness1.config import Config
from harness1.engines.engine import Engine
from harness1.models.checkpoint import Checkpoint
from harness1.records import Record
from harness1.rl.buffer import Buffer, BufferState
from harness1.rl.rollouts import EpisodeGroup
from harness1.rl.start_gate import check_start
from harness1.rl.training_rows import substeps
from harness1.rows.row import TrainRow
from harness1.training.saving import load_state, write_state
from harness1.training.validation import Best

STATE = Path("state", "state.pt")
MakeRows = Callable[[Sequence[EpisodeGroup], Config], list[TrainRow]]


class _State(Record):
    trainer: str
    """The name of the engine's save."""
    buffer: BufferState
    best: Best
    card: Checkpoint
    version: int
    validated: int = msgspec.field(name="looked")


class Learner:
    """The weights and their optimizer, the buffer, and the best validation; it resumes from the state in `out`.

    Args:
        engine: holds the weights that training begins with.
        out: the folder of the state and the checkpoint.
        card: the card of the checkpoint.
        make_rows: makes rows of groups.
    """

    def __init__(self, engine: Engine, out: Path, card: Checkpoint, make_rows: MakeRows, config: Config) -> None:
        rl, train = config.rl, config.train
        self.engine, self._out, self._make_rows, self._config = engine, out, make_rows, config
        self.buffer: Buffer[EpisodeGroup] = Buffer(rl.groups, rl.staleness, rl.window)
        self.best, self.card = Best(train.watch.metric), card
        self.version = 0
        """Batches trained, which is also the version of the weights."""
        self.validated = -1
        """The version that was validated last; -1 if none was."""
        self._load()
        self.begun = self.version
        """The version that this process began with."""

    @property
    def logged(self) -> int:
        """The last batch whose values belong in the log; -1 if not even the start was validated."""
        return self.version if self.validated >= 0 else -1

    def save(self) -> None:
        """Save the state."""
        state = _State(
            trainer=self.engine.save((self._out / STATE).parent),
            buffer=self.buffer.state(),
            best=self.best,
            card=self.card,
            version=self.version,
            validated=self.validated,
        )
        write_state(self._out / STATE, msgspec.to_builtins(state))

    def _load(self) -> None:
        if (state := load_state(self._out / STATE, _State)) is None:
            return
        self.engine.load((self._out / STATE).parent, state.trainer)
        self.buffer.load_state(state.buffer)
        self.best, self.card = state.best, state.card
        self.version, self.validated = state.version, state.validated

    def write_checkpoint(self, metrics: dict[str, float]) -> None:
        """Write the present weights as the checkpoint."""
        card = msgspec.structs.replace(self.card, step=self.version, metrics=metrics)
        self.card = self.engine.write(self._out, card)

    def train(self, groups: Sequence[EpisodeGroup]) -> dict[str, float]:
        """Take the optimizer steps of a batch, and count it; return the values to log.

        Raises:
            UsageError: the first batch was not sampled by these weights.
            Diverged: a loss is not finite.
        """
        rl = self._config.rl
        rows = self._make_rows(groups, self._config)
        logged: dict[str, float] = {}
        if self._is_exact():
            logged |= self._check_start(rows)
        logged |= _over_steps([self.engine.step(part) for part in substeps(rows, rl.substeps, rl.seed + self.version)])
        self.version += 1
        return logged | {"rows": float(len(rows)), "tokens": float(sum(len(row.token_ids) for row in rows))}

    def _check_start(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Compare the recorded log probabilities with those of the model, which must still be the one that sampled.

        Raises:
            UsageError: they differ by more than `rl.gate` allows.
        """
        replayed = [known for row in self.engine.logprobs(rows) for known in row]
        recorded = [known for row in rows for known in compress(row.rollout_logprobs or (), row.loss_mask)]
        return check_start(replayed, recorded, self._config)

    def _is_exact(self) -> bool:
        """Return True for a first batch that these very weights must have sampled."""
        return self.version == self.begun


def _over_steps(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the values of a batch's steps: tokens are summed, maxima stay maxima, and the rest is averaged."""
    combined = {}
    for name in values[0]:
        each = [value[name] for value in values]
        combine = sum if name == "trained_tokens" else max if name.endswith("_max") else fmean
        combined[name] = combine(each)
    return combined
