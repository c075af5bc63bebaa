"""A group of workers on one node: they share a cache folder and switch versions together."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random

from pulse_rl import GroupMember, PulseError, Update

from .model import STREAM, Model, check
from .store import STALE_CHANGES, CrashNow, Fault, Net
from .worker import Setup, Worker

_GROUP = "g"
_TIMEOUT_SECONDS = 15.0
_NOTE = re.compile(r"(.+)-[0-9]{15}-[^-]+-(?!away).*")
_NOTES = f"{STREAM}/groups/{_GROUP}/members"


class GroupWorker(Worker):
    """``present``: it has taken part since it was started, so that the others have to wait for it.
    ``why`` its last poll failed."""

    why = ""

    def __init__(
        self,
        net: Net,
        model: Model,
        counts: Counter[str],
        cache: Path | None,
        setup: Setup,
        *,
        name: str,
    ) -> None:
        self.name = name
        super().__init__(net, model, counts, cache, setup)

    def __str__(self) -> str:
        return f"member {self.name}, {super().__str__()}"

    def restart(self, how: str, rng: Random | None) -> None:
        super().restart("cold", rng)
        self.member = GroupMember(
            self.subscriber, group=_GROUP, name=self.name, timeout_seconds=_TIMEOUT_SECONDS
        )
        self.present = False

    def poll(self, faults: list[Fault]) -> bool:
        """One poll; whether it was not cut short. What it hands out is a version, and follows what
        was there."""
        self.touched = True
        self.expect(faults)
        try:
            update = self.persistent(self.member.poll)
        except CrashNow:
            return False
        except PulseError as error:
            self.why = f"{error.kind}: {error}"
            nothing = error.kind == "corrupt_manifest" and not self._model.readable(self._net.disk)
            check(
                self.client.hit > 0 or nothing or error.kind in ("chain_gap", "not_found"),
                f"{self}: {error!r}",
            )
            return False
        finally:
            self.calm()
        self._counts["polls"] += 1
        self.present = True
        if update is not None:
            self._counts["switches"] += 1
            self.take(update)
        return True

    def _follows(self, update: Update) -> bool:
        """After an interrupt it may get once more what it has taken over."""
        known = self.live.version
        return super()._follows(update) or (
            known is not None and (update.previous or 0) <= known <= update.version
        )

    def is_level(self) -> None:
        check(
            self.live.version == self.member.version,
            f"{self} was to activate {self.member.version}",
        )


class Group:
    """The members of one group, whoever comes and goes."""

    def __init__(
        self, net: Net, model: Model, counts: Counter[str], cache: Path, setup: Setup
    ) -> None:
        self._disk = net.disk
        self._new_member = lambda name: GroupWorker(net, model, counts, cache, setup, name=name)
        self.members: list[GroupWorker] = []
        self._named = 0

    def join(self) -> None:
        self._named += 1
        self.members.append(self._new_member(f"worker-{self._named}"))

    def leave(self, rng: Random) -> None:
        self.members.pop(rng.randrange(len(self.members))).close()

    def poll(self, worker: GroupWorker, faults: list[Fault], rng: Random) -> None:
        before = worker.live.version
        seen = self._noted(STALE_CHANGES * any(fault.kind == "stale" for fault in faults))
        worker.poll(faults)
        if worker.client.dead:
            worker.restart("cold", rng)
        elif worker.live.version != before and worker.live.version is not None:
            self._together(worker, worker.live.version, seen)

    def converge(self, head: int | None) -> None:
        """Everybody polls until all are at the head."""
        for _ in range(60):
            if all(member.live.version == head for member in self.members):
                return
            for member in self.members:
                member.poll([])
        states = ", ".join(f"{member} ({member.why})" for member in self.members)
        check(False, f"the group did not reach version {head}: {states}")

    def _noted(self, behind: int) -> dict[str, float]:
        """When each member that is not away wrote last, as a listing has it that is ``behind`` by
        so many changes."""
        notes: dict[str, float] = {}
        for info in self._disk.stale_list(_NOTES, None, behind):
            if found := _NOTE.fullmatch(info.name.rpartition("/")[2]):
                notes[found[1]] = max(info.modified, notes.get(found[1], info.modified))
        return notes

    def _together(self, first: GroupWorker, version: int, seen: dict[str, float]) -> None:
        """Nobody activates a version first that another member has not staged whose note it must
        have ``seen`` fresh: a stale listing may show one that has just come back as silent."""
        if any(
            member is not first and (member.live.version or -1) >= version
            for member in self.members
        ):
            return  # the group has switched while others were silent: whoever comes back follows
        newest = max(self._noted(0).values(), default=0.0)
        for member in self.members:
            if (
                member is first
                or not member.present
                or newest - seen.get(member.name, -1e9) > _TIMEOUT_SECONDS
            ):
                continue
            staged = member.subscriber.version
            check(
                staged is not None and staged >= version,
                f"{first} activates {version} before {member} has it",
            )
