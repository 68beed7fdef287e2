"""The benchmark that retrains a small policy without each mechanism: its variants, its world, its comparison."""

from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.mechanisms import BASE, VARIANTS, report, table, variant, write_pages
from benchmarks.micro import Start, make_world, play
from harness1.records import Status
from harness1.tools.registry import Toolbox

ONE_WORKER = ("machine.workers=1", "machine.threads=1")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mechanisms")
    write_pages(folder / "world", 120, 40)
    make_world(Start(folder, variant(BASE, ONE_WORKER)))
    return folder


RANKING, LEADS, FILLING, VERIFY, PRUNE = "ranking", "leads", "filling by evidence", "verify", "prune_chunks"
DIFFERENT = {
    "evidence order, leads and filling by it": {RANKING, LEADS, FILLING},
    "leads": {LEADS},
    "auto-population": {FILLING},
    "verification": {VERIFY},
    "transcript harness": {RANKING, LEADS, FILLING, PRUNE},
}
"""What a policy has in the whole harness and not in a variant, or the other way round, beyond what it is shown."""


def abilities(name: str) -> set[str]:
    env = variant(name, ()).env
    has = {RANKING: env.ranks, LEADS: env.leads_on, FILLING: env.refills}
    return {ability for ability, on in has.items() if on} | {spec.name for spec in Toolbox.of(env).specs}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_lacks_what_its_name_says(name: str) -> None:
    assert abilities(BASE) ^ abilities(name) == DIFFERENT.get(name, set())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_teacher_finds_something_in_every_variant(world: Path, name: str) -> None:
    start = Start(world, variant(name, ONE_WORKER))
    tasks = start.tasks("test", 3)
    episodes = play(start, "silent:oracle-teacher", f"teacher-{VARIANTS.index(name)}", tasks)
    assert {episode.status for episode in episodes} <= {Status.COMPLETED, Status.TRUNCATED}
    assert fmean(episode.reward.total for episode in episodes if episode.reward) > 1.0
    hidden = sum("Hidden copies" in str(turn.observation) for each in episodes for turn in each.turns)
    assert not hidden or name not in ("deduplication", "transcript harness")


def test_variants_are_compared_task_by_task_over_all_seeds() -> None:
    def one(rewards: list[float]) -> dict[str, dict[str, list[float]]]:
        return {"SFT": dict.fromkeys(("reward", "recall", "f1", "size", "turns", "valid"), rewards)}

    rows = report({BASE: [one([1.0, 2.0]), one([2.0, 3.0])], "leads": [one([1.5, 1.5]), one([0.5, 2.5])]})
    assert rows[BASE]["SFT"]["reward"] == 2.0
    assert rows["leads"]["SFT"]["seeds"] == [1.5, 1.5]
    mean, low, high = rows["leads"]["SFT"]["difference"]["reward"]
    assert (mean, low, high) == (-0.5, -0.5, -0.5)
    assert "-0.500 (-0.500 to -0.500)" in table(rows)
