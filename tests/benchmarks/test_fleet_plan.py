"""What a version costs a fleet, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.fleet_plan import WAYS, Fleet, catch_up_bytes, make_fleet_plan
from pulse_rl.study.plan import Scenario, make_plan, transfer_seconds
from tests.support.plans import METHODS

SEVEN = Scenario(
    params=7_000_000_000, density=0.0055, step_seconds=50, bandwidth=1e9, round_trip_seconds=0.1
)
FLEET = Fleet(
    workers=1000, regions=4, origin_bandwidth=10e9, region_bandwidth=1e9, near_bandwidth=10e9
)


def test_a_version_by_hand() -> None:
    ours = make_plan(SEVEN)["auto"]
    size, phases = ours.sync_bytes, ours.phases
    coding = sum(seconds for phase, seconds in phases.items() if phase != "download")
    relays = make_fleet_plan(SEVEN, FLEET).ways["relays"]["auto"]
    assert relays.versions == 1
    assert relays.fetch_bytes == size
    hops = sum(1 + 0.3 + transfer_seconds(size, rate, 0.1, 0.0) for rate in (1e9, 10e9 / 250))
    assert relays.seconds_to_all == pytest.approx(coding + hops)
    assert relays.origin_bytes == pytest.approx(4 * size * 86400 / 50, rel=1e-6)
    assert relays.dollars == pytest.approx(relays.origin_bytes / 1e9 * 0.09)
    assert relays.idle_looks == 4 * 60 + 1000 * 2
    direct = make_fleet_plan(
        SEVEN, replace(FLEET, region_bandwidth=None, origin_bandwidth=None)
    ).ways["direct"]["auto"]
    assert direct.seconds_to_all == pytest.approx(
        coding + 1 + 0.3 + transfer_seconds(size, 1e9, 0.1, 0.0)
    )
    assert direct.origin_bytes == pytest.approx(250 * relays.origin_bytes, rel=1e-6)
    assert direct.idle_looks == 60_000


def test_who_cannot_keep_up_takes_several_versions_at_a_time() -> None:
    narrow = make_fleet_plan(SEVEN, replace(FLEET, region_bandwidth=0.1e9))
    for way in WAYS:
        for method in METHODS:
            each = narrow.ways[way][method]
            rate = 0.1e9 / 250 if way == "direct" else min(0.1e9, 10e9 / 250)
            assert 1 + 8 * each.fetch_bytes / rate <= each.versions * 50
            if each.versions > 1:
                half = each.versions // 2
                fewer = min(14e9, half * make_plan(SEVEN)[method].sync_bytes)
                if method in ("auto", "history"):
                    fewer = min(fewer, catch_up_bytes(SEVEN, half, method=method)["folds"])
                assert 1.4 + 8 * fewer / rate > half * 50
    assert narrow.ways["relays"]["auto"].versions == 1 < narrow.ways["relays"]["full"].versions
    assert narrow.ways["direct"]["auto"].versions > 1


@pytest.mark.slow
def test_when_a_relay_pays() -> None:
    """Where a region's workers share a link, from some workers on; where each has its own to the
    origin, never."""
    plan = make_fleet_plan(SEVEN, FLEET)
    few = plan.relays_pay_from
    assert few is not None
    for among, sooner in ((few - 1, "direct"), (few, "relays")):
        ways = make_fleet_plan(SEVEN, replace(FLEET, workers=4 * among)).ways
        assert min(WAYS, key=lambda way: ways[way]["auto"].seconds_to_all) == sooner
    unlimited = replace(FLEET, origin_bandwidth=None, region_bandwidth=None, near_bandwidth=None)
    assert make_fleet_plan(SEVEN, unlimited).relays_pay_from is None
