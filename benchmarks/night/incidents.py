"""The kinds of incident. Each is a function that does its harm, undoes what a cause that passes
undoes, and says what it did; its cause has ended when it returns."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pulse_rl.errors import PulseError

from .store import Fault
from .world import KINDS, World

DAEMONS = ("trainer", "relay", "serve", "direct", "served", "python")
READERS = ("direct", "served", "python", "relay")
CLOCKED = ("trainer", "relay", "direct", "served", "python")
_LONGEST = 60.0


class Chance:
    """What is drawn for one incident; ``scale`` shortens all that lasts."""

    def __init__(self, rng: random.Random, scale: float) -> None:
        self.rng, self._scale = rng, scale

    def seconds(self, longest: float = _LONGEST) -> float:
        """From 1 s, or less with a ``scale``, to ``longest``."""
        return self.rng.uniform(1.0, longest) * self._scale

    def sleep(self, longest: float = _LONGEST) -> str:
        """Sleeps, and says for how long."""
        seconds = self.seconds(longest)
        time.sleep(seconds)
        return f"{seconds:.1f} s"


def store_down(world: World, chance: Chance) -> str:
    world.proxy.down()
    said = chance.sleep()
    world.proxy.up()
    return said


def _with(world: World, chance: Chance, fault: Fault) -> str:
    world.proxy.begin(fault)
    said = chance.sleep()
    world.proxy.end()
    return f"{fault.share:.0%} of the requests for {said}"


def errors(world: World, chance: Chance) -> str:
    status = chance.rng.choice([500, 502, 503, 504])
    share = chance.rng.choice([0.3, 0.7, 1.0])
    fault = Fault("status", share, status, {500: "InternalError"}.get(status, "ServiceUnavailable"))
    return f"{status}, {_with(world, chance, fault)}"


def throttling(world: World, chance: Chance) -> str:
    status = chance.rng.choice([429, 503])
    fault = Fault("status", chance.rng.choice([0.5, 0.9]), status, "SlowDown")
    return f"{status}, {_with(world, chance, fault)}"


def hung(world: World, chance: Chance) -> str:
    return _with(world, chance, Fault("hang", chance.rng.choice([0.3, 1.0])))


def resets(world: World, chance: Chance) -> str:
    return _with(world, chance, Fault("reset", chance.rng.choice([0.3, 0.7])))


def expired_keys(world: World, chance: Chance) -> str:
    code = chance.rng.choice(["ExpiredToken", "InvalidAccessKeyId"])
    if chance.rng.random() < 0.5:
        world.proxy.refusal = code
        world.renew_keys()
        return f"{code}, renewed before"
    world.expire_keys(code)
    said = chance.sleep()
    world.renew_keys()
    return f"{code}, renewed after {said}"


def _restart(world: World, chance: Chance) -> str:
    """Often a reader starts again then: damage meets those who need the object."""
    how, name = chance.rng.choice(["", "killed", "new", "new"]), chance.rng.choice(READERS)
    if how == "killed":
        world.signal(name, signal.SIGKILL)
    elif how == "new":
        world.forget(name)
    return f"; {name} {how}" * bool(how)


def damaged_object(world: World, chance: Chance, *, delete: bool = False) -> str:
    kind = chance.rng.choice(list(KINDS))
    found = world.objects(kind)[-8:]
    if not found:
        return f"no {kind}"
    # The newest, or one of the last.
    info = found[-1] if chance.rng.random() < 0.5 else chance.rng.choice(found)
    if delete:
        world.behind.delete(info.name)
    else:
        data = b""
        with suppress(PulseError):  # a heartbeat is replaced all the time
            data = world.behind.get(info.name)
        world.behind.put(info.name, _flipped(data, chance))
    return f"{kind} {info.name}{_restart(world, chance)}"


def deleted_object(world: World, chance: Chance) -> str:
    return damaged_object(world, chance, delete=True)


def damaged_copy(world: World, chance: Chance, *, delete: bool = False) -> str:
    kind = chance.rng.choice([kind for kind in KINDS if kind != "heartbeat"])
    found = world.files(world.folder / "near", kind)[-8:]
    return _harm(found, chance, delete=delete) + _restart(world, chance)


def deleted_copy(world: World, chance: Chance) -> str:
    return damaged_copy(world, chance, delete=True)


def damaged_cache(world: World, chance: Chance) -> str:
    found = world.files(world.folder / "caches")[-24:]
    return _harm(found, chance, delete=False) + _restart(world, chance)


def _harm(found: list[Path], chance: Chance, *, delete: bool) -> str:
    if not found:
        return "nothing there"
    path = found[-1] if chance.rng.random() < 0.5 else chance.rng.choice(found)
    with suppress(FileNotFoundError):
        if delete:
            path.unlink()
        else:
            new = path.with_name(".harmed")
            new.write_bytes(_flipped(path.read_bytes(), chance))
            os.replace(new, path)
    return path.name


def _flipped(data: bytes, chance: Chance) -> bytes:
    """The same with wrong bytes, cut short, or empty; what is empty gets some."""
    if not data:
        return b"junk"
    how = chance.rng.choice(["flipped", "flipped", "cut", "empty"])
    if how == "cut":
        return data[: len(data) // 2]
    if how == "empty":
        return b""
    flipped = bytearray(data)
    for _ in range(chance.rng.randint(1, 4)):
        flipped[chance.rng.randrange(len(data))] ^= chance.rng.randint(1, 255)
    return bytes(flipped)


def full_disk(world: World, chance: Chance) -> str:
    if not world.mounts:
        return "no disk may be filled here"
    place = chance.rng.choice(world.mounts)
    ballast, piece = place / "ballast", b"\0" * (1 << 20)
    seconds = chance.seconds()
    ends = time.monotonic() + seconds
    with ballast.open("wb", buffering=0) as file:
        while time.monotonic() < ends:  # also of what is freed meanwhile
            try:
                file.write(piece)
            except OSError:
                piece = piece[: max(1, len(piece) // 2)]
                time.sleep(0.05)
    ballast.unlink()
    return f"{place.name} for {seconds:.1f} s"


def killed_process(world: World, chance: Chance) -> str:
    name = chance.rng.choice(DAEMONS)
    world.signal(name, signal.SIGKILL)
    return name


def stopped_process(world: World, chance: Chance) -> str:
    name = chance.rng.choice(DAEMONS)
    world.signal(name, signal.SIGSTOP)
    said = chance.sleep()
    world.signal(name, signal.SIGCONT)
    return f"{name} for {said}"


def clock_step(world: World, chance: Chance) -> str:
    if world.preload is None:
        return "no clock may be moved here"
    name = chance.rng.choice(CLOCKED)
    step = chance.rng.choice([-86400, -3600, -600, -30, 30, 600, 3600, 86400])
    world.step_clock(name, step)
    said = chance.sleep()
    world.step_clock(name, 0)
    return f"{name} by {step:+d} s for {said}"


def restored_backup(world: World, chance: Chance) -> str:
    saved = world.backup()
    time.sleep(chance.rng.uniform(3.0, 12.0))
    down = chance.rng.random() < 0.7
    if down:
        world.proxy.down()
    changed = 0
    with suppress(PulseError):
        changed = world.restore(saved)
    if down:
        world.proxy.up()
    return f"{changed} objects, {'with the store down' if down else 'in a live store'}"


Kind = Callable[[World, Chance], str]
ALL: dict[str, tuple[Kind, int]] = {
    "store down": (store_down, 3),
    "5xx": (errors, 2),
    "throttling": (throttling, 2),
    "hung connections": (hung, 2),
    "reset connections": (resets, 2),
    "expired keys": (expired_keys, 2),
    "damaged object": (damaged_object, 3),
    "deleted object": (deleted_object, 3),
    "damaged copy of the relay": (damaged_copy, 2),
    "deleted copy of the relay": (deleted_copy, 2),
    "damaged cache": (damaged_cache, 1),
    "full disk": (full_disk, 2),
    "killed process": (killed_process, 3),
    "stopped process": (stopped_process, 3),
    "clock step": (clock_step, 2),
    "restored backup": (restored_backup, 2),
}


def drawn(rng: random.Random, count: int, kinds: list[str] | None) -> list[str]:
    """``count`` kinds in random order, each as often as its weight says."""
    names = kinds or [name for name, (_, weight) in ALL.items() for _ in range(weight)]
    found: list[str] = []
    while len(found) < count:
        deck = list(names)
        if not kinds:
            rng.shuffle(deck)
        found += deck
    return found[:count]
