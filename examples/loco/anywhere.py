"""PULSELoCo among trainers that share nothing but a store: one is slow, one is killed and comes
back, one joins later.

    python -m examples.loco.anywhere [STORE]

STORE is a folder (default: a temporary one) or the address of an object store, such as
s3://bucket/run. A table shows who was in each round. At the end all hold the same global weights,
and have learnt what a run without any of that has.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import pulse_rl
from pulse_rl.errors import NotFound, TrainerLost
from pulse_rl.loco import PulseLoCo, StoreExchange

from ..grpo.run import (
    Alarm,
    Event,
    Journal,
    Orchestrator,
    RunFolder,
    SavedSettings,
    option,
    run_role,
)

#: After so many rounds b is killed, d joins, and b comes back. A run ends once both have been in so
#: many again.
KILLED, LATER, BACK = 6, 8, 11
AGAIN, MOST = 10, 1000
STEP_SECONDS = 0.05
END = "end.json"
NAMES = "abcd"


@dataclass(frozen=True)
class Settings(SavedSettings):
    store: str = option("", "the store in which the trainers meet")
    patience: float = option(15.0, "seconds after which a trainer that is alone in a round ends")


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))


def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
    """Of a batch of a task that all trainers share: what a fixed network makes of random inputs."""
    teacher = torch.nn.Linear(32, 8)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        teacher.reset_parameters()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    return (model(x) - teacher(x).tanh()).square().mean()


def train(settings: Settings, folder: RunFolder, alarm: Alarm, name: str, slower: str) -> None:
    """A trainer, until the run has had its rounds; from its checkpoint where it has one."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    over = StoreExchange(
        settings.store,
        trainer=name,
        min_trainers=2,
        grace_seconds=0.5,
        timeout_seconds=settings.patience,
    )
    loop = PulseLoCo(model, optimizer, sync_every=8, exchange=over)
    checkpoint = folder.checkpoint(name)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loop.load_state_dict(saved["loop"])
    step = 0
    with loop:
        try:
            while loop.round < last_round(settings.store):
                alarm.check_parent()
                optimizer.zero_grad()
                loss_of(model, seed=1000 * ord(name[0]) + step).backward()
                optimizer.step()
                step += 1
                time.sleep(STEP_SECONDS * float(slower))
                if loop.inner_step == 0:
                    parts = {"model": model, "optimizer": optimizer, "loop": loop}
                    torch.save(
                        {key: part.state_dict() for key, part in parts.items()},
                        checkpoint.with_suffix(".new"),
                    )
                    checkpoint.with_suffix(".new").rename(checkpoint)
        except TrainerLost:
            pass  # the others have had their rounds, and so has this one
        final = loop.global_state()
    model.load_state_dict(final)
    loss = float(sum(loss_of(model, seed=-1 - k).item() for k in range(20)) / 20)
    Journal(folder.journal(name)).write("result", root=pulse_rl.state_root(final), loss=loss)


def last_round(store: str) -> int:
    """How many rounds the run has; it is said when it is known."""
    try:
        return int(json.loads(pulse_rl.open_store(store).get(END)))
    except NotFound:
        return MOST


class Run(Orchestrator):
    """Shows each round as it is closed, and disturbs the run unless the number of its ``rounds`` is
    given."""

    def __init__(self, folder: RunFolder, store: str, rounds: int | None) -> None:
        super().__init__(folder)
        Settings(store).save(folder.settings)
        self.rounds, self.results = rounds or MOST, dict[str, Event]()
        self._store = pulse_rl.open_store(store)
        self._number = 0
        self._again = {"b": 0, "d": 0}
        self._events: dict[int, tuple[str, Callable[[], None]]] = {
            KILLED: ("b is killed", self._kill),
            LATER: ("d joins", lambda: self.trainer("d")),
            BACK: ("b comes back", lambda: self.trainer("b")),
        }
        if rounds is not None:
            self._store.put(END, json.dumps(rounds).encode())
            self._events.clear()
        for name in "abc" if rounds is None else NAMES:
            self.trainer(name, slower=3.0 if name == "c" and rounds is None else 1.0)
        print(f"round   {'   '.join(NAMES)}   bytes of all messages")

    def trainer(self, name: str, slower: float = 1.0) -> None:
        self.start(name, "examples.loco.anywhere", "--name", name, "--slower", str(slower))

    def look(self) -> None:
        """Shows the rounds that were closed since the last look."""
        while True:
            try:
                posts = json.loads(self._store.get(f"loco/closed/{self._number:012d}.json"))[
                    "posts"
                ]
            except NotFound:
                return
            self._number += 1
            inside = {name for name, *_ in posts}
            marks = "   ".join("x" if name in inside else "." for name in NAMES)
            words, act = self._events.pop(self._number, ("", lambda: None))
            sizes = sum(size for _, _, size, *_ in posts)
            print(f"{self._number:5}   {marks}   {sizes:>9,}   {words}".rstrip(), flush=True)
            act()
            for name in inside & self._again.keys():
                self._again[name] += self._number > BACK
            if self.rounds == MOST and min(self._again.values()) >= AGAIN:
                self.rounds = self._number + 3  # for whoever is in the middle of a round
                self._store.put(END, json.dumps(self.rounds).encode())

    def see(self, role: str, event: Event) -> None:
        self.results[role] = event

    def _kill(self) -> None:
        self.kill("b")
        del self.processes["b"]


def run(store: str, rounds: int | None) -> tuple[list[Event], int]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Run(RunFolder(Path(folder)), store, rounds) as trainers,
    ):
        while trainers.running():
            trainers.look()
        trainers.look()
        return list(trainers.results.values()), trainers.rounds


def main(store: str) -> None:
    print("a, b and c, which is three times slower; b is killed and comes back, d joins later:")
    disturbed, rounds = run(f"{store}/disturbed", None)
    print("\nall four, without any of that:")
    calm, _ = run(f"{store}/calm", rounds)
    for title, results in (("disturbed", disturbed), ("undisturbed", calm)):
        assert len(results) == len(NAMES), f"{title}: only {len(results)} trainers have ended"
        assert len({str(each["root"]) for each in results}) == 1, (
            f"{title}: trainers differ: {results}"
        )
        print(f"{title}: all hold root {results[0]['root'][:12]}, loss {results[0]['loss']:.4f}")


if __name__ == "__main__":
    if "--parent" in sys.argv:
        sys.exit(run_role(train, Settings, "name", "slower"))
    elif len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
