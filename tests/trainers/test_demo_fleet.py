"""`make demo-fleet`, a short run of it: whatever is killed, joins or is cut off, all end with the
trainers' bits."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from examples.fleet.links import Direction, cut, link, origin
from examples.fleet.policies import advantages, verdict_rewards
from examples.grpo.run import RunFolder
from pulse_rl import LocalStore, MemoryStore, Publisher, Relay
from pulse_rl.errors import StoreUnavailable
from tests.support.manifests import manifest_of
from tests.support.programs import ran


def test_a_short_run(tmp_path: Path) -> None:
    options = ("--run", tmp_path / "run", "--steps", 12, "--sft-accuracy", 0.01)
    said = ran("-m", "examples.fleet", *options)
    assert "every worker of both regions holds both policies, bit for bit" in said
    for policy in ("solver", "verifier"):
        assert re.search(
            rf"far, cut off at version \d+ of the {policy}, came back by \d+ patches and no full state",  # noqa: E501
            said,
        )
    for note in ("killing worker-1", "worker-7 joins far", "far is cut off", "far is back"):
        assert note in said
    for policy in ("solver", "verifier"):
        store = LocalStore(tmp_path / "run" / "origin")
        assert [info.name for info in store.list(f"{policy}/versions")][
            -1
        ] == f"{policy}/versions/000000000012.json"
        newest = manifest_of(store, policy, 12)
        assert len(newest.patch.parts) == 2, "one of each rank"


def test_a_link_is_shared_by_all_who_have_its_file(tmp_path: Path) -> None:
    here, there = Direction(tmp_path / "link", 1e6), Direction(tmp_path / "link", 1e6)
    child = os.fork()
    if child == 0:
        there.carry(12_500)
        os._exit(0)
    os.waitpid(child, 0)
    before = os.times().elapsed
    here.carry(12_500)
    there.carry(12_500)
    assert os.times().elapsed - before >= 0.19


def test_a_simulated_region_is_cut_off_and_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    publisher = Publisher(origin(folder), stream="solver", threads=1)
    weights = torch.zeros(50_000, dtype=torch.bfloat16)
    publisher.publish({"w": weights})
    far = link(folder, "far")
    relay = Relay(far, MemoryStore(), stream="solver", threads=1)
    copied = relay.sync()
    assert copied.seconds >= 8 * copied.nbytes / 10e6
    cut(folder, "far").touch()
    weights[3] = 1
    publisher.publish({"w": weights})
    for call in (relay.sync, lambda: far.put("batches-solver/1", b"batch")):
        with pytest.raises(StoreUnavailable, match="cut off"):
            call()
    cut(folder, "far").unlink()
    relay.sync()
    far.put("batches-solver/1", b"batch")
    assert relay.version == 1
    assert origin(folder).get("batches-solver/1") == b"batch"


def test_the_verifier_learns_from_its_verdicts_on_right_answers() -> None:
    answers = torch.tensor([[1, 2], [1, 2], [1, 3], [1, 3]])
    sums = torch.tensor([[1, 2], [1, 1], [1, 3], [1, 2]])
    right = torch.tensor([1.0, 1.0, 0.0, 0.0])
    rewards = verdict_rewards(sums, answers, right)
    assert rewards.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert advantages(rewards, right, 4) == pytest.approx(
        torch.tensor([1.0, -1.0, 0.0, 0.0]), abs=1e-3
    )
    assert advantages(torch.ones(4), right, 2).tolist() == [0.0] * 4
