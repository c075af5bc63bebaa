"""The planner: the paper's Figure 1 from its inputs, recorded patches, fleets and relays, and its
own consistency."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pulse_rl.errors import InputError
from pulse_rl.study.plan import (
    Scenario,
    bandwidth_for,
    from_study,
    full_wins,
    make_plan,
    sync_bytes,
    utilization,
)
from tests.support.plans import METHODS, STUDY

PAPER = Scenario(params=7_000_000_000, density=0.0055, step_seconds=50, bandwidth=0.2e9)
SMALL = Scenario(params=22_600_000, density=0.003, step_seconds=0.7, bandwidth=50e6, cores=2)


def test_the_papers_figure_1() -> None:
    """14 GB need 20 Gbit/s for 90%, a patch of 108 MB about 0.2 Gbit/s."""
    full, zstd = make_plan(PAPER)["full"], make_plan(PAPER)["zstd"]
    assert full.sync_bytes == 14_000_000_000
    assert full.bandwidth_for_target == pytest.approx(20e9, rel=0.01)
    assert zstd.sync_bytes == pytest.approx(108e6, rel=0.02)
    assert 0.1e9 < zstd.bandwidth_for_target < 0.2e9
    assert zstd.utilization > 0.9 > 0.1 > full.utilization
    assert utilization(108e6, 50, 0.2e9) == pytest.approx(0.92, abs=0.01)


@pytest.mark.parametrize(
    ("density", "ours", "zstd"),
    [
        (0.00256, 0.943, 2.99), (0.00295, 0.940, 2.97), (0.00381, 0.887, 2.87), (0.00666, 0.828,
        2.71),
        (0.00704, 0.842, 2.72),
    ],
)  # fmt: skip
def test_bytes_agree_with_recorded_patches(density: float, ours: float, zstd: float) -> None:
    """notes/log.md, `make bench`: whole files, bytes a change."""
    changes = 22_565_376 * density
    assert sync_bytes("auto", 22_565_376, density) / changes == pytest.approx(ours, rel=0.06)
    assert sync_bytes("zstd", 22_565_376, density) / changes == pytest.approx(zstd, rel=0.03)


@pytest.mark.parametrize(("density", "ours"), [(0.0155, 0.75), (0.072, 0.61)])
def test_bytes_agree_with_recorded_folds(density: float, ours: float) -> None:
    assert sync_bytes("auto", 10**9, density) / (1e9 * density) == pytest.approx(ours, rel=0.06)


@pytest.mark.parametrize(("density", "history"), [(0.0030, 0.893), (0.0073, 0.793)])
def test_bytes_with_history_agree_with_recorded_runs_behind_fp32_masters(
    density: float, history: float
) -> None:
    """docs/benchmarks.md, "Streams with history"."""
    assert sync_bytes("history", 22_700_000, density) / (22.7e6 * density) == pytest.approx(
        history, rel=0.05
    )


@pytest.mark.parametrize("density", [0.003, 0.007])
def test_history_costs_a_tenth_more_time_at_either_end(density: float) -> None:
    """docs/benchmarks.md, FP32 masters: publish 1.09 to 1.14 times, sync 1.05 to 1.15 times."""
    methods = make_plan(Scenario(22_700_000, density, 1.0, 1e18, cores=1))
    plain, history = methods["auto"].phases, methods["history"].phases
    publish = [phases["encode"] + phases["hash"] for phases in (plain, history)]
    sync = [phases["verify"] + phases["apply"] for phases in (plain, history)]
    assert publish[1] / publish[0] == pytest.approx(1.115, rel=0.025)
    assert sync[1] / sync[0] == pytest.approx(1.1, rel=0.045)


@pytest.mark.parametrize("method", METHODS)
def test_a_patch_is_never_larger_than_the_state_and_grows_with_density(method: str) -> None:
    sizes = [sync_bytes(method, 10_000, d / 100) for d in range(101)]
    assert sizes[:96] == sorted(sizes[:96])
    assert max(sizes) <= 20_000
    assert sync_bytes(method, 100, 1.0) <= 200


@pytest.mark.parametrize("scenario", [PAPER, SMALL, replace(SMALL, sharers=4)])
@pytest.mark.parametrize("method", METHODS)
def test_the_bandwidth_for_a_target_reaches_it(scenario: Scenario, method: str) -> None:
    needed = make_plan(scenario)[method].bandwidth_for_target
    assert make_plan(replace(scenario, bandwidth=needed))[method].utilization == pytest.approx(0.9)
    assert bandwidth_for(1e6, 1.0, 0.5) == 8e6


def test_phases_add_up() -> None:
    for method in make_plan(SMALL).values():
        assert method.sync_seconds == pytest.approx(sum(method.phases.values()))
        assert method.worker_utilization == pytest.approx(
            0.7 / (0.7 + sum(method.phases[name] for name in ("download", "verify", "apply")))
        )
        assert method.worker_utilization < method.utilization


def test_links_and_round_trips() -> None:
    def phases(**changes: object) -> dict[str, float]:
        return make_plan(replace(SMALL, **changes))["auto"].phases  # type: ignore[arg-type]

    own = phases()
    assert phases(sharers=4)["download"] == pytest.approx(4 * own["download"])
    assert phases(upload_bandwidth=100e6)["upload"] == pytest.approx(own["upload"] / 2)
    assert phases(upload_bandwidth=100e6)["download"] == own["download"]
    far = phases(round_trip_seconds=1.0)
    slow_start = math.log2(1 + make_plan(SMALL)["auto"].sync_bytes / 1460 / 10)
    assert far["upload"] == pytest.approx(own["upload"] + 5 + slow_start)
    assert far["download"] == pytest.approx(own["download"] + 3 + slow_start)
    assert phases(round_trip_seconds=1.0, upload_round_trip_seconds=0.0)["upload"] == own["upload"]
    assert phases(cores=1)["encode"] == pytest.approx(2 * own["encode"])


LONG_WAY = {"round_trip_seconds": 0.08, "loss": 0.001}


@pytest.mark.parametrize(("method", "params"), [("auto", 1000 * 10**9), ("full", 10**10)])
def test_losses_bound_the_rate_of_each_of_eight_connections(method: str, params: int) -> None:
    """A quarter of the loss, twice the rate, as TCP's law has it; the first windows are larger."""

    def rate(loss: float) -> float:
        far = replace(SMALL, params=params, bandwidth=1e10, round_trip_seconds=0.08, loss=loss)
        plan = make_plan(far)[method]
        return 8 * plan.sync_bytes / plan.phases["download"]

    assert rate(0.001) == pytest.approx(8 * 42 * 1460 * 8 / 0.08 / 1.1, rel=0.05)
    assert rate(0.004) == pytest.approx(rate(0.001) / 2, rel=0.05)


