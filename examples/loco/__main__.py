"""``python -m examples.loco``: starts ``torchrun`` and the workers, shows their reports, compares
the final weights."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from statistics import mean, median

import pulse_rl

from ..grpo.rollouts import reported_root
from ..grpo.run import (
    Columns,
    Event,
    Orchestrator,
    RunFailed,
    RunFolder,
    compare,
    new_worker_root,
    note,
    orchestrate,
)
from .settings import Settings

LEGEND = """
density of one trainer's gate and its payload, a mean; how many times less that is than a payload of
DiLoCo and of DDP; patch to the workers, and against a full sync; rounds that rollouts lag behind;
time of the outer round; the root of the global weights"""


class Run(Orchestrator):
    """``kill``: RANK@ROUND of a trainer that is killed in mid-round, or nothing."""

    def __init__(self, settings: Settings, folder: RunFolder, kill: str) -> None:
        super().__init__(folder)
        self.settings, self.kill_at = settings, kill
        self.results: dict[str, Event] = {}
        self.rounds: list[dict[str, float]] = []
        self.reward = 0.0
        self.again = 0
        self._reported: dict[int, dict[str, Event]] = {}
        self._columns = Columns(
            round=5, steps=5, reward=6, density=7, payload_kB=10, vs_DiLoCo=9, vs_DDP=6,
            patch_kB=8, vs_full=7, lag=3,
            outer_ms=8, weights=12, same_on=7,
        )  # fmt: skip

    def run(self) -> None:
        """The whole run. Raises RunFailed."""
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
        ]
        launcher += ["--nproc-per-node", str(self.settings.trainers), "--max-restarts", "3"]
        for name in self.settings.trainer_names:
            self.follow(name)
        with self:
            self.start(
                "trainers", "examples.loco.trainer", "--kill", self.kill_at, launcher=launcher
            )
            for name in self.settings.worker_names:
                self.start(name, "examples.loco.worker", "--name", name)
            while self.running():
                pass
        self._summarize()
        print(f"  report     pulse report {self.folder.root} -o report.html\n")
        compare_weights(self.settings, self.folder, self.results)

    def see(self, role: str, event: Event) -> None:
        match event["event"]:
            case "warm-up":
                accuracy = (
                    f"accuracy {event['accuracy']:.2f} (RL starts at "
                    f"{self.settings.sft_accuracy:.2f})"
                )
                print(
                    f"warm-up step {event['step']}: loss {event['loss']:.3f}, {accuracy}",
                    flush=True,
                )
            case "met" if role == "trainer-0":
                self.reward = self.reward or event["reward"]
                self.again = event["restarts"]
                restart = f" again (restart {self.again})" if self.again else ""
                note(
                    f"the trainers have met{restart}: round {event['round']}, reward "
                    f"{event['reward']:.3f}"
                )
            case "round":
                trainers = self._reported.setdefault(event["round"], {})
                trainers[role] = event
                if len(trainers) == self.settings.trainers:
                    self._show([trainers[name] for name in self.settings.trainer_names])
            case "result":
                self.results[role] = event

    def _show(self, events: list[Event]) -> None:
        """One round, when all trainers have reported it. Bytes are means over the trainers:
        ``payload`` is a trainer's message, ``sent`` all that left it."""
        if not self.rounds:
            print(LEGEND)
        for reason, count in sum(
            (Counter(event["refused"]) for event in events), Counter()
        ).items():
            note(f"{count} batches of rollouts were refused: {reason}")
        first = events[0]
        row = {
            key: mean(e[key] for e in events)
            for key in ("reward", "density", "payload_bytes", "sent_bytes")
        }
        row |= {key: first[key] for key in ("patch_bytes", "dense_bytes")}
        row["dense"] = 4 * first["parameters"]
        row["lag"] = max(event["lag"] for event in events)
        row["outer_ms"] = 1e3 * min(sum(event["seconds"].values()) for event in events)
        self.rounds.append(row)
        same = sum(event["root"] == first["root"] for event in events)
        self._columns.row(
            f"{first['round']}",
            f"{first['round'] * self.settings.sync_every}",
            f"{row['reward']:.3f}",
            f"{row['density']:.2%}",
            f"{row['payload_bytes'] / 1e3:.1f}",
            f"{row['dense'] / row['payload_bytes']:.1f}",
            f"{row['dense'] * self.settings.sync_every / row['payload_bytes']:.0f}",
            f"{row['patch_bytes'] / 1e3:.1f}",
            f"{row['dense_bytes'] / row['patch_bytes']:.1f}",
            f"{row['lag']}",
            f"{row['outer_ms']:.0f}",
            first["root"][:12],
            f"{same} of {len(events)}",
        )

    def _summarize(self) -> None:
        """The totals of the rounds that were shown: one trainer's messages, and what left its
        process."""
        rows, settings = self.rounds, self.settings
        if not rows or "trainer-0" not in self.results:
            return
        payload, sent, dense, patch, full = (
            sum(row[key] for row in rows)
            for key in ("payload_bytes", "sent_bytes", "dense", "patch_bytes", "dense_bytes")
        )
        ring = 2 * (settings.trainers - 1) / settings.trainers * dense  # what an all-reduce sends
        steps = (
            f"{len(rows)} rounds of {settings.sync_every} inner steps at learning rate "
            f"{settings.lr:g}"
        )
        print(f"\n{steps}, {time.monotonic() - self.started:.0f} s, restarts: {self.again}")
        print(
            f"  reward     {self.reward:.3f} -> {self.results['trainer-0']['reward']:.3f} on the "
            "same problems"
        )
        print(f"  rollouts   at most {max(row['lag'] for row in rows)} rounds behind")
        print(
            f"  density    {mean(row['density'] for row in rows):.2%} of the entries passed a "
            "trainer's gate"
        )
        print(
            f"  outer      {median(row['outer_ms'] for row in rows):.0f} ms a round of the "
            "trainer that came last"
        )
        print(
            f"  payload    {payload / 1e6:.1f} MB of one trainer, counted; DiLoCo's "
            f"{dense / 1e6:.1f} MB, ",
            end="",
        )
        print(
            f"{dense / payload:.1f} times more, DDP's "
            f"{settings.sync_every * dense / payload:.0f} times"
        )
        print(
            f"  link       {sent / 1e6:.1f} MB left its process; in a ring DiLoCo's "
            f"{ring / sent:.1f} times, ",
            end="",
        )
        print(f"DDP's {settings.sync_every * ring / sent:.0f} times as much")
        less = f"{full / patch:.1f} times less"
        print(
            f"  PULSESync  {patch / 1e6:.1f} MB to a worker instead of {full / 1e6:.1f} MB, {less}"
        )


