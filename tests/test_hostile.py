"""The corpus of hostile files (tests/hostile/): every way in refuses each with a typed error, in
little memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from pulse_rl import (
    MemoryStore,
    Publisher,
    PulseError,
    State,
    Subscriber,
    state_root,
    verify_stream,
)
from pulse_rl.store import Data
from tests.hostile import make, pieces
from tests.support.checkpoints import entry, file_of
from tests.support.manifests import show_next
from tests.support.states import LIMIT_MEMORY, run_python, taken

CORPUS = Path(__file__).parent / "hostile"

#: What all files of a kind together may allocate. Patches: twice the cap of a header (128 MiB
#: plain, decoded and joined), and some for Python's own pools. A file that gets what it claims
#: needs a thousand times more.
SPARE_BYTES = {"patch": 448 << 20, "safetensors": 64 << 20, "json": 64 << 20}


def files(kind: str) -> list[Path]:
    return sorted(CORPUS.glob(f"*.{kind}"))


def expect_typed(path: Path, act: Callable[[], object]) -> str | None:
    """What is wrong with how ``act`` refuses a file; None where it is right."""
    try:
        act()
    except PulseError as error:
        return None if error.hint and str(error) else f"{path.name}: an error without words"
    except BaseException as error:
        return f"{path.name}: {type(error).__name__}: {str(error)[:200]}"
    return f"{path.name} was accepted"


def stream(head: int = 0) -> MemoryStore:
    """A stream whose version 0 is the base of the corpus, and ``head`` honest versions on."""
    store = MemoryStore()
    for name, data in published(head).items():
        store.put(name, data)
    return store


@cache
def published(head: int) -> dict[str, bytes]:
    store = MemoryStore()
    publisher = Publisher(store, stream="policy", threads=1, anchor_ratio=1e9)
    for version in range(head + 1):
        publisher.publish(pieces.base() if version % 2 == 0 else pieces.changed())
    return {info.name: store.get(info.name) for info in store.list("policy")}


def named_by(store: MemoryStore, path: Path) -> None:
    """Puts a file into the stream as all that leads to version 1."""
    if path.suffix == ".json":
        store.put("policy/versions/000000000001.json", path.read_bytes())
    else:
        show_next(store, "policy", path.suffix[1:], path.read_bytes(), state_root(pieces.changed()))


def through_sync(path: Path) -> None:
    """A worker at version 0 meets the file in the store, and rests where it was; so does a
    newcomer, who reads more. A manifest is passed over, unless it is asked for."""
    store = stream()
    worker = Subscriber(store, stream="policy", threads=1)
    assert taken(worker)
    named_by(store, path)
    newest = None if path.suffix != ".json" else 1
    if path.suffix == ".safetensors":
        wrong = expect_typed(path, Subscriber(store, stream="policy", threads=1).sync)
        assert wrong is None, f"a newcomer: {wrong}"
    if path.suffix == ".json":
        newcomer = Subscriber(store, stream="policy", threads=1)
        newcomer.sync()
        assert (newcomer.version, newcomer.root) == (0, worker.root)
        assert worker.sync() is None
    try:
        worker.sync(target=newest)
    finally:
        assert worker.status == "ready"
        assert worker.version == 0
        assert worker.root == state_root(pieces.base())


WAYS: dict[str, dict[str, Callable[[Path], object]]] = {
    "patch": {"sync": through_sync},
    "safetensors": {"load": State.of, "sync": through_sync},
    "json": {"sync": through_sync},
}


def refuse_all(kind: str, way: str) -> list[str]:
    """What went wrong with the files of a kind, by one way in; run under a memory limit by the
    test."""
    wrong = [expect_typed(path, lambda path=path: WAYS[kind][way](path)) for path in files(kind)]  # type: ignore[misc]
    return [text for text in wrong if text]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(WAYS))
def test_every_hostile_file_is_refused_in_bounded_memory(kind: str) -> None:
    """In a process of its own, native code included: more than the bound is a MemoryError, which is
    not typed."""
    code = LIMIT_MEMORY + (
        "import sys; sys.path[:0] = sys.argv[3:]\n"
        "from tests import test_hostile\n"
        "limit_memory(test_hostile.SPARE_BYTES[sys.argv[1]])\n"
        "for way in test_hostile.WAYS[sys.argv[1]]:\n"
        "    for text in test_hostile.refuse_all(sys.argv[1], way):\n"
        "        print(way, text)\n"
        "print('done')\n"
    )
    done = run_python(code, kind, "", str(Path(__file__).parents[1]), timeout=100)
    assert done.stdout == "done\n", done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("path", files("links"), ids=lambda path: path.stem)
def test_false_links_are_survived(path: Path) -> None:
    """Links are hints: a newcomer and a worker reach the head without them, and verify finds
    nothing wrong."""
    store = stream(head=12)
    for line in path.read_text().splitlines():
        store.put(f"policy/links/{line}", b"0" * 64 + b" 1\n")
    worker = Subscriber(store, stream="policy", threads=1)
    worker.sync(1)
    for subscriber in (worker, Subscriber(store, stream="policy", threads=1)):
        subscriber.sync()
        assert (subscriber.version, subscriber.root) == (12, state_root(pieces.base()))
    assert all(report.ok for report in verify_stream(store, "policy", threads=1))


class Names(MemoryStore):
    """A store that lists names which no well-behaved store would hold."""

    def __init__(self, inner: MemoryStore, names: list[str]) -> None:
        super().__init__()
        self._objects, self._names = inner._objects, inner._names
        self._strange = names

    def put(self, name: str, data: Data) -> None:
        raise AssertionError(f"{name} was written")

    def list(self, folder: str, start_after: str | None = None):  # type: ignore[no-untyped-def]
        found = list(super().list(folder, start_after))
        first = next(iter(super().list("policy")))
        found += [first._replace(name=f"{folder}/{name}") for name in self._strange]
        return iter(
            sorted(info for info in found if start_after is None or info.name > start_after)
        )


def test_names_of_a_hostile_listing_lead_nowhere() -> None:
    strange = [
        "../../etc/passwd",
        "000000000009.json/../x",
        "",
        "0",
        "٠٠٠٠٠٠٠٠٠٠٠١.json",
        "000000000001.json\n",
        "x" * 5000,
    ]
    store = Names(stream(head=10), strange)
    subscriber = Subscriber(store, stream="policy", threads=1)
    subscriber.sync()
    assert subscriber.version == 10


@pytest.mark.slow
def test_the_corpus_is_what_its_program_writes() -> None:
    """By name: compressed bytes may differ between versions of zstd, and are kept as they were."""
    assert {path.name for kind in (*WAYS, "links") for path in files(kind)} == {
        title for title, _ in make.corpus()
    }
    assert sum(len(files(kind)) for kind in (*WAYS, "links")) > 200


def test_the_same_files_unharmed_are_accepted(tmp_path: Path) -> None:
    """What the corpus is made from is good, so that each file is refused for what is wrong with
    it."""
    honest = tmp_path / "honest.patch"
    honest.write_bytes(pieces.honest())
    store = stream()
    named_by(store, honest)
    subscriber = Subscriber(store, stream="policy", threads=1)
    subscriber.sync()
    assert subscriber.root == state_root(pieces.changed())
    good = tmp_path / "good.safetensors"
    good.write_bytes(file_of({"a": entry("BF16", [4], [0, 8])}, bytes(8)))
    assert State.of(good).elements == 4
