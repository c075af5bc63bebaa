"""Commands on stores: serve, and store-check, which runs the conformance suite on a folder of a store in use."""

from __future__ import annotations

import argparse
import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress

from ..errors import InputError, InvalidName, PulseError
from ..store import Data, LocalStore, ObjectInfo, Store, open_store
from ..testing import StoreConformance
from .output import Console

DEFAULT_PORT = 8734


def serve(args: argparse.Namespace, console: Console) -> int:
    from ..store.server import FolderServer

    with FolderServer(args.folder, bind=args.bind, port=args.port) as server:
        console.result({"url": server.url, "folder": args.folder}, [f"{args.folder} is served at {server.url}"])
        threading.Event().wait()
    return 0


_TOO_LONG_HERE = {"test_the_longest_name"}
"""A folder's name comes on top."""


def store_check(args: argparse.Namespace, console: Console) -> int:
    store = open_store(args.store)
    if isinstance(store, LocalStore) and not store.root.is_dir():
        raise InputError(f"there is no folder {store.root}", hint="Check the path, or create the folder first.")
    findings = check(store)
    safe = all(held for _, held, _ in findings)
    lines = [
        f"{'ok  ' if held else 'FAIL'} {guarantee}{f': {seen}' * bool(seen)}" for guarantee, held, seen in findings
    ]
    lines.append(f"{args.store} is {'safe' if safe else 'NOT safe'} to publish to")
    names = ("guarantee", "held", "seen")
    facts = {"safe": safe, "findings": [dict(zip(names, each, strict=True)) for each in findings]}
    console.result(facts, lines)
    return 0 if safe else 1


def check(store: Store) -> list[tuple[str, bool, str]]:
    """(guarantee, whether it held, what was seen) of each test of the suite. Some S3-compatible servers ignore
    If-None-Match and let both of two creates succeed: there a second publisher could overwrite a version unseen.

    Its objects are removed by their names: lists may be what does not work. Raises StoreError if the store cannot be
    used at all.
    """
    suite = _Suite(store)
    names = [name for name in vars(StoreConformance) if name.startswith("test_") and name not in _TOO_LONG_HERE]
    findings = []
    try:
        suite.new_store().put("reachable", b"")
        for name in names:
            try:
                getattr(suite, name)()
                seen = ""
            except (AssertionError, PulseError) as error:
                seen = " ".join(str(error).split()) or type(error).__name__
            findings.append((name.removeprefix("test_").replace("_", " "), not seen, seen))
    finally:
        for written in sorted(suite.written):
            with suppress(InvalidName):  # a test tries such names, too
                store.delete(written)
    return findings


class _Suite(StoreConformance):
    many_objects = 103

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = f"pulse-store-check/{secrets.token_hex(8)}"
        self._folders = 0
        self.written = set[str]()

    def new_store(self) -> Store:
        self._folders += 1
        return _Folder(self._store, f"{self._root}/{self._folders}", self.written)


class _Folder:
    """A folder of a store as a store of its own, which notes what it has written."""

    def __init__(self, store: Store, folder: str, written: set[str]) -> None:
        self._store = store
        self._folder = folder
        self._written = written

    def _inside(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _writing(self, name: str) -> str:
        self._written.add(self._inside(name))
        return self._inside(name)

    def put(self, name: str, data: Data) -> None:
        self._store.put(self._writing(name), data)

    def put_new(self, name: str, data: bytes) -> None:
        self._store.put_new(self._writing(name), data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._store.get(self._inside(name), start, stop)

    def head(self, name: str) -> ObjectInfo:
        return self._own(self._store.head(self._inside(name)))

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        after = None if start_after is None else self._inside(start_after)
        return map(self._own, self._store.list(self._inside(folder), after))

    def delete(self, name: str) -> None:
        self._store.delete(self._inside(name))

    def _own(self, info: ObjectInfo) -> ObjectInfo:
        return info._replace(name=info.name.removeprefix(f"{self._folder}/"))