@pytest.mark.parametrize(
    ("method", "bandwidth", "seconds"),
    [("auto", 50e6, 0.66), ("zstd", 50e6, 0.80), ("full", 50e6, 17.8), ("full", 200e6, 11.6)],
)
def test_a_long_way_as_it_was_measured(method: str, bandwidth: float, seconds: float) -> None:
    """benchmarks/results/wan-cubic.jsonl: what a worker's sync takes."""
    scenario = replace(SMALL, params=45_130_752, bandwidth=bandwidth, cores=1, **LONG_WAY)  # type: ignore[arg-type]
    phases = make_plan(scenario)[method].phases
    assert phases["download"] + phases["verify"] + phases["apply"] == pytest.approx(
        seconds, rel=0.1
    )


def test_a_full_sync_wins_on_the_far_side_of_its_crossover() -> None:
    scenario = Scenario(params=7_000_000_000, density=0.02, step_seconds=50, bandwidth=50e9)

    def ahead(**changes: float) -> float:
        """Seconds that a patch is ahead of a full sync."""
        methods = make_plan(replace(scenario, **changes))  # type: ignore[arg-type]
        return methods["full"].sync_seconds - methods["auto"].sync_seconds

    where, _ = full_wins(scenario)
    assert where is not None
    assert ahead(density=where * 0.99) > 0 > ahead(density=where * 1.01)
    _, bandwidth = full_wins(replace(scenario, density=0.3))
    assert bandwidth is not None
    assert ahead(density=0.3, bandwidth=bandwidth * 0.99) > 0
    assert ahead(density=0.3, bandwidth=bandwidth * 1.01) < 0


def test_a_full_sync_never_wins_on_a_slow_link_or_where_a_patch_codes_faster() -> None:
    assert full_wins(SMALL) == (None, None)


def test_nothing_changes() -> None:
    assert make_plan(replace(SMALL, density=0.0))["auto"].sync_bytes < 2000


@pytest.mark.parametrize(
    "changes",
    [
        {"params": 0}, {"density": -0.1}, {"density": 1.1}, {"density": float("nan")},
        {"step_seconds": 0.0},
        {"bandwidth": -1.0}, {"bandwidth": float("inf")}, {"upload_bandwidth": 0.0},
        {"sharers": 0}, {"cores": 0},
        {"round_trip_seconds": -1.0}, {"upload_round_trip_seconds": -1.0}, {"loss": 1.5},
        {"bytes_per_changed": {"zstd": -1.0}},
    ],
)  # fmt: skip
def test_impossible_scenarios_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(changes))):
        replace(SMALL, **changes)  # type: ignore[arg-type]


def test_a_study_settles_params_density_and_bytes() -> None:
    measured = from_study(STUDY)
    assert (measured["params"], measured["density"]) == (1_000_000, pytest.approx(0.01))
    assert measured["bytes_per_changed"] == {"auto": 0.5}


@pytest.mark.parametrize(
    "study", [None, [], {}, {"rows": []}, STUDY | {"parameters": 0}, STUDY | {"rows": [{"k": 1}]}]
)
def test_what_is_no_study_is_refused(study: object) -> None:
    with pytest.raises(InputError, match="not a study"):
        from_study(study)


@pytest.mark.parametrize("target", [0.0, 1.0])
def test_a_target_that_no_link_reaches_is_refused(target: float) -> None:
    with pytest.raises(InputError, match="target"):
        make_plan(SMALL, target=target)
