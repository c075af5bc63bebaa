"""A damaged or lost object: what `verify` says of it, and `repair` and `anchor --from`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pulse_rl import Bits, Publisher, Relay, Signer, Subscriber
from pulse_rl.errors import ChainGap
from tests.support.commands import Pulse
from tests.support.states import Rng

VERSIONS = 12


class Run:
    """A stream of 12 versions, with an anchor at 0 and 6, its twin that a relay has made, and the
    checkpoints of versions 4 and 11 that a worker has kept."""

    def __init__(self, folder: Path, pulse: Pulse, rng: Rng) -> None:
        self.folder, self.pulse = folder, pulse
        self.store, self.copy = folder / "store", folder / "copy"
        weights = rng.integers(0, 1 << 15, 4000).astype(np.uint16)
        relay = Relay(self.store, self.copy, stream="policy")
        with Publisher(self.store, stream="policy", anchor_ratio=1e9) as publisher:
            for version in range(VERSIONS):
                weights = weights.copy()
                weights[rng.integers(0, 4000, 60)] += 1
                files = {"config.json": b"{}", "README.md": b"%d" % (version // 6)}
                publisher.publish({"w": Bits(weights, "BF16")}, files=files, anchor=version == 6)
                relay.sync()
                if version in (4, 11):
                    self.follow(self.store, f"kept-{version}")
        self.root = publisher.head().root  # type: ignore[union-attr]

    def follow(self, store: Path, out: str) -> Path:
        self.pulse("follow", store, "--stream", "policy", "--out", self.folder / out, "--once")
        return self.folder / out

    def patch(self, version: int) -> Path:
        with Subscriber(self.store, stream="policy") as reader:
            reader.sync(version)
            manifest = reader.manifest
        assert manifest.patch
        return self.store / f"policy/payloads/{manifest.patch.parts[0].sha256}.patch"

    def files(self, kind: str) -> list[Path]:
        return sorted((self.store / "policy").glob(kind))

    def verify(self, status: int) -> str:
        return str(self.pulse("verify", self.store, "--stream", "policy", status=status))

    def repair(self, source: Path, *more: str, status: int = 0) -> str:
        command = ("repair", self.store, "--stream", "policy", "--from", source, *more)
        return str(self.pulse(*command, status=status))

    def newcomer(self) -> str:
        with Subscriber(self.store, stream="policy") as reader:
            reader.sync()
            return reader.root


@pytest.fixture
def run(tmp_path: Path, pulse: Pulse, rng: Rng) -> Run:
    return Run(tmp_path, pulse, rng)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
def test_a_relays_target_gives_back_what_was_lost(run: Run, harm: Callable[[Path], None]) -> None:
    harmed = [
        run.patch(2),
        run.patch(9),
        *run.files("payloads/*.safetensors"),
        *run.files("payloads/*.file"),
        run.files("versions/*")[7],
        run.files("digests/*.tensors")[3],
        *run.files("digests/*.leaves"),
    ]
    for path in harmed:
        harm(path)
    text = run.repair(run.copy)
    assert f"{len(harmed)} objects of policy restored, 0 still" in text
    for path in harmed:
        assert path.read_bytes() == (run.copy / path.relative_to(run.store)).read_bytes()
    assert "all links are valid" in run.verify(0)


@pytest.mark.parametrize("harm", [flip, Path.unlink])
def test_what_no_copy_has_is_named(run: Run, harm: Callable[[Path], None]) -> None:
    patch, other = run.patch(9), run.patch(10)
    other.unlink()
    for folder in (run.store, run.copy):
        harm(folder / patch.relative_to(run.store))
    text = run.repair(run.copy, status=1)
    assert f"restored policy/payloads/{other.name}" in text
    assert f"{patch.name} cannot be restored: version 9 needs it" in text


def test_a_workers_cache_gives_back_payloads(run: Run, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with Subscriber(run.store, stream="policy", cache=cache) as reader:
        reader.sync(6)
        for version in range(7, VERSIONS):
            reader.sync(version)
    flip(run.patch(8))
    assert "0 still damaged" in run.repair(cache)
    assert "all links are valid" in run.verify(0)


def test_verify_says_in_one_line_what_is_damaged_and_what_depends_on_it(run: Run) -> None:
    damaged, rest = run.patch(8), run.patch(10)
    flip(damaged)
    lines = run.verify(1).splitlines()
    assert lines[0].startswith("version 8: the patch 7->8 is damaged: ")
    assert damaged.name in lines[0]
    assert lines[0].endswith("; versions 9 to 11 depend on it")
    assert "new workers cannot reach" in lines[1]
    assert lines[2:] == ["12 versions of policy verified: 1 problem"]
    rest.unlink()
    text = run.verify(1)
    assert "; version 9 depends on it\n" in text
    assert text.splitlines()[1].endswith("; version 11 depends on it")


def test_a_checkpoint_leads_around_the_damage(run: Run) -> None:
    flip(run.patch(9))
    for lost in run.files("payloads/*.file"):
        lost.unlink()
    with pytest.raises(ChainGap):
        run.newcomer()
    text = run.repair(run.folder / "kept-11")
    assert "restored the fold 8->11" in text or "restored the fold 8->" in text
    assert run.newcomer() == run.root
    assert "new workers cannot" not in run.verify(1), "the patch is still damaged, but passed over"


def test_a_checkpoint_gives_back_an_anchor(run: Run, tmp_path: Path) -> None:
    for anchor in run.files("payloads/*.safetensors"):
        anchor.unlink()
    with Subscriber(run.copy, stream="policy") as reader:
        reader.sync(6)
        reader.save(tmp_path / "at-6")
    run.repair(tmp_path / "at-6")
    assert run.newcomer() == run.root


def test_a_checkpoint_of_something_else_is_refused(run: Run, tmp_path: Path) -> None:
    with Publisher(tmp_path / "other", stream="policy") as publisher:
        publisher.publish({"w": np.zeros(4, np.float32)})
    other = run.follow(tmp_path / "other", "other-out")
    command = ("repair", run.store, "--stream", "policy", "--from", other)
    run.pulse.refused(*command, kind="input", match="no version of 'policy'")


@pytest.mark.parametrize("source", ["kept-11", "copy"])
def test_an_anchor_from_elsewhere_does_not_read_the_damage(run: Run, source: str) -> None:
    flip(run.patch(9))
    anchor = ("anchor", run.store, "--stream", "policy")
    assert run.root in run.pulse(*anchor, "--from", run.folder / source)
    assert run.newcomer() == run.root
    older = (*anchor, "--from", run.folder / "kept-4")
    run.pulse.refused(*older, kind="input", match="version 4, the newest is 12")


def test_without_another_copy_the_newest_that_can_be_restored_is_published(run: Run) -> None:
    flip(run.patch(9))
    text = run.pulse("anchor", run.store, "--stream", "policy")
    assert "version 11 cannot be restored, so these are the weights of version 8" in text
    with Subscriber(run.copy, stream="policy") as reader:
        reader.sync(8)
        assert run.newcomer() == reader.root


def test_a_signed_stream_is_repaired_with_its_key(tmp_path: Path, pulse: Pulse, rng: Rng) -> None:
    store, key = tmp_path / "store", tmp_path / "key"
    signer = Signer.generate()
    signer.save(key)
    weights = rng.integers(0, 1 << 15, 4000).astype(np.uint16)
    with Publisher(store, stream="policy", signer=signer, anchor_ratio=1e9) as publisher:
        for _ in range(4):
            weights = weights + 1
            publisher.publish({"w": Bits(weights.astype(np.uint16), "BF16")})
    shutil.copytree(store, tmp_path / "copy")
    for patch in (store / "policy/payloads").glob("*.patch"):
        flip(patch)
    command = ("repair", store, "--stream", "policy", "--trust", signer.public_key)
    assert "3 objects" in pulse(*command, "--from", tmp_path / "copy")
    with Subscriber(store, stream="policy", trusted_keys=[signer.public_key]) as reader:
        reader.sync()
        assert reader.version == 3
