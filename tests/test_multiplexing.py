"""The simulation of slots that rollouts and training share, in virtual time, with the real producer and buffer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from benchmarks import multiplexing
from benchmarks.simulated_slots import SAMPLES, Plan, Setting, simulated
from benchmarks.slots import Slots
from benchmarks.virtual_time import run

BATCHES, WARM = 4, 1
SMALL = Setting(slots=4, ratio=2.0, batch_s=40.0, groups=2)
IN_TURNS = Plan(0, 4, in_turns=True)
ALL = [Plan(1), Plan(3), IN_TURNS, Plan(0, 4), Plan(0, 2), Plan(1, 2), Plan(0, starving=True), Plan(2, starving=True)]


def ends(
    *changes: tuple[float, int], works: tuple[float, ...], moving: bool = True, switch_s: float = 0.0
) -> list[float]:
    """Return when calls end that begin together on two slots of one call each, of which some are lent or given back.
    Each is followed by another of no work."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        slots = Slots(2, 0, width=1.0, moving=moving)
        times = [0.0] * len(works)

        async def call(number: int) -> None:
            pool = slots.least_busy()
            pool.live += 1
            await pool.serve(works[number])
            await pool.serve(0.0)
            times[number] = loop.time()

        async def move(at: float, change: int) -> None:
            await asyncio.sleep(at)
            await (slots.lend(change, switch_s) if change > 0 else slots.give_back(-change, switch_s))

        await asyncio.gather(*map(call, range(len(works))), *(move(*each) for each in changes))
        return times

    return run(main())


def test_calls_share_the_slots_that_are_left() -> None:
    assert ends(works=(10.0, 20.0)) == pytest.approx([10.0, 20.0])
    assert ends(works=(10.0, 10.0, 10.0, 10.0)) == pytest.approx([20.0] * 4)
    assert ends((5.0, 1), works=(10.0, 20.0)) == pytest.approx([15.0, 25.0])


def test_calls_pause_while_all_slots_are_lent_or_switch() -> None:
    assert ends((5.0, 2), (20.0, -2), works=(10.0,)) == pytest.approx([25.0])
    assert ends((5.0, 2), (20.0, -2), works=(10.0,), switch_s=3.0) == pytest.approx([28.0])


def test_calls_that_stay_end_before_their_slot_leaves() -> None:
    assert ends((5.0, 2), (20.0, -2), works=(10.0, 4.0), moving=False) == pytest.approx([20.0, 4.0])
    assert ends((5.0, 2), (40.0, -2), works=(10.0, 30.0), moving=False, switch_s=3.0) == pytest.approx([43.0, 43.0])


@pytest.mark.parametrize("plan", ALL, ids=str)
@pytest.mark.parametrize("switch_s", [0.0, 7.0])
def test_no_episode_is_lost_and_none_is_too_old(plan: Plan, switch_s: float) -> None:
    setting = replace(SMALL, switch_s=switch_s)
    found = simulated(setting, plan, BATCHES, seed=3, warm=WARM)
    counts = found.counts
    assert found.begun == found.played + found.live
    assert counts.trained == (BATCHES + WARM) * setting.groups
    assert counts.stale == counts.faulty == 0
    assert counts.trained + counts.filtered + counts.waiting == counts.produced
    assert found.played >= counts.produced * SAMPLES
    assert found.staleness_max <= found.bound
    assert found.bound == (0 if plan.in_turns else 1)
    assert found == simulated(setting, plan, BATCHES, seed=3, warm=WARM)


@pytest.mark.parametrize("seed", range(3))
def test_sharing_at_no_cost_is_never_slower_than_turns(seed: int) -> None:
    turns = simulated(SMALL, IN_TURNS, BATCHES, seed, WARM).rows_per_hour
    assert simulated(replace(SMALL, staleness=0), Plan(0, 4), BATCHES, seed, WARM).rows_per_hour == pytest.approx(turns)
    for plan in (Plan(0, 4), Plan(0, starving=True)):
        assert simulated(SMALL, plan, BATCHES, seed, WARM).rows_per_hour > turns


def test_turns_pay_two_switches_for_every_batch() -> None:
    free, paid = (simulated(replace(SMALL, switch_s=switch_s), IN_TURNS, BATCHES, 0, WARM) for switch_s in (0.0, 10.0))
    assert free.counts == paid.counts
    assert paid.measured_s == pytest.approx(free.measured_s + 2 * 10.0 * BATCHES)


def test_training_that_never_waits_trains_at_the_speed_of_its_slots() -> None:
    setting = replace(SMALL, ratio=0.1, batch_s=1000.0)
    for own in (1, 2):
        rate = simulated(setting, Plan(own), BATCHES, 0, WARM).rows_per_hour
        assert rate == pytest.approx(3600 * own**setting.scaling / setting.row_s)


def test_slots_are_lent_when_rollouts_starve() -> None:
    setting = replace(SMALL, ratio=0.5, batch_s=200.0)
    alone, helped = (simulated(setting, Plan(1, starving=starving), BATCHES, 0, WARM) for starving in (False, True))
    assert alone.lent_share == 0 < helped.lent_share
    assert helped.rows_per_hour > 1.2 * alone.rows_per_hour
    # A switch longer than the step is not worth it.
    slow = simulated(replace(setting, switch_s=5000.0), Plan(1, starving=True), BATCHES, 0, WARM)
    assert slow.lent_share == 0
    assert slow.rows_per_hour == alone.rows_per_hour


def test_the_report_compares_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--slots", "2", "--ratios", "2", "--batch-s", "40", "--switch-s", "0", "15"]
    tiny += ["--groups", "1", "--batches", "2", "--seeds", "2"]
    report = multiplexing.main([*tiny, "--json"])
    assert json.loads(capsys.readouterr().out) == report
    assert [row["switch_s"] for row in report["settings"]] == [0, 15]
    for row in report["settings"]:
        ways = row["ways"]
        assert ways.keys() == {"split", "in turns", "group", "elastic"}
        assert row["fixed"] in ("split", "in turns")
        for name in ("group", "elastic"):
            gain, low, high = ways[name]["gain"]
            pairs = zip(ways[name]["rates"], ways[row["fixed"]]["rates"], strict=True)
            assert gain == pytest.approx(sum(own / other for own, other in pairs) / 2)
            assert low <= gain <= high
    multiplexing.main(tiny)
    assert "2 slots, ratio 2" in capsys.readouterr().out
