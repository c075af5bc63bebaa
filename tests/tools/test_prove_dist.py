"""The proof of a release refuses what must not be released (`make dist` shows that it accepts what
may)."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import prove_dist

Members = dict[str, bytes]
KERNELS = "pulse_rl/_native/_kernels.abi3.so"
INFO = "pulse_rl-1.2.3.dist-info"


def sdist_members() -> Members:
    package = {"__init__.py": b'__version__ = "1.2.3"\n', "py.typed": b""}
    needed = dict.fromkeys([*prove_dist.NEEDED, "src/native/common/scan.cpp"], b"x")
    return needed | {f"src/pulse_rl/{name}": body for name, body in package.items()}


def wheel_members() -> Members:
    package = {
        n.removeprefix("src/"): b
        for n, b in sdist_members().items()
        if n.startswith("src/pulse_rl/")
    }
    metadata = (
        b"Version: 1.2.3\nRequires-Dist: numpy>=1.26\nRequires-Dist: torch>=2.4; extra == 'torch'\n"
    )
    return package | {KERNELS: b"x", f"{INFO}/METADATA": metadata, f"{INFO}/licenses/LICENSE": b"x"}


def check_sdist(folder: Path, members: Members, monkeypatch: pytest.MonkeyPatch) -> Members:
    monkeypatch.setattr(
        prove_dist, "tracked_files", lambda: set(sdist_members()) | {"tests/x.py", "docs/big.png"}
    )
    path = folder / "pulse_rl-1.2.3.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, body in members.items():
            entry = tarfile.TarInfo(f"pulse_rl-1.2.3/{name}")
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return prove_dist.check_sdist(path)


def check_wheel(folder: Path, members: Members) -> list[str]:
    path = folder / "pulse_rl-1.2.3-cp312-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return [prove_dist.lowest(r) for r in prove_dist.check_wheel(path, sdist_members())]


def test_a_good_pair_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_sdist(tmp_path, sdist_members(), monkeypatch) == sdist_members()
    assert check_wheel(tmp_path, wheel_members()) == ["numpy==1.26"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.pop("CMakeLists.txt"), "lacks"),
        (lambda m: m.pop("src/native/common/scan.cpp"), "no kernels"),
        (lambda m: m.update({"tests/x.py": b"x"}), "holds .'tests'"),
        (lambda m: m.update({"docs/big.png": bytes(200_000)}), "above 102,400 bytes"),
        (lambda m: m.update({"src/pulse_rl/secret.key": b"x"}), "git does not track"),
    ],
)
def test_sdists_that_are_refused(
    change: Callable[[Members], object],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = sdist_members()
    change(members)
    with pytest.raises(SystemExit, match=reason):
        check_sdist(tmp_path, members, monkeypatch)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.pop(KERNELS), "holds 0 builds"),
        (lambda m: m.update({"pulse_rl/_native/_kernels.cpython-311.so": b"x"}), "holds 2 builds"),
        (lambda m: m.pop("pulse_rl/py.typed"), "differ in .'pulse_rl/py.typed'"),
        (lambda m: m.update({"pulse_rl/__init__.py": b"y"}), "differ in .'pulse_rl/__init__.py'"),
        (lambda m: m.update({"tests/test_x.py": b"x"}), "differ in .'tests/test_x.py'"),
        (lambda m: m.update({f"{INFO}/METADATA": b"Version: 1.2.4\n"}), "another version"),
        (lambda m: m.pop(f"{INFO}/licenses/LICENSE"), "no license"),
    ],
)
def test_wheels_that_are_refused(
    change: Callable[[Members], object], reason: str, tmp_path: Path
) -> None:
    members = wheel_members()
    change(members)
    with pytest.raises(SystemExit, match=reason):
        check_wheel(tmp_path, members)


def test_a_clean_environment_has_no_compiler_and_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.setenv("PIP_TIMEOUT", "7")
    found = prove_dist.clean_variables(tmp_path)
    assert found["PATH"] == str(tmp_path)
    assert found["CC"] == found["CXX"]
    assert Path(found["CC"]).name == "false"
    assert "PYTHONPATH" not in found
    assert found["PIP_TIMEOUT"] == "7"
