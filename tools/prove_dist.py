"""Proves that others can install what `python -m build` made: python tools/prove_dist.py dist
[--golden FOLDER …]

1. The sdist holds what a build needs, only files that git tracks, and nothing big; the wheel holds
   the sdist's package, byte for byte, and one build of the kernels.
2. In a fresh environment outside of the checkout, without a compiler and without torch, the wheel
   installs from binary wheels only and does its work (tools/exercise.py): with the newest
   dependencies, and with the oldest that it allows.

Needs `packaging`. One line for each thing that held; the first that does not ends it with status 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_sdist_filename, parse_wheel_filename

HERE = Path(__file__).resolve().parent
NEEDED = (
    "CMakeLists.txt",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "docs/format.md",
    "docs/protocol.md",
    "pyproject.toml",
)
UNWANTED = (".ci", ".github", "benchmarks", "build", "dist", "examples", "runs", "tests", "tools")
MOST_SDIST_BYTES, MOST_MEMBER_BYTES, MOST_WHEEL_BYTES = 1 << 20, 100 << 10, 4 << 20
PACKAGES = ("src/pulse_rl/", "src/pulse_rl_command/")
COMPILERS = ("cc", "gcc", "g++", "clang", "clang++", "c++", "cmake", "ninja", "make", "ld")
KEPT_VARIABLES = (
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
)


def require(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"FAIL {what}")


def held(what: str) -> None:
    print(f"ok   {what}", flush=True)


def only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    require(
        len(found) == 1, f"{folder} holds {len(found)} files {pattern}: build into an empty folder"
    )
    return found[0]


def tracked_files() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=HERE.parent, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split("\0"))


def check_sdist(sdist: Path) -> dict[str, bytes]:
    """The sdist's members, by their path below its folder."""
    with tarfile.open(sdist) as archive:
        files = [m for m in archive.getmembers() if not m.isdir()]
        require(all(m.isfile() for m in files), f"{sdist.name} holds links")
        prefix = f"{sdist.name.removesuffix('.tar.gz')}/"
        require(
            all(m.name.startswith(prefix) for m in files),
            f"{sdist.name} holds files outside {prefix}",
        )
        members = {}
        for member in files:
            body = archive.extractfile(member)
            members[member.name.removeprefix(prefix)] = body.read() if body else b""
    missing = [name for name in NEEDED if name not in members]
    require(not missing, f"{sdist.name} lacks {missing}")
    require(
        any(n.startswith("src/native/") and n.endswith(".cpp") for n in members),
        f"{sdist.name} has no kernels",
    )
    unwanted = sorted({name.partition("/")[0] for name in members} & set(UNWANTED))
    require(not unwanted, f"{sdist.name} holds {unwanted}")
    big = [name for name, body in members.items() if len(body) > MOST_MEMBER_BYTES]
    require(not big, f"{sdist.name} holds files above {MOST_MEMBER_BYTES:,} bytes: {big}")
    require(
        sdist.stat().st_size <= MOST_SDIST_BYTES, f"{sdist.name} has {sdist.stat().st_size:,} bytes"
    )
    untracked = sorted(members.keys() - tracked_files() - {"PKG-INFO"})
    require(not untracked, f"{sdist.name} holds files that git does not track: {untracked}")
    held(
        f"{sdist.name}: {len(members)} files, {sdist.stat().st_size:,} bytes, all tracked, no "
        "tests, nothing big"
    )
    return members


