"""Steps of operators, who fold, collect and audit, and of those who damage what is stored, or lie
about it."""

from __future__ import annotations

from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING

from pulse_rl import audit
from pulse_rl.ops.compaction import fold_stream
from tests.support.folds import fold_link

from .lies import false_parts, false_patch
from .model import MUST, STREAM, check, version_name
from .modes import FOLDS
from .store import Client, Fault

if TYPE_CHECKING:
    from .world import World


class Upkeep:
    def fold(self: World, rng: Random) -> None:
        client = Client(self.net)
        client.expect(self._faults(rng))

        def run() -> None:
            folds = rng.choice((FOLDS, (8,), (3,)))
            list(
                fold_stream(
                    client,
                    STREAM,
                    folds,
                    signer=self.signer,
                    stream_id=self.setup.stream_id,
                    threads=1,
                )
            )

        self._tool(client, run, "fold")

    def gc(self: World, rng: Random) -> None:
        """No grace where nothing is under way, as an operator may who has stopped the trainers."""
        self.net.flush()
        client = Client(self.net)
        client.expect(self._faults(rng))
        if rng.random() < 0.4:
            client.faults.append(Fault("crash", rng.randrange(5, 35), rng.random()))
        stale = any(fault.kind == "stale" for fault in client.faults)
        grace = 40.0 if stale or any(self.unsettled) else rng.choice((0.0, 10.0))
        if any(self.unsettled):
            grace = 3600.0
        keep = rng.choice((1, 1, 2, rng.randint(1, 12)))
        stored = self.model.listed(self.disk)
        before = self.model.reach(self.disk)
        self._tool(client, lambda: self._collect(client, keep, grace), f"gc keep={keep}")
        after = self.model.reach(self.disk)
        if not self.silently:
            for version in sorted(stored)[-keep:]:
                lost = before[version] == MUST and after[version] != MUST
                check(not lost, f"gc keep={keep} took what version {version} needs")

        if not self.destroyed:
            for version in self.model.listed(self.disk):
                left = after[version] == MUST or before[version] != MUST
                check(left, f"gc keep={keep} left version {version}, which leads nowhere")

    def destroy(self: World, rng: Random) -> None:
        """An object is deleted or damaged for good. The head's manifest is only damaged: where it
        is deleted, the version is as if it had never been."""
        kinds = ["payloads"] * 6 + ["links"] * 2 + ["versions"]
        names = self.disk.names(f"{STREAM}/{rng.choice(kinds)}")
        if not names:
            return
        name = rng.choice(names)
        if rng.random() < (0.7 if any(self.unsettled) else 0.1):
            name = max(
                names, key=lambda name: self.disk.head(name).modified
            )  # what may be about to be named
        data = self.disk.peek(name) or b""
        how = rng.choice(("delete", "truncate", "flip"))
        if not data or how == "delete":
            how = "truncate" if data and name == version_name(self.model.head or 0) else "delete"
        if how == "delete":
            self.disk.delete(name)
        elif how == "flip":
            at = rng.randrange(len(data))
            self.disk.damage(
                name, data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            )
            self.silently = True
        else:
            self.disk.damage(name, data[: rng.randrange(len(data))])
        self.destroyed = True
        self.net.injected[f"destroy_{how}"] += 1
        self.trace.append(f"  {how} {name}")
        if self.unsettled[0]:
            self._publish(rng, 0, [])  # what is pending may name it

    def lie(self: World, rng: Random) -> None:
        """A link that leads elsewhere, or to nothing; or to a patch that is not what it says."""
        head = self.model.head or 0
        base, version = rng.randint(0, head), rng.randint(0, head + 2)
        payloads = self.disk.names(f"{STREAM}/payloads")
        digest = (
            rng.choice(payloads).rpartition("/")[2][:64]
            if payloads and rng.random() < 0.7
            else "0" * 64
        )
        nbytes = rng.choice(
            (1, 300, len(self.disk.peek(f"{STREAM}/payloads/{digest}.patch") or b""))
        )
        how = rng.random()
        if how < 0.6 and head > 1:
            anchored = [
                v for v in self.model.versions if v < head - 1 and self.model.versions[v].anchored
            ]
            base = (
                rng.choice(anchored)
                if anchored and rng.random() < 0.6
                else rng.randint(0, head - 2)
            )
            version = rng.randint(base + 2, head)
            patch = self.model.versions[base + 1].patch
            data = false_patch(self.model, base, version, rng) if how < 0.4 else None
            if data is not None:
                digest, nbytes = sha256(data).hexdigest(), len(data)
                self.disk.put(f"{STREAM}/payloads/{digest}.patch", data)
                self.model.lies.add(digest)
            elif patch:  # a good one, to the version after its base
                digest, nbytes = patch
        if how > 0.8:
            self.disk.put(f"{STREAM}/links/{version:012d}-anchor-{nbytes:015d}", b"")
        elif how > 0.7 and len(payloads) > 1:
            self.disk.put(*false_parts(self.disk, base, version, rng))
        else:
            self.disk.put(*fold_link(STREAM, base, version, (digest, nbytes)))
        self.net.injected["false_link"] += 1

    def audit(self: World, rng: Random) -> None:
        for worker in self.workers:
            ready = (
                worker.subscriber.status == "ready"
                and worker.live.version == worker.subscriber.version
            )
            if ready and not worker.live.torn:
                report = audit(worker.live.tensors, worker.subscriber.digest, threads=1)
                check(report.ok, f"{worker} does not pass its audit: {report}")
                self.counts["audits"] += 1
