"""Any version of a stream, and its neighbors by the bits that are kept: the exact bits, few reads,
bounded memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from pulse_rl import LocalStore, MemoryStore, Publisher, Signer, checkout, state_root
from pulse_rl.errors import EmptyStream, InputError, Untrusted
from pulse_rl.events import Event, Synced
from pulse_rl.stream.manifest import Link
from pulse_rl.stream.stream import Stream as StoredStream
from pulse_rl.sync.planner import cheapest_path
from tests.support.commands import Pulse
from tests.support.publishers import FoldingPublisher, tuned
from tests.support.states import TinyTrainer
from tests.support.stores import FaultyStore

VERSIONS, ANCHORS, PATCH_BYTES = 260, 64, 126
Stream = tuple[Path, list[str]]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    """A stream with folds and anchors such that any version is one anchor and six links; and its
    roots."""
    store, weights, roots = tmp_path_factory.mktemp("long"), np.zeros(4000, np.uint16), []
    folds = (2, 4, 8, 16, 32, 64)
    with FoldingPublisher(store, stream="s", folds=folds, anchor_ratio=1e9, threads=1) as publisher:
        for step in range(VERSIONS):
            weights = weights.copy()
            weights[7 * step % 4000] += 1
            done = publisher.publish(
                {"w": weights}, metadata={"step": 10 * step}, anchor=step % ANCHORS == 0
            )
            roots.append(done.root)
    return store, roots


def dense(
    versions: int, *, history: bool, anchor_every: int = 100
) -> tuple[MemoryStore, list[str], int]:
    """A stream of which fifteen versions' changes take as much as the state; its roots, and the
    state's bytes."""
    store, trainer, roots = MemoryStore(), TinyTrainer(), []
    with tuned(
        store, stream="s", history=history, folds=(8,), anchor_ratio=1e9, threads=1
    ) as publisher:
        for step in range(versions):
            trainer.step(0.02)
            roots.append(publisher.publish(trainer.state, anchor=step % anchor_every == 0).root)
    return store, roots, sum(tensor.array.nbytes for tensor in trainer.state.values())


@pytest.mark.slow
@pytest.mark.parametrize("version", [0, 1, 63, 64, 127, 191, 259])
def test_any_version_is_one_anchor_and_six_links(long: Stream, version: int) -> None:
    store, roots = long
    seen: list[Event] = []
    with checkout(store, "s", version=version, threads=1, on_event=seen.append) as found:
        assert found.version == version
        assert found.root == roots[version]
        assert state_root(found.state) == roots[version]
    (synced,) = (event for event in seen if isinstance(event, Synced))
    assert [link.startswith("the anchor") for link in synced.links] == [True] + [False] * (
        len(synced.links) - 1
    )
    assert len(synced.links) <= 1 + 6


@pytest.mark.slow
def test_none_of_the_versions_is_farther(long: Stream) -> None:
    stream = StoredStream(LocalStore(long[0]), "s")
    patches = [Link(version - 1, version, PATCH_BYTES) for version in range(1, VERSIONS)]
    links = [*stream.links(), *patches]
    paths = [cheapest_path([x for x in links if x.version <= v], None, v) for v in range(VERSIONS)]
    assert max(map(len, paths)) == 1 + 6


@pytest.mark.slow
def test_a_walk_reads_each_object_once_and_back_from_the_cache(
    long: Stream, tmp_path: Path
) -> None:
    store, roots = FaultyStore(LocalStore(long[0])), long[1]

    def reads() -> Counter[str]:
        return Counter(
            name
            for call, name in store.calls
            if call == "get" and not name.endswith(".safetensors")
        )

    with checkout(store, "s", version=0, cache=tmp_path, threads=1) as found:
        assert [found.to(version).root for version in range(VERSIONS)] == roots
        assert set(reads().values()) == {1}
        assert len(reads()) == 2 * VERSIONS - 1  # a manifest each, and a patch each but the first
        forward = reads()
        store.calls.clear()
        back = range(VERSIONS - 1, 0, -10)
        assert [found.to(version).root for version in back] == [roots[version] for version in back]
        patches = {name: count for name, count in reads().items() if name.endswith(".patch")}
        assert set(patches.values()) <= {1}
        assert not any(name in forward for name in patches)
        assert state_root(found.state) == found.root


