"""Writes docs/evidence.md and its pictures from the logs in benchmarks/results: python -m
docs.make_evidence"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from . import charts
from .charts import COLOURS, LOGS, OURS, Bar, Log, bars, lines
from .llm_evidence import language_model


def shapes() -> str:
    """What was run at the shapes of real models (`benchmarks.sizes`), if there are logs of it."""
    logs = [Log.read(path.stem) for path in sorted(LOGS.glob("*.jsonl"))]
    found, parts = [], list[str]()
    for log in (log for log in logs if "pool" in log.about):
        a, timed = log.about, [row for row in log.rows if "seconds" in row]
        nbytes = next(row["nbytes"] for row in timed if "nbytes" in row)
        parts += [f"**{a['shape']}**, {in_bytes(nbytes)}, {a['density']:.1%} changed a version:\n"]
        parts[-1] += (
            "\n| | version | seconds | processor s | anonymous memory, states | mapped "
            "|\n|---|---|---|---|---|---|"
        )
        for row in timed:
            label = f"{row['part']} | {row['version']}"
            memory = f"{row['anonymous'] / nbytes:.3f} | {in_bytes(max(row['mapped'], 1))}"
            parts[-1] += f"\n| {label} | {row['seconds']:.1f} | {row['cpu']:.1f} | {memory} |"
            words = f"{row['seconds']:.1f} s, {row['anonymous'] / nbytes:.2f} states"
            found.append(
                Bar(f"{a['shape']}: {row['what']} {row['version']}", row["seconds"], words, True)
            )
        where = f"{a['cores']} cores of {a['processor']}, {a['memory'] / 1e9:.0f} GB"
        parts.append(
            f"`python -m benchmarks.sizes --shape {a['shape']} --pool {a['pool']:g} --density "
            f"{a['density']:g}"
            f"{a['options']}` · "
            f"{a['date']} · revision {a['revision'][:7]} · {where}"
        )
    if not found:
        return "Not run here yet: `python -m benchmarks.sizes`."
    low = min(bar.value for bar in found) / 2
    bars(
        "shapes",
        "Seconds of a publish and of a sync, and anonymous memory; the first with states in memory",
        found,
        low,
    )
    return "\n\n".join(["![Seconds and memory](evidence-shapes.svg)", *parts])


def training() -> str:
    """The runs that differ in who moved the weights."""
    theirs, ours = Log.read("same_training.trl"), Log.read("same_training.pulse")
    parts = []
    for what in ("reward", "loss"):
        series, styles = {}, []
        for log, label, style in (
            (theirs, "TRL's sync", (COLOURS[1], 5.0)),
            (ours, "Pulse", (COLOURS[0], 1.5)),
        ):
            for seed in sorted({row["seed"] for row in log.rows}):
                series[f"{label}, seed {seed}"] = [
                    (r["step"], r[what]) for r in log.rows if r["seed"] == seed
                ]
                styles.append(style)
        lines(
            f"training-{what}",
            f"GRPO with vLLM on a CPU: {what} by step",
            series,
            "step",
            styles=styles,
        )
        parts.append(f"![{what.capitalize()} by step](evidence-training-{what}.svg)")
    keys = (
        "reward",
        "loss",
        "entropy",
        "kl",
        "grad_norm",
        "tokens",
        "logprobs",
        "trainer",
        "engine",
    )
    steps = {(row["seed"], row["step"]): [row[key] for key in keys] for row in theirs.rows}
    equal = sum(
        steps.get((row["seed"], row["step"])) == [row[key] for key in keys] for row in ours.rows
    )
    parts.append(
        f"Of {len(ours.rows)} steps {equal} are equal in reward, loss, entropy, KL and norm of "
        "the gradient, "
        "and in the digests of all tokens, log-probabilities and weights."
    )
    return "\n\n".join([*parts, ours.caption()])


def in_bytes(n: float) -> str:
    power = min(int(math.log10(n) // 3), 4)
    return f"{n / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def peers(log: Log) -> str:
    rows = [row for row in log.rows if "absent" not in row]
    named = {row["peer"]: row for row in rows}
    ours = named["pulse"]
    weights = ours["bytes"] / ours["bytes_per_changed"] / ours["density"]
    labels = {"pulse": "Pulse", "PULSE's code (grail)": "the PULSE paper's code"}

    def bar(row: dict[str, Any], value: float, words: str) -> Bar:
        return Bar(labels.get(row["peer"], row["peer"]), value, words, row is ours)

    cells = [bar(row, row["bytes_per_changed"], f"{row['bytes_per_changed']:.3g}") for row in rows]
    bars(
        "bytes",
        f"Bytes a changed weight ({ours['density']:.2%} of {weights / 1e9:.2g} B weights changed)",
        cells,
        0.3,
    )
    cells = [bar(row, row["cpu"], f"{row['cpu']:.2f}") for row in rows]
    bars("processor", "Processor seconds a GB of weights, both ends together", cells, 0.5)
    table = [
        "| | bytes a change | publish | consume | processor s/GB | peak, states | lines | hashes "
        "| whose code |"
    ]
    table.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        publish, consume = (f"{row[way] / ours[way]:.2f}" for way in ("publish", "consume"))
        table.append(
            f"| {labels.get(row['peer'], row['peer'])} | {row['bytes_per_changed']:.3g} | "
            f"{publish} | {consume} | "
            f"{row['cpu']:.2f} | {row['peak']:.2f} | {row['lines']} | {row['hashes']} | "
            f"{row['kind']} |"
        )
    return "\n".join(table)


METHODS = {"auto": "Pulse", "zstd": "paper's layout", "full": "full sync", "rsync": "rsync"}


def wan(log: Log) -> str:
    for key, name, title in (
        ("newest", "newest", "Seconds from publish until a worker 80 ms away has the version"),
        ("idle", "idle", "Seconds that a step of that worker waits for its sync"),
    ):
        found = []
        for row in log.rows:
            label = f"{METHODS[row['method']]}, {row['rate'] / 1e6:.0f} Mbit/s"
            value, plan = row[f"{key}_seconds"], row.get(f"planned_{key}_seconds")
            found.append(Bar(label, value, f"{value:.3g}", row["method"] == "auto", plan))
        bars(name, title, found, 0.3)
    table = [
        "| | link | bytes | newest | planned | idle | planned | segments sent again | failed ways |"
    ]
    table.append("|---|---|---|---|---|---|---|---|---|")
    for row in log.rows:
        plans = [(row[f"{k}_seconds"], row.get(f"planned_{k}_seconds")) for k in ("newest", "idle")]
        cells = [
            f"{value:.2f} s | " + (f"{plan:.2f} ({plan / value - 1:+.0%})" if plan else "")
            for value, plan in plans
        ]
        table.append(
            f"| {METHODS[row['method']]} | {row['rate'] / 1e6:.0f} Mbit/s | "
            f"{in_bytes(row['bytes'])} | "
            f"{' | '.join(cells)} | {row['resent_segments'] or ''} | {row['fallbacks']} |"
        )
    return "\n".join(table)


def sizes(log: Log) -> str:
    rows = [row for row in log.rows if row["kind"] != "link"]
    found = []
    for row in rows:
        label = f"{row['model']}, {row['density']:.2%}"
        words = f"{in_bytes(row['bytes'])} of {in_bytes(row['full_bytes'])}"
        found.append(Bar(label, row["bytes"], words, row["kind"] == "measured"))
    bars(
        "sizes",
        "Bytes of a sync, and of the model: blue measured, gray planned",
        found,
        1e4,
        in_bytes,
    )
    table = [
        "| model | | density | as measured with | a sync | of | 200 Mbit/s | 1 Gbit/s | 10 Gbit/s |"
    ]
    table.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        times = [
            f"{row[f'seconds_{r}']:.3g} s ({row[f'full_seconds_{r}']:,.0f})"
            if f"seconds_{r}" in row
            else ""
            for r in ("200", "1000", "10000")
        ]
        plan = f" (planned {in_bytes(row['planned_bytes'])})" if "planned_bytes" in row else ""
        source = f"{row['at']}: {row['source']}" if "source" in row else "this run"
        table.append(
            f"| {row['model']} | {row['kind']} | {row['density']:.2%} | {source} | "
            f"{in_bytes(row['bytes'])}{plan} | "
            f"{in_bytes(row['full_bytes'])} | {' | '.join(times)} |"
        )
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in log.rows:
        if row["kind"] == "link":
            for key, label in (
                ("full", "full sync"),
                ("zstd", "the paper's layout"),
                ("auto", "Pulse"),
            ):
                curves.setdefault(label, []).append((row["rate"] / 1e6, row[key]))
    ordered = {label: curves[label] for label in ("Pulse", "the paper's layout", "full sync")}
    title = "Seconds a sync of 7 B weights, 0.86% changed, by the planner"
    lines("links", title, ordered, "Mbit/s of a worker's link", log_x=True, log_y=True)
    return "\n".join(table)


def history(masters: Log, pure: Log) -> None:
    logs = {"FP32 masters": masters, "pure BF16 weights": pure}
    densities = {
        label: [
            (r["step"], 100 * r["density"])
            for r in log.rows
            if r["way"] == "plain" and r["density"] is not None
        ]
        for label, log in logs.items()
    }
    lines(
        "density",
        "Share of the weights that a step changes, in %, learning rate 1e-6",
        densities,
        "step of the run",
    )
    coded = {}
    for label, log in logs.items():
        for way, words in (("plain", ""), ("history", ", with history")):
            rows = [r for r in log.rows if r["way"] == way and r["density"] and r["step"] > 2]
            coded[label + words] = [
                (r["step"], r["bytes"] / (r["density"] * r["elements"])) for r in rows
            ]
    lines("history", "Bytes a changed weight, whole patch files", coded, "step of the run")


def restarts(log: Log, lr: str) -> None:
    """A training that dies, for docs/restart.md: the mean of the seeds by the steps of work."""
    for what in ("reward", "loss"):
        series: dict[str, list[tuple[float, float]]] = {}
        for way in dict.fromkeys(row["way"] for row in log.rows):
            rows = [row for row in log.rows if row["way"] == way]
            steps = sorted({row["work"] for row in rows})
            label = way.replace("exact weights", "exact").replace("a checkpoint", "checkpoint")
            series[label] = [
                (step, mean(row[what] for row in rows if row["work"] == step)) for step in steps
            ]
        title = f"{what.capitalize()} of a training that dies 20 times, learning rate {lr}"
        lines(f"restarts-{lr}-{what}", title, series, "steps of work")


DILOCO = "DiLoCo"
TRAINERS_SHOWN = {
    "DDP": "#111827",
    DILOCO: "#6b7280",
    "DiLoCo int8": "#b07a1e",
    "DiLoCo FP4": "#d97706",
    "SparseLoCo 1%": "#f3a6b5",
    "SparseLoCo 3%": "#be3455",
    "PULSELoCo FP32": "#7aa5e0",
    "PULSELoCo int2": OURS,
    "PULSELoCo int2, sweep 4": "#2f855a",
}


class ExchangeTime(NamedTuple):
    """Seconds of an exchange on a link, ``fixed + a_byte * bytes`` that leave a process. ``off``:
    how far the measured ones are from it at most, as a share of them."""

    name: str
    fixed: float
    a_byte: float
    off: float

    def seconds(self, run: dict[str, Any]) -> list[float]:
        """Of each round; DDP has an exchange a step."""
        times = run["sync_every"] if run["method"] == "DDP" else 1
        return [times * self.fixed + self.a_byte * sent for sent in run["links"]]


def exchange_time(name: str, points: Sequence[tuple[float, float]]) -> ExchangeTime:
    """Least squares of the relative errors, nothing below 0. ``points``: bytes and seconds, as
    measured."""
    # In units of the measured seconds: 1 = fixed / y + a_byte * x / y.
    u, v = [1 / y for _, y in points], [x / y for x, y in points]
    uu, uv, vv = (
        sum(a * b for a, b in zip(*pair, strict=True)) for pair in ((u, u), (u, v), (v, v))
    )
    determinant = uu * vv - uv * uv
    fixed = (sum(u) * vv - sum(v) * uv) / determinant if determinant else 0.0
    if fixed < 0 or not determinant:
        fixed, a_byte = 0.0, sum(v) / vv
    else:
        a_byte = (sum(v) * uu - sum(u) * uv) / determinant
    return ExchangeTime(
        name, fixed, a_byte, max(abs(fixed + a_byte * x - y) / y for x, y in points)
    )


def link_name(row: dict[str, Any]) -> str:
    return f"{row['rate'] / 1e6:,.0f} Mbit/s" + (
        f", {1e3 * row['round_trip']:.0f} ms" if row["round_trip"] else ""
    )


def exchange_times(log: Log) -> list[ExchangeTime]:
    """Of each link, by the rows of trainers in a group."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in log.rows:
        times = row["sync_every"] if row["method"] == "DDP" else 1
        if "over a store" not in row["method"]:
            found = row["link"] / times, median(row["exchange"]) / times
            points.setdefault(link_name(row), []).append(found)
    return [exchange_time(name, found) for name, found in points.items()]


