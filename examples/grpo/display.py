"""The live table, plain lines where there is no terminal, and the plot."""

from __future__ import annotations

import sys
from collections import deque
from types import TracebackType
from typing import Any, Self

from .settings import RunFolder, Settings

SHOWN_ROWS = 14
AVERAGED = 20


class Display:
    """Shows the run: a table that follows the trainer on a terminal, otherwise a line every so many steps."""

    def __init__(self, settings: Settings, folder: RunFolder) -> None:
        self._settings = settings
        self._every = max(1, settings.steps // 25)
        self._rewards: deque[float] = deque(maxlen=AVERAGED)
        self._rows: deque[list[str]] = deque(maxlen=SHOWN_ROWS)
        self._status = "starting"
        self._live = None
        self._headed = False
        self._columns = [
            "step", "reward", f"mean\n{AVERAGED}", f"density\nlr {settings.lr:g}", "patch\nkB", "ratio",
            "publish\nms", "sync\nms", "pause\nms", "lag", "root",
        ]  # fmt: skip
        print(f"run folder: {folder.root}")
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(self._table(), refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        if self._live:
            self._live.console.print(f"· {text}", highlight=False)
        else:
            print(f"· {text}", flush=True)

    def warm_up(self, event: dict[str, Any]) -> None:
        self._status = (
            f"warm-up step {event['step']}: loss {event['loss']:.3f}, "
            f"accuracy {event['accuracy']:.2f} (RL starts at {self._settings.sft_accuracy:.2f})"
        )
        if self._live:
            self._live.update(self._table())
        else:
            print(self._status, flush=True)

    def step(self, event: dict[str, Any]) -> None:
        self._rewards.append(event["reward"])
        for reason, count in event["refused"].items():
            self.note(f"before step {event['step']} the trainer refused {count} batches of rollouts: {reason}")
        sizes = ["none", f"{event['dense_bytes'] / 1e3:.0f}", "1.0"]
        if event["changed"] is not None:
            ratio = min(event["ratio"], 99999.0)  # of an empty patch, when no group had a reward to learn from
            sizes = [f"{event['density']:.2%}", f"{event['patch_bytes'] / 1e3:.1f}", f"{ratio:.1f}"]
        row = [
            f"{event['step']}",
            f"{event['reward']:.3f}",
            f"{sum(self._rewards) / len(self._rewards):.3f}",
            *sizes,
            f"{event['publish_ms']:.0f}",
            f"{event['sync_ms']:.0f}",
            f"{event['pause_ms']:.1f}",
            f"{event['lag']}",
            f"{event['verified']} ok",
        ]
        self._status = f"step {event['step']} of {self._settings.steps}"
        self._rows.append(row)
        if self._live:
            self._live.update(self._table())
        elif event["step"] % self._every == 0 or event["step"] in (1, self._settings.steps):
            self._print_row(row)

    def _print_row(self, row: list[str]) -> None:
        columns = [column.replace("\n", " ") for column in self._columns]
        widths = [max(len(column), 7) for column in columns]
        if not self._headed:
            print("  ".join(c.rjust(w) for c, w in zip(columns, widths, strict=True)))
            self._headed = True
        print("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)), flush=True)

    def _table(self) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(
            title="asynchronous GRPO on addition",
            caption=self._status,
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 0, 0, 1),
        )
        for column in self._columns:
            table.add_column(column, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table
