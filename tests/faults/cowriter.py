"""What a hostile co-writer does to a signed stream: it writes, replaces, deletes and replays all,
without a key."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from random import Random

import numpy as np

from pulse_rl import Bits, MemoryStore, Signer
from pulse_rl.stream import manifest as manifests
from tests.support.folds import fold_link
from tests.support.publishers import tuned

from .lies import false_parts, false_patch
from .model import STREAM, Model, version_name
from .store import Disk

LAST = 10**12 - 1
_EVIL = Signer(bytes(range(100, 132)))
_KINDS_OF_OBJECTS = ("versions", "versions", "payloads", "payloads", "links", "epochs")


class CoWriter:
    """``signer`` is the publisher's: it only serves to make another run with the same key, as its
    owner may have done.

    Every method named in `KINDS` is one act.
    """

    def __init__(self, disk: Disk, model: Model, signer: Signer) -> None:
        self._disk, self._model, self._signer = disk, model, signer
        self._seen: dict[str, list[bytes]] = {}
        self._other_run: list[tuple[str, bytes]] | None = None

    def watch(self, rng: Random) -> None:
        """Keeps a copy of some objects, to replay them when they are gone."""
        for name in rng.sample(names := self._disk.names(STREAM), min(4, len(names))):
            self._seen.setdefault(name, []).append(self._disk.peek(name) or b"")

    def delete(self, rng: Random) -> None:
        if name := self._any(rng):
            self._disk.delete(name)

    def truncate(self, rng: Random) -> None:
        if name := self._any(rng):
            data = self._disk.peek(name) or b"x"
            self._disk.plant(name, data[: rng.randrange(len(data) or 1)])

    def flip(self, rng: Random) -> None:
        if (name := self._any(rng)) and (data := self._disk.peek(name)):
            at = rng.randrange(len(data))
            self._disk.plant(
                name, data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            )

    def overwrite(self, rng: Random) -> None:
        if name := self._any(rng):
            self._disk.plant(name, _junk(rng))

    def swap_payloads(self, rng: Random) -> None:
        names = self._disk.names(f"{STREAM}/payloads")
        if len(names) > 1:
            first, second = rng.sample(names, 2)
            one, two = self._disk.peek(first) or b"", self._disk.peek(second) or b""
            self._disk.plant(first, two)
            self._disk.plant(second, one)

    def replay(self, rng: Random) -> None:
        """An object as it once was, under its own name or another of its folder."""
        if not self._seen:
            return
        name = rng.choice(list(self._seen))
        folder = name.rpartition("/")[0]
        there = self._disk.names(folder)
        target = rng.choice(there) if there and rng.random() < 0.5 else name
        self._disk.plant(target, rng.choice(self._seen[name]))

    def replay_manifest(self, rng: Random) -> None:
        """A signed manifest as another version, existing or to come."""
        if self._model.versions:
            version = rng.choice(list(self._model.versions))
            self._disk.plant(version_name(self._place(rng)), self._model.versions[version].data)

    def hide_newer(self, rng: Random) -> None:
        """The stream as it was: every manifest above an old one is gone."""
        head = self._model.head
        if head is not None and rng.random() < 0.3:
            for version in range(rng.randint(0, head) + 1, head + 1):
                self._disk.delete(version_name(version))

    def forge(self, rng: Random) -> None:
        """A well-formed manifest that nobody has signed, or somebody else: with the payloads of one
        version and the root of another, or an older state as a newer version."""
        if not self._model.versions:
            return
        one, two = (self._parsed(rng.choice(list(self._model.versions))) for _ in range(2))
        version = self._place(rng)
        if one.patch and one.patch.base >= version and not one.anchor:
            return
        patch = one.patch if one.patch and one.patch.base < version else None
        fields = {field: getattr(one, field) for field in one.__struct_fields__}
        fields |= {"version": version, "root": rng.choice((one.root, two.root)), "patch": patch}
        forged = manifests.Manifest(**fields).sealed()
        how = rng.choice(("unsigned", "own key", "old signature"))
        if how == "own key":
            forged = _EVIL.sign(forged)
        elif how == "old signature":
            forged = forged.with_signature(one.signature)
        self._disk.plant(version_name(version), forged.to_bytes())

    def junk_above(self, rng: Random) -> None:
        for _ in range(rng.choice((1, 1, 3, 20))):
            self._disk.plant(version_name(self._place(rng, above=True)), _junk(rng))

    def junk_by_the_thousand(self, rng: Random) -> None:
        """Rare: each object is read."""
        if rng.random() < 0.2:
            folder, most = (
                rng.choice(("versions", "versions", "epochs", "links")),
                rng.choice((300, 600, 2000)),
            )
            first = self._place(rng)
            for number in rng.sample(range(first, first + 3 * most), most):
                name = (
                    version_name(number)
                    if folder == "versions"
                    else f"{STREAM}/{folder}/{number:012d}"
                )
                self._disk.plant(f"{name}-anchor-{40:015d}" if folder == "links" else name, b"x")

    def junk_at_the_end(self, rng: Random) -> None:
        self._disk.plant(version_name(LAST - rng.choice((0, 0, 1, 5))), _junk(rng))

    def claim(self, rng: Random) -> None:
        """A claim that is none, or another's, or one that was made before."""
        folder = f"{STREAM}/epochs"
        there = self._disk.names(folder)
        newest = int(there[-1].rpartition("/")[2]) if there else 0
        epoch = rng.choice((newest + 1, newest + 2, newest + 1000, newest + (1 << 20) + 1, LAST, 1))
        old = self._disk.peek(rng.choice(there)) if there else None
        word = f"{rng.getrandbits(64):016x}"
        ours = (
            self._parsed(next(iter(self._model.versions))).stream_id
            if self._model.versions
            else "0" * 32
        )
        unsigned = f"{word} {rng.choice((ours, ours, '0' * 32))}".encode()
        data = rng.choice((_junk(rng), old or b"", unsigned, unsigned, word.encode()))
        self._disk.plant(f"{folder}/{min(epoch, LAST):012d}", data)

    def false_link(self, rng: Random) -> None:
        head = self._model.head or 0
        base, version = rng.randint(0, head), rng.randint(0, head + 2)
        payloads = self._disk.names(f"{STREAM}/payloads")
        name = rng.choice(payloads) if payloads and rng.random() < 0.8 else f"/{'0' * 64}.patch"
        digest, nbytes = name.rpartition("/")[2][:64], len(self._disk.peek(name) or b"x")
        links = self._disk.names(f"{STREAM}/links")
        said = (
            rng.choice((b"", _junk(rng), self._disk.peek(rng.choice(links)) if links else b""))
            or b""
        )
        if rng.random() < 0.3:
            self._disk.plant(f"{STREAM}/links/{version:012d}-anchor-{nbytes:015d}", said)
        else:
            link, listed = fold_link(STREAM, base, version, (digest, nbytes))
            self._disk.plant(link, rng.choice((listed, listed + said)))
        if len(payloads) > 1:
            name, listed = false_parts(self._disk, base, version, rng)
            self._disk.plant(name, rng.choice((listed, listed + said, _junk(rng))))

    def false_fold(self, rng: Random) -> None:
        """A patch of its own from a right base, and a link to it that nobody has signed for it."""
        if len(self._model.versions) < 3 or not self._model.states:
            return
        base, version = sorted(rng.sample(list(self._model.versions), 2))
        data = false_patch(self._model, base, version, rng)
        if data is None:
            return
        digest = sha256(data).hexdigest()
        self._disk.plant(f"{STREAM}/payloads/{digest}.patch", data)
        links = self._disk.names(f"{STREAM}/links")
        said = rng.choice((b"", self._disk.peek(rng.choice(links)) if links else b"")) or b""
        link, listed = fold_link(STREAM, base, version, (digest, len(data)))
        self._disk.plant(link, listed + said.rpartition(b"\n")[2])

    def other_run(self, rng: Random) -> None:
        """What another run with the same key published under the same name: all of it, or parts."""
        objects = self._objects_of_other_run(rng)
        whole = rng.random() < 0.3
        for name, data in objects:
            if whole or rng.random() < 0.5:
                self._disk.plant(name, data)

    def _any(self, rng: Random) -> str | None:
        names = self._disk.names(f"{STREAM}/{rng.choice(_KINDS_OF_OBJECTS)}")
        return rng.choice(names) if names else None

    def _place(self, rng: Random, above: bool = False) -> int:
        head = -1 if self._model.head is None else self._model.head
        ahead = head + rng.choice((1, 1, 1, 2, 3, 10, 1000))
        return ahead if above or head < 1 or rng.random() < 0.6 else rng.randint(0, head)

    def _parsed(self, version: int) -> manifests.Manifest:
        return manifests.parse(self._model.versions[version].data, stream=STREAM, version=version)

    def _objects_of_other_run(self, rng: Random) -> list[tuple[str, bytes]]:
        if self._other_run is None:
            store = MemoryStore()
            publisher = tuned(
                store, stream=STREAM, history=True, signer=self._signer, folds=(2,), threads=1
            )
            for k in range(rng.randint(1, 6)):
                publisher.publish(
                    {"embed": Bits(np.full((40, 8), 7 + k, np.uint16), "BF16")}, anchor=k % 3 == 0
                )
            publisher.close()
            folders = ("payloads", "epochs", "links", "versions")
            names = [info.name for folder in folders for info in store.list(f"{STREAM}/{folder}")]
            self._other_run = [(name, store.get(name)) for name in names]
        return self._other_run


def _junk(rng: Random) -> bytes:
    return rng.choice(
        (
            b"",
            b"{}",
            b"null",
            b"[" * 500,
            b'{"format":"pulse.manifest.1"}',
            rng.randbytes(rng.choice((1, 200))),
        )
    )


#: The kinds of hostile acts, each of which can be switched off by its name.
KINDS: dict[str, Callable[[CoWriter, Random], None]] = {
    name: getattr(CoWriter, name)
    for name in (
        *("delete", "truncate", "flip", "overwrite", "swap_payloads", "replay", "replay_manifest"),
        *("hide_newer", "forge", "junk_above", "junk_at_the_end", "junk_by_the_thousand", "claim"),
        *("false_link", "false_fold", "other_run"),
    )
}