def rounds_on_links(log: Log) -> str:
    """Seconds of a round by method and link."""
    names = list(dict.fromkeys(map(link_name, log.rows)))
    dense = {link_name(row): row for row in log.rows if row["method"] == DILOCO}
    table = [
        "| | learning rate | density | left a process | times less | "
        f"{' | '.join(f'{n} | less' for n in names)} |"
    ]
    table.append("|---|---|---|---|---|" + "---|---|" * len(names))
    found = []
    rows: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for row in log.rows:
        rows.setdefault((row["method"], row["lr"]), {})[link_name(row)] = row
    for (method, lr), of_link in rows.items():
        one, cells = next(iter(of_link.values())), []
        for name in names:
            taken, reference = (
                median(r["seconds"]) if r else None for r in (of_link.get(name), dense.get(name))
            )
            within = f" ({median(of_link[name]['exchange']):.2f})" if taken else ""
            cells.append(
                f"{taken:.2f}{within} | {reference / taken:.1f}" if taken and reference else " | "
            )
        sent = mean(row["link"] for row in of_link.values())
        less = mean(row["link"] for row in dense.values()) / sent
        at = f"{lr:g}" if method.startswith("PULSELoCo") else "any"
        table.append(
            f"| {method} | {at} | {one['density']:.1%} | {in_bytes(sent)} | {less:.1f} | "
            f"{' | '.join(cells)} |"
        )
        slowest = of_link.get(names[0])
        if slowest and (method in TRAINERS_SHOWN or "over a store" in method):
            value = median(slowest["seconds"])
            label = method if at == "any" else f"{method.replace('PULSELoCo ', '')}, {lr:g}"
            found.append(Bar(label, value, f"{value:.3g} s", method.startswith("PULSELoCo")))
    title = (
        f"Seconds of a round of {log.rows[0]['sync_every']} inner steps at {names[0]}; blue: "
        "PULSELoCo, by wire"
    )
    bars("loco-rounds", title, found, min(bar.value for bar in found) / 2)
    return "\n".join(table)


