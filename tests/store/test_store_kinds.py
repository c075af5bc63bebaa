"""What is peculiar to one kind of store: addresses, a folder's files, an unreachable server."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pulse_rl import LocalStore, Publisher, open_store
from pulse_rl.errors import InputError, NotFound, StoreError, StoreUnavailable
from tests.support.states import run_python
from tests.support.stores import names, unreachable_store


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for address in (
        tmp_path / "s",
        str(tmp_path / "s"),
        "s",
        "~/s",
        f"file://{tmp_path}/s",
        f"file://localhost{tmp_path}/s",
    ):
        store = open_store(address)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / "s"
        assert open_store(store) is store
    spaced = open_store(f"file://{tmp_path}/with%20space")
    assert isinstance(spaced, LocalStore)
    assert spaced.root == tmp_path / "with space"
    open_store("memory://").put("a", b"x")
    assert names(open_store("memory://"), "a") == []


@pytest.mark.parametrize("address", ["ftp://x/y", "file://host/x", "S4://x"])
def test_addresses_that_are_no_store(address: str) -> None:
    with pytest.raises(InputError):
        open_store(address)


def test_a_store_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError):
        open_store(tmp_path / "file")
    with pytest.raises(StoreError):
        open_store(tmp_path / "file" / "below")
    with pytest.raises((StoreError, InputError)):
        open_store("s3://bucket", no_such_option="x")


@pytest.mark.slow
def test_s3_is_configured_by_the_environment(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "AWS_ENDPOINT_URL": s3,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    one, two = open_store("s3://bucket/environment"), open_store("s3://bucket/environment/deeper")
    one.put("deeper/a", b"x")
    assert two.get("a") == b"x"
    assert names(two, "a") == []
    assert names(one, "deeper") == ["deeper/a"]


def test_an_unreachable_store_is_unavailable() -> None:
    store = unreachable_store()
    calls = [
        lambda: store.put("a", b"x"),
        lambda: store.put("a", iter([b"x"])),
        lambda: store.put_new("a", b"x"),
        lambda: store.get("a"),
        lambda: store.get("a", 0, 1),
        lambda: store.head("a"),
        lambda: list(store.list("a")),
        lambda: store.delete("a"),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert "s3://bucket/x" in str(caught.value)
    with pytest.raises(StoreUnavailable):
        Publisher(store, stream="s").publish({"w": np.zeros(1)})


def test_keys_do_not_appear_in_errors() -> None:
    with pytest.raises(StoreUnavailable) as caught:
        unreachable_store(access_key_id="AKIDSECRET", secret_access_key="SECRETKEY").get("a")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["", "/a", "a//b", "../a", "a/../b", "a/.", ".a", "a/.b", "a b", "a\\b", "a\0b", "ü"]
)
def test_a_bad_name_touches_no_file(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("kept/x", b"x")
    before = sorted(tmp_path.rglob("*"))
    calls = [
        lambda: store.put(name, b"y"),
        lambda: store.put_new(name, b"y"),
        lambda: list(store.list(name or "/")),
        lambda: store.delete(name),
    ]
    for call in calls:
        with pytest.raises(InputError):
            call()
    assert sorted(tmp_path.rglob("*")) == before


def files_below(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_half_written_files_are_never_listed(tmp_path: Path) -> None:
    """What a killed writer leaves is beside the objects, not among them."""
    store = LocalStore(tmp_path)
    seen = []

    def chunks() -> Iterator[bytes]:
        yield b"half"
        seen.extend(names(store, "a"))
        with pytest.raises(NotFound):
            store.head("a/b")
        assert len(files_below(tmp_path)) == 1
        yield b" and half"

    store.put("a/b", chunks())
    assert seen == []
    assert store.get("a/b") == b"half and half"
    assert files_below(tmp_path) == ["a/b"]


def test_what_a_killed_writer_left_is_swept_a_day_later(tmp_path: Path) -> None:
    LocalStore(tmp_path).put("a", b"x")
    aside = tmp_path / ".unfinished"
    for name, age in (
        (".old.abcd_123", 2 * 86400),
        (".fresh.abcd_123", 60),
        (".bashrc", 9e6),
        ("old.txt", 9e6),
    ):
        (aside / name).write_bytes(b"half")
        os.utime(aside / name, (time.time() - age,) * 2)
    reader = LocalStore(tmp_path)
    assert reader.get("a") == b"x"
    assert len(list(aside.iterdir())) == 4, "a reader writes nothing"
    reader.put("b", b"y")
    assert sorted(p.name for p in aside.iterdir()) == [".bashrc", ".fresh.abcd_123", "old.txt"]


def test_nothing_is_swept_or_written_through_a_link(tmp_path: Path) -> None:
    """Opening a store once deleted the dotfiles of a home folder that its co-writer had linked
    to."""
    home, root = tmp_path / "home", tmp_path / "store"
    home.mkdir()
    root.mkdir()
    (home / ".old.abcd_123").write_bytes(b"precious")
    os.utime(home / ".old.abcd_123", (1, 1))
    (root / ".unfinished").symlink_to(home)
    store = LocalStore(root)
    for write in (lambda: store.put("a", b"x"), lambda: LocalStore(root).put_new("a", b"x")):
        with pytest.raises(StoreError, match="is a link"):
            write()
    assert [p.name for p in home.iterdir()] == [".old.abcd_123"]


def test_a_link_to_itself_is_a_store_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("s/a", b"x")
    (tmp_path / "s" / "b").symlink_to("b")
    for read in (store.get, store.head, lambda _: names(store, "s")):
        with pytest.raises(StoreError, match="s/b") as caught:
            read("s/b")
        assert not isinstance(caught.value, NotFound)


def test_what_is_no_file_is_an_error_and_never_waited_for(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("s/a", b"x")
    os.mkfifo(tmp_path / "s" / "b")
    (tmp_path / "s" / "c").mkdir()
    for read in (store.get, store.head):
        with pytest.raises(StoreError, match="not a regular file"):
            read("s/b")
        with pytest.raises(NotFound):
            read("s/c")
    assert [info.name for info in store.list("s")] == ["s/a"]


@pytest.mark.parametrize("stray", [".nfs0001", ".DS_Store", "notes~", "with space"])
def test_files_that_are_no_objects_do_not_stop_a_list(tmp_path: Path, stray: str) -> None:
    """A network file system keeps deleted files that are still open under names of its own."""
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    (tmp_path / "a" / stray).write_bytes(b"")
    assert names(store, "a") == ["a/b"]


def test_objects_are_readable_by_other_users_as_the_umask_says(tmp_path: Path) -> None:
    """Trainer and threads often run under different users on one shared folder."""
    before = os.umask(0o022)
    try:
        store = LocalStore(tmp_path)
        store.put("a/put", b"x")
        store.put_new("a/new", b"x")
    finally:
        os.umask(before)
    assert {
        name: oct(stat.S_IMODE((tmp_path / name).stat().st_mode)) for name in ("a/put", "a/new")
    } == {"a/put": "0o644", "a/new": "0o644"}


FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from pulse_rl import LocalStore, Publisher, State, verify_stream
from pulse_rl.errors import NotFound, StoreFull
from pulse_rl.follow.checkpoint import load, save

def limit(nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

def full(call):
    try:
        call()
    except StoreFull as error:
        assert "space" in str(error) + error.hint
        return
    raise SystemExit("the disk was not full")

folder = Path(sys.argv[1])
store = LocalStore(folder / "store")
store.put("a/old", b"old")
state = {"w": np.zeros(50_000, np.float32)}
save(folder / "model.safetensors", State.of(state))
publisher = Publisher(store, stream="s")
publisher.publish(state)
limit(10_000)
full(lambda: store.put("a/new", bytes(20_000)))
full(lambda: store.put("a/old", [bytes(5000)] * 4))
full(lambda: store.put_new("a/new", bytes(20_000)))
full(lambda: save(folder / "model.safetensors", State.of({"w": np.ones(50_000)})))
full(lambda: publisher.publish({"w": np.random.default_rng(0).random(50_000, np.float32)}))
limit(resource.RLIM_INFINITY)
assert store.get("a/old") == b"old"
assert [i.name for i in store.list("a")] == ["a/old"]
assert not load(folder / "model.safetensors")[0].read("w").any()
assert list((folder / "store" / ".unfinished").iterdir()) == []
assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "store"]
assert publisher.publish({"w": np.ones(50_000, np.float32)}).version == 1
assert [r.problems for r in verify_stream(store, "s")] == [(), ()]
print("fine")
"""


