"""Each command of docs/runbook.md runs in the situation that its section is for, and helps."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pulse_rl import Bits, Publisher, Signer, Subscriber, state_root
from pulse_rl.errors import ChainGap, PublisherConflict
from tests.support.commands import Pulse
from tests.support.states import Rng

PAGE = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text()
SECTIONS = {
    part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
}


class Situation:
    """A stream of six versions in a folder, its words of the page, and a worker's checkpoint."""

    def __init__(self, folder: Path, pulse: Pulse, rng: Rng) -> None:
        self.pulse, self.folder, self.rng = pulse, folder, rng
        self.words = {
            word: str(folder / word.lower())
            for word in ("STORE", "COPY", "CHECKPOINT", "TARGET", "BACKUP", "RESTORED", "WEIGHTS",
                         "OLDER", "new.key")
        }  # fmt: skip
        self.weights = rng.integers(0, 1 << 15, 4000).astype(np.uint16)
        self.store = self.words["STORE"]
        self.roots = list[str]()

    def train(self, versions: int = 6, **settings: object) -> Publisher:
        publisher = Publisher(self.store, stream="policy", **settings)  # type: ignore[arg-type]
        for _ in range(versions):
            self.weights = self.weights.copy()
            self.weights[self.rng.integers(0, 4000, 60)] += 1
            done = publisher.publish(
                {"w": Bits(self.weights, "BF16")}, files={"config.json": b"{}"}
            )
            self.roots.append(done.root)
        return publisher

    def checkpoint(self) -> None:
        out = self.words["CHECKPOINT"]
        self.pulse("follow", self.store, "--stream", "policy", "--out", out, "--once")

    def run(self, section: str) -> Iterator[str]:
        """Runs the commands of a section one by one; what each of them prints."""
        blocks = re.findall(r"^```sh\n(.*?)^```$", SECTIONS[section], re.DOTALL | re.MULTILINE)
        for line in "".join(blocks).splitlines():
            pulse, *words = shlex.split(line)
            assert pulse == "pulse"
            status = 1 if words[0] == "verify" and section == "Damaged object" else 0
            yield self.pulse(*(self.words.get(word, word) for word in words), status=status)

    def root(self, store: str, **settings: object) -> str:
        with Subscriber(self.words[store], stream="policy", **settings) as reader:  # type: ignore[arg-type]
            reader.sync()
            return reader.root

    def damage(self) -> None:
        """The patch of version 3."""
        with Subscriber(self.store, stream="policy") as reader:
            reader.sync(3)
            patch = reader.manifest.patch
        assert patch
        path = Path(self.store, f"policy/payloads/{patch.parts[0].sha256}.patch")
        path.write_bytes(bytes(path.stat().st_size))


@pytest.fixture
def now(tmp_path: Path, pulse: Pulse, rng: Rng) -> Situation:
    return Situation(tmp_path, pulse, rng)


def test_store_away(now: Situation) -> None:
    now.train()
    check, status = now.run("Store away")
    assert "safe to publish to" in check
    assert "version 5" in status


def test_damaged_object(now: Situation) -> None:
    now.train()
    now.checkpoint()
    shutil.copytree(now.store, now.words["COPY"])
    now.damage()
    with pytest.raises(ChainGap):
        now.root("STORE")
    commands = now.run("Damaged object")
    assert "version 3: the patch 2->3 is damaged" in next(commands)
    assert "1 object of policy restored" in next(commands)
    assert now.root("STORE") == now.roots[-1]
    now.damage()
    assert "restored the fold" in next(commands)
    assert now.root("STORE") == now.roots[-1]
    for fold in Path(now.store, "policy/links").glob("*5-000000000002-*"):
        fold.unlink()
    with pytest.raises(ChainGap):
        now.root("STORE")
    assert now.roots[-1] in next(commands)
    assert now.root("STORE") == now.roots[-1]


def test_disk_full(now: Situation) -> None:
    now.train(30, keep=20)
    junk = Path(now.store, "policy/payloads", f"{'0' * 64}.patch")
    junk.write_bytes(bytes(10_000))
    _, relay = now.run("Disk full")
    assert not junk.exists()
    assert not Path(now.store, "policy/versions", f"{9:012d}.json").exists()
    assert "version 29" in relay
    assert now.root("TARGET") == now.root("STORE") == now.roots[-1]


def test_worker_differs(now: Situation) -> None:
    now.train()
    now.checkpoint()
    digest, log = now.run("Worker differs")
    assert json.loads(log)["versions"][0]["root"] in digest
    assert now.roots[-1] == state_root({"w": Bits(now.weights, "BF16")})


def test_two_publishers(now: Situation) -> None:
    first = now.train()
    now.train(1)
    with pytest.raises(PublisherConflict):
        first.publish({"w": Bits(now.weights, "BF16")})
    streams, _ = now.run("Two publishers")
    (found,) = json.loads(streams)["streams"]
    assert found["epoch"] == 2
    assert found["publisher"]


def test_backup_and_restore(now: Situation) -> None:
    now.train()
    commands = now.run("Backup and restore")
    next(commands)
    kept = now.roots[-1]
    now.train(2)
    now.pulse("follow", now.store, "--stream", "policy", "--out", now.words["WEIGHTS"], "--once")
    shutil.rmtree(now.store)
    assert "version 5" in next(commands)
    assert "all links are valid" in next(commands)
    assert now.root("RESTORED") == kept
    now.store = now.words["RESTORED"]
    now.train(3)
    assert "version 8" in next(commands)
    assert now.root("RESTORED") == now.roots[-1]


def test_key_rotation(now: Situation) -> None:
    old = Signer.generate()
    now.train(signer=old)
    now.checkpoint()
    now.words["OLD"] = old.public_key
    commands = now.run("Key rotation")
    now.words["NEW"] = next(commands).strip()
    assert "version 5" in next(commands)
    next(commands)
    assert "version 6" in next(commands)
    assert now.root("STORE", trusted_keys=[now.words["NEW"]]) == now.roots[-1]


def test_upgrade(now: Situation) -> None:
    now.train()
    verified, status = now.run("Upgrade")
    assert "all links are valid" in verified
    assert "0 workers" in status or "no worker" in status


def test_rollback(now: Situation) -> None:
    now.train()
    _, _, published = now.run("Rollback")
    assert "version 6" in published
    assert now.root("STORE") == now.roots[3]


def test_moving_a_store(now: Situation) -> None:
    trainer = now.train()
    commands = now.run("Moving a store")
    next(commands)
    now.train(2)
    trainer.close()
    assert "version 7" in next(commands)
    assert "all links are valid" in next(commands)
    assert "version 7" in next(commands)
    now.store = now.words["TARGET"]
    now.train(1)
    assert now.root("TARGET") == now.roots[-1]


def test_each_section_is_tried() -> None:
    names = {name for name in globals() if name.startswith("test_")}
    assert {f"test_{name.lower().replace(' ', '_')}" for name in SECTIONS} <= names