def compare_weights(settings: Settings, folder: RunFolder, results: dict[str, Event]) -> None:
    """Compares the roots of all live models and of a new worker; raises RunFailed where two
    differ."""
    if len(results) < settings.trainers:
        raise RunFailed(f"only {len(results)} of {settings.trainers} trainers reported a result")
    store = pulse_rl.open_store(folder.store_address)
    first = results["trainer-0"]
    print(
        f"  weights    {first['weights']}  FP32, after round {settings.rounds}, on {len(results)} "
        "trainers"
    )
    roots = {name: results[name]["root"] for name in settings.trainer_names}
    roots |= {name: reported_root(store, name, settings.rounds) for name in settings.worker_names}
    compare(first["root"], roots | {"new worker": new_worker_root(store)})
    print(
        "  (trainers: their live FP32 models rounded to BF16; workers: their live models; "
        "new worker: from the store)"
    )
    if len({result["weights"] for result in results.values()}) > 1:
        raise RunFailed("the weights differ")
    print(
        f"\nall {settings.trainers} trainers hold the same global weights, and every worker their "
        "BF16 values, bit for bit"
    )


def run(settings: Settings, folder: RunFolder, kill: str | None) -> None:
    found = re.fullmatch(r"trainer-(\d+@\d+)", kill or "")
    if kill and found is None:
        raise ValueError(f"--kill {kill}: expected for instance trainer-2@5")
    Run(settings, folder, found[1] if found else "").run()


def main() -> int:
    text = "SIGKILL a trainer in the middle of a round: --kill trainer-2@5"
    return orchestrate(
        "loco", __doc__, Settings, run, kill={"metavar": "trainer-RANK@ROUND", "help": text}
    )


if __name__ == "__main__":
    sys.exit(main())