@pytest.mark.slow
def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The file size limit stands in for it; both end in the same error of the system call."""
    done = run_python(FULL_DISK, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.slow
def test_a_poll_reads_no_folder_that_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle poll once walked and sorted all versions there ever were."""
    store = LocalStore(tmp_path)
    for k in range(50):
        store.put(f"s/versions/{k:03d}", b"x")
    long_ago = time.time() - 60
    os.utime(tmp_path / "s" / "versions", (long_ago, long_ago))
    assert len(names(store, "s/versions")) == 50
    reads: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: reads.append(str(path)) or scandir(path))
    assert names(store, "s/versions", "s/versions/048") == ["s/versions/049"]
    assert names(store, "s/versions", "s/versions/049") == []
    assert reads == []
    store.put("s/versions/050", b"x")
    assert names(store, "s/versions", "s/versions/049") == ["s/versions/050"]
    store.put("s/versions/051", b"x")  # in the same tick of the file system's clock, perhaps
    assert names(store, "s/versions", "s/versions/049") == ["s/versions/050", "s/versions/051"]
    store.delete("s/versions/050")
    assert names(store, "s/versions", "s/versions/049") == ["s/versions/051"]
    assert reads


def test_nothing_is_written_through_a_linked_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "store" / "s").mkdir(parents=True)
    (tmp_path / "store" / "s" / "workers").symlink_to(home)
    store = LocalStore(tmp_path / "store")
    for write in (store.put, store.put_new):
        with pytest.raises(StoreError, match="is a link"):
            write("s/workers/a", b"x")
    assert list(home.iterdir()) == []
    (tmp_path / "linked").symlink_to(tmp_path / "store")
    LocalStore(tmp_path / "linked").put("s/a", b"x")  # the root is the caller's word