@pytest.mark.slow
@pytest.mark.parametrize("killed", [None, "$$", "$PPID"])  # the program, or what runs it
def test_a_bisection_of_128_versions_asks_seven_times_whatever_is_killed(
    long: Stream, tmp_path: Path, pulse: Pulse, monkeypatch: pytest.MonkeyPatch, killed: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where what is killed leaves its folder
    asking = "echo $PULSE_VERSION >> asked; cp -L {}/model.safetensors $PULSE_VERSION.safetensors; "
    killing = (
        f"[ $(wc -l < asked) != 5 ] || [ -e killed ] || {{ touch killed; kill -9 {killed}; }}; "
    )
    program = ("sh", "-c", f"{asking}{killing if killed else ''}[ $PULSE_VERSION -lt 59 ]")
    command = ["bisect", long[0], "--stream", "s", "--good", 0, "--bad", 128, "--", *program]
    if killed:
        done = subprocess.run(
            [Path(sys.executable).with_name("pulse"), *map(str, command)], check=False
        )
        assert done.returncode == (1 if killed == "$$" else -signal.SIGKILL)
    reads = Counter[str]()
    get = LocalStore.get
    monkeypatch.setattr(
        LocalStore, "get", lambda self, name, *part: reads.update([name]) or get(self, name, *part)
    )
    out = pulse(*command)
    assert out.splitlines()[-1] == "version 59 is the first bad one (step=590), asked 7 times"
    versions = [int(line) for line in (tmp_path / "asked").read_text().split()]
    again = [60] if killed else []  # what it was killed at
    assert versions == [64, 32, 48, 56, 60, *again, 58, 59]
    assert all(state_root(f"{version}.safetensors") == long[1][version] for version in versions)
    # One folder is made from another: the bad half may begin below the anchor of version 64,
    # nothing else does.
    assert sum(name.endswith(".safetensors") for name in reads) == (1 if killed else 2)
    # A patch is read again only where a version to try remembers what changed before.
    assert max(count for name, count in reads.items() if name.endswith(".patch")) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("history", [True, False])
def test_it_moves_anywhere(history: bool) -> None:
    store, roots, _ = dense(50, history=history, anchor_every=30)
    with checkout(store, "s", version=0, threads=1) as found:
        for version in np.random.default_rng(0).integers(0, 50, 15).tolist():
            assert (found.to(version).version, found.root) == (version, roots[version])
        assert state_root(found.state) == found.root


@pytest.mark.slow
def test_which_version_it_is(long: Stream, tmp_path: Path) -> None:
    store, roots = long
    with checkout(store, "s", threads=1) as found:
        assert found.version == VERSIONS - 1
        assert found.to(metadata={"step": 420}).version == 42
        assert found.metadata == {"step": 420}
        assert found.to(root=roots[17]).version == found.to(root=roots[17][:10]).version == 17
        held = found.state_dict()
        assert held["w"].dtype == torch.uint16
        assert state_root(held) == roots[17]
        found.save(tmp_path / "out")
        found.to(3)
        assert state_root(held) == state_root(tmp_path / "out") == roots[17]
        for wrong in (
            {"version": 4000},
            {"root": "0" * 64},
            {"root": "xyz"},
            {"metadata": {"step": 7}},
        ):
            with pytest.raises(InputError):
                found.to(**wrong)  # type: ignore[arg-type]
            assert (found.version, found.root) == (3, roots[3])
        with pytest.raises(InputError, match="one of them"):
            found.to(1, root=roots[1])
    with pytest.raises(EmptyStream):
        checkout(store, "other")


def test_only_trusted_versions_are_checked_out(tmp_path: Path, signer: Signer) -> None:
    with Publisher(tmp_path, stream="s", signer=signer) as publisher:
        done = publisher.publish({"w": np.arange(9)})
    with checkout(tmp_path, "s", root=done.root, trusted_keys=[signer.public_key]) as found:
        assert found.version == 0
    with pytest.raises(Untrusted):
        checkout(tmp_path, "s", trusted_keys=[Signer.generate().public_key])