def check_wheel(wheel: Path, sources: dict[str, bytes]) -> list[Requirement]:
    """The wheel's dependencies without extras."""
    with zipfile.ZipFile(wheel) as archive:
        members = {i.filename: archive.read(i) for i in archive.infolist() if not i.is_dir()}
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"
    package = {name: body for name, body in members.items() if not name.startswith(info)}
    kernels = [
        name
        for name in package
        if name.startswith("pulse_rl/_native/_kernels.") and name.endswith(".so")
    ]
    require(len(kernels) == 1, f"{wheel.name} holds {len(kernels)} builds of the kernels")
    expected = {
        n.removeprefix("src/"): body for n, body in sources.items() if n.startswith(PACKAGES)
    }
    del package[kernels[0]]
    differing = sorted(
        n for n in package.keys() | expected.keys() if package.get(n) != expected.get(n)
    )
    require(not differing, f"{wheel.name} and the sdist differ in {differing}")
    require(info + "licenses/LICENSE" in members, f"{wheel.name} has no license")
    require(
        wheel.stat().st_size <= MOST_WHEEL_BYTES, f"{wheel.name} has {wheel.stat().st_size:,} bytes"
    )
    metadata = BytesParser().parsebytes(members[info + "METADATA"])
    require(
        f'__version__ = "{metadata["Version"]}"'.encode() in expected["pulse_rl/__init__.py"],
        "another version",
    )
    held(
        f"{wheel.name}: {len(package)} files as in the sdist, {Path(kernels[0]).name}, "
        f"{wheel.stat().st_size:,} bytes"
    )
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def lowest(requirement: Requirement) -> str:
    """``numpy==1.26`` for ``numpy>=1.26``."""
    (bound,) = [s.version for s in requirement.specifier if s.operator == ">="]
    return f"{requirement.name}=={bound}"


def clean_variables(path: Path) -> dict[str, str]:
    """An environment in which nothing can be compiled and nothing of the checkout can be
    imported."""
    false = shutil.which("false") or "/bin/false"
    kept = {
        k: v
        for k, v in os.environ.items()
        if k in KEPT_VARIABLES or k.startswith("PIP_") or k.endswith("_proxy")
    }
    return {**kept, "PATH": str(path), "CC": false, "CXX": false, "PYTHONNOUSERSITE": "1"}


def prove_install(wheel: Path, pins: list[str], golden: list[Path], what: str) -> None:
    with tempfile.TemporaryDirectory(prefix="prove-wheel-") as made:
        folder = Path(made).resolve()
        require(not folder.is_relative_to(HERE.parent), f"{folder} lies in the checkout")
        home = folder / "venv"
        venv.create(home, with_pip=True)
        python, variables = home / "bin" / "python", clean_variables(home / "bin")
        there = [name for name in COMPILERS if shutil.which(name, path=variables["PATH"])]
        require(not there, f"{there} can be run")
        cwd = folder / "elsewhere"
        cwd.mkdir()

        def run(*args: object) -> str:
            done = subprocess.run(
                [python, *map(str, args)], cwd=cwd, env=variables, capture_output=True, text=True
            )
            require(
                done.returncode == 0,
                f"{what}: {' '.join(map(str, args))}\n{done.stdout}{done.stderr}",
            )
            return done.stdout

        run("-m", "pip", "install", "--quiet", "--only-binary", ":all:", wheel, *pins)
        run("-m", "pip", "check")
        installed = run("-m", "pip", "list", "--format", "freeze").split()
        require(not any(line.startswith("torch==") for line in installed), "torch was installed")
        others = [
            line
            for line in installed
            if line.partition("==")[0] not in ("pip", "setuptools", "pulse-rl")
        ]
        held(f"{what}: installed without a compiler and without torch: {', '.join(others)}")
        exercise = shutil.copy(HERE / "exercise.py", folder)
        print(run(exercise, *(["--golden", *golden] if golden else [])), end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/prove_dist.py", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="holds one sdist and one wheel for this interpreter"
    )
    parser.add_argument(
        "--golden",
        type=Path,
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="released formats that must decode",
    )
    args = parser.parse_args()
    sdist, wheel = (only(args.folder, pattern).resolve() for pattern in ("*.tar.gz", "*.whl"))
    require(
        parse_sdist_filename(sdist.name)[:2] == parse_wheel_filename(wheel.name)[:2], "two versions"
    )
    dependencies = check_wheel(wheel, check_sdist(sdist))
    golden = [folder.resolve() for folder in args.golden]
    prove_install(wheel, [], golden, "newest dependencies")
    # The oldest ones have binary wheels for the oldest Python only.
    if sys.version_info[:2] == (3, 11):
        prove_install(wheel, [lowest(r) for r in dependencies], golden, "oldest dependencies")
    print(f"{sdist.name} and {wheel.name} can be installed and used")


if __name__ == "__main__":
    main()
