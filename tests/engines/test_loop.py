"""The loop of every training, over an engine that only counts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from harness1.config import Train, Validation
from harness1.engines.engine import Engine
from harness1.engines.loop import HIGHER, STATE, Best, TrainingLoop
from harness1.errors import UsageError
from harness1.models.checkpoint import CHECKPOINT, Checkpoint
from harness1.runs.files import write_json
from harness1.training.log import NO_TRACKERS, read_log
from harness1.training.process_group import delay_interrupt
from harness1.training.saving import load_state, write_state
from harness1.training.trainer import Diverged

EVERY_SECOND = Validation(every=2)
CARD = Checkpoint(format="compact", counter="c", env={}, env_hash="e", base="b")


class CountingEngine:
    """Weights that are the number of steps."""

    step_count = 0

    def save(self, root: Path) -> str:
        return f"at-{self.step_count}"

    def load(self, root: Path, name: str) -> None:
        self.step_count = int(name.partition("-")[2])

    def write(self, folder: Path, card: Checkpoint) -> Checkpoint:
        write_json(folder / CHECKPOINT, card)
        return card


class CountingLoop(TrainingLoop):
    """Six updates, each of which can do something; the losses of validations are given."""

    def __init__(
        self,
        out: Path,
        watch: Validation = EVERY_SECOND,
        losses: Sequence[float] = (),
        during: Callable[[int], None] = lambda _: None,
        on_step: Callable[[int, int, Mapping[str, float]], None] = lambda *_: None,
        ends_at: float = inf,
        measured: Callable[[int], None] = lambda _: None,
        broken: Sequence[int] = (),
        **train: Any,
    ) -> None:
        engine = cast(Engine, CountingEngine())
        super().__init__(engine, out, CARD, Train(watch=watch, **train), 6, on_step, ends_at=ends_at)
        self.losses, self.during, self.saved = dict(enumerate(losses)), during, list[int]()
        self.measured, self.broken = measured, broken

    async def run(self) -> None:
        with self.open_log(NO_TRACKERS) as self.log:
            await super().run()

    async def update(self) -> None:
        with delay_interrupt():
            self.during(self.version + 1)
            self.version += 1
            cast(Any, self.engine).step_count += 1
            self.report({"loss": float(self.version)})
        await asyncio.sleep(0)

    async def measure(self) -> dict[str, float]:
        self.measured(self.version)
        await asyncio.sleep(0)
        found = {self.best.metric: self.losses[self.version]} if self.version in self.losses else {}
        return found | ({"faults": 1.0} if self.version in self.broken else {})

    def save(self) -> None:
        super().save()
        self.saved.append(self.version)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_at(step: int, times: int = 1) -> Callable[[int], None]:
    def during(version: int) -> None:
        for _ in range(times if version == step else 0):
            signal.raise_signal(signal.SIGINT)

    return during


@pytest.mark.parametrize(
    ("every", "minutes", "saved"), [(5, 1, [5, 6]), (50, 4, [3, 6]), (5, 4, [3, 5, 6]), (0, 1, [6])]
)
def test_a_state_is_saved_every_so_many_updates_ten_minutes_after_the_last_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, minutes: float, saved: list[int]
) -> None:
    now = [0.0]
    monkeypatch.setattr("harness1.engines.loop.time", SimpleNamespace(monotonic=lambda: now[0]))

    def during(step: int) -> None:
        now[0] += 60 * minutes

    loop = CountingLoop(tmp_path, during=during, save_every=every)
    loop.train()
    assert loop.saved == saved


def test_the_best_validation_after_the_start_is_the_checkpoint(tmp_path: Path) -> None:
    loop = CountingLoop(tmp_path, losses=(0.1, 9.0, 3.0, 9.0, 2.0, 9.0, 4.0))
    assert (loop.train().step, loop.card.metrics) == (4, {"nll": 2.0})
    seen = [(line["step"], line["held_out/nll"]) for line in read_log(tmp_path) if "held_out/nll" in line]
    assert seen == [(0, 0.1), (2, 3.0), (4, 2.0), (6, 4.0)]


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_waits_for_the_update_and_saves_it(tmp_path: Path, times: int) -> None:
    losses = (5.0, 0.0, 4.0, 0.0, 3.0, 0.0, 3.5)
    with pytest.raises(KeyboardInterrupt) as stopped:
        CountingLoop(tmp_path, losses=losses, during=press_at(3, times), save_every=0).train()
    assert stopped.value.__notes__ == ["the same command continues after step 3"]
    resumed = CountingLoop(tmp_path, losses=losses)
    assert (resumed.version, resumed.validated, resumed.best.value) == (3, 2, 4.0)
    assert resumed.train().step == 4
    assert [line["step"] for line in read_log(tmp_path) if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_an_interrupted_validation_is_done_again(tmp_path: Path) -> None:
    losses = (5.0, 0.0, 4.0, 0.0, 3.0, 0.0, 3.5)
    with pytest.raises(KeyboardInterrupt):
        CountingLoop(tmp_path, losses=losses, measured=press_at(4), save_every=0).train()
    assert (CountingLoop(tmp_path).validated, CountingLoop(tmp_path, losses=losses).train().step) == (2, 4)
    assert [line["step"] for line in read_log(tmp_path) if "held_out/nll" in line] == [0, 2, 4, 6]


def test_the_start_is_measured_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        CountingLoop(tmp_path, losses=(1.0,), during=press_at(1)).train()
    CountingLoop(tmp_path, losses=(9.0,)).train()
    assert [line["held_out/nll"] for line in read_log(tmp_path) if "held_out/nll" in line] == [1.0]


def test_a_mean_over_fewer_episodes_chooses_no_checkpoint(tmp_path: Path) -> None:
    watch = Validation(every=2, tasks=1, metric="curated_recall")
    loop = CountingLoop(tmp_path, watch, losses=(0.1, 0.0, 0.3, 0.0, 0.9, 0.0, 0.2), broken=[4])
    assert loop.train().step == 2


def test_what_raises_an_interrupt_itself_loses_nothing_either(tmp_path: Path) -> None:
    def on_step(step: int, _steps: int, values: Mapping[str, float]) -> None:
        if step == 2 and "loss" in values:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CountingLoop(tmp_path, on_step=on_step).train()
    assert CountingLoop(tmp_path).version == 2


def test_a_training_that_diverges_keeps_a_checkpoint(tmp_path: Path) -> None:
    def during(step: int) -> None:
        if step == 4:
            raise Diverged("at 4")

    with pytest.raises(Diverged):
        CountingLoop(tmp_path / "a", during=during, losses=(1.0, 1.0, 0.5)).train()
    with pytest.raises(Diverged):
        CountingLoop(tmp_path / "b", during=during).train()
    cards = [msgspec.json.decode((tmp_path / name / CHECKPOINT).read_bytes(), type=Checkpoint) for name in "ab"]
    assert [card.step for card in cards] == [2, 3]


def test_time_that_is_up_ends_a_training_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="time was up before the first step"):
        CountingLoop(tmp_path, ends_at=0.0).train()
    with pytest.raises(KeyboardInterrupt):
        CountingLoop(tmp_path, during=press_at(3)).train()
    assert CountingLoop(tmp_path, ends_at=0.0).train().step == 3


@pytest.mark.parametrize(
    "names", [("validated",), ("version", "looked")], ids=["fine-tuning", "reinforcement learning"]
)
def test_states_of_earlier_versions_are_resumed(tmp_path: Path, names: tuple[str, ...]) -> None:
    loop = CountingLoop(tmp_path)
    loop.validated, loop.version, cast(Any, loop.engine).step_count = 4, 4, 4
    loop.save()
    state = load_state(tmp_path / STATE, dict) | {"looked": 4}
    write_state(tmp_path / STATE, {name: state[name] for name in ("trainer", "best", "card", *names)})
    resumed = CountingLoop(tmp_path)
    assert (resumed.version, resumed.validated) == (4, 4)


@pytest.mark.parametrize(
    ("metric", "values", "better"),
    [
        ("nll", [2.0, 1.0, 1.0, nan, 1.5, 0.5], [True, True, False, False, False, True]),
        ("curated_recall", [0.2, 0.1, 0.2, 0.3, 0.3], [True, False, False, True, False]),
    ],
)
def test_a_validation_is_best_if_better_than_all_before(metric: str, values: list[float], better: list[bool]) -> None:
    best = Best(metric)
    assert not best.take({"turns": 9.0})
    assert [best.take({metric: value, "turns": 9.0}) for value in values] == better


def test_it_is_known_which_way_every_metric_of_the_settings_is_better() -> None:
    names: Any = Validation.__annotations__["metric"]
    assert all(name in str(names) for name in HIGHER)
    assert {name for name, higher in HIGHER.items() if not higher} == {"nll"}
