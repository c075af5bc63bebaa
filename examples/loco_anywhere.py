"""PULSELoCo among trainers that share nothing but a store: one is slow, one is killed and comes back, one joins later.

    python examples/loco_anywhere.py [STORE]

STORE is a folder (default: a temporary one) or the address of an object store, such as s3://bucket/run. A table shows
who was in each round. At the end all hold the same global weights, and have learnt what a run without any of that has.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import pulse_rl
from pulse_rl.errors import NotFound, TrainerLost
from pulse_rl.loco import PulseLoCo, StoreExchange

KILLED, LATER, BACK = 6, 8, 11
"""After so many rounds b is killed, d joins, and b comes back. A run ends once both have been in so many again."""
AGAIN, MOST = 10, 1000
STEP_SECONDS = 0.05
END = "end.json"


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


def train(name: str, store: str, checkpoint: Path, slower: float) -> None:
    """A trainer, until the run has had its rounds; from its checkpoint where it has one."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    over = StoreExchange(store, trainer=name, quorum=2, grace_seconds=0.5, deadline_seconds=15.0)
    loop = PulseLoCo(model, optimizer, sync_every=8, over=over)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loop.load_state_dict(saved["loop"])
    step = 0
    with loop:
        try:
            while loop.round < last_round(store):
                optimizer.zero_grad()
                loss_of(model, seed=1000 * ord(name[0]) + step).backward()
                optimizer.step()
                step += 1
                time.sleep(STEP_SECONDS * slower)
                if loop.inner_step == 0:
                    parts = {"model": model, "optimizer": optimizer, "loop": loop}
                    torch.save({key: part.state_dict() for key, part in parts.items()}, checkpoint.with_suffix(".new"))
                    checkpoint.with_suffix(".new").rename(checkpoint)
        except TrainerLost:
            pass  # the others have had their rounds, and so has this one
        final = loop.global_state()
        model.load_state_dict(final)
        loss = float(sum(loss_of(model, seed=-1 - k).item() for k in range(20)) / 20)
        said = {"name": name, "round": loop.round, "root": pulse_rl.state_root(final), "loss": loss}
    print(json.dumps(said), flush=True)


def last_round(store: str) -> int:
    """How many rounds the run has; it is said when it is known."""
    try:
        return int(json.loads(pulse_rl.open_store(store).get(END)))
    except NotFound:
        return MOST


class Trainers:
    """Processes of trainers, by name."""

    def __init__(self, store: str, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, slower: float = 1.0) -> None:
        checkpoint = str(self._folder / f"{name}.pt")
        command = [sys.executable, __file__, "--trainer", name, self._store, checkpoint, str(slower)]
        self._processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def kill(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes.pop(name).wait()

    def results(self) -> list[dict[str, object]]:
        said = {name: process.communicate(timeout=300)[0] for name, process in self._processes.items()}
        return [json.loads(text.splitlines()[-1]) for text in said.values()]


def follow(store: str, trainers: Trainers, rounds: int | None) -> int:
    """Prints each round as it is closed, and disturbs the run unless the number of its ``rounds`` is given. Returns
    that number."""
    opened, names = pulse_rl.open_store(store), "abcd"
    events: dict[int, tuple[str, Callable[[], None]]] = {
        KILLED: ("b is killed", lambda: trainers.kill("b")),
        LATER: ("d joins", lambda: trainers.start("d")),
        BACK: ("b comes back", lambda: trainers.start("b")),
    }
    again = {"b": 0, "d": 0}
    number, last = 0, rounds or MOST
    print(f"round   {'   '.join(names)}   bytes of all messages")
    while number < last:
        if not any(True for _ in opened.list("loco/closed", f"loco/closed/{number - 1:012d}.json")):
            time.sleep(0.05)
            continue
        posts = json.loads(opened.get(f"loco/closed/{number:012d}.json"))["posts"]
        number += 1
        inside = {name for name, _, _ in posts}
        marks = "   ".join("x" if name in inside else "." for name in names)
        words, act = events.get(number, ("", lambda: None)) if rounds is None else ("", lambda: None)
        print(f"{number:5}   {marks}   {sum(size for _, _, size in posts):>9,}   {words}".rstrip(), flush=True)
        act()
        for name in inside & again.keys():
            again[name] += number > BACK
        if last == MOST and min(again.values()) >= AGAIN:
            last = number + 3  # for whoever is in the middle of a round
            opened.put(END, json.dumps(last).encode())
    return last


def run(store: str, rounds: int | None) -> tuple[list[dict[str, object]], int]:
    with tempfile.TemporaryDirectory() as folder:
        trainers = Trainers(store, Path(folder))
        if rounds is not None:
            pulse_rl.open_store(store).put(END, json.dumps(rounds).encode())
            trainers.start("d")
        for name in "ab":
            trainers.start(name)
        trainers.start("c", slower=3.0 if rounds is None else 1.0)
        rounds = follow(store, trainers, rounds)
        return trainers.results(), rounds


def main(store: str) -> None:
    print("a, b and c, which is three times slower; b is killed and comes back, d joins later:")
    disturbed, rounds = run(f"{store}/disturbed", None)
    print("\nall four, without any of that:")
    calm, _ = run(f"{store}/calm", rounds)
    for title, results in (("disturbed", disturbed), ("undisturbed", calm)):
        assert len({str(each["root"]) for each in results}) == 1, f"{title}: trainers differ: {results}"
        print(f"{title}: all hold root {str(results[0]['root'])[:12]}, loss {results[0]['loss']:.4f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trainer"]:
        train(sys.argv[2], sys.argv[3], Path(sys.argv[4]), float(sys.argv[5]))
    elif len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
