"""Runs and studies for tests of reports and plans: events as `JsonLines` writes them, and a study's
JSON."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

START = 1.79e9
STEP = 50.0
PARAMETERS = 7_000_000_000
DENSITY = 0.01
PATCH_BYTES = 63_000_000

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=alert(1)><!-- "
    "{{script}} & \u2028 \ud800"
)
"""What a name must not be able to do."""


def published(
    version: int, *, stream: str = "policy", time: float | None = None, **changed: Any
) -> dict[str, Any]:
    return {
        "event": "published",
        "time": START + STEP * version if time is None else time,
        "stream": stream,
        "version": version,
        "root": "0" * 64,
        "elements": PARAMETERS,
        "changed": round(DENSITY * PARAMETERS) if version else None,
        "dense_bytes": 2 * PARAMETERS,
        "patch_bytes": PATCH_BYTES if version else 0,
        "anchor_bytes": 0 if version else 2 * PARAMETERS,
        "seconds": 4.0,
        "phases": {"resume": 0.1, "build": 3.0, "upload": 0.7, "commit": 0.1},
        "metadata": {"step": version, "reward": 0.5 + version / 1000},
    } | changed


def synced(
    version: int, previous: int | None, *, lag: float = 3.0, stream: str = "policy", **changed: Any
) -> Any:
    return {
        "event": "synced",
        "time": START + STEP * version + lag,
        "stream": stream,
        "version": version,
        "previous": previous,
        "root": "0" * 64,
        "links": ["the patch"],
        "fetched_bytes": PATCH_BYTES,
        "seconds": 2.0,
        "lag_seconds": lag,
        "phases": {"plan": 0.1, "fetch": 1.0, "apply": 0.8},
    } | changed


def write(path: Path, events: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def write_run(folder: Path, versions: int, *, workers: int = 2, stream: str = "policy") -> Path:
    """A run in which every worker takes every version."""
    write(folder / "events-trainer.jsonl", [published(v, stream=stream) for v in range(versions)])
    for worker in range(workers):
        events = []
        for v in range(versions):
            events.append(synced(v, v - 1 if v else None, lag=3.0 + worker, stream=stream))
            done = START + STEP * v + 3.1 + worker
            events.append(
                {"event": "applied", "time": done, "stream": stream, "version": v, "seconds": 0.08}
            )
        write(folder / f"events-worker-{worker}.jsonl", events)
    return folder


STUDY: dict[str, Any] = {
    "parameters": 1_000_000,
    "dense_bytes": 2_000_000,
    "rows": [
        {"k": 8, "sparsity": 0.98, "bytes_per_changed": 0.7, "bytes_per_changed_zstd": 2.5},
        {"k": 1, "sparsity": 0.99, "bytes_per_changed": 0.5, "bytes_per_changed_zstd": None},
    ],
}
"""The least that a plan needs of a study; k = 1 is not the first row."""


def quantised_too(study: dict[str, Any]) -> dict[str, Any]:
    """The same with FP8 states of half the patches."""
    ks = [row["k"] for row in study["rows"]]
    kinds = [
        {"kind": kind, "k": k, "sparsity": s}
        for kind, s in (("F8_E4M3", 0.999), ("scales", 0.25))
        for k in ks
    ]
    rows = [row | {"bytes": row["bytes"] / 2} for row in study["rows"]]
    return study | {"quantised": study | {"kinds": kinds, "rows": rows}}


def study(
    ks: tuple[int, ...] = (1, 2, 4, 8, 16, 32), *, name: str = "layers.0.mlp.weight"
) -> dict[str, Any]:
    """A study with one tensor of each of two layer types, in the shape that ``pulse study --json``
    prints."""
    sparsity = {k: 0.99 - 0.002 * k**0.5 for k in ks}
    rows = [
        {
            "k": k,
            "pairs": 40 - k,
            "elements": PARAMETERS,
            "changed": (1 - sparsity[k]) * PARAMETERS,
            "sparsity": sparsity[k],
            "sparsity_min": sparsity[k] - 0.002,
            "sparsity_max": sparsity[k] + 0.001,
            "untouched": sparsity[k] - 0.001 * (k - 1),
            "coded_pairs": 3,
            "bytes": 0.9 * (1 - sparsity[k]) * PARAMETERS,
            "bytes_per_changed": 0.9,
            "bytes_per_changed_zstd": 2.8,
            "entropy_bound": 0.88,
            "times_bound": 1.02,
        }
        for k in ks
    ]
    extremes = {"sparsity_min": 0.97, "sparsity_max": 0.995}
    kinds = [("mlp", 0.99), ("norms", 0.9995)]
    return {
        "format": "pulse.study.1",
        "source": "checkpoints",
        "dtype": "BF16",
        "dtypes": {"BF16": PARAMETERS},
        "parameters": PARAMETERS,
        "dense_bytes": 2 * PARAMETERS,
        "states": [f"step {i}" for i in range(40)],
        "rows": rows,
        "layers": [
            {
                "layer": layer,
                "k": k,
                "elements": 10,
                "changed": 1.0,
                "sparsity": s - 0.001 * k,
                **extremes,
            }
            for layer, s in kinds
            for k in ks
        ],
        "tensors": [
            {
                "name": name,
                "layer": layer,
                "dtype": "BF16",
                "shape": [5, 2],
                "k": k,
                "elements": 10,
                "changed": 1.0,
            }
            | {"sparsity": s, **extremes}
            for layer, s in kinds
            for k in ks
        ],
        "pairs": [
            {"k": k, "old": i, "new": i + k, "changed": 7e7, "sparsity": 0.99}
            for k in ks
            for i in range(40 - k)
        ],
        "history": {
            "first": 20,
            "steps": 20,
            "changed": 200_000,
            "ages": [
                {"from": a, "to": b, "share": 0.1}
                for a, b in ((1, 1), (2, 2), (3, 4), (5, 8), (9, None))
            ],
            "not_yet": 0.5,
            "within_8": 0.4,
            "coded_steps": 8,
            "entropy_bound": 0.88,
            "entropy_bound_with_history": 0.8,
            "bytes_per_changed_history": 0.85,
            "bytes_per_changed_auto": 0.9,
        },
        "exponents": [
            {
                "exponent": e,
                "elements": 1000,
                "changed": 10,
                "density": min(1.0, 2.0 ** (-e - 14)),
                "threshold": 1e-5,
            }
            | {
                "predicted_lr": min(1.0, 2.0 ** (-e - 13)),
                "predicted_10lr": min(1.0, 2.0 ** (-e - 10)),
            }
            for e in range(-20, -2)
        ],
        "lr": 1e-6,
        "gradient_density": 0.99,
        "gradients": [None, *[0.99] * 39],
        "summary": {
            "sparsity": sparsity[ks[0]],
            "bytes_per_sync": 0.9 * (1 - sparsity[ks[0]]) * PARAMETERS,
            "bandwidth_for_target": 2e8,
            "bandwidth_full": 2e10,
            "target": 0.9,
            "step_seconds": 50.0,
        },
    }


class Page(HTMLParser):
    """The elements of a page as (name, attributes, text)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.elements.append(("", {}, ""))

    def handle_data(self, data: str) -> None:
        if self.elements:
            name, attributes, text = self.elements[-1]
            self.elements[-1] = (name, attributes, text + data)

    def all(self, name: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for found, attributes, text in self.elements if found == name]

    @property
    def data(self) -> Any:
        return json.loads(self.all("script")[0][1])
