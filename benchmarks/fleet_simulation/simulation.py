"""The simulation: stores, links, relays and workers as processes of simpy.

Assumptions: a link carries what is asked of it in the order of the asking, so that of many transfers the last one ends
when it would if they shared evenly; a transfer over several links takes as long as over the slowest; regions are alike,
and of those behind relays two are simulated with their workers; many workers
are simulated as bundles that look together, 200 a region; a sync of k versions costs the bytes of their folds and
the time of one version's verifying.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

from pulse_rl.plan import Fleet, Scenario, make_plan
from pulse_rl.plan.fleet import catch_up_bytes

CHUNK_BYTES, SHARD_BYTES = 8 << 20, 5 << 30
Steps = Generator[simpy.Event, Any, None]
_REQUESTS, _TRIPS = 3, 4
_TOLD_SECONDS = 0.1
_MOST_SIMULATED = 200


@dataclass(frozen=True)
class Setting:
    """``relays``: whether each region has one. ``waits``: workers wait for a version at a relay's store, in place of
    looking every ``fleet.poll_seconds``, as all do at the origin. ``requests_a_second``: the most that the origin
    answers, None: any number; looks take their part of it. ``anchor_every``: versions. ``cut``: from and to which
    second the first region has no link. ``joining``: so many workers of the first region begin at ``joins_at``."""

    scenario: Scenario
    fleet: Fleet
    relays: bool = True
    waits: bool = False
    requests_a_second: float | None = None
    versions: int = 20
    anchor_every: int = 1000
    cut: tuple[float, float] | None = None
    joining: int = 0
    joins_at: float = math.inf


@dataclass(frozen=True)
class Outcome:
    """``to_all``: mean seconds from the call of publish until all workers had a version, or a later one, of the
    versions that were not published before the end of the cut; ``worst``: the longest; infinite where ``behind``.
    ``back``: seconds from the end of the cut until the region's relay showed the newest version; ``back_bytes``: what
    crossed the link for it. ``joined``: seconds until the last of the joining workers had what was the newest version
    when it began. ``origin_bytes`` and ``origin_requests`` a version, without looks. ``behind``: whether some workers
    did not have the last version ten versions' time after it."""

    to_all: float
    worst: float
    back: float | None
    back_bytes: float | None
    joined: float | None
    origin_bytes: float
    origin_requests: float
    behind: bool


class Line:
    """Something that carries so many units a second, in the order of the asking; not between the times ``cut``."""

    def __init__(self, env: simpy.Environment, rate: float | None, cut: tuple[float, float] | None = None) -> None:
        self._env, self._rate, self._cut, self._free = env, rate, cut, 0.0

    def end(self, units: float) -> float:
        """When so many units that are asked for now have passed."""
        start = max(self._env.now, self._free)
        end = start + (units / self._rate if self._rate else 0.0)
        if self._cut and start < self._cut[1] and end > self._cut[0]:
            end += self._cut[1] - max(start, self._cut[0])
        if self._rate:
            self._free = end
        return end

    def down_for(self) -> float:
        """Seconds until the link is there again."""
        if self._cut and self._cut[0] <= self._env.now < self._cut[1]:
            return self._cut[1] - self._env.now
        return 0.0


class Place:
    """A store: what it shows, and what it answers. ``lookers`` look at it all the time."""

    def __init__(
        self,
        env: simpy.Environment,
        setting: Setting,
        lookers: float,
        bandwidth: float | None,
        limit: float | None = None,
        *,
        waited_for: bool = False,
    ) -> None:
        if limit is not None:
            limit = max(1e-3, limit - lookers / setting.fleet.poll_seconds)
        self.env, self.newest, self.anchor, self.waited_for = env, 0, 0, waited_for
        self.requests, self.sent = Line(env, limit), Line(env, bandwidth)
        self.asked, self.nbytes = 0.0, 0.0
        self.shown = env.event()

    def show(self, version: int) -> None:
        self.newest = version
        told, self.shown = self.shown, self.env.event()
        told.succeed()


