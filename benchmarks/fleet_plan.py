"""The cost of a version for a whole fleet: many workers in regions, with and without a relay in
each of them.

Symbols, in addition to those of `pulse_rl.study.plan`:

==========  ========================================================================================
W, G        workers; regions, alike; ``w = ceil(W / G)`` workers in a region
B_o         bit/s that the origin's store sends to all together; B_g bit/s of a region's link to it;
            B_n bit/s that the
            store in a region sends to its workers together; each may be without a limit
P           seconds between two looks of a worker, or of a relay
==========  ========================================================================================

**Seconds until the last worker has a version**, from the call of ``publish`` on, if all fetch at
the same time and the links are shared evenly::

    direct    publish + P + 3 R + transfer(S, min(B, B_g / w, B_o / W), R)          + verify + apply
    relays    publish + P + 3 R + transfer(S, min(B_g, B_o / G), R)
                      + P + 3 R + transfer(S, min(B, B_n / w), R)                   + verify + apply

with ``publish`` = encode + hash + upload, and P the longest wait for a look. A relay shows a
version when its bytes are whole and checked, so that the two ways of a payload come one after the
other. R is the same everywhere.

**Who cannot keep up.** A link that cannot carry S in each step of T seconds carries k versions at a
time: the smallest k, a power of two, whose bytes take no longer than ``k T``. They are, for ours,
folds of 64 and of 8 and single patches (history makes only the patches smaller), the net changes of
s versions having the density ``density_of(d, s) = 1 - (1 - d)^s``, as if they were independent
(weights that change again and again make it less); for the paper's codec k patches; and never more
than the full state.

**A day** has ``86400 / (k T)`` fetches, of each worker (direct) or of each relay. **Looks** at the
origin in a minute in which nothing happens: ``60 W / P`` directly; with relays ``60 G / P`` and ``2
W``, since a worker looks at the origin every 30 s or so, in case its relay is dead."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pulse_rl._util.settings import checked_number
from pulse_rl.study.plan import (
    METHODS,
    SYNC_REQUESTS,
    Scenario,
    make_plan,
    sync_bytes,
    transfer_seconds,
)

#: All workers fetch from the origin; or from a relay's store in their region.
WAYS = ("direct", "relays")

_DAY = 86400
_MOST = 1 << 20
_PATIENCE = 30
_SPANS = (64, 8)


@dataclass(frozen=True, slots=True)
class Fleet:
    """``workers`` in ``regions``. Bandwidths in bit/s, None: without a limit. ``origin_bandwidth``
    and ``near_bandwidth`` are what the origin's store and the store in a region send in all;
    ``region_bandwidth`` is a region's link to the origin. ``poll_seconds`` lie between two looks.
    ``dollars_a_gb`` is the price of what leaves the origin. Raises InputError for impossible
    values."""

    workers: int
    regions: int = 1
    origin_bandwidth: float | None = None
    region_bandwidth: float | None = None
    near_bandwidth: float | None = None
    poll_seconds: float = 1.0
    dollars_a_gb: float = 0.09

    def __post_init__(self) -> None:
        for name in (
            "workers",
            "regions",
            "origin_bandwidth",
            "region_bandwidth",
            "near_bandwidth",
            "poll_seconds",
        ):
            value = getattr(self, name)
            if value is not None:
                checked_number(name, value, minimum=1e-9, maximum=1e18)
        checked_number("dollars_a_gb", self.dollars_a_gb, maximum=1e18)
        checked_number("regions", self.regions, minimum=1, maximum=self.workers)

    @property
    def in_a_region(self) -> int:
        """Workers in a region, the most."""
        return -(-self.workers // self.regions)


@dataclass(frozen=True, slots=True)
class WayPlan:
    """One way of a version to all workers by one method. ``fetch_bytes`` bring ``versions`` at a
    time; ``seconds_to_all`` is the age of the newest one when the last worker has it.
    ``origin_bytes`` and ``dollars`` are a day's; ``idle_looks`` are lists at the origin in a minute
    in which nothing happens."""

    fetch_bytes: int
    versions: int
    seconds_to_all: float
    origin_bytes: int
    dollars: float
    idle_looks: float


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What `make_fleet_plan` predicts for ``scenario`` and ``fleet``: ``ways`` has a plan for each
    of ``WAYS`` and each of ``METHODS``. ``relays_pay_from``: the number of workers in a region from
    which on a relay brings a patch to all of them sooner; None: never."""

    scenario: Scenario
    fleet: Fleet
    ways: dict[str, dict[str, WayPlan]]
    relays_pay_from: int | None


def make_fleet_plan(scenario: Scenario, fleet: Fleet) -> FleetPlan:
    """Predicts how a version of ``scenario`` reaches all workers of ``fleet``; the scenario's own
    ``sharers`` do not count."""
    ways = {way: {method: _way(scenario, fleet, way, method) for method in METHODS} for way in WAYS}
    return FleetPlan(scenario, fleet, ways, _relays_pay_from(scenario, fleet))