def learnt(log: Log, times: Sequence[ExchangeTime], step_seconds: dict[str, float]) -> str:
    """Reward by bytes that left a process and by wall-clock on each link: pictures, and a table for
    each task, number of trainers and H."""
    groups: dict[tuple[str, int, int], dict[str, list[dict[str, Any]]]] = {}
    for row in log.rows:
        if row["rewards"]:
            title = f"{row['method']}, lr {row['lr']:g}"
            groups.setdefault((row["task"], row["trainers"], row["sync_every"]), {}).setdefault(
                title, []
            ).append(row)
    parts = []
    for (task, trainers, sync_every), runs in groups.items():
        of_step = step_seconds[next(name for name in step_seconds if task.startswith(name))]
        parts.append(
            f"**{task}**, {trainers} trainers, H = {sync_every}, an inner step of {of_step:.3f} s:"
        )
        if (trainers, sync_every) == (4, 8):
            parts += learning_pictures(task, runs, times, of_step)
        parts.append(learning_table(runs, times, of_step))
    return "\n\n".join(parts)


def along(run: dict[str, Any], time: ExchangeTime | None, of_step: float) -> list[float]:
    """After each round: MB that left a process so far, or minutes on a link."""
    each = (
        run["links"]
        if time is None
        else [run["sync_every"] * of_step + s for s in time.seconds(run)]
    )
    return [total / (1e6 if time is None else 60) for total in accumulate(each)]


