"""The fleet's benchmark and its simulation: what they count, and that they agree with the arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.fleet import last_after
from benchmarks.fleet_simulation.settings import against_server
from benchmarks.fleet_simulation.simulation import Setting, Simulation, simulate
from pulse_rl.plan import Fleet, Scenario, make_fleet_plan
from pulse_rl.plan.fleet import catch_up_bytes

SEVEN = Scenario(7_000_000_000, 0.01, 60, 1e9, 10e9, cores=32, round_trip_seconds=0.1)
FLEET = Fleet(200, 4, 100e9, 2e9, 20e9)
STEP = SEVEN.step_seconds


def test_a_later_version_counts_for_those_that_it_leaps_over() -> None:
    had = [{1: 11.0, 2: 22.0}, {2: 25.0}]
    assert last_after({1: 10.0, 2: 20.0}, had) == [15.0, 5.0]
    assert last_after({1: 10.0}, []) == [0.0]


@pytest.mark.parametrize("relays", [False, True])
def test_without_queues_it_is_the_arithmetic(*, relays: bool) -> None:
    """Which takes each look to be the longest."""
    planned = make_fleet_plan(SEVEN, FLEET).ways["relays" if relays else "direct"]["context"]
    found = simulate(Setting(SEVEN, FLEET, relays=relays))
    looks = 2 if relays else 1
    assert planned.versions == 1
    assert planned.seconds_to_all - looks * FLEET.poll_seconds <= found.to_all <= planned.seconds_to_all
    receivers = FLEET.regions if relays else FLEET.workers
    assert found.origin_bytes == pytest.approx(receivers * planned.fetch_bytes, rel=0.01)
    assert not found.behind


def test_workers_that_wait_need_no_look() -> None:
    polling = Setting(SEVEN, replace(FLEET, near_bandwidth=None))
    found = simulate(replace(polling, waits=True)).to_all
    assert found == pytest.approx(simulate(polling).to_all - FLEET.poll_seconds, abs=0.3)


def test_a_store_that_answers_few_requests_makes_workers_queue() -> None:
    few = Setting(SEVEN, replace(FLEET, poll_seconds=100.0), relays=False, requests_a_second=50.0)
    asked = 3 + catch_up_bytes(SEVEN, 1)["folds"] // (8 << 20)
    assert simulate(few).worst >= FLEET.workers * asked / (50 - FLEET.workers / 100)
    assert simulate(replace(few, requests_a_second=None)).worst < simulate(few).worst
    assert simulate(against_server(400)).to_all == pytest.approx(9.5, rel=0.1), "what its rate was taken from"


def test_a_region_that_was_cut_off_comes_back_by_folds() -> None:
    away = 20
    cut = (2.5 * STEP, (2.5 + away) * STEP)
    found = simulate(Setting(SEVEN, FLEET, versions=30, cut=cut))
    assert found.back is not None
    assert found.back_bytes == pytest.approx(catch_up_bytes(SEVEN, away)["folds"])
    assert found.back_bytes < SEVEN.params * SEVEN.param_bytes / 5
    fetch = 8 * found.back_bytes / 2e9
    assert fetch < found.back < fetch + 2
    assert not found.behind


def test_workers_that_join_while_the_relay_copies_an_anchor_restore_from_the_one_before() -> None:
    setting = Setting(SEVEN, FLEET, versions=12, anchor_every=10, joining=5, joins_at=10.1 * STEP)
    simulation = Simulation(setting)
    found = simulation.run()
    full = 2 * SEVEN.params
    assert len(simulation.joined) == 5
    assert found.joined is not None
    shared = 8 * 5 * (full + catch_up_bytes(SEVEN, 10)["folds"]) / 20e9
    alone = 8 * full / 1e9
    assert max(shared, alone) < found.joined < 1.2 * max(shared, alone)


def test_who_cannot_keep_up_is_said_to_be_behind() -> None:
    slow = simulate(Setting(SEVEN, replace(FLEET, region_bandwidth=1e6), relays=True, versions=5))
    assert slow.behind
    assert math.isinf(slow.to_all)