def density_of(density: float, versions: int) -> float:
    """The density of the net changes of so many ``versions`` of this ``density``, as if they were
    independent: an upper bound."""
    return -math.expm1(versions * math.log1p(-density)) if density < 1 else 1.0


def catch_up_bytes(scenario: Scenario, versions: int, *, method: str = "auto") -> dict[str, float]:
    """Bytes that bring a worker of ``scenario`` which is so many ``versions`` behind to the newest
    one: by all "patches", by "folds" of 64 and 8, by the "full" state. ``method``: "auto" or
    "history", that of the patches."""
    patch = _patch_bytes(scenario, method)
    folds, rest = 0.0, versions
    for span in _SPANS:
        net = sync_bytes(
            "auto", scenario.params, density_of(scenario.density, span), scenario.param_bytes
        )
        folds += rest // span * min(net, span * patch)
        rest %= span
    return {
        "patches": versions * patch,
        "folds": folds + rest * patch,
        "full": scenario.params * scenario.param_bytes,
    }


def _way(scenario: Scenario, fleet: Fleet, way: str, method: str) -> WayPlan:
    versions = 1
    while (
        versions < _MOST
        and max(_hops(scenario, fleet, way, method, versions)) > versions * scenario.step_seconds
    ):
        versions *= 2
    nbytes = _fetch_bytes(scenario, method, versions)
    receivers = fleet.workers if way == "direct" else fleet.regions
    a_day = receivers * nbytes * _DAY / (versions * scenario.step_seconds)
    looks = 60 * receivers / fleet.poll_seconds + (
        60 / _PATIENCE * fleet.workers if way == "relays" else 0
    )
    phases = make_plan(scenario)[method].phases
    coding = (
        phases["encode"] + phases["hash"] + phases["upload"] + phases["verify"] + phases["apply"]
    )
    return WayPlan(
        fetch_bytes=round(nbytes),
        versions=versions,
        seconds_to_all=coding + sum(_hops(scenario, fleet, way, method, versions)),
        origin_bytes=round(a_day),
        dollars=a_day / 1e9 * fleet.dollars_a_gb,
        idle_looks=looks,
    )


def _hops(scenario: Scenario, fleet: Fleet, way: str, method: str, versions: int) -> list[float]:
    """Seconds of the fetches that follow one another, the one from the origin first."""
    nbytes, trip, among = (
        _fetch_bytes(scenario, method, versions),
        scenario.round_trip_seconds,
        fleet.in_a_region,
    )
    wait = fleet.poll_seconds + SYNC_REQUESTS * trip
    if way == "direct":
        rate = _least(
            scenario.bandwidth,
            _shared(fleet.region_bandwidth, among),
            _shared(fleet.origin_bandwidth, fleet.workers),
        )
        return [wait + transfer_seconds(nbytes, rate, trip, scenario.loss)]
    first = _least(fleet.region_bandwidth, _shared(fleet.origin_bandwidth, fleet.regions))
    second = _least(scenario.bandwidth, _shared(fleet.near_bandwidth, among))
    return [wait + transfer_seconds(nbytes, rate, trip, scenario.loss) for rate in (first, second)]


def _fetch_bytes(scenario: Scenario, method: str, versions: int) -> float:
    """Bytes that bring a receiver so many ``versions`` further."""
    if method in ("auto", "history"):
        ways = catch_up_bytes(scenario, versions, method=method)
        return min(ways["folds"], ways["full"])
    return min(scenario.params * scenario.param_bytes, versions * _patch_bytes(scenario, method))


def _patch_bytes(scenario: Scenario, method: str) -> float:
    return make_plan(scenario)[method].sync_bytes


def _shared(bandwidth: float | None, among: int) -> float | None:
    return None if bandwidth is None else bandwidth / among


def _least(*bandwidths: float | None) -> float:
    return min((b for b in bandwidths if b is not None), default=math.inf)


def _relays_pay_from(scenario: Scenario, fleet: Fleet) -> int | None:
    def pays(among: int) -> bool:
        grown = Fleet(
            workers=among * fleet.regions,
            regions=fleet.regions,
            origin_bandwidth=fleet.origin_bandwidth,
            region_bandwidth=fleet.region_bandwidth,
            near_bandwidth=fleet.near_bandwidth,
            poll_seconds=fleet.poll_seconds,
        )
        direct, relays = (sum(_hops(scenario, grown, way, "auto", 1)) for way in WAYS)
        return relays < direct

    most = 1
    while not pays(most):
        most *= 2
        if most > _MOST:
            return None
    low = most // 2
    while most - low > 1:
        middle = (low + most) // 2
        low, most = (low, middle) if pays(middle) else (middle, most)
    return most