class Simulation:
    def __init__(self, setting: Setting, seed: int = 0) -> None:
        self.setting, self.random = setting, random.Random(seed)
        self.env = simpy.Environment()
        scenario, fleet = setting.scenario, setting.fleet
        phases = make_plan(scenario).methods["context"].phases
        self.publishing = phases["encode"] + phases["hash"] + phases["upload"]
        self.applying = phases["verify"] + phases["apply"]
        self.cheapest = {0: 0.0}
        self.full = scenario.params * scenario.param_bytes
        lookers = fleet.regions if setting.relays else fleet.workers
        self.origin = Place(self.env, setting, lookers, fleet.origin_bandwidth, setting.requests_a_second)
        self.published: dict[int, float] = {}
        self.last = [0.0] * (setting.versions + 1)
        self.had = [0] * (setting.versions + 1)
        self.expected = 0
        self.back: tuple[float, float] | None = None
        self.joined: list[float] = []
        self.env.process(self._trainer())
        regions = range(fleet.regions)
        for region in regions:
            link = Line(self.env, fleet.region_bandwidth, setting.cut if region == 0 else None)
            if setting.relays:
                near = Place(self.env, setting, fleet.in_a_region, fleet.near_bandwidth, waited_for=setting.waits)
                self.env.process(self._relay(near, link, first=region == 0))
                if region < 2:
                    self._workers(near, [near.sent])
                    if region == 0:
                        self._joiners(near, [near.sent])
            else:
                self._workers(self.origin, [link, self.origin.sent])
                if region == 0:
                    self._joiners(self.origin, [link, self.origin.sent])

    def run(self) -> Outcome:
        setting = self.setting
        step = setting.scenario.step_seconds
        self.env.run(until=(setting.versions + 10) * step + self.publishing)
        cut = setting.cut or (0.0, 0.0)
        behind = self.had[setting.versions] < self.expected
        lag = (
            []
            if behind
            else [
                self.last[v] - at
                for v, at in self.published.items()
                if self.had[v] >= self.expected and not cut[0] - step <= at < cut[1] + step
            ]
        )
        return Outcome(
            to_all=sum(lag) / len(lag) if lag else math.inf,
            worst=max(lag, default=math.inf),
            back=self.back[0] if self.back else None,
            back_bytes=self.back[1] if self.back else None,
            joined=max(self.joined) if setting.joining and len(self.joined) else None,
            origin_bytes=self.origin.nbytes / setting.versions,
            origin_requests=self.origin.asked / setting.versions,
            behind=behind,
        )

    def _trainer(self) -> Steps:
        for version in range(1, self.setting.versions + 1):
            yield self.env.timeout(max(0.0, version * self.setting.scenario.step_seconds - self.env.now))
            self.published[version] = self.env.now
            yield self.env.timeout(self.publishing)
            if version % self.setting.anchor_every == 0:
                self.origin.anchor = version
            self.origin.show(version)

    def _look(self, place: Place) -> Steps:
        """Until it has seen that something is new."""
        yield place.shown
        pause = _TOLD_SECONDS if place.waited_for else self.random.uniform(0, self.setting.fleet.poll_seconds)
        yield self.env.timeout(pause)

    def _fetch(
        self, place: Place, nbytes: float, lines: list[Line], weight: int = 1, own: float | None = None
    ) -> Steps:
        requests = _REQUESTS + nbytes // CHUNK_BYTES
        yield self.env.timeout(_TRIPS * self.setting.scenario.round_trip_seconds)
        place.asked += requests * weight
        place.nbytes += nbytes * weight
        ends = [line.end(8 * nbytes * weight) for line in lines]
        ends.append(place.requests.end(requests * weight))
        ends.append(self.env.now + (8 * nbytes / own if own else 0.0))
        yield self.env.timeout(max(ends) - self.env.now)

    def _relay(self, near: Place, link: Line, *, first: bool) -> Steps:
        copied, shards = 0, math.ceil(self.full / SHARD_BYTES)
        cut = self.setting.cut if first else None
        crossed = 0.0
        while True:
            if (down := link.down_for()) > 0:
                yield self.env.timeout(down)
                crossed = 0.0
            if self.origin.newest > near.newest:
                target = self.origin.newest
                nbytes = self._bytes(target - near.newest)
                yield from self._fetch(self.origin, nbytes, [link, self.origin.sent])
                crossed += nbytes
                near.show(target)
                if cut and self.back is None and self.env.now > cut[1] and near.newest == self.origin.newest:
                    self.back = self.env.now - cut[1], crossed
            elif self.origin.anchor > near.anchor:
                yield from self._fetch(self.origin, min(self.full, SHARD_BYTES), [link, self.origin.sent])
                copied += 1
                if copied == shards:
                    near.anchor, copied = self.origin.anchor, 0
            else:
                yield from self._look(self.origin)

    def _workers(self, place: Place, lines: list[Line]) -> None:
        """Those of a region, bundled where they are many."""
        number = self.setting.fleet.in_a_region
        weight = -(-number // _MOST_SIMULATED)
        for _ in range(number // weight):
            self.expected += 1
            self.env.process(self._worker(place, lines, weight))

    def _joiners(self, place: Place, lines: list[Line]) -> None:
        for _ in range(self.setting.joining):
            self.env.process(self._joiner(place, lines))

    def _worker(self, place: Place, lines: list[Line], weight: int) -> Steps:
        have = 0
        while True:
            if place.newest == have:
                yield from self._look(place)
            target = place.newest
            yield from self._fetch(place, self._bytes(target - have), lines, weight, self.setting.scenario.bandwidth)
            yield self.env.timeout(self.applying)
            for version in range(have + 1, target + 1):
                self.last[version] = max(self.last[version], self.env.now)
                self.had[version] += 1
            have = target

    def _joiner(self, place: Place, lines: list[Line]) -> Steps:
        yield self.env.timeout(self.setting.joins_at)
        wanted, anchor, have = place.newest, place.anchor, -1
        while have < wanted:
            target = place.newest
            nbytes = self._bytes(target - have) if have >= 0 else self.full + self._bytes(target - anchor)
            yield from self._fetch(place, nbytes, lines, 1, self.setting.scenario.bandwidth)
            have = target
        self.joined.append(self.env.now - self.setting.joins_at)

    def _bytes(self, versions: int) -> float:
        """What brings a receiver so many versions further."""
        if versions not in self.cheapest:
            ways = catch_up_bytes(self.setting.scenario, versions)
            self.cheapest[versions] = min(ways["folds"], ways["full"])
        return self.cheapest[versions]


def simulate(setting: Setting) -> Outcome:
    return Simulation(setting).run()
