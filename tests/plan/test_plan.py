"""The planner: the paper's Figure 1 from its inputs, recorded patches, fleets and relays, and its
own consistency."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pulse_rl.errors import InputError
from pulse_rl.plan import Fleet, Scenario, from_study, make_fleet_plan, make_plan
from pulse_rl.plan.fleet import WAYS, catch_up_bytes, density_of
from pulse_rl.plan.model import bandwidth_for, sync_bytes, transfer_seconds, utilisation
from tests.support.plans import METHODS
from tests.support.reports import STUDY

PAPER = Scenario(params=7_000_000_000, density=0.0055, step_seconds=50, bandwidth=0.2e9)
SMALL = Scenario(params=22_600_000, density=0.003, step_seconds=0.7, bandwidth=50e6, cores=2)


def test_the_papers_figure_1() -> None:
    """14 GB need 20 Gbit/s for 90%, a patch of 108 MB about 0.2 Gbit/s."""
    full, zstd = make_plan(PAPER).methods["full"], make_plan(PAPER).methods["zstd"]
    assert full.sync_bytes == 14_000_000_000
    assert full.bandwidth_for_target == pytest.approx(20e9, rel=0.01)
    assert zstd.sync_bytes == pytest.approx(108e6, rel=0.02)
    assert 0.1e9 < zstd.bandwidth_for_target < 0.2e9
    assert zstd.utilisation > 0.9 > 0.1 > full.utilisation
    assert utilisation(108e6, 50, 0.2e9) == pytest.approx(0.92, abs=0.01)


@pytest.mark.parametrize(
    ("density", "ours", "zstd"),
    [
        (0.00256, 0.943, 2.99), (0.00295, 0.940, 2.97), (0.00381, 0.887, 2.87), (0.00666, 0.828,
        2.71),
        (0.00704, 0.842, 2.72),
    ],
)  # fmt: skip
def test_bytes_agree_with_recorded_patches(density: float, ours: float, zstd: float) -> None:
    """docs/log.md, `make bench`: whole files, bytes a change."""
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
    methods = make_plan(Scenario(22_700_000, density, 1.0, 1e18, cores=1)).methods
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
    needed = make_plan(scenario).methods[method].bandwidth_for_target
    assert make_plan(replace(scenario, bandwidth=needed)).methods[
        method
    ].utilisation == pytest.approx(0.9)
    assert bandwidth_for(1e6, 1.0, 0.5) == 8e6


def test_phases_add_up() -> None:
    for method in make_plan(SMALL).methods.values():
        assert method.sync_seconds == pytest.approx(sum(method.phases.values()))
        assert method.worker_utilisation == pytest.approx(
            0.7 / (0.7 + sum(method.phases[name] for name in ("download", "verify", "apply")))
        )
        assert method.worker_utilisation < method.utilisation


def test_links_and_round_trips() -> None:
    def phases(**changes: object) -> dict[str, float]:
        return make_plan(replace(SMALL, **changes)).methods["auto"].phases  # type: ignore[arg-type]

    own = phases()
    assert phases(sharers=4)["download"] == pytest.approx(4 * own["download"])
    assert phases(upload_bandwidth=100e6)["upload"] == pytest.approx(own["upload"] / 2)
    assert phases(upload_bandwidth=100e6)["download"] == own["download"]
    far = phases(round_trip_seconds=1.0)
    slow_start = math.log2(1 + make_plan(SMALL).methods["auto"].sync_bytes / 1460 / 10)
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
        plan = make_plan(far).methods[method]
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
    phases = make_plan(scenario).methods[method].phases
    assert phases["download"] + phases["verify"] + phases["apply"] == pytest.approx(
        seconds, rel=0.1
    )


def test_a_full_sync_wins_on_the_far_side_of_its_crossover() -> None:
    scenario = Scenario(params=7_000_000_000, density=0.02, step_seconds=50, bandwidth=50e9)

    def ahead(**changes: float) -> float:
        """Seconds that a patch is ahead of a full sync."""
        methods = make_plan(replace(scenario, **changes)).methods  # type: ignore[arg-type]
        return methods["full"].sync_seconds - methods["auto"].sync_seconds

    where = make_plan(scenario).full_wins.density
    assert where is not None
    assert ahead(density=where * 0.99) > 0 > ahead(density=where * 1.01)
    bandwidth = make_plan(replace(scenario, density=0.3)).full_wins.bandwidth
    assert bandwidth is not None
    assert (
        ahead(density=0.3, bandwidth=bandwidth * 0.99)
        > 0
        > ahead(density=0.3, bandwidth=bandwidth * 1.01)
    )


def test_a_full_sync_never_wins_on_a_slow_link_or_where_a_patch_codes_faster() -> None:
    assert make_plan(SMALL).full_wins.density is None
    assert make_plan(SMALL).full_wins.bandwidth is None


def test_nothing_changes() -> None:
    plan = make_plan(replace(SMALL, density=0.0))
    assert plan.methods["auto"].sync_bytes < 2000


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
    assert (measured.params, measured.density) == (1_000_000, pytest.approx(0.01))
    assert measured.bytes_per_changed == {"auto": 0.5}


def test_a_study_settles_what_history_takes_from_one_version_to_the_next() -> None:
    with_history = STUDY | {"history": {"bytes_per_changed_history": 0.3}}
    assert from_study(with_history).bytes_per_changed == {"auto": 0.5, "history": 0.3}
    assert from_study(
        STUDY | {"history": {"bytes_per_changed_history": None}}
    ).bytes_per_changed == {"auto": 0.5}
    apart = with_history | {"rows": STUDY["rows"][:1]}
    assert from_study(apart).bytes_per_changed == {"auto": 0.7, "zstd": 2.5}


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


SEVEN = Scenario(
    params=7_000_000_000, density=0.0055, step_seconds=50, bandwidth=1e9, round_trip_seconds=0.1
)
FLEET = Fleet(
    workers=1000, regions=4, origin_bandwidth=10e9, region_bandwidth=1e9, near_bandwidth=10e9
)


def test_a_version_by_hand() -> None:
    ours = make_plan(SEVEN).methods["auto"]
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
                fewer = min(14e9, half * make_plan(SEVEN).methods[method].sync_bytes)
                if method in ("auto", "history"):
                    fewer = min(fewer, catch_up_bytes(SEVEN, half, method=method)["folds"])
                assert 1.4 + 8 * fewer / rate > half * 50
    assert narrow.ways["relays"]["auto"].versions == 1 < narrow.ways["relays"]["full"].versions
    assert narrow.ways["direct"]["auto"].versions > 1


def test_catching_up() -> None:
    patch = make_plan(SEVEN).methods["auto"].sync_bytes
    assert catch_up_bytes(SEVEN, 0) == {"patches": 0, "folds": 0, "full": 14e9}
    assert catch_up_bytes(SEVEN, 7)["folds"] == catch_up_bytes(SEVEN, 7)["patches"] == 7 * patch
    for versions in (8, 64, 200, 5000):
        ways = catch_up_bytes(SEVEN, versions)
        assert ways["folds"] < ways["patches"] == versions * patch
    with_history, without = catch_up_bytes(SEVEN, 71, method="history"), catch_up_bytes(SEVEN, 71)
    saved = patch - make_plan(SEVEN).methods["history"].sync_bytes
    assert without["folds"] - with_history["folds"] == pytest.approx(
        7 * saved
    )  # folds know no history
    assert without["patches"] - with_history["patches"] == pytest.approx(71 * saved)
    assert density_of(0.01, 1) == pytest.approx(0.01)
    assert density_of(0.01, 64) == pytest.approx(1 - 0.99**64)
    assert density_of(1.0, 3) == 1.0


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


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1000, 10_000, 100_000])
@pytest.mark.parametrize("params", [7e9, 70e9, 1e12])
def test_more_workers_never_arrive_sooner(workers: int, params: float) -> None:
    scenario = replace(SEVEN, params=int(params))
    small, large = (
        make_fleet_plan(scenario, replace(FLEET, workers=n)) for n in (workers, 2 * workers)
    )
    for way in WAYS:
        assert large.ways[way]["auto"].seconds_to_all >= small.ways[way]["auto"].seconds_to_all
        assert small.ways[way]["full"].fetch_bytes >= small.ways[way]["auto"].fetch_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"regions": 0},
        {"regions": 1001},
        {"origin_bandwidth": 0.0},
        {"poll_seconds": -1},
    ],
)
def test_impossible_fleets(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        replace(FLEET, **wrong)  # type: ignore[arg-type]
