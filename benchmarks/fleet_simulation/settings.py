"""What is simulated: the fleets of the table, what happens to them, and the one that was measured."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.fleet_simulation.simulation import Setting
from pulse_rl.plan import Fleet, Scenario

STORE_REQUESTS = 5500.0
"""GETs a second of one prefix that Amazon promises for S3."""
LOOKS = 1000.0
CUT_SECONDS = 600.0
ANCHOR_EVERY, JOINS_AT_VERSION = 30, 30.5


def table_setting(params: float, workers: int, versions: int, *, relays: bool) -> Setting:
    """1% changed in a step of a minute; ten regions, each with 10 Gbit/s to an origin that sends 100 Gbit/s in all; 1
    Gbit/s to each worker and 100 Gbit/s in a region; 0.1 s a round trip; 32 cores. The origin is
    an S3 prefix with 5,500 requests a second; relays look every second, workers at the origin so that all together make
    1,000 looks a second. The relays' stores are served, and waited for."""
    scenario = Scenario(int(params), 0.01, 60, 1e9, 10e9, cores=32, round_trip_seconds=0.1)
    return Setting(
        scenario,
        Fleet(workers, 10, 100e9, 10e9, 100e9, poll_seconds=1.0 if relays else workers / LOOKS),
        relays=relays,
        waits=True,
        requests_a_second=STORE_REQUESTS,
        versions=versions,
    )


def eventful(setting: Setting) -> Setting:
    """With an anchor every 30 versions, a tenth more workers that join a region while its relay copies one, and that
    region cut off for ten minutes before."""
    step = setting.scenario.step_seconds
    return replace(
        setting,
        versions=2 * ANCHOR_EVERY,
        anchor_every=ANCHOR_EVERY,
        cut=(5.3 * step, 5.3 * step + CUT_SECONDS),
        joining=min(setting.fleet.in_a_region // 10, 100),
        joins_at=JOINS_AT_VERSION * step,
    )


SERVER_REQUESTS = 526.0
"""Requests a second of the measured server: 400 workers made 1,600 a second of them wait for 9.5 s."""


def against_server(workers: int) -> Setting:
    """`benchmarks.fleet`, its server and so many workers."""
    scenario = Scenario(500_000, 0.005, 4 if workers < 400 else 30, 1e9, 1e9, cores=2, round_trip_seconds=0.01)
    return Setting(scenario, Fleet(workers), relays=False, requests_a_second=SERVER_REQUESTS, versions=6)
