"""The real SGLang package, as far as it runs on a CPU. Without it nothing here is collected; see
`make test-sglang`."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