def learning_pictures(
    task: str, runs: dict[str, list[dict[str, Any]]], times: Sequence[ExchangeTime], of_step: float
) -> list[str]:
    parts = []
    rate = max(row["lr"] for of in runs.values() for row in of if row["method"] != "DDP")
    for time in (None, *times):
        series: dict[str, list[tuple[float, float]]] = {}
        for of_method in runs.values():
            first = of_method[0]
            if first["method"] in TRAINERS_SHOWN and (
                first["lr"] == rate or first["method"] == "DDP"
            ):
                across = [
                    mean(at)
                    for at in zip(*(along(run, time, of_step) for run in of_method), strict=True)
                ]
                rewards = [
                    mean(at) for at in zip(*(run["rewards"] for run in of_method), strict=True)
                ]
                series[first["method"]] = list(zip(across, rewards, strict=True))
        x = "MB that left a process" if time is None else f"minutes at {time.name}"
        kind = "bytes" if time is None else time.name.split()[0].replace(",", "")
        name = f"loco-{task.split()[0]}-{kind}"
        styles = [
            (TRAINERS_SHOWN[method], 2.5 if method.startswith("PULSELoCo") else 1.5)
            for method in series
        ]
        lines(
            name,
            f"Held-out reward, {task}, learning rate {rate:g}",
            series,
            x,
            log_x=True,
            styles=styles,
        )
        parts.append(f"![Reward by {x}](evidence-{name}.svg)")
    return parts


