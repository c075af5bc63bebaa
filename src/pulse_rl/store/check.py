"""Checks that a store is safe to publish to, by racing creates and by reading back what was written."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

from ..errors import AlreadyExists, StoreError
from .base import Store


@dataclass(frozen=True, slots=True)
class Finding:
    """One guarantee, whether it held, and what was seen."""

    guarantee: str
    held: bool
    seen: str


def check_store(store: Store, rounds: int = 20) -> list[Finding]:
    """Tests the guarantees of docs/protocol.md, section 2, on objects that it creates and removes afterwards.

    Some S3-compatible servers ignore If-None-Match and let both of two creates succeed: on those a second publisher
    could overwrite a committed version unseen. Raises StoreError when the store cannot be used at all.
    """
    folder = f"pulse-store-check/{secrets.token_hex(8)}"
    try:
        return [
            _creates_once(store, folder),
            _race(store, folder, rounds),
            _reads_back(store, folder),
            _lists_in_order(store, folder),
            _deletes(store, folder),
        ]
    finally:
        for name in _names(folder, rounds):  # not by listing, which may be what does not work
            store.delete(name)


def _names(folder: str, rounds: int) -> list[str]:
    races = [f"{folder}/race-{k:04d}" for k in range(rounds)]
    return [
        f"{folder}/once",
        *races,
        f"{folder}/data",
        *_listed_names(folder),
        f"{folder}/gone-30",
        f"{folder}/gone-300",
    ]


def _listed_names(folder: str) -> list[str]:
    return [f"{folder}/list/{k:04d}" for k in (3, 1, 2, 10)]


def _creates_once(store: Store, folder: str) -> Finding:
    name = f"{folder}/once"
    store.put_new(name, b"first")
    try:
        store.put_new(name, b"second")
    except AlreadyExists:
        kept = store.get(name) == b"first"
        return Finding("a second create is refused", kept, "refused" if kept else "refused, but the object changed")
    return Finding("a second create is refused", False, "the second create succeeded")


def _race(store: Store, folder: str, rounds: int) -> Finding:
    barrier = Barrier(2)

    def create(name: str, data: bytes) -> bool:
        barrier.wait(timeout=60)
        try:
            store.put_new(name, data)
        except AlreadyExists:
            return store.get(name) == data
        return True

    bad = 0
    with ThreadPoolExecutor(2) as pool:
        for k in range(rounds):
            name = f"{folder}/race-{k:04d}"
            tries = {data: pool.submit(create, name, data) for data in (b"a" * 64, b"b" * 64)}
            winners = [data for data, future in tries.items() if future.result()]
            bad += winners != [store.get(name)]
    return Finding("of two racing creates one wins", bad == 0, f"{rounds - bad} of {rounds} races had one winner")


def _reads_back(store: Store, folder: str) -> Finding:
    name, data = f"{folder}/data", secrets.token_bytes(1 << 20)
    store.put(name, data)
    whole = store.get(name) == data
    part = store.get(name, 1000, 70_000) == data[1000:70_000]
    store.put(name, data[:100])
    held = whole and part and store.get(name) == data[:100] and store.head(name).nbytes == 100
    return Finding("reads see the last finished write, whole and in ranges", held, "yes" if held else "stale or wrong")


def _lists_in_order(store: Store, folder: str) -> Finding:
    names = _listed_names(folder)
    for name in names:
        store.put(name, b"x")
    try:
        listed = [info.name for info in store.list(f"{folder}/list")]
        after = [info.name for info in store.list(f"{folder}/list", start_after=sorted(names)[1])]
    except StoreError as error:
        return Finding("lists are complete and in order", False, str(error))
    held = listed == sorted(names) and after == sorted(names)[2:]
    return Finding("lists are complete and in order", held, "yes" if held else f"saw {len(listed)} of {len(names)}")


def _deletes(store: Store, folder: str) -> Finding:
    store.put(f"{folder}/gone-30", b"x")
    store.put(f"{folder}/gone-300", b"y")
    store.delete(f"{folder}/gone-30")
    store.delete(f"{folder}/gone-30")
    left = [info.name for info in store.list(folder) if "gone" in info.name]
    held = left == [f"{folder}/gone-300"]
    return Finding("a delete removes one object", held, "yes" if held else f"left: {len(left)}")
