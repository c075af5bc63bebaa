"""Durable files where the platform or the file system lacks what they need: one typed error that
names it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pulse_rl import LocalStore
from pulse_rl.errors import StoreError
from tests.support.states import run_python

WRITERS: dict[str, Callable[[Path], None]] = {
    "put": lambda folder: LocalStore(folder).put("s/file", b"x"),
    "put_new": lambda folder: LocalStore(folder).put_new("s/file", b"x"),
}
writers = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


@writers
def test_a_writer_works_here(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()]


@writers
@pytest.mark.parametrize("name", ["fchmod", "link", "O_DIRECTORY"])
def test_a_platform_without_posix_is_told(
    write: Callable[[Path], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, name)
    with pytest.raises(
        StoreError, match=rf"cannot (write|create) .* this platform has no os\.{name}\n"
    ) as error:
        write(tmp_path)
    assert "Linux and macOS" in error.value.hint
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_local_store_can_be_read_without_posix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalStore(tmp_path).put("s/file", b"x")
    for name in ("fchmod", "link", "O_DIRECTORY"):
        monkeypatch.delattr(os, name)
    store = LocalStore(tmp_path)
    assert store.get("s/file") == b"x"
    assert [info.name for info in store.list("s")] == ["s/file"]


@pytest.mark.slow
def test_importing_needs_no_posix() -> None:
    done = run_python(
        "import os\n"
        "for name in ('fchmod', 'link', 'O_DIRECTORY', 'sched_getaffinity'): delattr(os, name)\n"
        "import pulse_rl, pulse_rl.cli\n"
        "from pulse_rl._util.threads import default_threads\n"
        "print(default_threads() == os.cpu_count())"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    "code", [errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK, errno.EACCES]
)
def test_a_file_system_without_hard_links_is_told(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another failure, as that of access, is not blamed on links."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    other = code == errno.EACCES
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError) as error:
        LocalStore(tmp_path).put_new("s/file", b"x")
    assert ("Permission denied" if other else "refuses hard links") in str(error.value)
    assert ("hard links" not in str(error.value) + error.value.hint) == other
    assert other or "object store" in error.value.hint
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    LocalStore(tmp_path).put("s/file", b"x")