def learning_table(
    runs: dict[str, list[dict[str, Any]]], times: Sequence[ExchangeTime], of_step: float
) -> str:
    names = " | ".join(f"minutes at {time.name} | less" for time in times)
    table = [f"| | seeds | reward at the end | left a process | times less | {names} |"]
    table.append("|---|---|---|---|---|" + "---|---|" * len(times))
    for title, of_method in runs.items():
        lr = of_method[0]["lr"]
        dense = next(
            (of for of in runs.values() if of[0]["method"] == DILOCO and of[0]["lr"] == lr), None
        )
        dense = dense or next((of for of in runs.values() if of[0]["method"] == DILOCO), None)
        ends = [mean(run["rewards"][-5:]) for run in of_method]
        spread = f" ± {stdev(ends):.4f}" if len(ends) > 1 else ""
        cells = []
        for time in (None, *times):
            mine, theirs = (
                [along(run, time, of_step)[-1] for run in of or ()] for of in (of_method, dense)
            )
            value = in_bytes(1e6 * mean(mine)) if time is None else f"{mean(mine):.3g}"
            share = 100 * stdev(mine) / mean(mine) if len(mine) > 1 else 0.0
            off = f" ± {share:.1f}%" if share >= 0.05 else ""
            cells.append(
                f"{value}{off} | " + (f"{mean(theirs) / mean(mine):.1f}" if theirs else "")
            )
        table.append(f"| {title} | {len(ends)} | {mean(ends):.4f}{spread} | {' | '.join(cells)} |")
    return "\n".join(table)


def between_trainers(log: Log) -> dict[str, str]:
    """What docs/evidence.in says of rounds on links, and, as far as there are logs of it, of what
    is learnt by then."""
    times = exchange_times(log)
    found = {"loco_rounds": rounds_on_links(log), "loco_links": log.caption()}
    found["loco_fitted"] = "; ".join(
        f"{time.name}: {time.fixed:.2f} s and {1e6 * time.a_byte:.3f} s a MB (at most "
        f"{time.off:.0%} off)"
        for time in times
    )
    logs = [Log.read(path.stem) for path in sorted(LOGS.glob("loco-learning*.jsonl"))]
    found["loco_learnt"] = "Not run here yet: `python -m benchmarks.loco.learning`."
    if logs:
        learning = Log(logs[0].about, [row for each in logs for row in each.rows])
        pictures = learnt(learning, times, log.about["inner_step_seconds"])
        found["loco_learnt"] = "\n\n".join([pictures, *(each.caption() for each in logs)])
    return found


def main() -> None:
    for lr in ("1e-5", "1e-3"):
        restarts(Log.read(f"restarts-{lr}"), lr)
    logs = {
        name: Log.read(name)
        for name in ("peers", "network-cubic", "planned", "history-1e-6", "history-1e-6-bf16")
    }
    history(logs["history-1e-6"], logs["history-1e-6-bf16"])
    found = {
        "training": training(),
        "shapes": shapes(),
        "peers_table": peers(logs["peers"]),
        "wan_table": wan(logs["network-cubic"]),
        "sizes_table": sizes(logs["planned"]),
    }
    found |= {
        name.replace("-", "_").replace("1e_6", "lr"): log.caption() for name, log in logs.items()
    }
    found |= between_trainers(Log.read("loco-links"))
    found |= language_model()
    page = (charts.FOLDER / "evidence.in").read_text()
    for name, words in found.items():
        page = page.replace("{" + name + "}", words)
    (charts.FOLDER / "evidence.md").write_text(page)


if __name__ == "__main__":
    main()
