"""Exercises an installed pulse-rl with numpy alone: patches, a store, a follower, and formats of
earlier releases.

python tools/exercise.py [--golden tests/golden/format-*]

Runs the command `pulse` of the interpreter's own environment, as a user would; cibuildwheel runs it
on every wheel that it builds. One line for each thing that held; the first that does not ends it
with status 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ELEMENTS = 1 << 20
CHANGE_EVERY = 200
MOST_SHARE = 0.02  # of a full state: what a patch may cost when 0.5% of the elements change

#: Name → (safetensors dtype, array of its bits).
Tensors = dict[str, tuple[str, npt.NDArray[Any]]]


def states() -> tuple[Tensors, Tensors]:
    """Two states by integer arithmetic, the same on any machine: BF16 weights and an FP32 norm,
    little-endian."""
    k = np.arange(ELEMENTS, dtype=np.uint32)
    weights = (0x3B00 + (k * np.uint32(2654435761) >> 20) % 1024).astype("<u2")
    norm = np.full(1024, 0x3F800000, "<u4")
    moved = weights.copy()
    moved[::CHANGE_EVERY] += np.uint16(1)
    return (
        {"layer.weight": ("BF16", weights.reshape(1024, -1)), "norm.weight": ("F32", norm)},
        {"layer.weight": ("BF16", moved.reshape(1024, -1)), "norm.weight": ("F32", norm)},
    )


def write_checkpoint(path: Path, tensors: Tensors) -> None:
    """A safetensors file, written from its specification rather than by the package under test."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": array.shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensor_bytes(path: Path) -> dict[str, bytes]:
    """Name → bytes of each tensor of a safetensors file."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: raw[start + e["data_offsets"][0] : start + e["data_offsets"][1]]
        for name, e in header.items()
    }


def pulse(*args: object, status: int = 0) -> Any:
    """The JSON that a `pulse` command of this environment prints."""
    command = [str(Path(sys.executable).with_name("pulse")), *map(str, args), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    require(
        done.returncode == status,
        f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}",
    )
    return json.loads(done.stdout)


def require(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"FAIL {what}")


def held(what: str) -> None:
    print(f"ok   {what}", flush=True)


def check_import() -> None:
    before = set(sys.modules)
    import pulse_rl
    import pulse_rl.cli

    loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
    require("torch" not in loaded, "importing pulse_rl imports torch")
    place = Path(pulse_rl.__file__).resolve()
    require(
        place.is_relative_to(Path(sys.prefix).resolve()),
        f"pulse_rl comes from {place}, not from {sys.prefix}",
    )
    require(
        pulse_rl.__version__ == version("pulse-rl"),
        "the package's version is not its distribution's",
    )
    printed = subprocess.run(
        [str(Path(sys.executable).with_name("pulse")), "--version"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    require(printed == f"pulse {pulse_rl.__version__}", f"pulse --version prints {printed!r}")
    held(
        f"{printed} on Python {sys.version.split()[0]}; torch "
        f"{'not imported' if find_spec('torch') else 'absent'}"
    )


def check_patch(folder: Path) -> None:
    old, new, patch, out = (
        folder / n for n in ("old.safetensors", "new.safetensors", "patch", "out.safetensors")
    )
    made = pulse("diff", old, new, "-o", patch)
    require(
        made["changed"] == -(-ELEMENTS // CHANGE_EVERY), f"diff found {made['changed']} changes"
    )
    require(made["patch_bytes"] == patch.stat().st_size, "diff does not know its patch's size")
    require(
        made["patch_bytes"] < MOST_SHARE * made["dense_bytes"],
        f"a patch has {made['patch_bytes']} bytes",
    )
    held(
        f"pulse diff: {made['patch_bytes']:,} bytes for {made['dense_bytes']:,}, "
        f"{made['changed']:,} changes"
    )
    pulse("apply", old, patch, "-o", out)
    require(tensor_bytes(out) == tensor_bytes(new), "apply does not give the new tensors")
    roots = [pulse("digest", file)["root"] for file in (old, new, out)]
    require(roots[1] == roots[2] != roots[0], f"digests of old, new and applied: {roots}")
    held(f"pulse apply: every byte is the new one's; pulse digest agrees: {roots[2][:16]}…")
    refused = pulse("apply", new, patch, "-o", folder / "twice.safetensors", status=1)
    require(refused["error"] == "wrong_base", f"a patch on a wrong base: {refused}")
    held("pulse apply: refuses a patch for another base")


def check_stream(folder: Path) -> None:
    store, out = folder / "store", folder / "followed"
    for number, name in enumerate(("old", "new")):
        file = folder / f"{name}.safetensors"
        published = pulse("publish", file, store, "--stream", "policy")
        followed = pulse("follow", store, "--stream", "policy", "--out", out, "--once")
        require(
            published["version"] == followed["version"] == number,
            f"version {number}: {published}, {followed}",
        )
        require(
            tensor_bytes(out / "model.safetensors") == tensor_bytes(file),
            f"follow does not give {name}",
        )
        require(
            followed["root"] == pulse("digest", file)["root"],
            f"follow has another root than {name}",
        )
        held(
            f"pulse publish, pulse follow --once: version {number}, "
            f"{followed['payload_bytes']:,} bytes fetched"
        )
    require(
        followed["payload_bytes"] < MOST_SHARE * published["dense_bytes"],
        "the follower fetched no patch",
    )
    verdict = pulse("verify", store, "--stream", "policy")
    require(verdict["ok"] and verdict["versions"] == 2, f"verify: {verdict}")
    payload = next((store / "policy" / "payloads").glob("*.patch"))
    payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    verdict = pulse("verify", store, "--stream", "policy", status=1)
    require(not verdict["ok"], f"verify of a damaged patch: {verdict}")
    held("pulse verify: both versions hold; a damaged patch is found")


def check_golden(golden: Path, folder: Path) -> None:
    folder.mkdir()
    root = pulse("digest", golden / "new.safetensors")["root"]
    patches = sorted(golden.glob("*.patch"))
    require(bool(patches), f"{golden} has no patches")
    for patch in patches:
        out = folder / f"{patch.stem}.safetensors"
        applied = pulse("apply", golden / "old.safetensors", patch, "-o", out)
        require(applied["root"] == root, f"{patch} leads to {applied['root']}, not to {root}")
        require(
            tensor_bytes(out) == tensor_bytes(golden / "new.safetensors"),
            f"{patch} gives other bytes",
        )
    followed = pulse(
        "follow", golden / "store", "--stream", "golden", "--out", folder / "followed", "--once"
    )
    require(
        followed["root"] == root, f"the golden store leads to {followed['root']}, not to {root}"
    )
    held(f"{golden.name}: {', '.join(p.stem for p in patches)} and a store decode to {root[:16]}…")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/exercise.py", description=__doc__)
    parser.add_argument(
        "--golden",
        type=Path,
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="released formats that must decode",
    )
    args = parser.parse_args()
    check_import()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, tensors in zip(("old", "new"), states(), strict=True):
            write_checkpoint(folder / f"{name}.safetensors", tensors)
        check_patch(folder)
        check_stream(folder)
        for golden in args.golden:
            check_golden(golden.resolve(), folder / golden.name)


if __name__ == "__main__":
    main()
