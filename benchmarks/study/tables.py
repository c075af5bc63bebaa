"""The tables of docs/study.md, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.study.settings import KS

Result = dict[str, Any]
SHOWN_STEPS = (1, 2, 5, 10, 20, 30, 40, 65, 100, 200, 300, 400)
SHOWN_SHARE = 2e-4


def all_tables(results: list[Result]) -> str:
    parts = [
        ("Sparsity in %, end states k apart", sparsity(results)),
        ("Share of weights in % that changed in none of k steps", untouched(results)),
        ("Density in % by step", over_time(results)),
        ("Bytes per changed weight", cost(results)),
        ("Other compute dtypes, sparsity in %", dtypes(results)),
        ("Recurrence: changes in % by the age of the last one", recurrence(results)),
        ("What history knows of a step: bits and bytes a change, without and with", known(results)),
        ("Sparsity in % by layer type, k = 1 / 32", layers(results)),
    ]
    parts += [
        (f"Density in % by exponent, k = 1: {r['settings']['name']}", exponents(r)) for r in results
    ]
    return "\n\n".join(f"{title}\n\n{table}" for title, table in parts if table)


def sparsity(results: list[Result]) -> str:
    head = ["run", *(f"k = {k}" for k in KS), "least (step)", "gradient density", "reward"]
    return _table(head, [[_name(r), *_by_k(r["study"], "sparsity"), *_around(r)] for r in results])


def untouched(results: list[Result]) -> str:
    rows = [[_name(r), *_by_k(r["study"], "untouched"), _added_up(r)] for r in results]
    return _table(["run", *(f"k = {k}" for k in KS), "1 - 32 x density"], rows)


def over_time(results: list[Result]) -> str:
    def at(r: Result, step: int) -> str:
        return f"{100 * r['density'][step - 1]:.3f}" if step <= len(r["density"]) else ""

    rows = [[_name(r), *(at(r, step) for step in SHOWN_STEPS)] for r in results]
    return _table(["run", *(f"step {step}" for step in SHOWN_STEPS)], rows)


def cost(results: list[Result]) -> str:
    head = ["run", *(f"{what}, k = {k}" for k in (1, 8, 32) for what in ("auto", "zstd", "bound"))]
    rows = []
    for r in results:
        by_k = {row["k"]: row for row in r["study"]["rows"]}
        fields = ("bytes_per_changed", "bytes_per_changed_zstd", "entropy_bound")
        cells = [by_k[k][field] for k in (1, 8, 32) for field in fields]
        rows.append([_name(r), *(f"{cell:.3f}" for cell in cells)])
    return _table(head, rows)


def dtypes(results: list[Result]) -> str:
    rows = [
        [f"{_name(r)} {name}", *_by_k(found["study"], "sparsity")]
        for r in results
        for name, found in r["dtypes"].items()
    ]
    return _table(["run", *(f"k = {k}" for k in KS)], rows) if rows else ""


def recurrence(results: list[Result]) -> str:
    rows = []
    for name, found in _histories(results):
        shares = [*(age["share"] for age in found["ages"]), found["not_yet"], found["within_8"]]
        rows.append([name, *(f"{100 * share:.1f}" for share in shares)])
    ages = [_age(age["from"], age["to"]) for age in results[0]["study"]["history"]["ages"]]
    return _table(["run", *ages, "not yet", "within 8"], rows)


def _age(first: int, last: int | None) -> str:
    if last is None:
        return f"{first} and more"
    return f"{first}" if first == last else f"{first} to {last}"


def known(results: list[Result]) -> str:
    kinds = ("position_bits", "sign_bits", "size_bits", "entropy_bound")
    rows = []
    for name, found in _histories(results):
        cells = [f"{found[kind]:.3f} / {found[f'{kind}_with_history']:.3f}" for kind in kinds]
        reached = " / ".join(
            f"{found[f'bytes_per_changed_{codec}']:.3f}" for codec in ("auto", "history")
        )
        rows.append([name, *cells, reached])
    return _table(
        ["run", "position", "sign", "size", "bound, bytes", "files, bytes: context / history"], rows
    )


def _histories(results: list[Result]) -> Iterator[tuple[str, dict[str, Any]]]:
    for r in results:
        yield _name(r), r["study"]["history"]
        for dtype, found in r["dtypes"].items():
            yield f"{_name(r)} {dtype}", found["study"]["history"]


def layers(results: list[Result]) -> str:
    names = list(dict.fromkeys(row["layer"] for r in results for row in r["study"]["layers"]))
    rows = []
    for r in results:
        found = {(row["layer"], row["k"]): row["sparsity"] for row in r["study"]["layers"]}
        rows.append([_name(r), *(_pair(found.get((n, 1)), found.get((n, 32))) for n in names)])
    return _table(["run", *names], rows)


def exponents(result: Result) -> str:
    rows = result["study"]["exponents"]
    total = sum(row["elements"] for row in rows)
    shown = [row for row in rows if row["elements"] >= SHOWN_SHARE * total]
    head = [
        "weights from",
        "share",
        "measured",
        "if every update were lr",
        "10 lr",
        "lr / threshold",
    ]
    lr = result["settings"]["lr"]
    return _table(
        head,
        [
            [
                f"2^{row['exponent']}",
                f"{100 * row['elements'] / total:.2f}",
                f"{100 * row['density']:.3f}",
                f"{100 * row['predicted_lr']:.3f}",
                f"{100 * row['predicted_10lr']:.3f}",
                f"{lr / row['threshold']:.3f}",
            ]
            for row in shown
        ],
    )


def _around(r: Result) -> list[str]:
    """The least sparse step, gradient density, and the reward of the first and last ten steps."""
    rewards = r["rewards"]
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    what = "loss " if r["settings"]["supervised"] else ""
    density = r["study"]["gradient_density"]
    return [
        f"{100 * (1 - r['peak']):.3f} ({r['peak_step']})",
        f"{100 * density:.2f}%",
        f"{what}{first:.2f} to {last:.2f}",
    ]


def _added_up(r: Result) -> str:
    density = 1 - r["study"]["rows"][0]["sparsity"]
    return f"{100 * (1 - 32 * density):.2f}"


def _by_k(study: dict[str, Any], field: str) -> list[str]:
    found = {row["k"]: row[field] for row in study["rows"]}
    return [f"{100 * found[k]:.3f}" for k in KS]


def _pair(first: float | None, last: float | None) -> str:
    return "" if first is None or last is None else f"{100 * first:.2f} / {100 * last:.2f}"


def _name(r: Result) -> str:
    return str(r["settings"]["name"])


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
