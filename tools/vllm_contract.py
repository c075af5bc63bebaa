"""Unpacks of vLLM's wheels what tests/integrations/vllm/test_contract.py needs: some 20 files of a
wheel of hundreds of MB, read in ranges from where pip would download it.

usage: python tools/vllm_contract.py [VERSION ...]

They come to build/vllm-contract/VERSION. The files that the test runs have the SHA-256 that is
noted here, if the version is one of these; the others are only read. Exit status 1: not all could
be had.
"""

from __future__ import annotations

import ast
import io
import json
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
FOLDER = CHECKOUT / "build" / "vllm-contract"
ENGINE = CHECKOUT / "src" / "pulse_rl" / "engines" / "vllm"
#: The oldest and the newest that pyproject.toml admits, and those between that changed something;
#: with the digest of what is run of each.
VERSIONS = {
    "0.26.0": "b89626bd5f49866c6f0104e56249e62ac369756f6a5a15febef0950a96d3c62e",
    "0.28.0": "d423b5d13d024e909608576a0518feb9094a7c872bceac93607fdda476e4a404",
    "0.32.0": "54ce0b352e5f4b508867b15595ed5a94110590eaeca34f429ba4a4b90109f122",
    "0.33.0": "a8c8eaec9fcc0ad3783bba1a0d029f22251aae5ea25395644cab55e60ad50d2d",
}
#: What the test runs.
RUN = [
    f"vllm/distributed/weight_transfer/{n}.py" for n in ("__init__", "base", "clients", "factory")
]
#: Who calls an engine.
WORKER = "vllm/v1/worker/gpu_worker.py"


def imported() -> list[tuple[str, str]]:
    """What the engine's side imports of vLLM: module and name."""
    found = set()
    for file in ENGINE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("vllm."):
                found |= {(str(node.module), alias.name) for alias in node.names}
    return sorted(found)


def wanted() -> set[str]:
    """The files, of which a wheel has those that there are."""
    modules = {name for module, each in imported() for name in (module, f"{module}.{each}")}
    places = [module.replace(".", "/") for module in modules]
    return {*RUN, WORKER, *(f"{p}{end}" for p in places for end in (".py", "/__init__.py"))}


class Ranges(io.RawIOBase):
    """A file behind HTTP, of which only what is read is fetched."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        self._size = int(self._get(0, 0)[1].rpartition("/")[2])

    def _get(self, first: int, last: int) -> tuple[bytes, str]:
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            if answer.status != 206:
                raise OSError("the server sends no ranges")
            return answer.read(), answer.headers["Content-Range"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        last = min(self._at + len(buffer), self._size) - 1
        if last < self._at:
            return 0
        data, _ = self._get(self._at, last)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def address(version: str) -> str:
    """Where pip finds the wheel."""
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--quiet"]
    asked = [sys.executable, "-m", "pip", "install", *options, "--report", "-", f"vllm=={version}"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=100, check=True)
    return str(json.loads(said.stdout)["install"][0]["download_info"]["url"])


def digest(folder: Path) -> str:
    """Of what the test runs."""
    return sha256(
        b"".join(sha256((folder / name).read_bytes()).digest() for name in RUN)
    ).hexdigest()


def unpack(version: str) -> str:
    """Why it could not be done; "" if it was, now or before."""
    folder, part = FOLDER / version, FOLDER / f"{version}.part"
    pinned = VERSIONS.get(version, "")
    try:
        names = wanted()
        noted = folder / "wanted.txt"
        if not noted.exists() or noted.read_text().split() != sorted(names):
            with zipfile.ZipFile(io.BufferedReader(Ranges(address(version)), 1 << 16)) as wheel:
                for name in sorted(names & set(wheel.namelist())):
                    wheel.extract(name, part)
            (part / noted.name).write_text("\n".join(sorted(names)))
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        if pinned and digest(folder) != pinned:
            shutil.rmtree(folder)
            return f"vLLM {version}: other files than were seen before"
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, zipfile.BadZipFile) as e:
        return f"vLLM {version}: {type(e).__name__}"
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return ""


def main(versions: list[str]) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(4) as threads:
        missing = [said for said in threads.map(unpack, versions) if said]
    print("\n".join(missing) or f"unpacked: vLLM {', '.join(versions)}")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(VERSIONS)))
