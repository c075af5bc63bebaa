"""Reward by the bytes between trainers, from what a publisher notes of their rounds."""

from __future__ import annotations

from pathlib import Path

from pulse_rl.loco import Round
from pulse_rl.report import read_run
from tests.support.reports import published, write


def test_the_reward_of_trainers_is_told_by_the_bytes_between_them(tmp_path: Path) -> None:
    done = Round(1, 4, 1000, 60, 90, True, 120, 300, 0, "root", {})
    assert done.dense_bytes == 6000
    assert done.metadata == {"round": 1, "loco_sent_bytes": 300, "loco_dense_bytes": 6000}
    rounds = [
        published(v, metadata=done.metadata | {"round": v + 7, "reward": v / 4})
        for v in range(1, 5)
    ]
    write(tmp_path / "events.jsonl", [published(0, metadata={"round": 0}), *rounds])
    assert read_run(tmp_path)["by_bytes"] == {
        "sent": {"xs": [300.0, 600.0, 900.0, 1200.0], "ys": [0.25, 0.5, 0.75, 1.0]},
        "dense": {"xs": [6000.0, 12000.0, 18000.0, 24000.0], "ys": [0.25, 0.5, 0.75, 1.0]},
        "totals": [1200, 24000],
    }
    junk = published(2, metadata={"reward": 0.5, "loco_sent_bytes": "many"})
    alone = Round(1, 1, 1000, 60, 90, True, 120, 0, 0, "root", {}).metadata
    for untold in (
        [rounds[0], junk],
        [rounds[0], *rounds[2:]],  # not every round
        [published(v, metadata=alone | {"round": v, "reward": 0.5}) for v in (1, 2)],
    ):
        write(tmp_path / "events.jsonl", untold)
        assert read_run(tmp_path)["by_bytes"] is None
