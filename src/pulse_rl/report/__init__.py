"""One self-contained HTML page of a run, a study, or both: it loads nothing and opens in any
browser.

::

    page = render(run=read_run("runs/policy"), study=study)
    Path("report.html").write_text(page, encoding="utf-8")

``run`` is what `read_run` makes of a folder of events (`pulse_rl.metrics.JsonLines` writes them),
``study`` the JSON object of ``pulse study`` (format "pulse.study.1"). The page always has a planner
with sliders, which starts from their numbers.
"""

from __future__ import annotations

from .data import read_run
from .document import render

__all__ = ["read_run", "render"]
