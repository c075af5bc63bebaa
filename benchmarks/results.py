"""The logs in benchmarks/results/: figures of the docs, with their command, machine, date and
revision.

A log is JSON lines: the first says how the rest was made (`save`). ``python -m docs.make_evidence``
draws what docs/evidence.md shows from these files alone.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """In generic words: the processor's name, cores, memory in GB, operating system, Python."""
    cpu = platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        cpu = next(
            (
                s.partition(":")[2].strip()
                for s in info.read_text().splitlines()
                if "model name" in s
            ),
            cpu,
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(memory),
        "system": platform.system(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[1], 1),
    }


def revision() -> str:
    """The commit of this checkout, with "+" where files differ from it."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=here, check=False, capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "../src", ".", ":!results")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def save(name: str, command: str, rows: Iterable[dict[str, Any]], **facts: Any) -> Path:
    """Writes the log ``name``: a line of how it was made, with ``facts``, then the rows."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    about = {"command": command, "date": day, "revision": revision(), "machine": machine(), **facts}
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [about, *rows]))
    return path


def load(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(How it was made, the rows)."""
    about, *rows = [
        json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()
    ]
    return about, rows
